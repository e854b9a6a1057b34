"""Exercises of ``summon_full_params``: what is shown inside, what is kept afterwards, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import ShardingStrategy

from shardproof import InterfaceBench
from suites.wrapper.claims import Claims
from suites.wrapper.specimens import (
    Form,
    Tower,
    batch,
    copies,
    gradients,
    parameters,
    summoned,
    tower,
    train,
    trained_alone,
    wrapped,
)

__all__ = [
    "leave_by_an_exception",
    "refuse_combinations",
    "refuse_inside_backward",
    "refuse_inside_forward",
    "refuse_inside_itself",
    "summon_gradients",
    "summon_here",
    "summon_of_others",
    "summon_on_rank_0",
    "summon_to_host",
    "summon_to_the_host_of_rank_0",
    "summon_values",
    "write_and_forget",
    "write_back",
    "write_back_from_the_host",
    "write_gradients",
    "write_shares",
]


def summon_values(bench: InterfaceBench, strategy: ShardingStrategy, form: Form) -> None:
    """Note names, shapes and values inside, before and after a forward, and that all is as before outside."""
    claims = Claims(bench)
    root = wrapped(bench, tower(), sharding_strategy=strategy, use_orig_params=form.use_orig_params)
    outside = _shapes(root)
    claims.same("parameters inside", summoned(bench, root), parameters(tower()))
    claims.same("shapes outside", _shapes(root), outside)
    root(batch(bench.rank))
    claims.same("parameters after a forward", summoned(bench, root), parameters(tower()))
    train(bench, root)
    claims.same("parameters after a backward", summoned(bench, root), parameters(tower()))


def summon_of_others(bench: InterfaceBench) -> None:
    """Note what is shown of wrapped models inside a module that is not wrapped."""
    plain = nn.ModuleDict(
        {"first": wrapped(bench, tower()), "second": wrapped(bench, tower(), units=("head",))}
    )
    with bench.names.FullyShardedDataParallel.summon_full_params(plain, writeback=False):
        got = [copies(root.named_parameters()) for root in plain.values()]
    Claims(bench).same("parameters inside", got, [parameters(tower())] * 2)


def write_back(bench: InterfaceBench, form: Form) -> None:
    """Change parameters inside; note that the change stays, and that the model is trained from there."""
    claims = Claims(bench)
    root = wrapped(bench, tower(), use_orig_params=form.use_orig_params)
    with bench.names.FullyShardedDataParallel.summon_full_params(root):
        _change(root)
    alone = tower()
    _change(alone)
    claims.same("parameters afterwards", summoned(bench, root), parameters(alone))
    claims.same("an output afterwards", root(batch(bench.rank)).detach(), alone(batch(bench.rank)).detach())


def write_and_forget(bench: InterfaceBench, form: Form) -> None:
    """Change parameters inside without writing back; note that nothing of it stays."""
    claims = Claims(bench)
    root = wrapped(bench, tower(), use_orig_params=form.use_orig_params)
    with bench.names.FullyShardedDataParallel.summon_full_params(root, writeback=False):
        _change(root)
    claims.same("parameters afterwards", summoned(bench, root), parameters(tower()))


def write_shares(bench: InterfaceBench) -> None:
    """Have each rank write its number everywhere; note that each number stays in its rank's share alone."""
    claims = Claims(bench)
    root = wrapped(bench, tower(), use_orig_params=False)
    with bench.names.FullyShardedDataParallel.summon_full_params(root), torch.no_grad():
        for parameter in root.parameters():
            parameter.fill_(bench.rank)
    after = summoned(bench, root)
    stem = torch.cat([value.flatten() for name, value in after.items() if name.startswith(("stem", "head"))])
    claims.same(
        "all numbers, in the order of ranks",
        torch.unique_consecutive(stem).tolist(),
        [float(rank) for rank, _ in enumerate(stem.chunk(bench.size))],  # the last ones may own nothing
    )
    ours = torch.cat([value.flatten() for value in after.values()])
    everyone = [torch.empty_like(ours) for _ in range(bench.size)]
    distributed.all_gather(everyone, ours)
    claims.same("what others see", everyone, [ours] * bench.size)


def summon_here(bench: InterfaceBench) -> None:
    """Summon the root's own parameters; note that units keep their shares."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    outside, whole = _shapes(root), parameters(tower())
    with bench.names.FullyShardedDataParallel.summon_full_params(root, recurse=False, writeback=False):
        inside = copies(root.named_parameters())
    own = {name: value for name, value in whole.items() if not name.startswith("middle")}
    claims.same("the root's own", {name: inside[name] for name in own}, own)
    units = [list(value.shape) for name, value in inside.items() if name not in own]
    kept = [shape for name, shape in outside if "middle" in name]
    claims.same("those of units", units, kept)
    claims.same("whole ones of units", [n for n in inside if n not in own and inside[n].dim() == 2], [])


def summon_on_rank_0(bench: InterfaceBench) -> None:
    """Summon on rank 0 alone; note that others keep their shares."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    outside, whole = _shapes(root), parameters(tower())
    engine = bench.names.FullyShardedDataParallel
    with engine.summon_full_params(root, rank0_only=True, writeback=False):
        inside = copies(root.named_parameters())
    if bench.rank == 0:
        claims.same("what the rank sees", inside, whole)
    else:
        claims.same("what the rank sees", [list(v.shape) for v in inside.values()], [s for _, s in outside])
    claims.same("shapes outside", _shapes(root), outside)


def summon_to_host(bench: InterfaceBench) -> None:
    """Summon into the host's memory; note what is there, and that it is where it was afterwards."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    engine = bench.names.FullyShardedDataParallel
    with engine.summon_full_params(root, offload_to_cpu=True, writeback=False):
        devices = {p.device.type for p in root.parameters()}
        claims.same("parameters inside", copies(root.named_parameters()), parameters(tower()))
    claims.same("where they are", devices, {"cpu"})
    claims.same("where they are afterwards", {p.device.type for p in root.parameters()}, {bench.device.type})


def summon_to_the_host_of_rank_0(bench: InterfaceBench) -> None:
    """Summon into the host's memory of rank 0 alone; note what each rank sees."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    outside, whole = _shapes(root), parameters(tower())
    engine = bench.names.FullyShardedDataParallel
    with engine.summon_full_params(root, offload_to_cpu=True, rank0_only=True, writeback=False):
        shapes = _shapes(root)
        if bench.rank == 0:
            claims.same("what the rank sees", copies(root.named_parameters()), whole)
        else:
            claims.same("what the rank sees", [shape for _, shape in shapes], [shape for _, shape in outside])
    claims.same("shapes outside", _shapes(root), outside)
    claims.same("parameters afterwards", summoned(bench, root), whole)


def write_back_from_the_host(bench: InterfaceBench) -> None:
    """Change parameters in the host's memory; note that the change stays."""
    root, alone = wrapped(bench, tower()), tower()
    with bench.names.FullyShardedDataParallel.summon_full_params(root, offload_to_cpu=True):
        _change(root)
    _change(alone)
    Claims(bench).same("parameters afterwards", summoned(bench, root), parameters(alone))


def summon_gradients(bench: InterfaceBench, strategy: ShardingStrategy) -> None:
    """Note gradients inside, and that an update afterwards uses them as they were."""
    claims = Claims(bench)
    root = wrapped(bench, tower(), sharding_strategy=strategy)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.25)
    engine = bench.names.FullyShardedDataParallel
    with engine.summon_full_params(root, with_grads=True, writeback=False):
        claims.same(
            "gradients before there are any", [p.grad for p in root.parameters() if p.grad is not None], []
        )
    train(bench, root)
    with engine.summon_full_params(root, with_grads=True, writeback=False):
        got = {name: p.grad.clone() for name, p in root.named_parameters() if p.grad is not None}
    claims.same("gradients inside", got, gradients(tower(), bench.size))
    optimizer.step()
    claims.same("parameters afterwards", summoned(bench, root), trained_alone(bench.size, lr=0.25))


def write_gradients(bench: InterfaceBench) -> None:
    """Halve gradients inside; note that the update is halved."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    optimizer = torch.optim.SGD(root.parameters(), lr=0.5)
    train(bench, root)
    with bench.names.FullyShardedDataParallel.summon_full_params(root, with_grads=True):
        shapes = {name: list(p.grad.shape) for name, p in root.named_parameters() if p.grad is not None}
        for parameter in root.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(2)
    claims.same("shapes inside", shapes, {name: list(p.shape) for name, p in parameters(tower()).items()})
    optimizer.step()
    claims.same("parameters afterwards", summoned(bench, root), trained_alone(bench.size, lr=0.25))


def refuse_combinations(bench: InterfaceBench) -> None:
    """Note what becomes of options that exclude each other, and that the model still works."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    flat = wrapped(bench, tower(), use_orig_params=False)
    enter = _entering(bench)
    claims.refuses("rank 0 alone that writes back", lambda: enter(root, rank0_only=True, writeback=True))
    claims.refuses("gradients on the host", lambda: enter(root, with_grads=True, offload_to_cpu=True))
    claims.refuses("gradients of flat parameters", lambda: enter(flat, with_grads=True))
    claims.same("parameters afterwards", summoned(bench, root), parameters(tower()))
    train(bench, root)


def refuse_inside_itself(bench: InterfaceBench) -> None:
    """Note what becomes of summoning what is summoned, and of the outer context."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    enter = _entering(bench)
    with bench.names.FullyShardedDataParallel.summon_full_params(root, writeback=False):
        claims.refuses("summoning inside", lambda: enter(root))
        claims.same("parameters inside", copies(root.named_parameters()), parameters(tower()))
    claims.same("parameters afterwards", summoned(bench, root), parameters(tower()))


def refuse_inside_forward(bench: InterfaceBench) -> None:
    """Note what becomes of summoning in the root's forward, and of the training step around it."""
    claims = Claims(bench)
    enter = _entering(bench)

    class Impatient(Tower):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            claims.refuses("summoning in forward", lambda: enter(roots[0]))
            return super().forward(rows)

    roots: list[Any] = []
    model = Impatient()
    model.load_state_dict(tower().state_dict())
    roots.append(wrapped(bench, model))
    train(bench, roots[0])


def refuse_inside_backward(bench: InterfaceBench) -> None:
    """Note what becomes of summoning in backward."""
    claims = Claims(bench)
    enter = _entering(bench)
    root = wrapped(bench, tower())

    def look(_: nn.Module, __: object, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: claims.refuses("summoning in backward", lambda: enter(root)))  # type: ignore[no-untyped-call]

    root.stem.register_forward_hook(look)
    train(bench, root)


def leave_by_an_exception(bench: InterfaceBench) -> None:
    """Leave by an exception; note that what was written stays, that shares are shares, and that training goes on."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    outside = _shapes(root)

    def leave() -> None:
        with bench.names.FullyShardedDataParallel.summon_full_params(root):
            _change(root)
            raise KeyError("of the caller")

    claims.refuses("the exception", leave, KeyError)
    claims.same("shapes afterwards", _shapes(root), outside)
    alone = tower()
    _change(alone)
    claims.same("parameters afterwards", summoned(bench, root), parameters(alone))
    train(bench, root)


def _entering(bench: InterfaceBench) -> Callable[..., None]:
    # Any: the engine's wrapper and its options.
    def enter(root: Any, **options: Any) -> None:
        with bench.names.FullyShardedDataParallel.summon_full_params(root, **{"writeback": False, **options}):
            pass

    return enter


def _change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(1)


def _shapes(root: Any) -> list[tuple[str, list[int]]]:
    return [(name, list(p.shape)) for name, p in root.named_parameters()]
