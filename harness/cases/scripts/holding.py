"""A script that holds on to what went in, what came out, and what units handed on, until the step is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from engine.contract import Capability
from harness.cases.script import Actor

__all__ = ["HoldsOn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsOn:
    """A plain loop that keeps each output, a slice of each input, and the outputs of ``units``, taken by hooks."""

    units: tuple[str, ...]
    demands: ClassVar[frozenset[Capability]] = frozenset()

    def play(self, actor: Actor) -> None:
        """Take one microbatch at a time, and let nothing go."""
        kept: list[torch.Tensor] = []
        for microbatch in range(actor.num_microbatches):
            inputs = actor.batch(microbatch).inputs
            with actor.synchronisation(microbatch):
                output, activations = self._forward(actor, microbatch)
                slices = [tensor[:1] for tensor in inputs]
                actor.hold("an activation", *activations)
                actor.hold("a slice of an input", *slices)
                actor.backward(microbatch, actor.loss(microbatch, output))
            kept += [output.detach(), *activations, *slices]

    # Any: a model takes and returns what it likes.
    def _forward(self, actor: Actor, microbatch: int) -> tuple[Any, list[torch.Tensor]]:
        taken: list[torch.Tensor] = []

        def take(_: torch.nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> None:
            taken.append(output.detach())

        handles = [actor.part(unit).register_forward_hook(take) for unit in self.units]
        output = actor.forward(microbatch, *actor.batch(microbatch).inputs)
        for handle in handles:
            handle.remove()
        return output, taken
