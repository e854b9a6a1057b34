"""An oracle that is stored between runs, in a file named by a digest of everything that it was computed from.

[Note: what a kept oracle may decide] The digest does not cover files that a model reads, such as weights. So a kept
oracle can let an engine pass, because a pass needs equal numbers on both sides. An engine that fails is judged again
with a newly computed oracle.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import BinaryIO

import torch

from shardproof.harness.regular_file import open_regular

_PACKAGES = Path(__file__).parents[2]  # harness and engine, whose code digests of content know by name
_ENDING = 65  # bytes
_PIECE = 2**20  # bytes


@dataclass(frozen=True, slots=True)
class KeptOracle:
    """One file: the answer, a newline, and the SHA-256 of the answer in hexadecimal."""

    path: Path

    def is_whole(self) -> bool:
        """Return whether the file contains the answer that was stored."""
        try:
            with open_regular(self.path) as file:
                size = os.fstat(file.fileno()).st_size - _ENDING
                return size > 0 and b"\n" + _digest_of(file, size) == file.read(_ENDING)
        except OSError:
            return False

    def write(self, answer: Path) -> None:
        """Store an answer; if it cannot be written, the next run computes it again."""
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(answer, part)
            with part.open("r+b") as file:
                digest = _digest_of(file, part.stat().st_size)
                file.write(b"\n" + digest)
            part.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


def kept_oracle(folder: Path, *digests: str) -> KeptOracle:
    """Return the path of an oracle in a folder, by the training, this machine, and the installed packages."""
    return KeptOracle(folder / _digest([*(text.encode() for text in digests), _environment()]))


@cache
def _environment() -> bytes:
    machine = (
        sys.version,
        platform.machine(),
        torch.__config__.show(),
        torch.backends.cpu.get_cpu_capability(),
        str(torch.get_num_threads()),
    )
    installed = sorted(f"{found.name} {found.version}" for found in distributions())
    ours = sorted(path for name in ("harness", "engine") for path in (_PACKAGES / name).rglob("*.py"))
    code = (path.read_bytes() for path in ours)
    return _digest([*(text.encode() for text in (*machine, *installed)), *code]).encode()


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(b"%d:" % len(part) + part)
    return found.hexdigest()


def _digest_of(file: BinaryIO, size: int) -> bytes:
    """Hash the first bytes of a file, and leave the file position after them."""
    found = hashlib.sha256()
    while size and (piece := file.read(min(size, _PIECE))):
        found.update(piece)
        size -= len(piece)
    return found.hexdigest().encode()
