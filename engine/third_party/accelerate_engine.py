"""Hugging Face accelerate on a CPU: DistributedDataParallel, FSDP1 and FSDP2 through its Accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
)
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters import composable_capabilities, torch_ddp
from shardproof.engine.adapters.composable import members
from shardproof.engine.adapters.torch_fsdp1 import NAMES, PreparedFsdp1
from shardproof.engine.contract import (
    Capability,
    Copies,
    Engine,
    OptimizerFactory,
    Plan,
    PreparedModel,
    Reshard,
)

# By version: whether parameters are freed after forward, as the plugin spells it.
_RESHARD: Mapping[int, Mapping[bool, bool | str]] = {
    1: {False: "SHARD_GRAD_OP", True: "FULL_SHARD"},
    2: {False: False, True: True},
}


class PreparedAccelerate(PreparedModel):
    """accelerate takes model and optimizer together, so it receives the model when there is an optimizer."""

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        super().__init__(model)
        self._accelerator = accelerator

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Prepare both; FSDP2 replaces the parameters, also in the optimizer."""
        self._accelerator.free_memory()  # it keeps what it prepared before for an optimizer that this one replaces
        given = factory(self.named.parameters())
        self.module, built = self._accelerator.prepare(self.named, given)
        super().optimizer(lambda _: built)
        if isinstance(self.module, DistributedDataParallel):
            self.copies = Copies.BUCKETS

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)

    def accumulating(self) -> AbstractContextManager[None]:
        """Use accelerate's own context."""
        context: AbstractContextManager[None] = self._accelerator.no_sync(self.module)
        return context

    def save_checkpoint(self, folder: Path) -> None:
        self._accelerator.save_state(str(folder))

    def load_checkpoint(self, folder: Path) -> None:
        """Load model and optimizer, as they were prepared."""
        self._accelerator.load_state(str(folder))

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        """Use accelerate's own."""
        norm = self._accelerator.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class AccelerateDdpEngine(Engine):
    """accelerate's default for several processes on a CPU."""

    name = "accelerate.ddp"
    package = "accelerate"
    known_as = "torch.ddp"
    needs_processes = True  # its state is one per process
    capabilities = torch_ddp.WRAPPED

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Pass the options of DDP by a handler."""
        plan.refuse_beyond(self.capabilities)
        options = DistributedDataParallelKwargs(
            bucket_cap_mb=25 if plan.bucket_bytes is None else plan.bucket_bytes / 2**20,
            broadcast_buffers=Capability.OWN_BUFFERS not in plan.demands,
            find_unused_parameters=bool(plan.demands & {Capability.UNUSED, Capability.RANK_DEPENDENT}),
        )
        return PreparedAccelerate(Accelerator(cpu=True, kwargs_handlers=[options]), model)


class AccelerateFsdp2Engine(AccelerateDdpEngine):
    """FSDP2 by accelerate's plugin, whose units are all modules of the listed classes."""

    name = "accelerate.fsdp2"
    known_as = "torch.fsdp2"
    capabilities = composable_capabilities.WRAPPED

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Set the options that accelerate sets on accelerators: on a CPU it ignores the plugin, and trains with DDP."""
        plan.refuse_beyond(self.capabilities)
        return PreparedAccelerate(_with_plugin(model, plan, version=2), model)


class AccelerateFsdp1Engine(AccelerateDdpEngine):
    """FSDP1 by the same plugin, which wraps the model before there is an optimizer."""

    name = "accelerate.fsdp1"
    known_as = "torch.fsdp1"
    capabilities = frozenset(
        {Capability.SHARD, Capability.RESHARD_POLICY, Capability.ACCUMULATE, Capability.CLIP}
    )

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap the model; pieces are read as those of torch's own wrapper."""
        plan.refuse_beyond(self.capabilities)
        return PreparedFsdp1(_with_plugin(model, plan, version=1).prepare(model), model, NAMES)


def _with_plugin(model: nn.Module, plan: Plan, *, version: int) -> Accelerator:
    accelerator = Accelerator(cpu=True)
    for state in (PartialState, AcceleratorState):  # the latter is refilled from the former
        state._shared_state |= {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        reshard_after_forward=_RESHARD[version][plan.reshard is not Reshard.KEEP],
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted(
            {type(module).__name__ for unit in plan.units for module in members(model, unit)}
        ),
        cpu_ram_efficient_loading=False,
    )
    return accelerator
