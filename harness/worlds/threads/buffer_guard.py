"""Guards the buffers of an asynchronous call until it completes: poisons outputs, detects reads, writes and frees."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from shardproof.harness.tracing.collectives.call import Call, Pieces
from shardproof.harness.tracing.ledger import Op, ViolationKind

# Both halves of every byte are wrong for indices and counts, and it is negative in every signed dtype.
_GARBAGE_BYTE = 0xA5


def poison(call: Call, seed: int) -> None:
    """Overwrite the outputs of a call in flight."""
    for i, outputs in enumerate(call.outputs):
        spared = spared_piece(call, i)
        for output in outputs:
            # A root, or a rank that gathers in place, may go on reading its own input.
            if spared is None or output.data_ptr() != spared.data_ptr():
                output.fill_(_garbage(output.dtype, seed))


def spared_piece(call: Call, i: int) -> torch.Tensor | None:
    """Return the input whose values the call does not change for its caller, if an output may alias it."""
    inputs = call.inputs[i] if i < len(call.inputs) else ()
    if not inputs:
        return None
    if call.op is Op.SCATTER:
        return inputs[call.rank]
    return inputs[0] if call.op in {Op.BROADCAST, Op.ALL_GATHER, Op.GATHER} else None


@cache
def poisoned(dtype: torch.dtype, seed: int, device: torch.device | None = None) -> torch.Tensor:
    """Return one element of poison, 1-D; by default on the CPU."""
    return torch.empty(1, dtype=dtype, device=device).fill_(_garbage(dtype, seed))


def _garbage(dtype: torch.dtype, seed: int) -> complex | float | int | bool:
    if dtype.is_complex:
        return complex("nan+nanj")
    if dtype.is_floating_point:
        return float("nan")
    if dtype is torch.bool:
        return seed % 2 == 0
    byte = (_GARBAGE_BYTE + seed) % 128
    # The top bit makes it negative in signed dtypes, and too large for an index in unsigned ones.
    return byte - 128 if dtype.is_signed else byte + 128


class BufferGuard:
    """The buffers of one call, and their contents when it was issued: inputs their values, outputs poison.

    Until the call is complete no other code may write to any of them, nor free their memory. ``inputs`` are the
    transport's flat snapshots, in the form in which it took them.
    """

    def __init__(self, call: Call, inputs: Pieces, seed: int) -> None:
        self._call = call
        self._inputs = inputs
        self._seed = seed

    def violations(self) -> Iterator[ViolationKind]:
        """Yield the violations since then, each kind once. Call it before results are written."""
        inputs = [t for part in self._call.inputs for t in part]
        outputs = [t for part in self._call.outputs for t in part]
        if any(map(is_freed, inputs)):
            yield ViolationKind.INPUT_FREED
        elif any(self._overwritten()):
            yield ViolationKind.INPUT_OVERWRITTEN
        if any(map(is_freed, outputs)):
            yield ViolationKind.OUTPUT_FREED
        elif not all(self._untouched()):
            yield ViolationKind.OUTPUT_OVERWRITTEN

    def _overwritten(self) -> Iterator[bool]:
        outputs = [t for part in self._call.outputs for t in part]
        for tensor, kept in self._kept():
            spared = any(tensor.data_ptr() == t.data_ptr() for t in self._spared())
            if spared or not any(_overlap(tensor, output) for output in outputs):
                yield not torch.equal(_bits(tensor), _bits(kept))

    def _kept(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for pieces, kept in zip(self._call.inputs, self._inputs, strict=True):
            # The snapshot of a reduce-scatter has its pieces joined.
            is_joined = self._call.op is Op.REDUCE_SCATTER
            parts = torch.split(kept[0], [t.numel() for t in pieces]) if is_joined else kept
            yield from zip(pieces, parts, strict=True)

    def _untouched(self) -> Iterator[bool]:
        for i, outputs in enumerate(self._call.outputs):
            spared = spared_piece(self._call, i)
            for output in outputs:
                if output.numel() and (spared is None or output.data_ptr() != spared.data_ptr()):
                    yield _holds_only(output, poisoned(output.dtype, self._seed, output.device))

    def _spared(self) -> Iterator[torch.Tensor]:
        pieces = (spared_piece(self._call, i) for i in range(len(self._call.outputs)))
        return (piece for piece in pieces if piece is not None)


# By size in bytes.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory was freed and must not be touched."""
    if not tensor.numel():
        return False
    return (
        tensor.untyped_storage().nbytes() < (_reach(tensor) + tensor.storage_offset()) * tensor.element_size()
    )


def _reach(tensor: torch.Tensor) -> int:
    """Count the elements of the storage from a tensor's first one to its last one."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    start, other_start = one.data_ptr(), other.data_ptr()
    end = start + _reach(one) * one.element_size()
    return start < other_start + _reach(other) * other.element_size() and other_start < end


def _holds_only(tensor: torch.Tensor, element: torch.Tensor) -> bool:
    """Return whether every element of a tensor has the bits of one."""
    bits, expected = _bits(tensor), _bits(element)
    if expected.numel() > 1:  # complex
        return bool((bits == expected).all())
    low, high = torch.aminmax(bits)  # ten times as fast as comparing each element
    return bool(low == expected) and bool(high == expected)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of the elements as integers, one row each: as integers, a NaN equals itself."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return plain.view(_INTEGERS[plain.element_size()]).reshape(
        tensor.numel(), 2 if tensor.is_complex() else 1
    )
