"""Mutants that go on where they were interrupted, by an exception or by an evaluation."""

from __future__ import annotations

from typing import Any

import torch

from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.mutants.staleness import Stale
from engine.reference.unit import unit_of

__all__ = [
    "ComputesWithWhatAnEvaluationSaw",
    "KeepsAnInferenceTensor",
    "LeaksTheFailedIteration",
    "NeverRecovers",
]


class _PreparedEvaluating(Stale, PreparedReference):
    """Goes on with old parameters where they were gathered for an evaluation."""

    _has_evaluated = False

    def __call__(self, *inputs: torch.Tensor) -> Any:  # Any: a model returns what it likes
        if self.module.training:
            return super().__call__(*inputs)
        self._has_evaluated = True
        return PreparedReference.__call__(self, *inputs)

    def step(self) -> None:
        super().step()
        if not self._has_evaluated:
            self._older = []
        self._has_evaluated = False


class ComputesWithWhatAnEvaluationSaw(ReferenceEngine):
    """After an evaluation the next step computes with the parameters that the evaluation was given.

    After pytorch/pytorch#137348: parameters that had been gathered and not freed were taken for up to date,
    and an optimizer step did not reach them.
    """

    name = "mutant.ComputesWithWhatAnEvaluationSaw"
    prepared_type = _PreparedEvaluating


class _PreparedLazily(PreparedReference):
    _scale: torch.Tensor | None = None

    def __call__(self, *inputs: torch.Tensor) -> Any:  # Any: a model returns what it likes
        output = super().__call__(*inputs)
        if self._scale is None:
            self._scale = torch.ones_like(output[:1])
        return output * self._scale


class KeepsAnInferenceTensor(ReferenceEngine):
    """What is made at the first forward, and kept, cannot be trained with if that forward was an inference.

    After pytorch/pytorch#113203: state made lazily in inference mode broke the backward of the first training
    step.
    """

    name = "mutant.KeepsAnInferenceTensor"
    prepared_type = _PreparedLazily


class _PreparedLeaking(PreparedReference):
    def recover(self) -> None:
        for unit in filter(None, map(unit_of, self.module.modules())):
            for group in unit.groups:
                vars(group)["drop_gradients"] = group.forget_backward
        super().recover()


class LeaksTheFailedIteration(ReferenceEngine):
    """Gradients held back when an iteration failed are reduced with those of the next.

    After espnet/espnet#3283: where an accumulation was abandoned, what it had gathered was not cleared.
    """

    name = "mutant.LeaksTheFailedIteration"
    prepared_type = _PreparedLeaking


class _PreparedWithoutRecovery(PreparedFullyShard):
    def recover(self) -> None:
        pass


class NeverRecovers(FullyShardEngine):
    """After a forward that raised, the next one begins in the middle of it.

    After mosaicml/composer#3866: a training step begun again after it had run out of memory found the engine
    in an illegal state.
    """

    name = "mutant.NeverRecovers"
    prepared_type = _PreparedWithoutRecovery
