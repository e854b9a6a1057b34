"""Scripts in which a model is evaluated between its training steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.contract import Capability
from harness.cases.script import Actor, EachMicrobatch

__all__ = ["EvaluatesFirst"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatesFirst:
    """Each step evaluates the first microbatch without gradients, then trains on all of them."""

    demands: ClassVar[frozenset[Capability]] = frozenset()

    def play(self, actor: Actor) -> None:
        """Evaluate, then train."""
        actor.evaluate(0)
        EachMicrobatch().play(actor)
