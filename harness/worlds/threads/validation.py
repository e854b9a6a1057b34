"""Checks whether the calls of several ranks can form one collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from shardproof.harness.errors import CollectiveMismatchError
from shardproof.harness.tracing.collectives.call import Call, short_name
from shardproof.harness.tracing.ledger import Op
from shardproof.harness.worlds.threads.reduction import check_reducible

_SAME_CALL = "issue a group's collectives in one order, with one dtype and one size, on every rank"
_FITTING = "give every rank buffers of the sizes that its peers send"

# Ops in which ranks may contribute different sizes; their sizes are compared piece by piece.
_RAGGED = frozenset({Op.ALL_GATHER, Op.GATHER, Op.SCATTER, Op.ALL_TO_ALL})


def check_alone(call: Call, where: str) -> None:
    """Raise if a call is invalid independently of the other ranks."""
    tensors = [t for part in (*call.inputs, *call.outputs) for t in part]
    if call.reduce_op is not None:
        for dtype in {t.dtype for t in tensors}:
            check_reducible(call.reduce_op, dtype, where, call.device.type)
    for i, (ins, outs) in enumerate(zip(call.inputs, call.outputs, strict=False)):
        if len({t.dtype for t in (*ins, *outs)}) > 1:
            raise CollectiveMismatchError(
                f"tensor {i} of {where}",
                expected=f"one dtype for input and output, such as {short_name((*ins, *outs)[0].dtype)}",
                got=", ".join(sorted({short_name(t.dtype) for t in (*ins, *outs)})),
                hint="allocate the output like the input",
            )
        for name, part in (("input", ins), ("output", outs)):
            if len(part) not in {0, 1, len(call.ranks)}:
                raise CollectiveMismatchError(
                    f"{name} {i} of {where}",
                    expected=f"{len(call.ranks)} pieces, one for each rank of the group",
                    got=str(len(part)),
                    hint=_FITTING,
                )


def is_same(one: Call, other: Call) -> bool:
    """Return whether two ranks' calls may be one collective."""
    return _signature(one) == _signature(other)


def refuse_sides(calls: Sequence[Call], where: str) -> NoReturn:
    """Raise CollectiveMismatchError for calls that are not the same, naming the ranks of each side."""
    sides: dict[tuple[object, ...], list[Call]] = {}
    for one in calls:
        sides.setdefault(_signature(one), []).append(one)
    raise CollectiveMismatchError(
        where,
        expected="the same call on every rank",
        got="; ".join(f"on rank(s) {[c.global_rank for c in side]} {side[0]}" for side in sides.values()),
        hint=_SAME_CALL,
    )


def check_pieces(calls: Mapping[int, Call], where: str) -> None:
    """Raise CollectiveMismatchError unless the pieces that each rank sends fit the buffers of their receivers.

    ``calls`` has every rank of the group, by group rank.
    """
    for receiver, other in calls.items():
        for i, outputs in enumerate(other.outputs):
            for sender, output in _senders(other, i, outputs):
                sent = _piece_for(calls[sender], i, receiver)
                if sent is not None and sent.numel() != output.numel():
                    raise CollectiveMismatchError(
                        f"tensor {i} of {where}",
                        expected=f"{output.numel()} elements from rank {calls[sender].global_rank} on"
                        f" rank {other.global_rank}, which called {other}",
                        got=f"{sent.numel()} from {calls[sender]}",
                        hint=_FITTING,
                    )


def check_message(sent: Call, received: Call) -> None:
    """Raise CollectiveMismatchError unless a message fits the buffers of its receiver."""
    ins = [t for part in sent.inputs for t in part]
    outs = [t for part in received.outputs for t in part]
    if [(t.numel(), t.dtype) for t in ins] != [(t.numel(), t.dtype) for t in outs]:
        raise CollectiveMismatchError(
            f"message from rank {sent.global_rank} to rank {received.global_rank} in"
            f" group {list(sent.ranks)}",
            expected=f"what {received} has room for",
            got=str(sent),
            hint=_FITTING,
        )


def _signature(call: Call) -> tuple[object, ...]:
    tensors = call.described_by()
    dtypes = tuple(t.dtype for t in tensors)
    if call.op in _RAGGED:
        # One dtype per coalesced tensor; the number of pieces may differ between ranks.
        return (call.op, call.peer, max(len(call.inputs), len(call.outputs)), tuple(dict.fromkeys(dtypes)))
    return (call.op, call.reduce_op, call.peer, dtypes, tuple(t.numel() for t in tensors))


def _senders(call: Call, i: int, outputs: tuple[torch.Tensor, ...]) -> list[tuple[int, torch.Tensor]]:
    """Pair each output piece with the group rank that it comes from."""
    match call.op:
        case Op.ALL_GATHER | Op.GATHER | Op.ALL_TO_ALL:
            return list(enumerate(outputs))
        case Op.SCATTER if call.peer is not None:
            return [(call.peer, outputs[0])]
        case Op.REDUCE_SCATTER:
            return [(rank, outputs[0]) for rank in range(len(call.ranks))]
        case _:
            return []


def _piece_for(call: Call, i: int, receiver: int) -> torch.Tensor | None:
    """Return the piece of a sender's tensor ``i`` that goes to a receiver."""
    ins = call.inputs[i]
    if call.op in {Op.ALL_TO_ALL, Op.SCATTER, Op.REDUCE_SCATTER}:
        return ins[receiver] if receiver < len(ins) else None
    return ins[0] if ins else None
