"""The places of a training whose values are looked at, and files of these values. No module hooks here."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardproof.harness.torch_compat.dtypes import bytes_of

# Of a larger tensor only so many elements, evenly spaced, are looked at.
_MOST_ELEMENTS = 2**16
# A file that is full takes no more values.
_MOST_BYTES = 2**32


class ValueKind(StrEnum):
    """The kinds of values; the first ones belong to calls of modules, the others to the rank."""

    PARAMETER = "parameter"  # as the module has it when it computes
    BUFFER = "buffer"
    INPUT = "input"
    OUTPUT = "output"
    OUTPUT_GRADIENT = "gradient of the output"
    INPUT_GRADIENT = "gradient of the input"
    LOSS = "loss"
    LOCAL_GRADIENT = "gradient of this rank's microbatch"  # before any reduction
    INITIAL = "initial parameter"  # once the engine has prepared the model
    LOADED = "loaded parameter"
    LOADED_STATE = "loaded optimizer state"
    REDUCED = "reduced gradient"
    UNSCALED = "unscaled gradient"
    NORM = "gradient norm"
    CLIPPED = "clipped gradient"
    UPDATED = "parameter after the step"
    STATE = "optimizer state after the step"


class ComputeTurn(StrEnum):
    """The part of a microbatch in which a module computes."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"  # a forward inside backward
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePoint:
    """The place of a value; ``call`` counts equal places of a microbatch.

    ``module`` is None for values of the rank. ``name`` is that of a parameter, buffer or state, or the position of an
    input or output. ``rank`` is the index of the rank's data, and -1 for values that all ranks share.
    """

    kind: ValueKind
    step: int
    name: str
    rank: int = -1
    microbatch: int = -1
    module: str | None = None
    turn: ComputeTurn = ComputeTurn.FORWARD
    call: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A value in a file: its place, its position, and where it lies in a whole tensor if it is a shard.

    ``num_calls`` is the number of collectives that the rank had issued. ``factor`` is that of the loss scale.
    """

    point: ProbePoint
    start: int
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None = None
    global_shape: tuple[int, ...] | None = None
    is_flat: bool = False
    num_calls: int = 0
    factor: float = 1.0


def sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or evenly spaced elements of a large one."""
    stride = -(-tensor.numel() // _MOST_ELEMENTS)
    return tensor if stride < 2 else tensor.reshape(-1)[::stride]


class ProbeWriter:
    """Writes values as they come; equal values are written once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._path = path
        self._known: dict[bytes, int] = {}
        self.stored: list[Stored] = []
        self.is_full = False

    # Any: the other fields of `Stored`.
    def write(self, point: ProbePoint, tensor: torch.Tensor, **fields: Any) -> None:
        """Append a value."""
        data = bytes_of(tensor)
        key = blake2b(data, digest_size=16).digest()
        start = self._known.get(key)
        if start is None:
            self.is_full |= self._file.tell() + len(data) > _MOST_BYTES
            if self.is_full:
                return
            start = self._known[key] = self._file.tell()
            self._file.write(data)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        self.stored.append(Stored(point=point, start=start, dtype=dtype, shape=shape, **fields))

    def flush(self) -> None:
        """Make what was written readable."""
        self._file.flush()

    def close(self, **more: Any) -> None:
        """Write the table of contents, with JSON values of the caller's, beside the values."""
        self._file.close()
        rows = [[*astuple(s.point), *astuple(replace(s, point=None))[1:]] for s in self.stored]  # type: ignore[arg-type]  # not written
        self._path.with_suffix(".contents").write_text(
            json.dumps({"rows": rows, "is_full": self.is_full, **more})
        )


class ProbeFile:
    """The values of a file, read one by one."""

    def __init__(self, path: Path) -> None:
        """Read the table of contents; raises the errors of files and of JSON."""
        plain = json.loads(path.with_suffix(".contents").read_text())
        self.more: dict[str, Any] = {k: v for k, v in plain.items() if k != "rows"}
        self.stored = [_stored(row) for row in plain["rows"]]
        self._of_any = {replace(stored.point, rank=-1): stored for stored in self.stored}
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __iter__(self) -> Iterator[Stored]:
        return iter(self.stored)

    def of_other_rank(self, point: ProbePoint) -> Stored | None:
        """Return the value at the place of another rank's."""
        return self._of_any.get(replace(point, rank=-1))

    def tensor(self, stored: Stored) -> torch.Tensor:
        """Read a value."""
        return read_at(self._file, stored)


def read_at(file: int, stored: Stored) -> torch.Tensor:
    """Read a value from an open file."""
    dtype = getattr(torch, stored.dtype)
    data = bytearray(os.pread(file, prod(stored.shape) * dtype.itemsize, stored.start))
    return (
        torch.frombuffer(data, dtype=dtype).view(stored.shape)
        if data
        else torch.empty(stored.shape, dtype=dtype)
    )


def _stored(row: list[Any]) -> Stored:
    kind, step, name, rank, microbatch, module, turn, call, start, dtype, shape, *rest = row
    offsets, whole, is_flat, num_calls, factor = rest
    point = ProbePoint(
        kind=ValueKind(kind),
        step=step,
        name=name,
        rank=rank,
        microbatch=microbatch,
        module=module,
        turn=ComputeTurn(turn),
        call=call,
    )
    return Stored(
        point=point,
        start=start,
        dtype=dtype,
        shape=tuple(shape),
        offsets=None if offsets is None else tuple(offsets),
        global_shape=None if whole is None else tuple(whole),
        is_flat=is_flat,
        num_calls=num_calls,
        factor=factor,
    )
