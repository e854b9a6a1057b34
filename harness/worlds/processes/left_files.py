"""Names the files that the ranks of a world leave behind: in their temporary folder, and in shared memory.

All ranks of a world share a temporary folder of their own, which is removed with the world, so what lies in it is
theirs. Shared memory has no folder per world: a file counts if it belongs to this user and appeared while the world
ran, so that another program of this user can be meant. Ranks on other machines are not looked at.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import util
from pathlib import Path

from shardproof.harness.regular_file import clear
from shardproof.harness.worlds.output import LEFT_FILES

_SHARED_MEMORY = Path("/dev/shm")
_MOST_NAMES = 8


class LeftFiles:
    """The temporary folder of one world, and the files that are left in it and in shared memory."""

    def __init__(self, folder: Path) -> None:
        """Make the temporary folder; `close` writes what is left to the file `LEFT_FILES` of ``folder``."""
        self._folder = folder
        # Not below ``folder``: the path of a socket has at most 107 bytes. The session's own goes with the session.
        self._temporary = Path(tempfile.mkdtemp(dir=util.get_temp_dir()))
        self._before = {path for path, _ in _sized(_SHARED_MEMORY)}

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables with which ranks use the folder; compiled kernels stay where all worlds find them."""
        kernels = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        return {
            "TMPDIR": str(self._temporary),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(kernels)),
        }

    def close(self) -> None:
        """Write what is left, if there is anything, and remove the temporary folder."""
        shared = [found for found in _sized(_SHARED_MEMORY) if found[0] not in self._before]
        lines = _line("in the temporary folder", list(_sized(self._temporary))) + _line(
            "in shared memory", shared
        )
        if lines:
            # A rank may have removed the folder, which the verdict tells.
            self._folder.mkdir(parents=True, exist_ok=True)
            clear(self._folder / LEFT_FILES)
            (self._folder / LEFT_FILES).write_text(lines)
        shutil.rmtree(self._temporary, ignore_errors=True)


def _line(where: str, files: Sequence[tuple[Path, int]]) -> str:
    names = [f"{path.name!r} ({size} bytes)" for path, size in files[:_MOST_NAMES]]
    more = [f"and {len(files) - _MOST_NAMES} more"] if len(files) > _MOST_NAMES else []
    return f"{where}: {', '.join(names + more)}\n" if names else ""


def _sized(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield this user's files of a folder, also in folders below it, with their sizes in bytes."""
    for parent, _, names in os.walk(folder):  # it follows no links
        for path in (Path(parent, name) for name in sorted(names)):
            with contextlib.suppress(OSError):  # it has just gone
                found = path.lstat()
                if found.st_uid == os.getuid():
                    yield path, found.st_size
