"""Mutants that are right in training and wrong when the model is evaluated in between."""

from __future__ import annotations

from typing import Any

import torch

from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.mutants.staleness import Stale

__all__ = ["EvaluatesWithStaleParameters"]


class _PreparedStaleInEvaluation(Stale, PreparedFullyShard):
    """Swaps the older shards in for evaluation alone."""

    def __call__(self, *inputs: torch.Tensor) -> Any:  # Any: a model returns what it likes
        if self.module.training:
            return PreparedFullyShard.__call__(self, *inputs)
        output = super().__call__(*inputs)
        if self._newest:
            self._assign(self._newest)
            self._newest = []
        return output


class EvaluatesWithStaleParameters(FullyShardEngine):
    """Evaluation uses the parameters of the step before; training is right.

    After NVIDIA/Megatron-LM#663: a forward ran on parameters that had not been gathered since the update.
    """

    name = "mutant.EvaluatesWithStaleParameters"
    prepared_type = _PreparedStaleInEvaluation
