"""How many bytes the C allocator has given out in this process: also to what no operator of torch made.

NumPy, ctypes, Python's larger objects, C++ extensions and tensors that an engine's own threads make all take memory
there. Python's small objects, mappings that a process asks the kernel for, and other processes do not.
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
    """Return what counts the bytes in use, in heaps and in mappings of their own; None where libc is not glibc."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    mallinfo.restype = _Info

    def in_use() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return in_use
