"""Mutants whose ranks do not run the same model, or draw other random numbers than they should."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from engine.adapters.torch_replicate import ReplicateEngine
from engine.contract import Plan, PreparedModel
from engine.mutants.mutant import Condition, mutant


@mutant(after="pytorch/pytorch#158719", kills_on=Condition(because="a lone rank drops nothing"))
class DropsAUnitOnTheLastRank(ReplicateEngine):
    """The last rank alone drops the output of one unit.

    Reported: ranks that took different branches used different parameters. There it ended in mismatched reductions;
    here gradients of zero keep the reductions alike.
    """

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


@mutant(after="radixark/miles#3187", kills_on=Condition(because="models that draw nothing are right"))
class DrawsAlikeOnAllRanks(ReplicateEngine):
    """All ranks draw the same random numbers in forward.

    Reported: the first rank's generator was saved, and restored on every rank.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replicate honestly, and restore one state of the generator before each forward."""
        prepared = super().prepare(model, plan, mesh)
        state = torch.Generator().manual_seed(0).get_state()
        prepared.module.register_forward_pre_hook(partial(_restore, state))
        return prepared


# Any: a forward hook is given what its module takes.
def _restore(state: torch.Tensor, module: nn.Module, inputs: Any) -> None:
    torch.set_rng_state(state)


@mutant(
    after="allenai/OLMo-core#828",
    kills_on=Condition(world_size=1, because="models that draw nothing are right"),
)
class RecomputesWithOtherDraws(ReplicateEngine):
    """A recomputation draws other random numbers than its forward.

    Reported: activation checkpointing did not keep the generator's state, so gradients were those of another
    dropout mask than the loss.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replicate honestly, with units that keep no activations."""
        plan.refuse_beyond(self.capabilities)
        for name in plan.units:
            for part in name.split(","):
                module = model.get_submodule(part)
                # Any: a module takes what it likes.
                forward: Any = module.forward
                module.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        return super().prepare(model, plan, mesh)
