"""Mutants that are right in training and wrong when the model is evaluated in between."""

from __future__ import annotations

from typing import Any

from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.mutants.mutant import Condition, mutant
from engine.mutants.staleness import Stale


class _PreparedStaleInEvaluation(Stale, PreparedFullyShard):
    """Swaps the older shards in for evaluation alone."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns what it likes
        if self.module.training:
            return PreparedFullyShard.__call__(self, *inputs)
        output = super().__call__(*inputs, **named)
        if self._newest:
            self._assign(self._newest)
            self._newest = []
        return output


@mutant(
    after="NVIDIA/Megatron-LM#663",
    kills_on=Condition(world_size=1, steps=2, because="the first step has no step before it"),
)
class EvaluatesWithStaleParameters(FullyShardEngine):
    """Evaluation uses the parameters of the step before.

    Reported: a forward ran on parameters that had not been gathered since the update.
    """

    prepared_type = _PreparedStaleInEvaluation
