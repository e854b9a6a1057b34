"""Trees of plain values and tensors as one file: JSON, and the bytes of all tensors in one buffer.

torch.save writes each tensor as an entry of its own in an archive: that takes longer than a small training.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

__all__ = ["dtype_name", "dtype_of", "read_tree", "write_tree"]

# The only key of an object that stands for a tensor: where it begins, its dtype and shape. No parameter can have this
# name: torch refuses dots.
_LEAF = "."
# Bound before an engine is imported, which may replace them where everybody finds them.
_Encoder, _save = json.JSONEncoder, torch.save
_ALIGNMENT_BYTES = 16  # so that the buffer can be read as any dtype


# Any, throughout: a tree of what JSON knows, and tensors.
def write_tree(tree: Any, path: Path | BinaryIO) -> None:
    """Write dicts with string keys, sequences, CPU tensors, and what JSON knows; sequences are read as lists."""
    writer = _Writer()
    text = _Encoder(default=writer.leaf).encode(tree)
    _save({"tree": text, "data": writer.data()}, path)


def read_tree(path: Path | BinaryIO) -> Any:
    """Read what `write_tree` wrote, without running code of the file; a broken file raises what torch or json do."""
    stored = torch.load(path, weights_only=True)
    data = stored["data"]
    return json.loads(stored["tree"], object_hook=lambda found: _tensor(found, data))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as files have it."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Read what `dtype_name` spelled; raises ValueError for any other name of torch's."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a dtype, got {name!r}")
    return dtype


class _Writer:
    """Collects the bytes of tensors, each padded."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []
        self._num_bytes = 0

    def leaf(self, value: Any) -> dict[str, Any]:
        """Take a tensor, give what stands for it; anything else is no part of a tree."""
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"write_tree: expected tensors and what JSON knows, got {type(value).__name__}")
        plain = value.detach().contiguous().flatten().view(torch.uint8)
        padding = -plain.numel() % _ALIGNMENT_BYTES
        start = self._num_bytes
        self._pieces += [plain, plain.new_zeros(padding)]
        self._num_bytes += plain.numel() + padding
        return {_LEAF: [start, dtype_name(value.dtype), list(value.shape)]}

    def data(self) -> torch.Tensor:
        """Give all bytes so far: uint8[bytes]."""
        return torch.cat([torch.empty(0, dtype=torch.uint8), *self._pieces])


def _tensor(found: dict[str, Any], data: torch.Tensor) -> Any:
    if found.keys() != {_LEAF}:
        return found
    start, name, shape = found[_LEAF]
    dtype = dtype_of(name)
    return data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
