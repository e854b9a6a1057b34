"""Ranks in threads draw random numbers as ranks in processes do, each from a state of its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch itself uses
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import random_split

from shardproof.harness.torch_compat.dispatch import random_operators
from shardproof.harness.tracing.current_rank import bind_rank
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.threads.isolation import rank_generators
from tests.values import returned

# Operators that draw on CPU without a generator argument: they draw through others that have one
# (native_dropout), or not at all on CPU (choosing a kernel; attention that refuses dropout).
_DRAW_THROUGH_OTHERS = {"_fused_sdp_choice", "_scaled_dot_product_flash_attention_for_cpu", "native_dropout"}


def draw(pause: Any = lambda: None) -> dict[str, Any]:
    """Draw with every operator that an engine might use; call ``pause`` between any two."""
    drawn: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        drawn[name] = tensor.detach()
        pause()

    keep("rand", torch.rand(3))
    keep("randn", torch.randn(33))
    keep("randint", torch.randint(100, (5,)))
    keep("randperm", torch.randperm(20))
    linear = nn.Linear(7, 5)
    keep("linear", linear.weight)
    keep("xavier", nn.init.xavier_uniform_(torch.empty(4, 4)))
    keep("trunc_normal", nn.init.trunc_normal_(torch.empty(9)))
    keep("dropout", F.dropout(torch.ones(40), 0.5))
    keep("native_dropout", torch.native_dropout(torch.ones(40), 0.5, True)[0])
    keep("dropout2d", F.dropout2d(torch.ones(2, 8, 2, 2), 0.5))
    keep("rrelu", F.rrelu(-torch.ones(9), training=True))
    keep("multinomial", torch.multinomial(torch.ones(9), 6))
    keep("bernoulli", torch.bernoulli(torch.full((40,), 0.5)))
    keep("normal", torch.normal(0.0, torch.ones(4)))
    keep("poisson", torch.poisson(torch.full((9,), 4.0)))
    keep("exponential", torch.empty(3).exponential_())
    keep("gamma", torch.distributions.Gamma(2.0, 1.0).sample((5,)))
    query = torch.randn(1, 2, 4, 8)
    keep("attention", F.scaled_dot_product_attention(query, query, query, dropout_p=0.5))
    keep("of_the_default", torch.rand(2, generator=torch.default_generator))
    keep("split", torch.tensor(random_split(range(10), [4, 6])[0].indices))  # type: ignore[arg-type]  # a sequence
    state = torch.get_rng_state()
    keep("before", torch.rand(2))
    torch.set_rng_state(state)
    keep("again", torch.rand(2))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        keep("forked", torch.rand(2))
    keep("after", torch.rand(2))
    keep("own", torch.rand(2, generator=torch.Generator().manual_seed(3)))
    return {name: t.tolist() for name, t in drawn.items()} | {"seed": torch.initial_seed()}


def draw_in_turns(context: RankContext) -> dict[str, Any]:
    turn = threading.Event()
    torch.manual_seed(11)
    # Lets the other ranks run between any two draws.
    return draw(pause=lambda: turn.wait(0.001))


def test_every_rank_draws_the_numbers_of_one_process(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        expected = draw()
    for drawn in returned("threads:4", draw_in_turns, folder=tmp_path):
        assert drawn == expected


def draw_unseeded(context: RankContext) -> list[list[float]]:
    return [torch.rand(2).tolist(), [float(torch.initial_seed())]]


def test_unseeded_ranks_all_start_where_a_process_starts(tmp_path: Path) -> None:
    threads = returned("threads:2", draw_unseeded, folder=tmp_path / "threads")
    processes = returned("processes:2", draw_unseeded, folder=tmp_path / "processes")
    assert threads == processes
    assert [seed for _, (seed,) in processes] == [float(torch.Generator().initial_seed())] * 2


def seed_apart(context: RankContext) -> list[float]:
    torch.manual_seed(context.rank)
    return [*torch.rand(2).tolist(), *torch.rand(2).tolist()]


def test_ranks_seeded_apart_stay_apart(tmp_path: Path) -> None:
    drawn = returned("threads:3", seed_apart, folder=tmp_path)
    for rank, mine in enumerate(drawn):
        generator = torch.Generator().manual_seed(rank)
        expected = [
            *torch.rand(2, generator=generator).tolist(),
            *torch.rand(2, generator=generator).tolist(),
        ]
        assert mine == expected


def checkpointed_gradient(context: RankContext) -> list[float]:
    torch.manual_seed(1)
    turn = threading.Event()
    weight = torch.ones(64, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        turn.wait(0.001 * context.rank)
        return F.dropout(x * x, 0.5)

    out: Any = checkpoint(block, weight, use_reentrant=False)
    torch.rand(context.rank)  # moves this rank on before the block is run again
    out.sum().backward()
    assert weight.grad is not None
    # Where forward dropped an element, its gradient is zero; the recomputation must drop the same ones.
    return [float(((out == 0) == (weight.grad == 0)).all()), float((out == 0).sum())]


def test_checkpointing_recomputes_with_the_same_mask_on_every_rank(tmp_path: Path) -> None:
    results = returned("threads:4", checkpointed_gradient, folder=tmp_path)
    assert [same for same, _ in results] == [1.0] * 4
    assert 0 < results[0][1] < 64


def test_threads_of_no_rank_keep_the_generator_of_the_process() -> None:
    expected = torch.rand(2, generator=torch.Generator().manual_seed(4)).tolist()
    results: dict[str, list[float]] = {}

    def live() -> None:
        bind_rank(0)
        torch.manual_seed(9)
        results["rank"] = torch.rand(2).tolist()

    with torch.random.fork_rng(), rank_generators():
        torch.manual_seed(4)
        thread = threading.Thread(target=live)
        thread.start()
        thread.join()
        results["process"] = torch.rand(2).tolist()
        assert isinstance(torch.default_generator, torch.Generator)
    assert results["process"] == expected
    assert results["rank"] == torch.rand(2, generator=torch.Generator().manual_seed(9)).tolist()


def test_leaves_no_trace() -> None:
    before = torch.default_generator
    with rank_generators():
        assert torch.default_generator is not before
    assert torch.default_generator is before
    bind_rank(3)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            drawn = torch.rand(2).tolist()
    finally:
        bind_rank(None)
    assert drawn == torch.rand(2, generator=torch.Generator().manual_seed(2)).tolist()


def test_knows_every_operator_that_draws() -> None:
    known = {name.split(".")[0] for name in random_operators()}
    drawing = set()
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        base, _, overload = name.partition(".")
        if namespace != "aten" or not torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CPU"):
            continue
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if operator is not None and torch.Tag.nondeterministic_seeded in operator.tags:
            drawing.add(base)
    assert known >= {"uniform_", "normal_", "bernoulli_", "random_", "randperm", "multinomial"}
    assert drawing - known <= _DRAW_THROUGH_OTHERS


@pytest.mark.parametrize("name", ["uniform_", "random_.from"])
def test_names_operators_with_their_overload(name: str) -> None:
    assert name in random_operators()
