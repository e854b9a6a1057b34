"""torch.nn.parallel.DistributedDataParallel."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.contract import Capability, Copies, Engine, Plan, PreparedModel

# Since torch 2.15, by pytorch#196651.
_OF_NEWER_RELEASES = {Capability.FINALIZE} if hasattr(DistributedDataParallel, "finalize_backward") else set()

# What other packages' wrappers of DDP, or after its model, have as well: at least the first, and at most both.
BASICS = frozenset(
    {
        Capability.REPLICATE,
        Capability.ACCUMULATE,
        Capability.BUCKETS,
        Capability.CLIP,
        Capability.UNUSED,
        Capability.RANK_DEPENDENT,
        Capability.OWN_BUFFERS,
    }
)
WRAPPED = BASICS | {
    Capability.RANK_DEPENDENT_UNITS,
    Capability.RANK_DEPENDENT_ORDER,
    Capability.FREEZE,
    Capability.RECOVER,
    Capability.RECOVER_KEEPING,
    Capability.EDIT_GRADIENTS,
    Capability.COMPLEX,
    Capability.SPARSE_GRADIENTS,
    Capability.PARAMETER_ORDER,
    Capability.PARAMETER_SHAPES,
    Capability.LATE_PARAMETERS,
    Capability.LOSS_SCALE,
    Capability.COMPARES_RANKS,
    Capability.START_FROM_FIRST,
    Capability.LOADED_WEIGHTS,
    Capability.STATE,
    Capability.CHECKPOINTS,
    Capability.RESIZED_CHECKPOINTS,
}


class PreparedDdp(PreparedModel):
    """A model in DDP, which keeps the original module and its names."""

    copies = Copies.BUCKETS
    interface: ClassVar[type[DistributedDataParallel]] = DistributedDataParallel
    """The class that cases call."""

    def data_parallel(self) -> type[DistributedDataParallel]:
        """Return the class that cases call."""
        return self.interface

    def pipelined(self) -> nn.Module:
        """Return the wrapper itself: torch's stages support its class, and set which backward is its last."""
        return self.module


class DistributedDataParallelEngine(Engine):
    """All-reduces gradients by bucket; the C++ reducer starts each all-reduce during backward."""

    name = "torch.ddp"
    capabilities = frozenset(
        {
            Capability.REPLICATE,
            Capability.ACCUMULATE,
            Capability.BUCKETS,
            Capability.PIPELINE,
            Capability.UNUSED,
            Capability.RANK_DEPENDENT,
            Capability.RANK_DEPENDENT_UNITS,
            Capability.RANK_DEPENDENT_ORDER,
            Capability.RECOVER,
            Capability.RECOVER_KEEPING,
            Capability.SUM_OF_FORWARDS,
            Capability.CLIP,
            Capability.COMPLEX,
            Capability.MIXED_DTYPES,
            Capability.MEMORY_FORMATS,
            Capability.SPARSE_GRADIENTS,
            Capability.STATE,
            Capability.OWN_BUFFERS,
            Capability.EDIT_GRADIENTS,
            Capability.LOADED_WEIGHTS,
            Capability.START_FROM_FIRST,
            Capability.LOSS_SCALE,
            Capability.COMPARES_RANKS,
            Capability.PARAMETER_ORDER,
            Capability.PARAMETER_SHAPES,
            Capability.LATE_PARAMETERS,
            Capability.SEVERAL_OPTIMIZERS,
            Capability.DATA_PARALLEL,
            *_OF_NEWER_RELEASES,
        }
    )
    decided_by: ClassVar[Mapping[str, frozenset[Capability]]] = {
        "bucket_cap_mb": frozenset({Capability.BUCKETS}),
        "forward_sync_buffers": frozenset({Capability.OWN_BUFFERS}),
    }
    prepared_type: ClassVar[type[PreparedDdp]] = PreparedDdp
    options: ClassVar[Mapping[str, Any]] = {}
    call = DistributedDataParallel

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap the whole model; DDP chooses its buckets itself, so ``plan.units`` does not apply."""
        plan.refuse_beyond(self.capabilities)
        finds_unused = bool(plan.demands & {Capability.UNUSED, Capability.RANK_DEPENDENT})
        asked = {
            "process_group": mesh.get_group(),
            "device_ids": _device_ids(model),
            "find_unused_parameters": finds_unused,
            "bucket_cap_mb": None if plan.bucket_bytes is None else plan.bucket_bytes / 2**20,
            **_buffer_options(plan),
            **self.options,
            **self.call_options,
        }
        return self.adopt(DistributedDataParallel(model, **asked), model, plan)

    def adopt(self, module: nn.Module, model: nn.Module, plan: Plan) -> PreparedModel:
        return self.prepared_type(module, named=model)


def _device_ids(model: nn.Module) -> list[torch.device] | None:
    """Return the accelerator that the model is on, so that DDP moves inputs there, as in user scripts."""
    device = next((parameter.device for parameter in model.parameters()), None)
    return None if device is None or device.index is None else [device]


def _buffer_options(plan: Plan) -> dict[str, Any]:
    """Keep DDP from broadcasting rank 0's buffers before each forward, if the plan asks for it."""
    if Capability.OWN_BUFFERS not in plan.demands:
        return {}
    # torch 2.13 renamed the option, and warns about the old name (pytorch#178054).
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}
