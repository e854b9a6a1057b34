"""Mutants that divide by a wrong number, or elsewhere, in some layouts, units or dtypes; some with right numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any  # the engine's methods are in a class that modules receive at run time

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.contract import Plan, PreparedModel, Wire
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.plans import changing


@mutant(after="deepspeedai/DeepSpeed#5618")
class AveragesWhateverTheFactor(ReferenceEngine):
    """In every layout gradients are averaged although another divisor was set."""

    misreads = changing(divide_factor=None)


@mutant(after="pytorch/pytorch#167178")
class DividesByTheSquareOfTheFactor(ReferenceEngine):
    """In every layout gradients are divided by the divisor twice."""

    class Prepared(PreparedReference):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss / (self.plan.divide_factor or 1))


@mutant(after="pytorch/pytorch#167178")
class IgnoresTheDivideFactorOfOneRank(ReferenceEngine):
    """A rank that is alone does not divide although a divisor was set."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly; alone, under a plan without the factor."""
        return super().prepare(model, replace(plan, divide_factor=None) if mesh.size() == 1 else plan, mesh)


@mutant(after="pytorch/pytorch#160285")
class HalvesOneUnit(ReferenceEngine):
    """The gradients of the first unit are half of what they should be."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly, and give one unit another factor."""
        prepared = super().prepare(model, plan, mesh)
        first = next(iter(plan.units), "").split(",")[0]
        unit: Any = model.get_submodule(first)
        unit.set_gradient_divide_factor(2.0 * plan.divisor(mesh.size()))
        return prepared


@mutant(after="pytorch/torchtitan#1551", trace=Trace.COMMUNICATION)
class AveragesOnTheWire(ReferenceEngine):
    """Averages cross between ranks although only sums were requested."""

    misreads = changing(wire=Wire.NATIVE)
