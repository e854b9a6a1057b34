"""The bytes that the C allocator has allocated in this process, including those that no torch operator made.

They include the memory of NumPy, ctypes, Python's larger objects, C++ extensions and tensors that an engine's own
threads make. They exclude Python's small objects, direct mappings from the kernel, and other processes.
"""

from __future__ import annotations

import builtins
import ctypes
import threading
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


class Growth:
    """The bytes by which this process has grown since this was made, without those that import statements took.

    Engines import optional packages when they first need them: accelerate imports DeepSpeed wherever it is installed.
    The import statement stays measured until the process ends. Threads may import at the same time: from the first of
    imports that overlap to the last, nothing counts.
    """

    def __init__(self, in_use: Callable[[], int]) -> None:
        self._in_use = in_use
        self._import = builtins.__import__
        self._lock = threading.Lock()
        self._num_importing = 0
        self._before = 0  # the first of the imports under way
        builtins.__import__ = self._measured
        self._base = in_use()  # with all that imports took since

    @property
    def num_bytes(self) -> int:
        return self._in_use() - self._base

    # Any: the signature of the function behind the import statement.
    def _measured(self, name: str, *args: Any, **options: Any) -> Any:
        with self._lock:
            if not self._num_importing:
                self._before = self._in_use()
            self._num_importing += 1
        try:
            return self._import(name, *args, **options)
        finally:
            with self._lock:
                self._num_importing -= 1
                if not self._num_importing:
                    self._base += self._in_use() - self._before
