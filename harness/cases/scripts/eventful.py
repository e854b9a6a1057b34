"""A script that wraps another one: it adds moves, and changes the form of inputs and backwards."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import torch

from shardproof.engine.contract import Capability
from shardproof.harness.cases.batch import ModelBatch
from shardproof.harness.cases.script import (
    Actor,
    EachMicrobatch,
    Evaluation,
    Move,
    Script,
    evaluating,
    with_gradients,
)
from shardproof.harness.cases.scripts.failures import Fail
from shardproof.harness.cases.scripts.moves import Freeze


def goes_in_turn(script: Script) -> bool:
    """Return whether each microbatch goes forward and backward before the next one, as in most training loops."""
    return isinstance(script.inner if isinstance(script, Eventful) else script, EachMicrobatch)


class Interlude(Enum):
    """When a move is made in a step."""

    BEFORE = "before its first forward"
    BETWEEN = "after its first backward, before another one"
    EACH = "after each of its backwards, before another one"
    END = "after its last backward, before the optimizer steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eventful:
    """Play ``inner`` with these events, and each of the ``moves`` at its moment.

    ``by_keyword`` passes the inputs to forward as ``rows=`` and, if there is another, ``context=``, and
    ``inputs_have_gradients`` as leaves that get one. ``backward_by_halves`` runs two backwards through the graph of
    each forward, each of half the loss. If units are ``kept_until_last``, they stay gathered after each backward but
    that of the last microbatch. If it ``fails_and_starts_again``, a forward after the last backward of each step
    raises, gradients are cleared, and the forwards and backwards are done again, with the moves among them and after
    them.
    """

    inner: Script = field(default_factory=EachMicrobatch)
    moves: tuple[tuple[Interlude, Move], ...] = ()
    fails_and_starts_again: bool = False
    by_keyword: bool = False
    inputs_have_gradients: bool = False
    backward_by_halves: bool = False
    kept_until_last: bool = False

    @property
    def demands(self) -> frozenset[Capability]:
        asked = {
            Capability.RECOVER: self.fails_and_starts_again,
            Capability.UNIT_SYNC: self.backward_by_halves,  # as for other backwards through one graph
            Capability.KEEP_AFTER_BACKWARD: self.kept_until_last,
        }
        of_moves = [move.demands for _, move in self.moves]
        return self.inner.demands.union(*of_moves, (c for c, is_asked in asked.items() if is_asked))

    @property
    def freezes(self) -> tuple[Freeze, ...]:
        """The moves that freeze parts, and thaw them."""
        return tuple(move for _, move in self.moves if isinstance(move, Freeze))

    def has(self, *moves: Move) -> bool:
        """Return whether the loop makes one of these moves."""
        return any(move in moves for _, move in self.moves)

    @property
    def fails(self) -> bool:
        """Whether some forward raises."""
        return self.fails_and_starts_again or any(isinstance(move, Fail) for _, move in self.moves)

    def play(self, actor: Actor) -> None:
        self.interlude(actor, Interlude.BEFORE)
        if self.fails_and_starts_again:
            self.inner.play(self._around(actor, is_counted=False))
            Fail().play(actor)
            actor.zero_grad()
        self.inner.play(self._around(actor))
        self.interlude(actor, Interlude.END)

    def interlude(self, actor: Actor, moment: Interlude) -> None:
        """Make the moves of this moment, in order: in evaluation mode if one is an evaluation, as loops save then."""
        moves = [move for when, move in self.moves if when is moment]
        is_evaluating = any(isinstance(move, Evaluation) for move in moves)
        with evaluating(actor.part("")) if is_evaluating else nullcontext():
            for move in moves:
                move.play(actor)

    def _around(self, actor: Actor, *, is_counted: bool = True) -> Actor:
        return cast(Actor, _Proxy(actor, self, is_counted=is_counted))  # it delegates all other methods


class _Proxy:
    """An actor whose forwards and backwards have the requested form, with interludes after its first backward."""

    def __init__(self, actor: Actor, script: Eventful, *, is_counted: bool = True) -> None:
        self._actor = actor
        self._script = script
        self._is_counted = is_counted
        self._num_backwards = 0

    # Any: the actor's own methods.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def forward(self, microbatch: int, *inputs: Any, part: str = "") -> Any:
        """Call the model, or a part of it."""
        if self._script.inputs_have_gradients:
            inputs = with_gradients(inputs)
        if self._script.by_keyword:
            names = ("rows", "context")[: len(inputs)]
            inputs = (ModelBatch(value=dict(zip(names, inputs, strict=True))),)
        return self._actor.forward(microbatch, *inputs, part=part)

    def leave_out(self) -> None:
        """Record as many losses as other microbatches have."""
        if self._script.backward_by_halves:
            self._actor.leave_out()
        self._actor.leave_out()

    def backward(self, microbatch: int, loss: torch.Tensor, *, is_counted: bool = True) -> None:
        """Run backward, then the interludes of this moment."""
        if self._script.kept_until_last:
            for unit in self._actor.units().values():
                unit.set_reshard_after_backward(is_on=microbatch == self._actor.num_microbatches - 1)
        if self._script.backward_by_halves:
            loss = loss * 0.5
            self._actor.backward_of_branch(microbatch, loss)
        self._actor.backward(microbatch, loss, is_counted=is_counted and self._is_counted)
        self._num_backwards += 1
        if self._num_backwards == 1 and self._is_counted:
            self._script.interlude(self._actor, Interlude.BETWEEN)
        if self._num_backwards < self._actor.num_microbatches and self._is_counted:
            self._script.interlude(self._actor, Interlude.EACH)
