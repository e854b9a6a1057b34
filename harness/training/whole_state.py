"""Whole state dicts: whether an engine's state dict has this rank's values, and what loading changed in it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardproof.engine.contract import Cut, PreparedModel, Shard, shard_of
from shardproof.harness.torch_compat.dtypes import bytes_of, dense
from shardproof.harness.training.reads import read_declared, read_shards


# Any, here and below: a state may be of any type.
def difference_of_state(prepared: PreparedModel, state: dict[str, Any], names: Collection[str]) -> str:
    """Return the first difference between a state and this rank's shards, in words; empty if there is none.

    ``state`` has the model's state under ``names``, the names of its state dict, and the optimizer's under parameter
    names, or their indices among the trained parameters in the order of the optimizer's groups, as in torch's.
    """
    return next(_differences(prepared, state, names), "")


def _differences(prepared: PreparedModel, state: dict[str, Any], names: Collection[str]) -> Iterator[str]:
    model, optimizer = state["model"], state["optimizer"]["state"]
    strange = sorted(set(names) ^ set(model))
    if strange:
        yield f"model: {strange[0]!r} is {'missing' if strange[0] in names else 'no name of the model'}"
    parameters = read_shards(prepared, "local_parameters")
    held = parameters | read_shards(prepared, "local_buffers")
    for name in sorted(held.keys() & set(names)):
        yield from _difference(f"model: {name!r}", held[name], model.get(name))
    trained = _trained(prepared) if any(type(key) is int for key in optimizer) else []
    by_name: Mapping[str, Any] = {
        trained[key] if type(key) is int else key: optimizer[key] for key in optimizer
    }
    shards = read_shards(prepared, "local_optimizer_state")
    # A rank that owns nothing of what has state has none; where each parameter has one owner, any rank may be one.
    is_cut = read_declared(prepared, "cut", Cut) is not Cut.PARAMETERS
    own = [n for n in by_name if is_cut and n in parameters and parameters[n].tensor.numel()]
    if not shards and (lost := next((f"{name}/{key}" for name in own for key in by_name[name]), "")):
        yield f"optimizer: {lost!r} is not there, nor any other"
    for place, shard in shards.items():
        name, _, key = place.rpartition("/")
        if not shard.global_shape and name in parameters and not parameters[name].tensor.numel():
            continue  # a count of steps, which ranks of FSDP1 (2.13) do not take for what they hold no element of
        whole = by_name.get(name, {}).get(key)
        # Zeros may be made before the first step as well as in it.
        if name in by_name or shard.tensor.any():
            yield from _difference(f"optimizer: {place!r}", shard, whole)
    yield from _one_memory(optimizer)
    yield from _different_options(prepared.built_optimizer().param_groups, state["optimizer"]["param_groups"])


def _one_memory(state: Mapping[Any, Any]) -> Iterator[str]:
    """Yield two tensors of one memory, which an optimizer that loads them updates twice, as a step count."""
    places: dict[int, str] = {}
    for name, key, value in ((name, key, value) for name, of in state.items() for key, value in of.items()):
        if not _has_address(value):
            continue
        other = places.setdefault(value.data_ptr(), f"'{name}/{key}'")
        if other != f"'{name}/{key}'":
            yield f"optimizer: {other} and '{name}/{key}' are one tensor in memory"


def _has_address(value: Any) -> bool:
    """Whether a value is a tensor with elements in one memory of its own."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_plain and value.layout is torch.strided and value.numel() > 0


# Any: options are numbers, tensors, or whatever else a user's schedule keeps there.
def _different_options(held: list[dict[str, Any]], groups: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the options that differ, also those that are not the optimizer's own."""
    if len(held) != len(groups):
        yield f"optimizer: {len(groups)} parameter groups for the {len(held)} that a rank has"
    for number, (mine, other) in enumerate(zip(held, groups, strict=False)):
        for key in sorted((mine.keys() | other.keys()) - {"params", "param_names"}):
            pair = [_spelt(options[key]) if key in options else "missing" for options in (other, mine)]
            if pair[0] != pair[1]:
                yield f"optimizer: {key!r} of parameter group {number} is {pair[0]} in the state, {pair[1]} here"


def _spelt(option: Any) -> str:
    """Return the text of an option; a tuple is a list, for loading makes one of the other."""
    return repr(list(option) if isinstance(option, tuple) else option)


def _trained(prepared: PreparedModel) -> list[str]:
    """Name the trained parameters in the order in which the optimizer's groups have them."""
    names = {id(p): name for name, p in prepared.owned_parameters().items() if p.requires_grad}
    listed = (id(p) for group in prepared.built_optimizer().param_groups for p in group["params"])
    return [names[i] for i in listed if i in names]


def _difference(what: str, shard: Shard, whole: Any) -> Iterator[str]:
    if whole is None:
        yield f"{what} is missing, or has another name"
    elif not isinstance(whole, torch.Tensor) or isinstance(whole, DTensor):
        yield f"{what} is of type {type(whole).__name__}"
    elif whole.dtype != shard.tensor.dtype or tuple(whole.shape) != shard.global_shape:
        yield f"{what} has shape {tuple(whole.shape)} and dtype {whole.dtype}"
    elif not torch.equal(shard.of(dense(whole.detach().cpu())), shard.tensor):
        yield f"{what} has other values"


def digests_of(state: dict[str, Any], parameters: Collection[str]) -> str:
    """Return a word for each tensor of the optimizer's state, and of these parameters: its path, and a digest."""
    model = {name: value for name, value in state["model"].items() if name in parameters}
    tensors = tensors_of(model, "model") | tensors_of(state["optimizer"]["state"], "optimizer")
    return " ".join(f"{path}={_digest(tensors[path])}" for path in sorted(tensors))


def _digest(tensor: torch.Tensor) -> str:
    seen = hashlib.sha256(repr(tuple(tensor.shape)).encode())
    seen.update(bytes_of(tensor))
    return seen.hexdigest()[:8]


def wipe(prepared: PreparedModel) -> None:
    """Make zeros of parameters: a load has to bring all of them, also of what never trains."""
    with torch.no_grad():
        for parameter in prepared.owned_parameters().values():
            parameter.zero_()


def copied(state: Any) -> Any:
    """Copy nested dicts and lists, and the tensors in them; of a sharded tensor only this rank's part."""
    if isinstance(state, torch.Tensor):
        return shard_of(state).tensor.detach().clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    return [copied(value) for value in state] if isinstance(state, list) else state


def tensors_of(state: Any, path: str = "state") -> dict[str, torch.Tensor]:
    """Find the tensors of nested dicts and lists, by their path; of a sharded tensor this rank's part."""
    if isinstance(state, torch.Tensor):
        return {path: dense(shard_of(state).tensor.detach())}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {p: t for key, value in items for p, t in tensors_of(value, f"{path}[{key!r}]").items()}


def changed(before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> str:
    """Return the first path at which two states differ; empty if they are equal."""
    lost = [path for path in before.keys() & now.keys() if not _is_equal(before[path], now[path])]
    return min((*lost, *(before.keys() ^ now.keys())), default="")


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
