"""Trees of plain values and tensors in one file that contains only data, read whole or piece by piece.

After a header come the bytes of all tensors, then the tree as JSON, in which a tensor is a position in the file. So a
tensor can be written before the next is computed, and mapped when it is needed: a file may be larger than memory.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from shardproof.harness.regular_file import open_regular
from shardproof.harness.torch_compat.dtypes import bytes_of, num_bytes_of

_T = TypeVar("_T", torch.Tensor, torch.Tensor | None)

# The only key of an object that represents a tensor: its position, dtype and shape. No parameter can have this name,
# because torch refuses dots.
_LEAF = "."
# Bound before an engine is imported, which may replace it in its module.
_Encoder = json.JSONEncoder
_HEADER = struct.Struct("<16sQQ")  # the file's type, the position of the tree, and its bytes
_MAGIC = b"tensors and tree"
_ALIGNMENT_BYTES = 16  # so that the buffer can be read as any dtype
_MAPPED_BYTES = 2**20  # smaller tensors are read at once: a mapping needs a page, and more time


# Any, throughout: a tree of JSON types and tensors.
def write_tree(tree: Any, path: Path) -> None:
    """Write dicts with string keys, sequences, CPU tensors, and JSON types; sequences are read as lists."""
    with TensorWriter(path) as writer:
        writer.finish(tree)


def read_tree(path: Path, *, is_mapped: bool = False) -> Any:
    """Read a file of `write_tree` without running code from it; ValueError or OSError for a damaged one.

    With ``is_mapped``, large tensors are mapped on each access, and take memory while they are used; the file may be
    deleted meanwhile.
    """
    with open_regular(path) as file:
        header = file.read(_HEADER.size)
        size = os.fstat(file.fileno()).st_size
        magic, start, length = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"", 0, 0)
        if magic != _MAGIC or not _HEADER.size <= start <= start + length <= size:
            raise ValueError(f"expected a complete file of tensors, got {size} bytes that are none")
        stored = _MappedFile(file, start) if is_mapped else _ReadFile(file, start)
        file.seek(start)
        return json.loads(file.read(length), object_hook=stored.tree)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as files have it."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Parse a name from `dtype_name`; raises ValueError for any other name in torch."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a dtype, got {name!r}")
    return dtype


class TensorWriter:
    """Writes tensors as they are produced, and at the end the tree that contains them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._file.write(bytes(_HEADER.size))

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keep(self, tensors: Mapping[str, _T]) -> Mapping[str, _T]:
        """Write the large ones of these tensors; returns a mapping that reads them again, and can be in the tree."""
        plain = {
            name: self.leaf(tensor) if _is_large(tensor) else _copied(tensor)
            for name, tensor in tensors.items()
        }
        self._file.flush()
        mapped: Mapping[str, _T] = _MappedFile(self._file, self._file.tell()).tree(plain)
        return mapped

    def leaf(self, value: Any) -> dict[str, Any]:
        """Write a tensor, and return its representation; for tensors of a mapping from `keep`, the same again."""
        if isinstance(value, _MappedTensors):
            return value.plain
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"write_tree: expected tensors and JSON types, got {type(value).__name__}")
        plain = bytes_of(value)
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT_BYTES))
        start = self._file.tell()
        self._file.write(plain)
        return {_LEAF: [start, dtype_name(value.dtype), list(value.shape)]}

    def finish(self, tree: Any) -> None:
        """Write the tree, which makes the file complete."""
        text = _Encoder(default=self.leaf).encode(tree).encode()
        start = self._file.tell()
        self._file.write(text)
        self._file.seek(0)
        self._file.write(_HEADER.pack(_MAGIC, start, len(text)))


def _is_large(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and num_bytes_of(tensor) >= _MAPPED_BYTES


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


class _ReadFile:
    """A file whose tensors were all read at once, or mapped if they are large."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        file.seek(0)
        self._data = (
            mmap.mmap(file.fileno(), end, access=mmap.ACCESS_COPY)
            if end >= _MAPPED_BYTES
            else bytearray(file.read(end))
        )

    def tree(self, plain: dict[str, Any]) -> Any:
        """Return an object of the tree, or the tensor that it represents."""
        if plain.keys() != {_LEAF}:
            return plain
        start, dtype, shape = _place(plain, len(self._data))
        return _tensor(self._data, start, dtype, shape)


class _MappedFile:
    """A file whose small tensors are read, and whose large ones are mapped on access."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._end = end
        self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def tree(self, plain: dict[str, Any]) -> Any:
        """Return an object of the tree; the large tensors in it remain representations."""
        if plain.keys() == {_LEAF}:
            start, dtype, shape = _place(plain, self._end)
            num_bytes = prod(shape) * dtype.itemsize
            if num_bytes >= _MAPPED_BYTES:
                return plain
            return _tensor(bytearray(os.pread(self._file, num_bytes, start)), 0, dtype, shape)
        is_large = any(isinstance(value, dict) and value.keys() == {_LEAF} for value in plain.values())
        return _MappedTensors(plain, self) if is_large else plain

    def mapped(self, leaf: dict[str, Any]) -> torch.Tensor:
        """Map a tensor: writing into it does not change the file."""
        start, dtype, shape = _place(leaf, self._end)
        page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = start - page + prod(shape) * dtype.itemsize
        data = mmap.mmap(self._file, length, access=mmap.ACCESS_COPY, offset=page)
        return _tensor(data, start - page, dtype, shape)


class _MappedTensors(Mapping[str, Any]):
    """A mapping whose values may be tensors in a file."""

    def __init__(self, plain: dict[str, Any], file: _MappedFile) -> None:
        self.plain = plain  # as it is in the tree
        self._file = file

    def __getitem__(self, name: str) -> Any:
        value = self.plain[name]
        is_leaf = isinstance(value, dict) and value.keys() == {_LEAF}
        return self._file.mapped(value) if is_leaf else value

    def __contains__(self, name: object) -> bool:
        return name in self.plain

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)


def _place(leaf: dict[str, Any], end: int) -> tuple[int, torch.dtype, tuple[int, ...]]:
    """Read the position of a tensor; ValueError for a position that is not before ``end``."""
    start, name, shape = leaf[_LEAF]
    dtype = dtype_of(name)
    numbers = (start, *shape)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"expected a start and sizes, got {numbers}")
    if start + prod(shape) * dtype.itemsize > end:
        raise ValueError(
            f"expected {list(shape)} of {name} at byte {start}, got a file whose tensors end at {end}"
        )
    return start, dtype, tuple(shape)


def _tensor(
    data: bytearray | mmap.mmap, start: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=prod(shape), offset=start).view(shape)
