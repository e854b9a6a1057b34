"""torch.distributed.fsdp.fully_shard (FSDP2), on a 1-D mesh or a 2-D replicate-by-shard mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardproof.engine.adapters.composable import DECIDED_BY, PreparedComposable, apply_plan
from shardproof.engine.adapters.composable_capabilities import COMPOSABLE_CAPABILITIES
from shardproof.engine.adapters.torch_internals import RELEASE, can_place, has_mesh_dims, placed_on, replicate
from shardproof.engine.contract import Capability, ComposableApi, Engine, Layout, Plan, PreparedModel

# The method behind each capability: a release without the method does not have the capability.
_METHODS = {
    Capability.BUFFERS: "set_symm_mem_for_comm",
    Capability.FINALIZE: "set_manual_backward_finalization",
    Capability.KEEP_STORAGE: "set_keep_unsharded_storage",
    Capability.RANK_DEPENDENT: "set_reduce_scatter_unused_params",
    Capability.RECOVER: "reset_iter_state",
    Capability.RECOVER_KEEPING: "reset_iter_state",
    Capability.REDUCE_BUFFERS: "set_reduce_scatter_max_input_buffers",
}


def not_of_this_release() -> Iterator[Capability]:
    """Yield the capabilities that FSDP2 lacks in this release of torch."""
    yield from (capability for capability, method in _METHODS.items() if not hasattr(FSDPModule, method))
    if not can_place():
        yield Capability.EXPERTS
    if not has_mesh_dims():
        yield Capability.MESH_DIMS
    is_newer = RELEASE >= (2, 15)
    # 2.15 reduces in the gradients' dtype: that of the parameters, unless a user sets another.
    yield Capability.REDUCE_AS_COMPUTED if is_newer else Capability.REDUCE_AS_STORED
    if is_newer:  # its reset_iter_state drops all gradients
        yield Capability.RECOVER_KEEPING
    else:
        yield from (Capability.FREES_PACKED, Capability.GRADIENT_DTYPES, Capability.PARAMETER_DTYPES)


# Only the ranks that call a unit gather it, so it does not declare RANK_DEPENDENT_UNITS.
CAPABILITIES = (
    COMPOSABLE_CAPABILITIES | {Capability.REDUCE_AS_COMPUTED, Capability.BUFFERS, Capability.GRAPHS}
) - set(not_of_this_release())
"""The capabilities of FSDP2's machinery, sharded or replicated."""


def _set_divide_factor(module: FSDPModule, factor: float, num_shards: int) -> None:
    """Make one unit divide by ``factor``.

    For a factor other than the number of shards, FSDP2 reduce-scatters with PREMUL_SUM, which only NCCL supports
    (pytorch#129286): a CPU needs plain sums that are divided afterwards (pytorch#155915). With one shard there is no
    reduce-scatter, so that op is not used, and forcing plain sums would trigger the double division of torch 2.13
    (pytorch#167178).
    """
    assert isinstance(module, nn.Module)
    # Read the device from the mesh: parameters without memory are on no device yet.
    is_on_cpu = all(
        (p.device_mesh.device_type if isinstance(p, DTensor) else p.device.type) == "cpu"
        for p in module.parameters()
    )
    module.set_gradient_divide_factor(factor)
    if is_on_cpu and num_shards not in {1, factor}:
        module.set_force_sum_reduction_for_comms(True)


FSDP2_API = ComposableApi(
    fully_shard=torch_fsdp.fully_shard,
    replicate=replicate,
    sharded_module=FSDPModule,
    mixed_precision=torch_fsdp.MixedPrecisionPolicy,
    cpu_offload=torch_fsdp.CPUOffloadPolicy,
    register_forward_method=torch_fsdp.register_fsdp_forward_method,
    share_comm_ctx=torch_fsdp.share_comm_ctx,
    set_divide_factor=_set_divide_factor,
    placed_on=placed_on,
)


class PreparedFullyShard(PreparedComposable):
    """A model in FSDP2, which swaps module classes in place and keeps names; parameters are DTensors."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        super().__init__(module, plan, FSDP2_API)
        if Capability.ASYNC_GATHER in plan.demands:
            for root in self._roots():
                root._set_unshard_async_op(True)  # private in torch; there is no public method

    def full_state(self) -> dict[str, Any]:
        """Call torch's function and leave its effects: FSDP2 documents it as the way to its state dicts."""
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(self.module, self.built_optimizer(), options=options)
        return {"model": model, "optimizer": optimizer}

    def pipelined(self) -> nn.Module:
        """Return the module itself: torch's stages support its class."""
        return self.module


class FullyShardEngine(Engine):
    """Gathers each unit before use and reduce-scatters its gradients after backward."""

    name = "torch.fsdp2"
    capabilities = CAPABILITIES - {Capability.REPLICATE}
    prepared_type: ClassVar[type[PreparedFullyShard]] = PreparedFullyShard
    call = torch_fsdp.fully_shard
    decided_by = DECIDED_BY

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        apply_plan(FSDP2_API, model, plan, mesh, Layout.SHARD, self.call_options)
        return self.adopt(model, model, plan)

    def adopt(self, module: nn.Module, model: nn.Module, plan: Plan) -> PreparedModel:
        return self.prepared_type(model, plan)
