"""torch.distributed.fsdp.FullyShardedDataParallel (FSDP1), one flat parameter for each unit, on a 1-D or 2-D mesh."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from engine.contract import Capability, Engine, Layout, Plan, PreparedModel, Reshard, Shard, shard_of

__all__ = ["FullyShardedDataParallelEngine", "PreparedFsdp1"]

# What FSDP1 puts into the names of everything inside a module that it wraps.
_WRAPPER = "_fsdp_wrapped_module."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """What a rank has of one parameter of that shape: the elements of the flattened one from ``start`` on."""

    shape: tuple[int, ...]
    start: int


class PreparedFsdp1(PreparedModel):
    """Between forward and backward parameters are views of the unit's flat one: intervals, where it is sharded."""

    def __init__(self, module: FullyShardedDataParallel, model: nn.Module) -> None:
        super().__init__(module, named=model)
        self._pieces = dict(_pieces(module))

    def accumulating(self) -> AbstractContextManager[None]:
        """Use FSDP1's own no_sync, which keeps whole gradients on every rank."""
        assert isinstance(self.module, FullyShardedDataParallel)
        return self.module.no_sync()

    def local_parameters(self) -> Mapping[str, Shard]:
        """Read this rank's piece of every parameter."""
        return {name: self._shard(p, p) for name, p in self._named_parameters()}

    def local_gradients(self) -> Mapping[str, Shard | None]:
        """Read this rank's piece of every gradient, or all of it where it was not reduced yet."""
        return {
            name: None if p.grad is None else self._shard(p.grad, p) for name, p in self._named_parameters()
        }

    def local_buffers(self) -> Mapping[str, Shard]:
        """Read this rank's buffers, which FSDP1 leaves alone."""
        return {name.replace(_WRAPPER, ""): shard_of(b) for name, b in self.named.named_buffers()}

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        """Read this rank's state: of pieces like the pieces, but for what is one number."""
        state = self._built_optimizer().state
        return {
            f"{name}/{key}": self._shard(value, p)
            for name, p in self._named_parameters()
            for key, value in state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.named.named_parameters():
            yield name.replace(_WRAPPER, ""), parameter

    def _shard(self, tensor: torch.Tensor, parameter: nn.Parameter) -> Shard:
        """Describe a tensor that belongs to a parameter: flat if it has the form of a piece, else whole."""
        piece = self._pieces.get(parameter)
        read = shard_of(tensor)
        if piece is None or tensor.shape != parameter.shape:
            return read
        return Shard.flat(read.tensor, piece.start, piece.shape)


class FullyShardedDataParallelEngine(Engine):
    """Each unit is one flat parameter: gathered before use, its gradient reduce-scattered after backward."""

    name = "torch.fsdp1"
    capabilities = frozenset(
        {
            Capability.REPLICATE,
            Capability.SHARD,
            Capability.HYBRID,
            Capability.UNITS,
            Capability.RESHARD_POLICY,
            Capability.ACCUMULATE,
            Capability.REDUCE_DTYPE,
        }
    )
    prepared_type: ClassVar[type[PreparedFsdp1]] = PreparedFsdp1

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap every unit of the plan, then the root."""
        plan.refuse_beyond(self.capabilities)
        if plan.layout is Layout.REPLICATE:
            plan.refuse_options_of_shards()
        _expect_warnings()
        units = {model.get_submodule(name) for unit in plan.units for name in unit.split(",")}
        wrap = partial(
            FullyShardedDataParallel,
            device_mesh=mesh,
            device_id=next(model.parameters()).device,
            use_orig_params=True,
            sharding_strategy=_strategy(plan),
            mixed_precision=_precision(plan),
        )
        root = wrap(model, auto_wrap_policy=CustomPolicy(lambda module: module in units))
        if plan.reshard is Reshard.AFTER_FORWARD:
            # FSDP1 keeps what the root gathered until backward, always: let the root be one that owns nothing.
            root = wrap(root)
        return self.prepared_type(root, model)


def _strategy(plan: Plan) -> ShardingStrategy:
    keeps = plan.reshard is Reshard.KEEP
    match plan.layout:
        case Layout.NATIVE | Layout.SHARD:
            return ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD
        case Layout.HYBRID:
            return ShardingStrategy._HYBRID_SHARD_ZERO2 if keeps else ShardingStrategy.HYBRID_SHARD
        case Layout.REPLICATE:
            return ShardingStrategy.NO_SHARD


def _precision(plan: Plan) -> MixedPrecision | None:
    if plan.reduce_dtype is None:
        return None
    # No exceptions by class: for them FSDP1 would make units that the plan does not have.
    return MixedPrecision(reduce_dtype=plan.reduce_dtype, _module_classes_to_ignore=())


def _pieces(root: FullyShardedDataParallel) -> Iterator[tuple[nn.Parameter, _Piece]]:
    """Find where the pieces of sharded units lie; FSDP1 keeps that in private attributes, and tells it nowhere."""
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        if unit._handle is None or not unit._handle.uses_sharded_strategy:
            continue
        flat = unit._handle.flat_param
        for parameter, shape, info in zip(
            flat._params or (), flat._shapes, flat._shard_param_infos, strict=True
        ):
            yield parameter, _Piece(shape=tuple(shape), start=info.intra_param_start_idx or 0)


def _expect_warnings() -> None:
    """Silence what FSDP1 says of plans that ask for it; for good, since ranks that are threads share filters."""
    # Replication is what such a plan asks for.
    warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
    # Of a group of one rank, where to shard and to replicate are the same.
    warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD` instead of", UserWarning)
