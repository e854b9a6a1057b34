"""Mutants that continue wrongly after an interruption by an exception or an evaluation."""

from __future__ import annotations

from typing import Any

import torch

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import Stale
from shardproof.engine.reference.fsdp_state import state_of


@mutant(after="pytorch/pytorch#137348")
class ComputesWithWhatAnEvaluationSaw(ReferenceEngine):
    """The step after an evaluation computes with the parameters that the evaluation used."""

    class Prepared(Stale, PreparedReference):
        """Continues with old parameters if they were gathered for an evaluation."""

        _has_evaluated = False

        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns any type
            if self.module.training:
                return super().__call__(*inputs, **named)
            self._has_evaluated = True
            return PreparedReference.__call__(self, *inputs, **named)

        def step(self) -> None:
            super().step()
            if not self._has_evaluated:
                self._older = []
            self._has_evaluated = False


@mutant(after="pytorch/pytorch#113203", trace=Trace.CRASH)
class KeepsAnInferenceTensor(ReferenceEngine):
    """State made in inference mode is used for training."""

    class Prepared(PreparedReference):
        _scale: torch.Tensor | None = None

        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns any type
            output = super().__call__(*inputs, **named)
            if self._scale is None:
                self._scale = torch.ones_like(output[:1])
            return output * self._scale


@mutant(after="espnet/espnet#3283")
class LeaksTheFailedIteration(ReferenceEngine):
    """Gradients of an iteration that failed are added to those of the next."""

    class Prepared(PreparedReference):
        def recover(self) -> None:
            for unit in filter(None, map(state_of, self.module.modules())):
                for group in unit.param_groups:
                    vars(group)["drop_gradients"] = group.forget_backward
            super().recover()


@mutant(after="mosaicml/composer#3866")
class NeverRecovers(FullyShardEngine):
    """The state of a failed forward is not cleared."""

    class Prepared(PreparedFullyShard):
        def recover(self) -> None:
            pass


@mutant(after="mflux-community/mflux#447")
class DropsEarlierBackwards(ReferenceEngine):
    """Recovery from a failed forward clears the gradients of the backwards before it."""

    class Prepared(PreparedReference):
        def recover(self) -> None:
            super().recover()
            for parameter in self.owned_parameters().values():
                parameter.grad = None
