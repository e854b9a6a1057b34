"""Redirects the output of a world's processes, from Python or C, to one file each instead of the terminal."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

from shardproof.harness.regular_file import open_regular

SUFFIX = ".output"
ANY_OUTPUT = f"*{SUFFIX}"
LEFT_FILES = f"left behind{SUFFIX}"  # what lists the files that ranks left; the others hold what they printed
# Characters of a record: enough for a few tracebacks. The files contain the rest.
_LIMIT = 8_000


def redirect_output(file: Path) -> None:
    """Redirect the output of this process, and of processes that it starts, to ``file`` from now on."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The last output of a process that is killed must not be lost.
        sys.stdout.reconfigure(line_buffering=True)


def drop_empty(file: Path) -> None:
    """Remove the file of a process that has printed nothing."""
    if file.is_file() and not file.stat().st_size:
        file.unlink()


def printed(folder: Path, *, limit: int = _LIMIT, name: str = ANY_OUTPUT) -> str:
    """Return the output that worlds kept in ``folder``, the last ``limit`` characters of each file of this name."""
    parts = []
    # A rank may have created a pipe there.
    for file in sorted(path for path in folder.rglob(name) if path.is_file()):
        size = file.stat().st_size
        with open_regular(file) as stream:
            stream.seek(max(0, size - limit))
            text = stream.read().decode("utf-8", errors="backslashreplace").strip()
        if text:
            left_out = f" (the last {limit} of {size} bytes)" if size > limit else ""
            parts.append(f"{file.stem}{left_out}:\n{text}")
    return "\n".join(parts)
