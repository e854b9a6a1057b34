"""A script that calls a model's head once for each chunk of what the rest of the model returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.contract import Capability
from harness.cases.script import Actor

__all__ = ["NUM_CHUNKS", "HoldHeadOpen", "after_chunk"]

NUM_CHUNKS = 4


def after_chunk(chunk: int) -> str:
    """Name the moment after a chunk's backward."""
    return f"after chunk {chunk}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldHeadOpen:
    """The head's unit is told to stay gathered through all chunks, each with a backward of its own, then is freed.

    The model returns what its part ``head`` takes; the head takes a chunk of it, and of the target, and returns
    the loss. The gradients of all chunks then go through the rest of the model.
    """

    unit: str
    demands: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PARTS, Capability.UNIT_STATE, Capability.KEEP_AFTER_BACKWARD}
    )
    freed: ClassVar[str] = "after the last chunk, freed by hand"

    def play(self, actor: Actor) -> None:
        """Take one microbatch at a time; look at the last one's units."""
        for microbatch in range(actor.num_microbatches):
            batch = actor.batch(microbatch)
            hidden = actor.forward(microbatch, *batch.inputs)
            unit = actor.units()[self.unit]
            unit.set_reshard_after_forward(is_on=False)
            unit.set_reshard_after_backward(is_on=False)
            leaf = hidden.detach().requires_grad_()
            pieces = zip(leaf.chunk(NUM_CHUNKS), batch.target.chunk(NUM_CHUNKS), strict=True)
            for chunk, (piece, target) in enumerate(pieces):
                loss = actor.forward(microbatch, piece, target, part="head") * actor.weight
                actor.backward(microbatch, loss)
                actor.look(after_chunk(chunk))
            unit.set_reshard_after_forward(is_on=True)
            unit.set_reshard_after_backward(is_on=True)
            unit.reshard()
            actor.look(self.freed)
            actor.backward(microbatch, (hidden * leaf.grad).sum(), is_counted=False)
