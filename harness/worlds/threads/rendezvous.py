"""The operations on which a rank may block, and their data: a rendezvous of a whole group, or a message to receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardproof.harness.errors import CollectiveError, CollectiveRefusedError
from shardproof.harness.torch_compat.accelerators import await_moment, moment_of, used_here
from shardproof.harness.tracing.collectives.call import Call, Pieces
from shardproof.harness.tracing.ledger import Op
from shardproof.harness.worlds.threads.premultiplied_sum import PREMULTIPLIED, multiplied
from shardproof.harness.worlds.threads.reduction import reduce_flat
from shardproof.harness.worlds.threads.validation import check_message, check_pieces, is_same, refuse_sides

_REDUCTIONS = frozenset({Op.ALL_REDUCE, Op.REDUCE})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """One rank's call together with the values of its inputs at the time."""

    call: Call
    inputs: Pieces
    moment: torch.Event | None = None  # after which the inputs have their values; None on a CPU


def snapshot(call: Call) -> Pieces:
    """Copy a call's inputs, flat, because the caller may write to them, or the transport to outputs that alias them.

    The inputs of a synchronous reduction are not copied: its caller is blocked until the result has been computed.
    """
    if call.reduce_op is not None and call.reduce_op.name == PREMULTIPLIED:
        call = replace(call, inputs=multiplied(call))
    elif call.op in _REDUCTIONS and not call.is_async:
        return call.inputs
    if call.op is Op.REDUCE_SCATTER:
        # One tensor per rank: it is reduced whole and split afterwards.
        return tuple((torch.cat([t.reshape(-1) for t in pieces]),) for pieces in call.inputs)
    return tuple(
        tuple(t.clone(memory_format=torch.contiguous_format).view(-1) for t in pieces)
        for pieces in call.inputs
    )


class PendingOp:
    """An operation that completes or fails once; the transport's lock guards it."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.is_over = False
        self.moment: torch.Event | None = None  # after which the sources have their values; None on a CPU
        self.error: CollectiveError | None = None

    def absent(self) -> tuple[int, ...]:
        """Global ranks that have not arrived."""
        raise NotImplementedError

    def is_unsatisfiable(self, departed: frozenset[int]) -> bool:
        """Return whether the ranks that have left make completion impossible: one of the others would be enough."""
        return departed.issuperset(self.absent())

    def sources(self, i: int, rank: int) -> Sequence[torch.Tensor]:
        """Return the sources for the pieces of ``outputs[i]`` of a group rank, once complete."""
        raise NotImplementedError


Sources = Callable[[int, int], Sequence[torch.Tensor]]


class Rendezvous(PendingOp):
    """One collective of one group: every member deposits its call, the last one to arrive settles it."""

    def __init__(self, where: str, ranks: tuple[int, ...]) -> None:
        super().__init__(where)
        self.ranks = ranks
        self.arrivals: dict[int, Contribution] = {}
        self._sources: Sources | None = None

    @property
    def is_full(self) -> bool:
        """Return whether every member has arrived."""
        return len(self.arrivals) == len(self.ranks)

    def add(self, arrival: Contribution) -> None:
        """Deposit a call; raises CollectiveMismatchError when it differs from those deposited before."""
        self.arrivals[arrival.call.rank] = arrival
        first = next(iter(self.arrivals.values()))
        if not is_same(first.call, arrival.call):
            refuse_sides([a.call for a in self.arrivals.values()], self.where)

    def settle(self) -> None:
        """Compute the result once for all members, from their deposits; raises CollectiveError."""
        arrivals = [self.arrivals[rank] for rank in range(len(self.ranks))]
        check_pieces({rank: a.call for rank, a in self.arrivals.items()}, self.where)
        device = arrivals[0].call.device
        for arrival in arrivals:
            await_moment(device, arrival.moment)
            used_here(piece for pieces in arrival.inputs for piece in pieces)
        try:
            self._sources = _settle(arrivals)
            self.moment = moment_of(device)
        except RuntimeError as error:  # torch does not implement the arithmetic for this dtype
            raise CollectiveRefusedError(
                self.where, expected="tensors that can be combined", got=str(error), hint="another dtype"
            ) from error
        self.arrivals.clear()  # each work keeps this rendezvous until it took its part; the calls can be released now

    def absent(self) -> tuple[int, ...]:
        """Members that have not deposited their call."""
        return tuple(g for rank, g in enumerate(self.ranks) if rank not in self.arrivals)

    def is_unsatisfiable(self, departed: frozenset[int]) -> bool:
        """Return whether at least one missing member has left: all are needed."""
        return not departed.isdisjoint(self.absent())

    def sources(self, i: int, rank: int) -> Sequence[torch.Tensor]:
        """Return a member's part of the result."""
        return () if self._sources is None else self._sources(i, rank)


def _settle(arrivals: Sequence[Contribution]) -> Sources:
    call = arrivals[0].call
    root = arrivals[call.peer or 0].inputs
    match call.op:
        case Op.ALL_REDUCE | Op.REDUCE | Op.REDUCE_SCATTER if call.reduce_op is not None:
            op = call.reduce_op
            totals = [reduce_flat(op, [a.inputs[i][0] for a in arrivals]) for i in range(len(call.inputs))]
            if call.op is not Op.REDUCE_SCATTER:
                return lambda i, rank: (totals[i],)
            cuts = [
                torch.split(total, [t.numel() for t in part])
                for total, part in zip(totals, call.inputs, strict=True)
            ]
            return lambda i, rank: (cuts[i][rank],)
        case Op.ALL_GATHER | Op.GATHER:
            columns = [[a.inputs[i][0] for a in arrivals] for i in range(len(call.inputs))]
            return lambda i, rank: columns[i]
        case Op.BROADCAST:
            return lambda i, rank: root[i]
        case Op.SCATTER:
            return lambda i, rank: (root[i][rank],)
        case Op.ALL_TO_ALL:
            rows = [a.inputs for a in arrivals]
            return lambda i, rank: [inputs[i][rank] for inputs in rows]
        case _:
            return lambda i, rank: ()


class Message(PendingOp):
    """A message of one rank; complete when it is received, because no backend promises to buffer it."""

    def __init__(self, where: str, arrival: Contribution) -> None:
        super().__init__(where)
        self.arrival = arrival
        self.source = arrival.call.rank  # group rank

    def absent(self) -> tuple[int, ...]:
        """The destination rank."""
        call = self.arrival.call
        return () if call.peer is None else (call.ranks[call.peer],)

    def sources(self, i: int, rank: int) -> Sequence[torch.Tensor]:
        """Return nothing: a send has no results."""
        return ()


class PostedReceive(PendingOp):
    """One posted receive, from one source or from any."""

    def __init__(self, where: str, call: Call) -> None:
        super().__init__(where)
        self.call = call
        self.source = call.peer  # group rank; for a receive from any source, known once it is complete
        self._is_any = self.source is None
        self._message: Message | None = None

    def accepts(self, source: int) -> bool:
        """Return whether this receive accepts messages from a group rank."""
        return self._is_any or source == self.source

    def take(self, message: Message) -> None:
        """Complete with a message; raises CollectiveMismatchError when it does not fit."""
        self.source = message.source
        check_message(message.arrival.call, self.call)
        self._message = message
        self.moment = message.arrival.moment

    def absent(self) -> tuple[int, ...]:
        """Ranks that may send the awaited message."""
        ranks = self.call.ranks
        if self._is_any:
            return tuple(g for rank, g in enumerate(ranks) if rank != self.call.rank)
        return () if self.source is None else (ranks[self.source],)

    def sources(self, i: int, rank: int) -> Sequence[torch.Tensor]:
        """Return the tensors of the message."""
        return () if self._message is None else self._message.arrival.inputs[i]


@dataclass(slots=True, kw_only=True, eq=False)
class Mailbox:
    """Unmatched messages and receives of one destination and tag; first come, first served."""

    messages: deque[Message] = field(default_factory=deque)
    receives: list[PostedReceive] = field(default_factory=list)

    def deliver(self, message: Message) -> PostedReceive | None:
        """Return the earliest posted receive that accepts a message; if there is none, keep the message."""
        for posted in self.receives:
            if posted.accepts(message.source):
                self.receives.remove(posted)
                return posted
        self.messages.append(message)
        return None

    def post(self, posted: PostedReceive) -> Message | None:
        """Return the earliest message for a receive; if there is none, keep the receive."""
        for message in self.messages:
            if posted.accepts(message.source):
                self.messages.remove(message)
                return message
        self.receives.append(posted)
        return None
