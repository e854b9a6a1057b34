"""The reference engine: each unit of the plan is one group, and the root takes the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardproof.engine import reference
from shardproof.engine.adapters.composable import DECIDED_BY, PreparedComposable, apply_plan
from shardproof.engine.adapters.composable_capabilities import COMPOSABLE_CAPABILITIES
from shardproof.engine.adapters.torch_internals import has_mesh_dims
from shardproof.engine.contract import Capability, ComposableApi, Engine, Plan, PreparedModel, shard_of
from shardproof.engine.reference.fsdp_state import state_of


def _set_divide_factor(module: Any, factor: float, num_shards: int) -> None:
    module.set_gradient_divide_factor(factor)


REFERENCE_API = ComposableApi(
    fully_shard=reference.fully_shard,
    replicate=reference.replicate,
    sharded_module=reference.FSDPModule,
    mixed_precision=reference.MixedPrecisionPolicy,
    cpu_offload=reference.CPUOffloadPolicy,
    register_forward_method=reference.register_fsdp_forward_method,
    share_comm_ctx=reference.share_comm_ctx,
    set_divide_factor=_set_divide_factor,
    placed_on=lambda mesh: reference.ShardPlacementResult(mesh=mesh),
)


class PreparedReference(PreparedComposable):
    """Clips with the engine's own function, which supports empty shards and meshes of several axes."""

    scaler_class: ClassVar[type[GradScaler]] = reference.GradScaler

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        return float(reference.clip_grad_norm_(self.module.parameters(), max_norm, norm_type))

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Load this rank's part of each tensor: torch's function does not support uneven shards of sharded tensors."""
        with self._loadable(state["optimizer"]):
            model, optimizer = get_state_dict(self.module, self.built_optimizer())
        # There is no entry to load into of what was frozen when the optimizer was made.
        made: Any = optimizer["state"]
        for name, parameter in self._named_shards().items():
            saved = state["optimizer"]["state"].get(name, {})
            made.setdefault(name, {key: _like(parameter, value) for key, value in saved.items()})
        self._load(_part_of(state["model"], model), _part_of(state["optimizer"], optimizer))

    def shared_state(self) -> dict[str, Any]:
        """Return this rank's shares, with entries to load into of what is frozen too: torch's function makes none.

        What the engine ignores stays frozen, because fused optimizers do not step it beside DTensors. To make entries,
        torch's function takes a step with gradients of zero, which the optimizer is not to keep (pytorch#164929).
        """
        parameters, made = self._named_shards(), self.built_optimizer().state
        unstepped = {name for name, parameter in parameters.items() if parameter not in made}
        with self._thawed(parameters.keys() - set(self.plan.ignored)):
            state = super().shared_state()
        entries = state["optimizer"]["state"]
        for name in unstepped & entries.keys():
            made.pop(parameters[name], None)
            if "step" in entries[name]:
                entries[name]["step"].zero_()
        return state

    def load_shared_state(self, state: dict[str, Any]) -> None:
        self._load(state["model"], state["optimizer"])

    def _load(self, model: dict[str, Any], state: dict[str, Any]) -> None:
        """Load this rank's shares, ``state`` those of the optimizer.

        torch's function does not support parameters without state: it refuses them, or creates the state of one step
        (pytorch#192202).
        """
        optimizer = self.built_optimizer()
        with self._loadable(state):
            set_model_state_dict(self.module, model)
            set_optimizer_state_dict(self.module, optimizer, state, options=StateDictOptions(strict=False))
        for name, parameter in self._named_shards().items():
            if name not in state["state"]:
                optimizer.state.pop(parameter, None)
        _restore_empty_groups(optimizer, state)

    def _named_shards(self) -> dict[str, nn.Parameter]:
        """Return what the optimizer has: after a forward alone, units may show their parameters whole."""
        for module in self.module.modules():
            if isinstance(module, reference.FSDPModule):
                module.reshard()
        return self._named_parameters()

    @contextmanager
    def _loadable(self, state: dict[str, Any]) -> Iterator[None]:
        """Thaw parameters that have state, and hide gradients, for torch's functions.

        Where there are gradients they take a new optimizer for one that has state (pytorch#140898).
        """
        gradients = [(p, p.grad) for p in self._named_shards().values() if p.grad is not None]
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            with self._thawed(state["state"]):
                yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    @contextmanager
    def _thawed(self, names: Collection[str]) -> Iterator[None]:
        """Thaw these parameters for torch's functions, which load no state of frozen ones (pytorch#192202)."""
        named = self._named_shards().items()
        frozen = [p for name, p in named if not p.requires_grad and name in names]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


# Any: states are nested dicts and lists of tensors and other values.
def _restore_empty_groups(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the options of groups without parameters: torch's functions take them away (pytorch#143828)."""
    saved = [group for group in state["param_groups"] if not group["params"]]
    empty = [group for group in optimizer.param_groups if not group["params"]]
    for group, options in zip(empty, saved, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})


def _like(parameter: nn.Parameter, value: Any) -> Any:
    """Return zeros in the form of a parameter if a value has its shape, as moments do; otherwise the value."""
    is_moment = isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
    return torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False) if is_moment else value


def _part_of(whole: Any, own: Any) -> Any:
    """Return ``whole`` in the form of ``own``, with this rank's part of each tensor that is sharded in ``own``."""
    if isinstance(own, DTensor):
        part = shard_of(own).of(whole).to(own.device)
        own.to_local().copy_(part)
        return own
    if isinstance(own, dict):
        return {key: _part_of(value, own.get(key, value)) for key, value in whole.items()}
    return whole.clone() if isinstance(whole, torch.Tensor) else whole


class ReferenceEngine(Engine):
    """Shards, or replicates if the plan requests that; both are one engine."""

    name = "reference"
    # CUDA graphs have not been tested yet, and the engine always allocates its own buffers.
    capabilities = COMPOSABLE_CAPABILITIES - ({Capability.MESH_DIMS} if not has_mesh_dims() else set())
    prepared_type: ClassVar[type[PreparedReference]] = PreparedReference
    call = reference.fully_shard
    decided_by = DECIDED_BY

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard or replicate every unit of the plan, then the root."""
        plan.refuse_beyond(self.capabilities)
        apply_plan(REFERENCE_API, model, plan, mesh, plan.layout, self.call_options)
        return self.adopt(model, model, plan)

    def adopt(self, module: nn.Module, model: nn.Module, plan: Plan) -> PreparedModel:
        return self.prepared_type(model, plan, REFERENCE_API)


class ReferenceOnStreams(ReferenceEngine):
    """The same engine with an accelerator's overlap on a CPU: each reduction is issued completely, on its stream."""

    name = "reference.on_streams"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare as usual, then select the other form of overlap."""
        prepared = super().prepare(model, plan, mesh)
        for module in prepared.module.modules():
            if (unit := state_of(module)) is not None:
                unit.comm_ctx.waits_hold_up_the_thread = False
        return prepared
