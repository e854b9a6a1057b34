"""Python in a process of its own, called as a user calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Done = subprocess.CompletedProcess[str]


def python(*arguments: str, cwd: Path = ROOT, limit_s: float = 110, **environment: str) -> Done:
    """Run Python with these arguments and additional environment variables, and capture its output."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
