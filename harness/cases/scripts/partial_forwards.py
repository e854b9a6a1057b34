"""Training loops that run a part of the model: one part alone, an early stop, a head called for each chunk.

A model that can stop early takes the name of the last module to run as one more argument of its forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from shardproof.engine.contract import Capability
from shardproof.harness.cases.script import Actor, EachMicrobatch


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePartOnOddSteps:
    """Even steps go through the model, odd ones through ``part`` alone, which takes the model's inputs."""

    part: str
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.PARTS, Capability.UNUSED})

    def play(self, actor: Actor) -> None:
        if actor.step % 2 == 0:
            EachMicrobatch().play(actor)
            return
        for microbatch in range(actor.num_microbatches):
            output = actor.forward(microbatch, *actor.batch(microbatch).inputs, part=self.part)
            actor.backward(microbatch, _half_square_sum(actor, output))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksOfTheHead:
    """The model runs down to ``stop``; ``head`` runs on chunks of that output, each with a backward; then the trunk's.

    So the model's activations and those of the whole output are never in memory together.
    """

    stop: str
    head: str
    num_chunks: int
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.PARTS})

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches):
            with actor.synchronisation(microbatch):
                self.play_one(actor, microbatch)

    def play_one(self, actor: Actor, microbatch: int) -> None:
        """Run one microbatch through trunk, head chunks and the trunk's backward."""
        batch = actor.batch(microbatch)
        trunk = actor.forward(microbatch, *batch.inputs, self.stop)
        cut = trunk.detach().requires_grad_()
        chunks = zip(cut.chunk(self.num_chunks, 1), batch.target.chunk(self.num_chunks, 1), strict=True)
        for rows, target in chunks:
            output = actor.forward(microbatch, rows, part=self.head)
            actor.backward(microbatch, actor.loss(microbatch, output, target))
        assert cut.grad is not None
        actor.backward(microbatch, (trunk * cut.grad).sum(), is_counted=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlaggedChunks:
    """Like `ChunksOfTheHead`, but flags of the ``units`` and the root mark that the last microbatch ends the step."""

    chunks: ChunksOfTheHead
    units: tuple[str, ...]
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.PARTS, Capability.UNIT_SYNC})

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches):
            is_last = microbatch == actor.num_microbatches - 1
            for name in (*self.units, ""):
                actor.units()[name].set_gradient_sync(is_on=is_last)
            actor.units()[""].set_last_backward(is_last=is_last)
            self.chunks.play_one(actor, microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrunkTwiceOnOddSteps:
    """Even steps go through the model; odd ones run all microbatches down to ``stop``, then one backward for all."""

    stop: str
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.INTERLEAVE, Capability.UNUSED})

    def play(self, actor: Actor) -> None:
        if actor.step % 2 == 0:
            EachMicrobatch().play(actor)
            return
        microbatches = range(actor.num_microbatches)
        trunks = [actor.forward(m, *actor.batch(m).inputs, self.stop) for m in microbatches]
        total = torch.stack([_half_square_sum(actor, trunk) for trunk in trunks]).sum()
        actor.backward(microbatches[-1], total)


class Backwards(Enum):
    """How several losses go backward."""

    AT_ONCE = "one backward, of the sum of the losses"
    ONE_BY_ONE = "each by itself, the first one first"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllForwardsFirst:
    """All microbatches go forward before any goes backward."""

    backwards: Backwards
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.INTERLEAVE})

    def play(self, actor: Actor) -> None:
        microbatches = range(actor.num_microbatches)
        outputs = [actor.forward(m, *actor.batch(m).inputs) for m in microbatches]
        losses = [actor.loss(m, output) for m, output in zip(microbatches, outputs, strict=True)]
        if self.backwards is Backwards.AT_ONCE:
            actor.backward(microbatches[-1], torch.stack(losses).sum())
            return
        for microbatch, loss in zip(microbatches, losses, strict=True):
            actor.backward(microbatch, loss)


def _half_square_sum(actor: Actor, output: torch.Tensor) -> torch.Tensor:
    """Return a loss that needs no target, for outputs that have none."""
    return 0.5 * output.square().sum() * actor.weight


NUM_CHUNKS = 4


def after_chunk(chunk: int) -> str:
    """Name the moment after a chunk's backward."""
    return f"after chunk {chunk}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldHeadOpen:
    """The head's unit stays gathered through all chunks, each with its own backward, and is then freed.

    The model returns the inputs of its part ``head``. The head takes a chunk of them, and of the target, and returns
    the loss. The gradients of all chunks then go through the rest of the model.
    """

    unit: str
    demands: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.PARTS, Capability.UNIT_STATE, Capability.KEEP_AFTER_BACKWARD}
    )
    freed: ClassVar[str] = "after the last chunk, freed by hand"

    def play(self, actor: Actor) -> None:
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
