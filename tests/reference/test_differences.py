"""What torch's engines and the reference engine do differently, each shown on both.

`python -m tests.reference.test_differences` writes the tables into docs/side-by-side.md. A row whose difference is gone
fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.autograd import forward_ad
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import ShardingStrategy

from shardproof.engine import reference
from shardproof.harness.errors import CollectiveRefusedError
from shardproof.harness.tracing.ledger import Op
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import WorldKind
from tests.reference.models import (
    BY_NAME,
    Chain,
    apply_to,
    chain_gradients,
    hybrid_mesh,
    inputs_of,
    train,
    whole,
)
from tests.reference.ranks import Ranks, collectives
from tests.reference.test_methods import fail_in_backward, recover
from tests.reference.test_module import recompute
from tests.shell import ROOT

PAGE = ROOT / "docs" / "side-by-side.md"
_WRAPPERS: dict[str, Any] = {
    "torch": torch.distributed.fsdp.FullyShardedDataParallel,
    "reference": reference.FullyShardedDataParallel,
}
_THERE = "accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What the page tells of both engines, and what a rank sees of it with either."""

    about: str
    there: str
    here: str
    show: Callable[[RankContext, str], object]
    seen: tuple[object, object]  # with torch's engine, and with the reference engine
    kind: WorldKind = WorldKind.THREADS


def _chain(api: str, **options: Any) -> Any:  # Any: modules gain methods
    return apply_to(Chain(), BY_NAME[api].fully_shard, **options)


def _accepts(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, NotImplementedError):
        return "refused"
    return _THERE


def _blocks(context: RankContext, api: str) -> set[bool]:
    train(context, _chain(api))
    return {not e.is_async for e in context.recorder.ledger() if e.op is Op.REDUCE_SCATTER}


def _gathers_before(context: RankContext, api: str) -> list[int]:
    """Count the gathers that are issued when each unit of a second forward starts to compute."""
    model, counts = _chain(api, reshard_after_forward=True), list[int]()
    train(context, model, step=0)
    for unit in model.units:
        unit.register_forward_pre_hook(lambda *_: counts.append(collectives(context, step=1)[Op.ALL_GATHER]))
    train(context, model, step=1)
    return counts


def _sees_the_step(context: RankContext, api: str) -> bool:
    model, plain = _chain(api), Chain()
    train(context, model)
    gradients, optimizer = chain_gradients(context.size), torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model(inputs_of(0))
        for name, gradient in gradients.items():
            plain.get_parameter(name).sub_(gradient)
        optimizer.step()
        return torch.allclose(model(inputs_of(0)), plain(inputs_of(0)))


def _reduces_by(context: RankContext, api: str) -> set[str]:
    model = _chain(api)
    for module in (*model.units, model):
        module.set_gradient_divide_factor(3.0)
    try:
        train(context, model)
    except CollectiveRefusedError as refusal:  # no backend of a CPU has it
        return set(re.findall("got PREMUL_SUM", str(refusal)))
    return {str(e.reduce_op) for e in context.recorder.ledger() if e.op is Op.REDUCE_SCATTER}


def _reduces_in(context: RankContext, api: str) -> set[str]:
    train(context, _chain(api, mp_policy=BY_NAME[api].mixed_precision(param_dtype=torch.bfloat16)))
    return {e.dtype for e in context.recorder.ledger() if e.op is Op.REDUCE_SCATTER}


def _share_of_a_gradient(context: RankContext, api: str) -> float:
    model = _chain(api, mesh=hybrid_mesh(context.size, 1)).double()
    for module in (*model.units, model):
        module.set_gradient_divide_factor(2.0)
    model(inputs_of(context.rank, torch.float64)).sum().backward()
    expected = chain_gradients(context.size, context.size / 2, torch.float64)["scale"]
    return float(whole(model.scale.grad).norm() / expected.norm())


def _sums_of_waiting(context: RankContext, api: str) -> float:
    engine, model = BY_NAME[api], nn.Linear(1, 1, bias=False)
    policy = engine.mixed_precision(reduce_dtype=torch.bfloat16)
    sharded: Any = engine.fully_shard(model, mesh=hybrid_mesh(context.size, 1), mp_policy=policy)
    for gradient in (256.0, 1.0, 1.0, 0.0):  # bfloat16 has 258, and no 257
        sharded.set_requires_all_reduce(not gradient)
        sharded(torch.tensor([[gradient]])).sum().backward()
    return whole(sharded.weight.grad).item()


def _inside_ddp(context: RankContext, api: str) -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    BY_NAME[api].fully_shard(model[0])
    return _accepts(lambda: replicate(model)(torch.ones(1, 2)))


def _tangents(context: RankContext, api: str) -> str:
    model = _chain(api)
    with forward_ad.dual_level():
        rows = forward_ad.make_dual(inputs_of(0).requires_grad_(), torch.ones_like(inputs_of(0)))
        return _accepts(lambda: model(rows))


DIFFERENCES = (
    Difference(
        about="reductions on a CPU",
        there="block the thread",
        here="overlap with compute, as [gathers do](reference-engine.md#two-ways-to-overlap)",
        show=_blocks,
        seen=({True}, {False}),
    ),
    Difference(
        about="forward prefetch",
        there="lists; on a GPU, a thread that runs ahead",
        here="predicted from the second forward on; or lists",
        show=_gathers_before,
        seen=([2, 3, 4], [3, 4, 4]),
    ),
    Difference(
        about="an evaluation between backward and step",
        there="the next forward computes with the root's parameters of before the step",
        here="the root is gathered again after the step",
        show=_sees_the_step,
        seen=(False, True),
    ),
    Difference(
        about="another divide factor",
        there="PREMUL_SUM",
        here="SUM, then a division",
        show=_reduces_by,
        seen=({"got PREMUL_SUM"}, {"sum"}),
    ),
    Difference(
        about="`param_dtype` without `reduce_dtype`",
        there="gradients are reduced in `param_dtype`",
        here="in the parameters' own dtype, as in torch 2.15",
        show=_reduces_in,
        seen=({"bfloat16"}, {"float32"}),
    ),
    Difference(
        about="a factor in float64, one rank per shard axis",
        there="[divides twice](../suites/known_failures.toml)",
        here="divides once",
        show=_share_of_a_gradient,
        seen=(0.5, 1.0),
    ),
    Difference(
        about="reentrant checkpoints around units with prefetch lists",
        there="gather units twice",
        here="once",
        show=lambda context, api: recompute(context, api, True)[Op.ALL_GATHER],
        seen=(6, 4),
    ),
    Difference(
        about="sums over microbatches that wait for their all-reduce",
        there="in the reduce dtype",
        here="in the parameter's own, if that is wider",
        show=_sums_of_waiting,
        seen=(256.0, 258.0),
    ),
    Difference(
        about="inside a model under DDP's `replicate`",
        there="left alone, by torch's private registry of what it has prepared",
        here="refused at the first forward; `ignored_modules` leaves it alone",
        show=_inside_ddp,
        seen=(_THERE, "refused"),
        kind=WorldKind.PROCESSES,
    ),
    Difference(
        about="`reset_iter_state`",
        there="a failed backward's gradients may leak into the next",
        here="dropped",
        show=lambda context, api: "scale" in recover(context, api, fail_in_backward, False),
        seen=(True, False),
    ),
    Difference(
        about="inputs with tangents of `torch.autograd.forward_ad`",
        there="refused",
        here="carried through",
        show=_tangents,
        seen=("refused", _THERE),
        kind=WorldKind.PROCESSES,  # levels are of the process
    ),
)


def _wrapped(api: str, strategy: str, **options: Any) -> Any:  # Any: modules gain methods
    layer = nn.Linear(4, 4, bias=False)
    nn.init.ones_(layer.weight)
    cpu = torch.device("cpu")
    return _WRAPPERS[api](
        layer, sharding_strategy=ShardingStrategy[strategy], use_orig_params=True, device_id=cpu, **options
    )


def _pending(context: RankContext, api: str) -> tuple[str, int]:
    root = _wrapped(api, "FULL_SHARD")
    with root.no_sync():
        root(torch.ones(1, 4)).sum().backward()
    gradient = root.module.weight.grad
    return _accepts(gradient.sum), gradient.numel()


def _waiting(context: RankContext, api: str) -> int:
    root = _wrapped(api, "SHARD_GRAD_OP")
    root(torch.ones(1, 4)).sum().backward()
    root(torch.ones(1, 4))
    return int(next(root.parameters()).numel())


def _written(context: RankContext, api: str) -> str:
    root = _wrapped(api, "FULL_SHARD")
    held = root.module.weight

    def write() -> None:
        with _WRAPPERS[api].summon_full_params(root), torch.no_grad():
            held.fill_(7)

    return _accepts(write)


def _replicas(context: RankContext, api: str) -> str:
    root = _wrapped(api, "HYBRID_SHARD", device_mesh=hybrid_mesh(context.size, 1))
    root(torch.full((1, 4), context.rank + 1.0)).sum().backward()
    own, whole_sum = context.rank + 1, context.size * (context.size + 1) / 2
    told = {own / context.size: "divided", whole_sum / context.size: "averaged"}
    return told[float(root.module.weight.grad.flatten()[0])]


OF_WRAPPER = (
    Difference(
        about="`.grad` in `no_sync`, under names",
        there="this rank's whole gradient, of another shape than its parameter, in `param_dtype`",
        here="pending, in the parameter's dtype: using its values raises, None drops what accumulated",
        show=_pending,
        seen=((_THERE, 16), ("refused", 8)),
    ),
    Difference(
        about="parameters between forward and backward under SHARD_GRAD_OP, while a reduced gradient waits",
        there="whole, without that gradient",
        here="the optimizer's, with it: who clears or lists them reaches those",
        show=_waiting,
        seen=(16, 8),
    ),
    Difference(
        about="a write to the optimizer's parameter inside `summon_full_params`",
        there="kept, as it is the whole one then",
        here="refused where writing back would undo it",
        show=_written,
        seen=(_THERE, "refused"),
    ),
    Difference(
        about="HYBRID_SHARD over groups of one rank",
        there="replicas are [never added up](../suites/known_failures.toml)",
        here="they are",
        show=_replicas,
        seen=("divided", "averaged"),
    ),
)


def _show(context: RankContext, about: str, api: str) -> object:
    (row,) = (row for row in (*DIFFERENCES, *OF_WRAPPER) if row.about == about)
    return row.show(context, api)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="measured with torch 2.13; look again")
@pytest.mark.parametrize("row", [*DIFFERENCES, *OF_WRAPPER], ids=lambda row: row.about)
def test_they_differ_as_the_page_says(row: Difference, ranks: Ranks) -> None:
    for api, seen in zip(("torch", "reference"), row.seen, strict=True):
        assert ranks.run(2, _show, row.about, api, kind=row.kind) == [seen] * 2


def _page() -> str:
    """Return the page with the tables as they are to be."""
    page = PAGE.read_text(encoding="utf-8")
    for name, engine, rows in (("", "FSDP2", DIFFERENCES), (" of the wrapper", "FSDP1", OF_WRAPPER)):
        before, rest = page.split(f"<!-- differences{name} -->\n")
        _, after = rest.split(f"<!-- end of differences{name} -->\n")
        table = "".join(f"| {row.about} | {row.there} | {row.here} |\n" for row in rows)
        head = f"| | {engine} | here |\n|---|---|---|\n"
        page = f"{before}<!-- differences{name} -->\n{head}{table}<!-- end of differences{name} -->\n{after}"
    return page


def test_the_page_lists_them() -> None:
    assert _page() == PAGE.read_text(encoding="utf-8")


def test_both_have_the_functions_that_the_page_names() -> None:
    told = PAGE.read_text(encoding="utf-8").partition("## What differs")[0]
    rows = [line.strip("|").split("|")[-2:] for line in told.splitlines() if line.startswith("| ")]
    folders = Path(torch.distributed.fsdp.__path__[0]) / "_fully_shard", ROOT / "engine" / "reference"
    for column, folder in enumerate(folders):
        source = "\n".join(file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
        words = set(re.findall(r"\w+", source))
        named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row[column])}
        assert len(named) > len(rows) // 2
        assert not [
            name
            for name in named
            if not words.issuperset(name.removesuffix(".py").split(".")) and not (folder / name).exists()
        ]


if __name__ == "__main__":
    PAGE.write_text(_page(), encoding="utf-8")
