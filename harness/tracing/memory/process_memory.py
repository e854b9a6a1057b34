"""The bytes that the C allocator has allocated in this process, including those that no torch operator made.

They include the memory of NumPy, ctypes, Python's larger objects, C++ extensions and tensors that an engine's own
threads make. They exclude Python's small objects, direct mappings from the kernel, and other processes.
"""

from __future__ import annotations

import builtins
import ctypes
from collections.abc import Callable
from typing import Any

_FIELDS = [
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
]


class _Info(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def allocator() -> Callable[[], int] | None:
    """Return a function that counts the bytes in use, in heaps and in the allocator's mappings; None without glibc."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    mallinfo.restype = _Info

    def in_use() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return in_use


class ImportedBytes:
    """The growth of the process during import statements, from now until the process ends.

    Engines import optional packages when they are first used: accelerate imports DeepSpeed wherever it is installed.
    """

    def __init__(self, in_use: Callable[[], int]) -> None:
        self.num_bytes = 0
        self._in_use = in_use
        self._import = builtins.__import__
        self._is_inside = False
        builtins.__import__ = self._measured

    # Any: the signature of the function behind the import statement.
    def _measured(self, name: str, *args: Any, **options: Any) -> Any:
        if self._is_inside:
            return self._import(name, *args, **options)
        self._is_inside, before = True, self._in_use()
        try:
            return self._import(name, *args, **options)
        finally:
            self._is_inside = False
            self.num_bytes += self._in_use() - before
