"""A script that gives a model its inputs nested, and on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.contract import Capability
from harness.cases.script import Actor

__all__ = ["NestInputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NestInputs:
    """Forward is called with one tensor and a tuple of the others; they come from the host, as from a loader."""

    demands: ClassVar[frozenset[Capability]] = frozenset()

    def play(self, actor: Actor) -> None:
        """Take one microbatch at a time."""
        for microbatch in range(actor.num_microbatches):
            with actor.synchronisation(microbatch):
                first, *others = (tensor.cpu() for tensor in actor.batch(microbatch).inputs)
                output = actor.forward(microbatch, first, tuple(others))
                actor.backward(microbatch, actor.loss(microbatch, output))
