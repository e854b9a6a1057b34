"""The bytes that the C allocator has allocated in this process, including those that no torch operator made.

They include the memory of NumPy, ctypes, Python's larger objects, C++ extensions and tensors that an engine's own
threads make. They exclude Python's small objects, direct mappings from the kernel, and other processes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

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
