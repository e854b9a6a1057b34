"""Loops with an interruption: a forward that raises, or an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardproof.engine.contract import Capability
from shardproof.harness.cases.batch import converted_tree
from shardproof.harness.cases.script import Actor, is_differentiable

RAISED = "what the forward did that had to raise"  # the subject of a note


@dataclass(frozen=True, slots=True, kw_only=True)
class FailsFirst:
    """The last microbatch of a step makes the model raise; then the whole step runs again.

    The model must raise FloatingPointError for NaN inputs.
    """

    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.RECOVER})

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches - 1):
            _train(actor, microbatch, is_counted=False)
        Fail().play(actor)
        actor.zero_grad()
        for microbatch in range(actor.num_microbatches):
            _train(actor, microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """A move: a forward of the last microbatch raises, as for `FailsFirst`, and is skipped.

    Of the step's own gradients, those of earlier backwards stay where it ``keeps_gradients``.
    """

    keeps_gradients: bool = False

    @property
    def demands(self) -> frozenset[Capability]:
        return frozenset(
            {Capability.RECOVER, *([Capability.RECOVER_KEEPING] if self.keeps_gradients else [])}
        )

    def play(self, actor: Actor) -> None:
        microbatch = actor.num_microbatches - 1
        inputs = converted_tree(actor.batch(microbatch).inputs, _without_numbers)
        try:
            actor.forward(microbatch, *inputs)
        except FloatingPointError as error:
            actor.note(RAISED, type(error).__name__)
        else:
            actor.note(RAISED, "nothing")
        actor.recover()


def _without_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, torch.nan) if is_differentiable(tensor) else tensor


def _train(actor: Actor, microbatch: int, *, is_counted: bool = True) -> None:
    with actor.synchronisation(microbatch):
        output = actor.forward(microbatch, *actor.batch(microbatch).inputs)
        actor.backward(microbatch, actor.loss(microbatch, output), is_counted=is_counted)
