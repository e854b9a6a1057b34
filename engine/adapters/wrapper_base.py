"""Shared by engines with the interface of ``FullyShardedDataParallel``: applies a plan, and reads the model."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)

from shardproof.engine.adapters.composable import members
from shardproof.engine.adapters.torch_internals import hybrid_that_keeps
from shardproof.engine.contract import (
    BackwardGather,
    Capability,
    Engine,
    Layout,
    Offload,
    OptimizerFactory,
    Plan,
    PreparedModel,
    Reshard,
    Shard,
    Wrapper,
    WrapperNames,
    shard_of,
)
from shardproof.engine.pieces import Piece

# The wrapper adds this to the names of everything inside a wrapped module.
_WRAPPED = "_fsdp_wrapped_module"
PREFIX = f"{_WRAPPED}."

CAPABILITIES = frozenset(
    {
        Capability.REPLICATE,
        Capability.SHARD,
        Capability.HYBRID,
        Capability.IGNORE,
        Capability.UNITS,
        Capability.RESHARD_POLICY,
        Capability.ACCUMULATE,
        Capability.SUM_OF_FORWARDS,
        Capability.MIXED_DTYPES,
        Capability.REDUCE_DTYPE,
        Capability.CPU_OFFLOAD,
        Capability.CONVERT,
        Capability.CLIP,
        Capability.STATE,
        Capability.WRAPPER,
        Capability.EDIT_GRADIENTS,
        Capability.LOADED_WEIGHTS,
        Capability.LATE_PARAMETERS,
        Capability.START_FROM_FIRST,
        Capability.LOSS_SCALE,
        Capability.PARAMETER_ORDER,
        Capability.RANK_DEPENDENT_ORDER,
    }
)
"""The capabilities of both engines with this adapter."""

_PREFETCH = {
    BackwardGather.BEFORE: BackwardPrefetch.BACKWARD_PRE,
    BackwardGather.AFTER: BackwardPrefetch.BACKWARD_POST,
    BackwardGather.WHEN_NEEDED: None,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrapperPiece(Piece):
    """A piece that is a parameter of its own, or part of a flat one if ``is_flat``."""

    numel: int
    is_flat: bool

    def of(self, tensor: torch.Tensor) -> Shard:
        """Return this piece's part of a tensor that belongs to its owner, or the whole tensor if its shape differs."""
        read = shard_of(tensor)
        if not self.is_flat and tensor.shape == self.owner.shape:
            return Shard.flat(read.tensor, self.start, self.shape)
        if self.is_flat and tensor.dim() == 1:
            return Shard.flat(
                read.tensor[self.offset : self.offset + self.numel].clone(), self.start, self.shape
            )
        return read


class PreparedWrapper(PreparedModel, ABC):
    """A wrapped model: outside forward and backward, parameters are pieces of the unit's flat one.

    Pieces are intervals if the unit is sharded. Each engine lists them in ``pieces``; all other parameters are read
    directly.
    """

    wrapped_as = (_WRAPPED,)

    def __init__(
        self,
        module: Any,  # the engine's wrapper
        model: nn.Module,
        names: WrapperNames,
    ) -> None:
        super().__init__(module, named=model)
        self._root = module
        self._names = names

    @abstractmethod
    def pieces(self) -> Iterator[WrapperPiece]:
        """Yield the pieces of the units that are sharded or flat."""

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Build it over the parameters that the root shows, including its own flat one, under the model's names."""
        names = {parameter: name for name, parameter in self.named.named_parameters()}
        self._optimized = {
            names.get(parameter, name): parameter for name, parameter in self._root.named_parameters()
        }
        self._optimizer = factory(self._optimized.values())

    def wrapper(self) -> WrapperNames:
        return self._names

    def grad_scaler(self, *, init_scale: float, growth_interval: int) -> GradScaler:
        """Use the sharded scaler: torch's default scaler does not combine found infs over ranks."""
        scaler: GradScaler = self._names.ShardedGradScaler(
            self._root.compute_device.type, init_scale=init_scale, growth_interval=growth_interval
        )
        return scaler

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        """Use the wrapper's own method."""
        return float(self._root.clip_grad_norm_(max_norm, norm_type))

    def full_state(self) -> dict[str, Any]:
        """Use the wrapper's state dicts: whole, on every rank."""
        wrapper = self._names.FullyShardedDataParallel
        with wrapper.state_dict_type(self._root, StateDictType.FULL_STATE_DICT):
            return {
                "model": self._root.state_dict(),
                "optimizer": wrapper.optim_state_dict(self._root, self.built_optimizer()),
            }

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Use the wrapper's functions; the state may come from another wrapping."""
        wrapper, optimizer = self._names.FullyShardedDataParallel, self.built_optimizer()
        with wrapper.state_dict_type(self._root, StateDictType.FULL_STATE_DICT):
            self._root.load_state_dict(state["model"])
            made = wrapper.optim_state_dict_to_load(self._root, optimizer, state["optimizer"])
        optimizer.load_state_dict(made)

    def local_parameters(self) -> Mapping[str, Shard]:
        """Read this rank's piece of every parameter."""
        return {name: read(owner.detach()) for name, owner, read in self._owned()}

    def local_gradients(self) -> Mapping[str, Shard | None]:
        """Read this rank's piece of every gradient, or the whole gradient if it is not reduced yet."""
        return {name: _gradient(owner, read) for name, owner, read in self._owned()}

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        """Read this rank's state: pieces like the parameters', except for single numbers."""
        state = self.built_optimizer().state
        return {
            f"{name}/{key}": read(value)
            for name, owner, read in self._owned()
            for key, value in state.get(owner, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def _owned(self) -> Iterator[tuple[str, nn.Parameter, Callable[[torch.Tensor], Shard]]]:
        """Yield each parameter's name, the tensor that the optimizer updates, and a function to read its pieces."""
        pieces = list(self.pieces())
        owners = {piece.owner for piece in pieces}
        for piece in pieces:
            yield piece.name, piece.owner, piece.of
        for name, parameter in self.named.named_parameters():
            if parameter not in owners:
                yield self.original_name(name), parameter, shard_of


def _gradient(owner: nn.Parameter, read: Callable[[torch.Tensor], Shard]) -> Shard | None:
    """Read one gradient; an empty piece may have one or not, so an absent one is not reported as missing."""
    if owner.grad is not None:
        return read(owner.grad)
    return read(torch.empty_like(owner)) if owner.requires_grad and not owner.numel() else None


class WrapperEngine(Engine):
    """Makes each unit one flat parameter: gathers it before use, and reduce-scatters its gradient after backward."""

    decided_by: ClassVar[Mapping[str, frozenset[Capability]]] = {
        "sharding_strategy": frozenset(
            {Capability.RESHARD_POLICY, Capability.REPLICATE, Capability.HYBRID, Capability.SHARD}
        ),
        "auto_wrap_policy": frozenset({Capability.UNITS}),
        "mixed_precision": frozenset({Capability.REDUCE_DTYPE}),
        "cpu_offload": frozenset({Capability.CPU_OFFLOAD}),
        "use_orig_params": frozenset({Capability.PARAMETER_ORDER, Capability.WRAPPER}),
        "backward_prefetch": frozenset({Capability.WRAPPER}),
        "forward_prefetch": frozenset({Capability.WRAPPER}),
        "sync_module_states": frozenset({Capability.START_FROM_FIRST}),
    }
    names: ClassVar[WrapperNames]
    prepared_type: ClassVar[type[PreparedWrapper]]

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap every unit of the plan, then the root."""
        plan.refuse_beyond(self.capabilities)
        return self.adopt(_open(self.names, model, plan, mesh, self.call_options), model, plan)

    def adopt(self, module: nn.Module, model: nn.Module, plan: Plan) -> PreparedModel:
        return self.prepared_type(module, model, self.names)


# Any: options are any values, and the result is the engine's wrapper.
def _open(
    names: WrapperNames, model: nn.Module, plan: Plan, mesh: DeviceMesh, call_options: Mapping[str, Any]
) -> Any:
    """Wrap every unit of the plan, then the root; return the root's wrapper."""
    if plan.layout is Layout.REPLICATE:
        plan.refuse_options_of_shards()
    _expect_warnings()
    units = {module for unit in plan.units for module in members(model, unit)}
    own_options = dict(call_options)
    policy = own_options.pop("auto_wrap_policy", names.CustomPolicy(lambda module: module in units))
    options = plan.wrapper or Wrapper()
    asked = {
        "device_id": next(model.parameters()).device,
        "sharding_strategy": _strategy(plan),
        "mixed_precision": _precision(plan),
        "cpu_offload": CPUOffload(offload_params=plan.offload is not Offload.NONE),
        "ignored_states": [model.get_parameter(name) for name in plan.ignored] or None,
        "use_orig_params": options.use_orig_params,
        "backward_prefetch": _PREFETCH[options.backward_prefetch],
        "forward_prefetch": options.forward_prefetch,
        "limit_all_gathers": options.limit_all_gathers,
        "sync_module_states": Capability.START_FROM_FIRST in plan.demands,
        **_ranks(plan, mesh, by_groups=options.by_groups),
        **own_options,
    }
    wrap = partial(names.FullyShardedDataParallel, **asked)
    root = wrap(model, auto_wrap_policy=policy)
    if plan.reshard is Reshard.AFTER_FORWARD:
        # The root always keeps its gathered parameters until backward: make the root a wrapper that owns none.
        root = wrap(root)
    return root


def _ranks(plan: Plan, mesh: DeviceMesh, *, by_groups: bool) -> dict[str, Any]:
    if not by_groups:
        return {"device_mesh": mesh}
    if plan.layout is Layout.HYBRID:
        return {"process_group": (mesh.get_group("shard"), mesh.get_group("replicate"))}
    return {"process_group": mesh.get_group()}


def _strategy(plan: Plan) -> ShardingStrategy:
    keeps = plan.reshard is Reshard.KEEP
    match plan.layout:
        case Layout.NATIVE | Layout.SHARD:
            return ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD
        case Layout.HYBRID:
            return hybrid_that_keeps() if keeps else ShardingStrategy.HYBRID_SHARD
        case Layout.REPLICATE:
            return ShardingStrategy.NO_SHARD
        case Layout.ZERO1 | Layout.ZERO2:
            raise ValueError(f"plan.layout: expected a layout that the wrapper declares, got {plan.layout}")


def _precision(plan: Plan) -> MixedPrecision | None:
    if plan.reduce_dtype is None:
        return None
    # No exemptions by class: they would create units that the plan does not have.
    return MixedPrecision(reduce_dtype=plan.reduce_dtype, _module_classes_to_ignore=())


_EXPECTED_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # The plan asks for replication; with one rank it equals sharding.
    ("The `NO_SHARD` sharding strategy is deprecated", FutureWarning),
    ("FSDP is switching to use `NO_SHARD` instead of", UserWarning),
    ("When using ``NO_SHARD`` for ``ShardingStrategy``", UserWarning),
    # Deprecated features are tested until they are removed.
    (r"FSDP\.state_dict_type\(\) and FSDP\.set_state_dict_type\(\) are being deprecated", FutureWarning),
    (r"``FullyShardedDataParallel\.\w+_optim_state_dict``is being deprecated", FutureWarning),
    ("Please use DTensor instead", FutureWarning),
    ("`_get_pg_default_device` will be deprecated", UserWarning),
)


def _expect_warnings() -> None:
    """Ignore the warnings that plans expect, permanently: ranks that are threads share the warning filters."""
    for message, category in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message, category)
