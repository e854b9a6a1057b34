"""The one way to open files of a run or of a foreign folder: regular files alone, without blocking, up to a size.

An engine, or the maker of a folder, may have put a pipe, a device, a folder or an endless link where a file belongs.
Opening a pipe waits for its other end, and reading a device never ends. No torch here.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from io import BufferedReader, FileIO
from pathlib import Path

# Of a file that is read at once: a ledger of a million collectives has some 400 MB.
MOST_BYTES = 2**30

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def clear(path: Path) -> None:
    """Remove what a rank may have put where a file is to be written: opening a pipe would block forever."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; links to files are followed.

    Raises OSError at once if it is no regular file, with its kind as the reason.
    """
    return open(path, "rb", opener=_opened)


def open_to_append(path: Path) -> FileIO:
    """Open a file for appending without a buffer, so that a line is one write; otherwise as `open_regular`."""
    return open(path, "ab", buffering=0, opener=_opened)


def read_regular(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Read a whole file; raises OSError if it is no regular file, or larger than that."""
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(path))
    return data


def replace_regular(path: Path, data: bytes) -> None:
    """Write a whole file atomically, whatever has its name: readers see the old bytes or the new ones."""
    # Not tempfile: its files are private to the user, and reports are shared.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        scratch.unlink(missing_ok=True)
        with scratch.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _opened(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # A pipe that nobody reads cannot be opened for writing without blocking.
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "not a regular file, but a pipe or a device", path) from error
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"not a regular file, but {_KINDS.get(kind, 'something else')}", path)
    return descriptor
