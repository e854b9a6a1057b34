"""Scripts that inspect units, and gather, free and configure them by hand, around forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from shardproof.engine.contract import Capability, UnitHandle
from shardproof.harness.cases.script import Actor

BEFORE_FORWARD = "before forward"
AFTER_FORWARD = "after forward"
AFTER_FORWARD_FREED = "after forward, set to free"
AFTER_FORWARD_KEPT = "after forward, set to keep"
BEFORE_BACKWARD = "before backward, gathered or freed by hand"
AFTER_BACKWARD = "after backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAround:
    """A plain loop that observes before and after the last microbatch's forward and backward.

    Between the two it frees the units of ``frees``, or sets the policy of ``changes`` to free after forward.
    """

    frees: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.UNIT_STATE})

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches):
            is_looked_at = microbatch == actor.num_microbatches - 1
            with actor.synchronisation(microbatch):
                _look(actor, BEFORE_FORWARD, is_looked_at=is_looked_at)
                output = actor.forward(microbatch, *actor.batch(microbatch).inputs)
                loss = actor.loss(microbatch, output)
                _look(actor, AFTER_FORWARD, is_looked_at=is_looked_at)
                for unit in _handles(actor, self.changes):
                    unit.set_reshard_after_forward(is_on=True)
                for unit in _handles(actor, self.frees):
                    unit.reshard()
                if self.frees or self.changes:
                    _look(actor, BEFORE_BACKWARD, is_looked_at=is_looked_at)
                actor.backward(microbatch, loss)
                _look(actor, AFTER_BACKWARD, is_looked_at=is_looked_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToggleReshard:
    """Two microbatches: ``units`` are set to free after the first one's forward, and to keep after the second's."""

    units: tuple[str, ...]
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.UNIT_STATE})

    def play(self, actor: Actor) -> None:
        for microbatch, moment in enumerate((AFTER_FORWARD_FREED, AFTER_FORWARD_KEPT)):
            for unit in _handles(actor, self.units):
                unit.set_reshard_after_forward(is_on=moment == AFTER_FORWARD_FREED)
            output = actor.forward(microbatch, *actor.batch(microbatch).inputs)
            loss = actor.loss(microbatch, output)
            actor.look(moment)
            actor.backward(microbatch, loss)
        actor.look(AFTER_BACKWARD)


class Gather(Enum):
    """How the caller asks for whole parameters, and which side waits for them."""

    BLOCKING = "the call returns when they are there"
    AWAITED = "the call returns at once; the caller waits, when all units have been asked"
    UNAWAITED = "the call returns at once; only the forward or backward that needs them waits"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnshardByHand:
    """Units are gathered by hand before each forward, and again before each backward."""

    units: tuple[str, ...]
    gather: Gather
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.UNIT_STATE})

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches):
            self._unshard(actor, BEFORE_FORWARD)
            output = actor.forward(microbatch, *actor.batch(microbatch).inputs)
            loss = actor.loss(microbatch, output)
            self._unshard(actor, BEFORE_BACKWARD)
            actor.backward(microbatch, loss)
            actor.look(AFTER_BACKWARD)

    def _unshard(self, actor: Actor, moment: str) -> None:
        waits: list[Callable[[], None]] = []
        for unit in _handles(actor, self.units):
            if self.gather is Gather.BLOCKING:
                unit.unshard()
            else:
                waits.append(unit.unshard_async())
        if self.gather is Gather.UNAWAITED:
            return
        for wait in waits:
            wait()
        actor.look(moment)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternateHeads:
    """The model returns the outputs of two heads; the loss uses one, and the other in the next step."""

    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.UNIT_STATE, Capability.UNUSED})

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches):
            outputs = actor.forward(microbatch, *actor.batch(microbatch).inputs)
            loss = actor.loss(microbatch, outputs[actor.step % 2])
            actor.look(AFTER_FORWARD)
            actor.backward(microbatch, loss)
            actor.look(AFTER_BACKWARD)


def _handles(actor: Actor, names: tuple[str, ...]) -> list[UnitHandle]:
    units = actor.units()
    return [units[name] for name in names]


def _look(actor: Actor, moment: str, *, is_looked_at: bool) -> None:
    if is_looked_at:
        actor.look(moment)
