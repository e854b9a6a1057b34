"""The caller's own module: whether it holds the parameters that the adapter shows.

An adapter may read from anywhere. What a user trains, evaluates and saves is the module that the engine prepared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.engine.contract import PreparedModel, Shard, shard_of
from shardproof.harness.cases.training import AS_SHOWN
from shardproof.harness.torch_compat.dtypes import bytes_of, dense

_PLAIN = (torch.Tensor, nn.Parameter)


class Preparation:
    """A prepared model, and the module from which the engine made it; None where stages of a pipeline have several."""

    def __init__(self, prepared: PreparedModel, model: nn.Module | None) -> None:
        self.prepared = prepared
        is_inside = model is None or any(module is model for module in prepared.module.modules())
        self._modules = (
            [prepared.module] if model is None else [model] if is_inside else [model, prepared.module]
        )
        self._built = {} if model is None else _digests(model)
        self.settle()

    def settle(self) -> None:
        """Note which parameters are whole, at first and once there is an optimizer: some engines shard only then.

        A parameter that is whole only later, or on fewer axes of a mesh, belongs to a unit that happens to be gathered:
        a copy for computation.
        """
        self._wholes = {name for module in self._modules for name in self._named(module, _has_memory)}
        self._num_axes = {
            name: p.device_mesh.ndim
            for module in self._modules
            for name, p in self._named(module, lambda p: isinstance(p, DTensor)).items()
            if isinstance(p, DTensor)
        }

    def difference(self, shown: Mapping[str, Shard]) -> str:
        """Return how the module differs from these parameters, or `AS_SHOWN`; never communicates.

        A parameter is compared where the module holds all of it, or a DTensor. A flat shard or a freed storage says
        nothing about its place in the whole. A module that still is as it was built does not train: the engine trains
        parameters of its own.
        """
        num_compared = 0
        for module in self._modules:
            held = self._held(module, shown)
            texts = {name: _difference(shard_of(p), shown[name]) for name, p in held.items() if name in shown}
            wrong = [f"parameter {name!r} {text}" for name, text in texts.items() if text]
            if not wrong:
                num_compared = max(num_compared, len(held))
            elif _digests(module) != self._built:
                return wrong[0]
        return f"{AS_SHOWN}, in {num_compared} of {len(shown)} parameters"

    def _held(self, module: nn.Module, shown: Mapping[str, Shard]) -> dict[str, torch.Tensor]:
        wholes = self._named(module, _has_memory)
        sharded = self._named(module, lambda p: isinstance(p, DTensor))
        return {name: p for name, p in sharded.items() if not self._is_gathered(name, p)} | {
            name: tensor
            for name, tensor in wholes.items()
            if name in shown and name in self._wholes and tuple(tensor.shape) == shown[name].global_shape
        }

    def _is_gathered(self, name: str, parameter: torch.Tensor) -> bool:
        return isinstance(parameter, DTensor) and parameter.device_mesh.ndim < self._num_axes.get(name, 0)

    def _named(self, module: nn.Module, is_asked: Callable[[torch.Tensor], bool]) -> dict[str, torch.Tensor]:
        named = {self.prepared.original_name(name): p for name, p in module.named_parameters()}
        return {name: p for name, p in named.items() if is_asked(p)}


def _digests(module: nn.Module) -> dict[str, str]:
    """Hash what this rank has of a module's parameters, as far as it is in memory and no flat shard."""
    own = {
        name: shard_of(p).tensor
        for name, p in module.named_parameters()
        if isinstance(p, DTensor) or _has_memory(p)
    }
    return {name: hashlib.sha256(bytes_of(tensor)).hexdigest() for name, tensor in own.items()}


def _has_memory(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in _PLAIN and tensor.device.type != "meta" and tensor.layout is torch.strided
    return is_plain and tensor.untyped_storage().nbytes() > 0


def _difference(here: Shard, shown: Shard) -> str:
    """Compare two reads of a parameter where both hold it."""
    if here.is_whole:
        mine, other = shown.of(dense(here.tensor)), shown.tensor
    elif shown.is_whole:
        mine, other = dense(here.tensor), here.of(shown.tensor)
    elif (here.offsets, here.tensor.shape) == (shown.offsets, shown.tensor.shape):
        mine, other = dense(here.tensor), shown.tensor
    else:
        mine_is = f"{list(here.tensor.shape)} at {list(here.offsets)}"
        return f"is {mine_is} in the module, and shown as {list(shown.tensor.shape)} at {list(shown.offsets)}"
    # The module may compute in fewer bits than the optimizer updates.
    differs = (mine != other.to(mine.dtype)) & ~(mine.isnan() & other.isnan())
    if not bool(differs.any()):
        return ""
    local = tuple(differs.nonzero()[0].tolist())
    return (
        f"is {mine[local].item():.9g} in the module, and shown as {other[local].item():.9g}, at {list(local)}"
    )
