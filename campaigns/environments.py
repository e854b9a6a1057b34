"""Virtual environments below ``.venvs/``, each made once; what others install stays out of the project's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venvs"


def environment(folder: Path, *packages: str) -> Path:
    """Return the Python of an environment with Shardproof and torch as proven, made if it is missing.

    ``packages`` are arguments of pip, a string for each call.
    """
    python = folder / "bin" / "python"
    if not (folder / ".made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"making {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        ours = ("--constraint", str(ROOT / "constraints.txt"), "--editable", str(ROOT))
        for arguments in (ours, *map(str.split, packages)):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *arguments], check=True)
        (folder / ".made").touch()
    return python
