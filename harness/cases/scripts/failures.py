"""Loops with an interruption: a forward that raises, or an evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shardproof.engine.contract import Capability
from shardproof.harness.cases.script import Actor

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
        _fail(actor, actor.num_microbatches - 1)
        actor.zero_grad()
        for microbatch in range(actor.num_microbatches):
            _train(actor, microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipsAFailure:
    """After the last microbatch of a step one more makes the model raise; the optimizer steps without it.

    As for `FailsFirst`, the model must raise FloatingPointError for NaN inputs.
    """

    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.RECOVER, Capability.RECOVER_KEEPING})

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches):
            _train(actor, microbatch)
        _fail(actor, actor.num_microbatches - 1)


def _fail(actor: Actor, microbatch: int) -> None:
    inputs = (torch.full_like(x, torch.nan) for x in actor.batch(microbatch).inputs)
    try:
        actor.forward(microbatch, *inputs)
    except FloatingPointError as error:
        actor.note(RAISED, type(error).__name__)
    else:
        actor.note(RAISED, "nothing")
    actor.recover()


def _train(actor: Actor, microbatch: int, *, is_counted: bool = True) -> None:
    with actor.synchronisation(microbatch):
        output = actor.forward(microbatch, *actor.batch(microbatch).inputs)
        actor.backward(microbatch, actor.loss(microbatch, output), is_counted=is_counted)
