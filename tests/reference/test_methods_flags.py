"""Switches of a sharded module: whom each reaches, when it takes effect, and what comes after an accident."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.tracing.ledger import Op, Phase
from harness.worlds.rank import RankContext
from tests.reference.front_doors import BY_NAME
from tests.reference.watching import (
    DOORS,
    ROOT,
    WIDTH,
    Seen,
    Watch,
    assert_gradients,
    both_doors,
    count,
    doors_with,
    full_gradients,
    hybrid_mesh,
    inputs_of,
    is_whole,
    plain_gradients,
    replicate_chain,
    run,
    shard_chain,
    story,
)

SIZE = 2
NUM_UNITS = 3
Setter = Callable[[Any], None]

# Each switch, set on the root or on unit 1; and what it changes there.
SWITCHES: dict[str, tuple[str, dict[str, bool]]] = {
    "sync, all": ("set_requires_gradient_sync", {}),
    "sync, one": ("set_requires_gradient_sync", {"recurse": False}),
    "reshard after backward, all": ("set_reshard_after_backward", {}),
    "reshard after backward, one": ("set_reshard_after_backward", {"recurse": False}),
    "reshard after forward, all": ("set_reshard_after_forward", {}),
    "reshard after forward, one": ("set_reshard_after_forward", {"recurse": False}),
    "gather in backward": ("set_unshard_in_backward", {}),
}


def _switch_off(context: RankContext, door: str, switch: str, on: int) -> Seen:
    watch = Watch(context, NUM_UNITS)
    model = shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=True)
    target: Any = model if on == ROOT else watch.chain.units[on]
    setter, options = SWITCHES[switch]
    if switch == "gather in backward":
        target.set_unshard_in_backward(False)
        target.set_unshard_in_backward(True)
    else:
        getattr(target, setter)(False, **options)
    watch.train()
    return watch.seen()


def _missing(words: list[str], letter: str) -> set[int]:
    present = {int(word[1:]) for word in words if word[0] == letter}
    return {ROOT, *range(NUM_UNITS)} - present


@both_doors
@pytest.mark.parametrize("on", [ROOT, 1])
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_reaches_whom_it_should(door: str, switch: str, on: int, tmp_path: Path) -> None:
    all_below = {ROOT, *range(NUM_UNITS)} if on == ROOT else {on}
    reached = set() if switch == "gather in backward" else ({on} if "one" in switch else all_below)
    for seen in run(tmp_path, SIZE, _switch_off, door, switch, on):
        words = story(seen, SIZE, Phase.BACKWARD)
        assert _missing(words, "R") == (reached if switch.startswith("sync") else set())
        assert _missing(words, "G") == (reached if "after forward" in switch else set())
        assert seen.left_whole == (reached if "after backward" in switch else set())


def _all_reduce_off(context: RankContext, door: str, recurse: bool) -> dict[Op, int]:
    watch = Watch(context, NUM_UNITS)
    model = shard_chain(BY_NAME[door], watch.chain, mesh=hybrid_mesh(2, 2))
    model.set_requires_all_reduce(False, recurse=recurse)
    watch.train()
    return count((e for e in watch.seen().entries if e.op is not Op.ALL_GATHER), Phase.BACKWARD)


@both_doors
@pytest.mark.parametrize("recurse", [True, False])
def test_all_reduce_is_switched_off_alone(door: str, recurse: bool, tmp_path: Path) -> None:
    others = {} if recurse else {Op.ALL_REDUCE: NUM_UNITS}
    expected = {Op.REDUCE_SCATTER: NUM_UNITS + 1, **others}
    assert run(tmp_path, 4, _all_reduce_off, door, recurse) == [expected] * 4


class Lookup(nn.Module):
    """An embedding, whose backward needs no value of its weight, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up and mix."""
        result: torch.Tensor = self.layer(self.table(ids))
        return result


def _without_gather(context: RankContext, door: str) -> dict[Op, int]:
    torch.manual_seed(0)
    model = Lookup()
    plain = Lookup()
    plain.load_state_dict(model.state_dict())
    for layer in (model.table, model.layer):
        BY_NAME[door].fully_shard(layer)
    BY_NAME[door].fully_shard(model)
    model.table.set_unshard_in_backward(False)  # type: ignore[operator]  # of the sharded class
    loss = model(torch.tensor([1, 2, 3])).sum()
    with context.recorder.during(Phase.BACKWARD, step=0):
        loss.backward()
    plain(torch.tensor([1, 2, 3])).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert_gradients(model, expected)
    assert not is_whole(model.table)
    return count(context.recorder.ledger(), Phase.BACKWARD)


@both_doors
def test_what_backward_does_not_need_is_not_gathered(door: str, tmp_path: Path) -> None:
    expected = {Op.ALL_GATHER: 1, Op.REDUCE_SCATTER: 2}
    assert run(tmp_path, SIZE, _without_gather, door) == [expected] * SIZE


class Accident(Exception):  # noqa: N818 - what happens in training, not in the tests
    """What a user's module raises."""


def _raise(*_: object) -> None:
    raise Accident


def _recover(context: RankContext, door: str, where: str, hybrid: bool) -> list[str]:
    """Have an accident, reset, train; tell whose gradients are wrong then."""
    watch = Watch(context, NUM_UNITS)
    model = shard_chain(BY_NAME[door], watch.chain, mesh=hybrid_mesh(2, 2) if hybrid else None)
    units: list[Any] = list(watch.chain.units)
    for previous, unit in pairwise(units):
        previous.set_modules_to_forward_prefetch([unit])
    watch.train(step=0)
    model.zero_grad()
    with pytest.raises(Accident):
        _have_an_accident(watch, where)
    model.reset_iter_state()
    assert not watch.whole(), f"left whole: {watch.whole()}"
    model.zero_grad()
    watch.train(step=2)
    expected, gradients = plain_gradients(context.size), full_gradients(watch.chain)
    wrong = [name for name, g in gradients.items() if g is None or not torch.allclose(g, expected[name])]
    model.zero_grad()
    watch.train(step=3)
    assert_gradients(watch.chain, expected)
    before, after = ([e for e in watch.seen().entries if e.step == step] for step in (0, 3))
    assert count(before) == count(after)
    return wrong


def _have_an_accident(watch: Watch, where: str) -> None:
    if where == "forward":
        handle = watch.chain.units[1].register_forward_hook(_raise)
        try:
            watch.forward(step=1)
        finally:
            handle.remove()
    elif where == "partly accumulated":
        model: Any = watch.chain
        model.set_requires_gradient_sync(False)
        watch.train(step=1)
        model.set_requires_gradient_sync(True)
        raise Accident
    else:
        hidden: list[torch.Tensor] = []
        handle = watch.chain.units[0].register_forward_hook(lambda *a: hidden.append(a[2]))
        output = watch.forward(step=1)
        handle.remove()
        hidden[0].register_hook(_raise)
        watch.backward(output, step=1)


def _accidents() -> Iterator[Any]:
    for where in ("forward", "backward", "partly accumulated"):
        for door in DOORS:
            # torch keeps what autograd had put into gathered parameters: see below.
            if where == "forward" or door != "torch":
                yield pytest.param(door, where, id=f"{where}-{door}")


@pytest.mark.parametrize("hybrid", [False, True], ids=["flat", "hybrid"])
@pytest.mark.parametrize(("door", "where"), list(_accidents()))
def test_training_goes_on_after_an_accident(door: str, where: str, hybrid: bool, tmp_path: Path) -> None:
    assert run(tmp_path, 4, _recover, door, where, hybrid) == [[]] * 4


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="measured with torch 2.13; look again")
@pytest.mark.parametrize("where", ["backward", "partly accumulated"])
def test_torch_adds_the_failed_iteration_to_the_next(where: str, tmp_path: Path) -> None:
    # "The failed iteration's gradients are discarded", says reset_iter_state.
    for wrong in run(tmp_path, 4, _recover, "torch", where, False):
        assert "scale" in wrong


def _event(context: RankContext, door: str, replicated: bool) -> None:
    watch = Watch(context, NUM_UNITS)
    shard = replicate_chain if replicated else shard_chain
    model = shard(BY_NAME[door], watch.chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-12)
    for step in range(3):
        optimizer.zero_grad()
        watch.train(step=step)
        optimizer.step()
        event = torch.cpu.Event()
        event.record()
        model.set_post_optim_event(event)
    assert model(inputs_of(context.rank)).isfinite().all()


@both_doors
@pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "replicated"])
def test_an_event_after_the_optimizer_is_taken(door: str, replicated: bool, tmp_path: Path) -> None:
    run(tmp_path, SIZE, _event, door, replicated)


def _accumulate_kept(context: RankContext, door: str) -> list[bool]:
    """Keep a group whole over chunked backwards, then let it go."""
    watch = Watch(context, NUM_UNITS)
    shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=True)
    unit: Any = watch.chain.units[1]
    told = []
    for keeps in (True, True, False):
        unit.set_reshard_after_forward(not keeps)
        unit.set_reshard_after_backward(not keeps)
        watch.train()
        told.append(is_whole(unit))
    assert_gradients(watch.chain, {name: 3 * g for name, g in plain_gradients(SIZE).items()})
    return told


@both_doors
def test_a_group_is_kept_while_asked(door: str, tmp_path: Path) -> None:
    assert run(tmp_path, SIZE, _accumulate_kept, door) == [[True, True, False]] * SIZE


def _sync_off(context: RankContext, door: str) -> tuple[set[str], dict[Op, int]]:
    watch = Watch(context, NUM_UNITS)
    model = shard_chain(BY_NAME[door], watch.chain)
    model.set_requires_gradient_sync(False)
    watch.train(step=0)
    held = {name for name, param in model.named_parameters() if param.grad is not None}
    model.set_requires_gradient_sync(True)
    watch.train(step=1)
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())
    assert_gradients(watch.chain, {name: 2 * g for name, g in plain_gradients(SIZE).items()})
    return held, count(e for e in watch.seen().entries if e.step == 0 and e.op is Op.REDUCE_SCATTER)


@both_doors
def test_shards_have_no_gradient_until_it_is_reduced(door: str, tmp_path: Path) -> None:
    assert run(tmp_path, SIZE, _sync_off, door) == [(set(), {})] * SIZE


def _buffers(context: RankContext, door: str, hybrid: bool) -> None:
    watch = Watch(context, NUM_UNITS)
    model = shard_chain(BY_NAME[door], watch.chain, mesh=hybrid_mesh(2, 2) if hybrid else None)
    model.set_reduce_scatter_max_input_buffers(3)
    unit: Any = watch.chain.units[0]
    unit.set_reduce_scatter_max_input_buffers(2, recurse=False)
    for step in range(2):
        model.zero_grad()
        watch.train(step=step)
    assert_gradients(watch.chain, plain_gradients(context.size))


@doors_with("set_reduce_scatter_max_input_buffers")
@pytest.mark.parametrize("hybrid", [False, True], ids=["flat", "hybrid"])
def test_more_buffers_change_no_gradient(door: str, hybrid: bool, tmp_path: Path) -> None:
    run(tmp_path, 4, _buffers, door, hybrid)
