"""torch.distributed._composable.replicate_with_fsdp: replication on FSDP2's machinery."""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from engine.adapters.torch_fsdp2 import PreparedFullyShard, set_divide_factor
from engine.contract import Capability, Engine, Plan, PreparedModel


class ReplicateEngine(Engine):
    """Parameters are replicated DTensors; each unit's gradients are all-reduced once."""

    name = "torch.replicate"
    capabilities = frozenset(
        {
            Capability.REPLICATE,
            Capability.ACCUMULATE,
            Capability.UNITS,
            Capability.REDUCE_DTYPE,
            Capability.GRADIENT_DIVIDE,
        }
    )

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replicate every unit of the plan, then the root."""
        plan.refuse_beyond(self.capabilities)
        precision = MixedPrecisionPolicy(reduce_dtype=plan.reduce_dtype)
        for module in (*map(model.get_submodule, plan.units), model):
            replicate(module, mesh=mesh, mp_policy=precision)
        if plan.divide_factor is not None:
            set_divide_factor(model, plan.divide_factor, 1, mesh.device_type)
        return PreparedFullyShard(model)
