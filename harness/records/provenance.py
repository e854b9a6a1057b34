"""The conditions of a run: versions, hardware, git state, clock. No torch here."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardproof.harness.records.record import Footer, Header, Verdict

UNKNOWN = "unknown"

_PACKAGES = ("torch", "pytest", "shardproof")
_GIT_TIMEOUT_S = 10  # a work tree on a slow network disk; a longer wait is not worth the answer


def header(
    *, command: str, engines: Sequence[str], worlds: Sequence[str], seed: int, num_cases: int
) -> Header:
    """Return the header of a run that starts now; ``num_cases`` counts records over engines and worlds."""
    head = _git("rev-parse", "HEAD")
    # Tracked files only: the folder of a run in the work tree is no change of the code.
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return Header(
        started_at=_now(),
        command=command,
        engines=tuple(engines),
        worlds=tuple(worlds),
        versions={"python": platform.python_version()} | {name: version_of(name) for name in _PACKAGES},
        hardware={
            "cpu": _cpu_model(),
            "cores": str(_num_cores()),
            "memory_bytes": _memory_bytes(),
            "platform": platform.platform(),
            "gpus": ", ".join(_gpu_models()) or "none found",
        },
        git_head=head or UNKNOWN,
        git_dirty=bool(changes),
        git_changes=hashlib.sha256(_git("diff", "HEAD").encode()).hexdigest()[:12] if changes else "",
        seed=seed,
        num_cases=num_cases,
    )


def footer(*, verdicts: Iterable[Verdict], duration_s: float) -> Footer:
    """Return the footer of a run that ends now."""
    return Footer(ended_at=_now(), duration_s=duration_s, counts=dict(Counter(str(v) for v in verdicts)))


def today() -> date:
    """Return the day in UTC, so that machines in different time zones agree; call it once per run."""
    return datetime.now(UTC).date()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def version_of(package: str) -> str:
    """Return the installed release of a package, from its metadata."""
    # Importing torch for its version would cost seconds.
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _git(*arguments: str) -> str:
    """Run git on the current folder; empty if there is no git, no work tree or no commit."""
    try:
        # Without the lock that `status` takes to refresh the index: others may be working in this tree.
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            capture_output=True,
            check=True,
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu_model() -> str:
    model = _field(Path("/proc/cpuinfo"), "model name")
    return model or platform.processor() or platform.machine() or UNKNOWN


def _num_cores() -> int:
    # CPUs that this process may use: in a container often fewer than the machine has.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _memory_bytes() -> str:
    try:
        return str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return UNKNOWN


def _gpu_models() -> list[str]:
    # The driver's own list; asking torch would import it.
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [_field(file, "Model") or UNKNOWN for file in files]


def _field(path: Path, name: str) -> str:
    """Return the value of ``name : value`` in a file of the kernel; empty if there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
