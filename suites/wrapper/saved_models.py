"""Exercises of a wrapped model's state dicts: full, sharded and local, and what other models make of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import FullStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor

from shardproof import InterfaceBench
from suites.wrapper.claims import Claims
from suites.wrapper.specimens import (
    Form,
    Tower,
    Wrapping,
    batch,
    parameters,
    summoned,
    tower,
    train,
    trained_alone,
)

__all__ = [
    "blank",
    "copy_it",
    "exchange_with_a_plain_model",
    "hand_over_local",
    "resume_in",
    "save_full",
    "save_in_part",
    "save_on_rank_0",
    "save_sharded",
    "save_shards_to_host",
    "save_to_host",
]

_LR = 0.25


def save_full(bench: InterfaceBench, wrapping: Wrapping) -> None:
    """Note names and values of a full state dict, before and after training."""
    claims = Claims(bench)
    root = wrapping.wrap(bench, tower())
    claims.same("the state at first", _sorted(_full(bench, root)), _sorted(tower().state_dict()))
    _train(bench, root)
    claims.same(
        "the state after training", _sorted(_full(bench, root)), _sorted(_trained(bench).state_dict())
    )


def save_in_part(bench: InterfaceBench) -> None:
    """Note names and values of the full state dict of a unit, and of a prefixed one."""
    claims = Claims(bench)
    engine, root = bench.names.FullyShardedDataParallel, Wrapping().wrap(bench, tower())
    whole = tower().state_dict()
    root.check_is_root()  # a unit that is asked first would take itself for the root
    with engine.state_dict_type(root, StateDictType.FULL_STATE_DICT):
        unit, prefixed = root.middle.state_dict(), root.state_dict(prefix="model.")
    own = {name.removeprefix("middle."): value for name, value in whole.items() if name.startswith("middle.")}
    claims.same("the state of a unit", _sorted(unit), _sorted(own))
    claims.same(
        "the state under a prefix", _sorted(prefixed), {f"model.{k}": v for k, v in _sorted(whole).items()}
    )


def copy_it(bench: InterfaceBench) -> None:
    """Train on after saving; note that what was saved stays as it was."""
    claims = Claims(bench)
    root = Wrapping().wrap(bench, tower())
    saved = _full(bench, root)
    _train(bench, root)
    claims.same("what was saved", _sorted(saved), _sorted(tower().state_dict()))


def save_on_rank_0(bench: InterfaceBench) -> None:
    """Note that rank 0 alone is given a full state dict, and that the model can be trained on."""
    claims = Claims(bench)
    root = Wrapping().wrap(bench, tower())
    saved = _full(bench, root, FullStateDictConfig(rank0_only=True))
    expected = _sorted(tower().state_dict()) if bench.rank == 0 else {}
    claims.same("what the rank is given", _sorted(saved), expected)
    _train(bench, root)
    claims.same("parameters afterwards", summoned(bench, root), parameters(_trained(bench)))


def save_to_host(bench: InterfaceBench) -> None:
    """Note where a full state dict is that was asked for on the host, and what is in it."""
    claims = Claims(bench)
    saved = _full(bench, Wrapping().wrap(bench, tower()), FullStateDictConfig(offload_to_cpu=True))
    claims.same("where it is", {value.device.type for value in saved.values()}, {"cpu"})
    claims.same("what it is", _sorted(saved), _sorted(tower().state_dict()))


def save_shards_to_host(bench: InterfaceBench) -> None:
    """Note where a sharded state dict is that was asked for on the host, and that it can be loaded."""
    claims = Claims(bench)
    engine, root = bench.names.FullyShardedDataParallel, Wrapping().wrap(bench, tower())
    other = Wrapping().wrap(bench, blank())
    config = ShardedStateDictConfig(offload_to_cpu=True)
    with engine.state_dict_type(root, StateDictType.SHARDED_STATE_DICT, config):
        saved = root.state_dict()
    claims.same(
        "elsewhere than on the host", {place for v in saved.values() for place in _places(v)} - {"cpu"}, set()
    )
    with engine.state_dict_type(other, StateDictType.SHARDED_STATE_DICT, config):
        other.load_state_dict(saved)
    claims.same("parameters afterwards", summoned(bench, other), parameters(tower()))


def save_sharded(bench: InterfaceBench, wrapping: Wrapping) -> None:
    """Note names, sizes and values of a sharded state dict, and that ranks share it."""
    claims = Claims(bench)
    engine, root = bench.names.FullyShardedDataParallel, wrapping.wrap(bench, tower())
    with engine.state_dict_type(root, StateDictType.SHARDED_STATE_DICT):
        saved = root.state_dict()
    whole = tower().state_dict()
    claims.same("names", sorted(saved), sorted(whole))
    if saved.keys() != whole.keys():
        return  # there is nothing to compare by name
    claims.same(
        "sizes",
        {k: list(saved[k].size()) for k in sorted(saved)},
        {k: list(whole[k].shape) for k in sorted(whole)},
    )
    held = [_held(saved[name], whole[name]) for name in parameters(tower())]
    claims.same("values", [h.got for h in held], [h.right for h in held])
    owned = sum(h.numel for h in held)
    shares = torch.tensor([owned if bench.rank == 0 or wrapping.is_sharded else 0])
    distributed.all_reduce(shares)
    claims.same("elements of all ranks", int(shares), sum(p.numel() for p in tower().parameters()))


def resume_in(bench: InterfaceBench, kind: StateDictType, before: Wrapping, after: Wrapping) -> None:
    """Train, save, and load into a model of other values that is wrapped in another way."""
    claims = Claims(bench)
    engine = bench.names.FullyShardedDataParallel
    first, second = before.wrap(bench, tower()), after.wrap(bench, blank())
    _train(bench, first)
    with engine.state_dict_type(first, kind):
        saved = first.state_dict()
    with engine.state_dict_type(second, kind):
        claims.same("what loading says", _spelt(second.load_state_dict(saved)), [[], []])
    claims.same("parameters afterwards", summoned(bench, second), parameters(_trained(bench)))
    claims.same("buffers afterwards", _buffers(second), _buffers(tower()))
    alone = _trained(bench)(batch(bench.rank)).detach()
    claims.same("an output afterwards", second(batch(bench.rank)).detach(), alone)


def hand_over_local(bench: InterfaceBench, form: Form) -> None:
    """As `resume_in`, by each rank's own part, into a model that is wrapped in the same way."""
    claims = Claims(bench)
    engine, wrapping = bench.names.FullyShardedDataParallel, Wrapping(form=form)
    first, second = wrapping.wrap(bench, tower()), wrapping.wrap(bench, blank())
    _train(bench, first)
    with engine.state_dict_type(first, StateDictType.LOCAL_STATE_DICT):
        saved = first.state_dict()
    with engine.state_dict_type(second, StateDictType.LOCAL_STATE_DICT):
        claims.same("what loading says", _spelt(second.load_state_dict(saved, strict=False)), [[], []])
    claims.same("parameters afterwards", summoned(bench, second), parameters(_trained(bench)))
    claims.same("buffers afterwards", _buffers(second), _buffers(tower()))


def exchange_with_a_plain_model(bench: InterfaceBench, wrapping: Wrapping) -> None:
    """Load what a plain model saved, train, and let a plain model load that."""
    claims = Claims(bench)
    engine, root = bench.names.FullyShardedDataParallel, wrapping.wrap(bench, blank())
    with engine.state_dict_type(root, StateDictType.FULL_STATE_DICT):
        root.load_state_dict(tower().state_dict())
    claims.same("parameters of the wrapped", summoned(bench, root), parameters(tower()))
    _train(bench, root)
    plain = blank()
    plain.load_state_dict(_full(bench, root))
    claims.same("parameters of the plain", parameters(plain), parameters(_trained(bench)))
    claims.same("buffers of the plain", _buffers(plain), _buffers(tower()))


def blank() -> Tower:
    """Make a tower whose values are all wrong."""
    model = tower()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(9)
    return model


def _train(bench: InterfaceBench, root: Any) -> None:
    optimizer = torch.optim.SGD(root.parameters(), lr=_LR)
    train(bench, root)
    optimizer.step()
    optimizer.zero_grad()


def _trained(bench: InterfaceBench) -> Tower:
    model = tower()
    model.load_state_dict(trained_alone(bench.size, lr=_LR), strict=False)
    return model


def _full(bench: InterfaceBench, root: Any, config: FullStateDictConfig | None = None) -> dict[str, Any]:
    with bench.names.FullyShardedDataParallel.state_dict_type(root, StateDictType.FULL_STATE_DICT, config):
        saved: dict[str, Any] = root.state_dict()
    return saved


def _sorted(state: Any) -> dict[str, Any]:
    return {name: state[name] for name in sorted(state)}


def _spelt(result: Any) -> list[list[str]]:
    return [list(result.missing_keys), list(result.unexpected_keys)]


def _buffers(model: Any) -> list[torch.Tensor]:
    """Give the buffers that are saved."""
    return [model.offset.detach().clone().cpu(), model.middle.calls.detach().clone().cpu()]


def _places(saved: Any) -> set[str]:
    """Name the devices that hold what this rank has of a tensor."""
    held = [shard.tensor for shard in saved.local_shards()] if hasattr(saved, "local_shards") else [saved]
    return {tensor.device.type for tensor in held}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """What can be read on a rank of a saved tensor, what is right there, and how many elements are the rank's own."""

    got: list[torch.Tensor]
    right: list[torch.Tensor]
    numel: int


def _held(saved: Any, whole: torch.Tensor) -> _Held:
    if isinstance(saved, DTensor):
        return _Held(got=[saved.full_tensor()], right=[whole], numel=saved.to_local().numel())
    if not hasattr(saved, "local_shards"):
        return _Held(got=[saved], right=[whole], numel=saved.numel())
    got, right = [], []
    for shard in saved.local_shards():  # none, on a rank that rows did not suffice for
        piece = whole
        for dim, start in enumerate(shard.metadata.shard_offsets):
            piece = piece.narrow(dim, start, shard.metadata.shard_sizes[dim])
        got.append(shard.tensor.detach().clone())
        right.append(piece)
    return _Held(got=got, right=right, numel=sum(tensor.numel() for tensor in got))
