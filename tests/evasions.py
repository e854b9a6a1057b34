"""Engines that evade a law by means that docs/threat-model.md names as left to them. Named by path in tests."""

from __future__ import annotations

from typing import Any

import numpy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.refusals import ShowsSlicesOfWholes
from shardproof.harness.tracing.memory.census import Census


# Any: whatever it is called with.
def _count_nothing(*_: Any, **__: Any) -> None:
    """Stand where the census is taken."""


class BlindsItsCensus(ShowsSlicesOfWholes):
    """Replicates, shows slices, and replaces the census that runs beside it in its process."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replace it."""
        Census.take = _count_nothing  # type: ignore[method-assign]  # the fault
        return super().prepare(model, plan, mesh)


class HoldsWholesInNumPy(ReferenceEngine):
    """Shards, and keeps the whole model in arrays that no operator of torch made."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Copy the model."""
        wholes = [numpy.array(parameter.detach().numpy(), copy=True) for parameter in model.parameters()]
        prepared = super().prepare(model, plan, mesh)
        prepared.module.register_forward_pre_hook(lambda *_: _look(wholes))
        return prepared


def _look(wholes: list[Any]) -> None:
    """Keep them alive as long as the module is."""
    assert wholes
