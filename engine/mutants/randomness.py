"""Mutants whose ranks do not run the same model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_replicate import ReplicateEngine
from engine.contract import Plan, PreparedModel

__all__ = ["DropsAUnitOnTheLastRank"]


class DropsAUnitOnTheLastRank(ReplicateEngine):
    """The last rank multiplies one unit's output by zero; every collective is still made.

    After pytorch/pytorch#158719: ranks that took different branches used different parameters. There it
    ended in mismatched reductions; here gradients of zero keep the reductions alike.
    """

    name = "mutant.DropsAUnitOnTheLastRank"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Drop the unit on the last rank, then replicate honestly."""
        plan.refuse_beyond(self.capabilities)
        if mesh.size() > 1 and mesh.get_local_rank() == mesh.size() - 1:
            model.get_submodule(_first_unit(model, plan)).register_forward_hook(_drop)
        return super().prepare(model, plan, mesh)


def _first_unit(model: nn.Module, plan: Plan) -> str:
    """Name the first unit, or where the plan has none the first module that owns a parameter."""
    owners = (name for name, module in model.named_modules() if list(module.parameters(recurse=False)))
    return next(iter(plan.units), None) or next(owners)


# Any: a forward hook is given what its module takes and returns.
def _drop(module: nn.Module, inputs: Any, output: Any) -> Any:
    return output * 0 if isinstance(output, torch.Tensor) else output
