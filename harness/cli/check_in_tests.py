"""`check`, for users' own tests: runs the command of that name in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardproof.engine.names import spelled
from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM, USAGE
from shardproof.harness.errors import HarnessBug, UsageError
from shardproof.harness.records.run import read_run

_HINT = "the command `shardproof check` with the same arguments"
# Options of the caller's pytest that the command's pytest must not inherit.
_OF_PYTEST = ("PYTEST_", "PY_COLORS")


def check(
    model: type | str,
    *,
    engine: type | str,
    world: str = "threads:2",
    thorough: bool = False,
    keyword: str = "",
    options: Mapping[str, Any] | None = None,
    wrap: Callable[..., Any] | str | None = None,
    out: str | os.PathLike[str] | None = None,
) -> None:
    """Judge an engine on a model of your own, like ``shardproof check``; raises AssertionError with the output.

    ``model`` and ``engine`` are classes of a module, or their names as on the command line. ``keyword`` selects cases,
    as ``-k`` does. ``options`` are those of the call that wraps the model, as ``--with`` gives them, and ``wrap`` is a
    function of yours that makes this call, as ``--wrap``. ``out`` is the folder that keeps the run. Raises UsageError
    for a model that cannot be judged.
    """
    __tracebackhide__ = True
    flags = ["--engine", spelled(_name(engine), options or {}), "--world", world]
    flags += ["--wrap", _name(wrap)] if wrap else []
    flags += [*(["--thorough"] if thorough else []), *(["-k", keyword] if keyword else [])]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(out or Path(scratch) / "run")
        done = subprocess.run(
            [sys.executable, "-m", "shardproof", "check", _name(model), *flags, "--out", str(folder)],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode == CONFORMS:
            return
        screen = _screen(folder) if done.returncode == DOES_NOT_CONFORM else ""
    if screen:
        raise AssertionError(screen)
    said = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
    if done.returncode == USAGE:
        raise UsageError(
            f"check({_name(model)})",
            expected="a model and an engine that can be judged",
            got=said,
            hint=_HINT,
        )
    raise HarnessBug(f"check({_name(model)})", expected="a verdict", got=said, hint="reporting this")


def _screen(folder: Path) -> str:
    # Here: a rank that loads a test's file, because it contains the model, does not need reports.
    from shardproof.reports.summary import Conclusion, conclude
    from shardproof.reports.user_model_result import render

    run = read_run(folder)
    is_open = conclude(run) is Conclusion.NOT_PROVEN
    found = "it is not proven that the engine trains" if is_open else "the engine does not train"
    return f"{found} the model as one process does\n\n{render(run)}"


# Any, above and here: options and the results of users' functions are any values.
def _name(named: type | Callable[..., Any] | str) -> str:
    """Name a class so that another process finds it: by its package if it has one, else by its file."""
    if isinstance(named, str):
        return named
    module = sys.modules[named.__module__]
    file = getattr(module, "__file__", None)
    if "." in named.__qualname__ or not file:
        raise UsageError(
            f"check({named.__qualname__})",
            expected="a class or function at the top of a module, which other processes can import",
            got=f"one that is defined inside {named.__qualname__.rpartition('.')[0] or 'no file'}",
            hint="moving it to the top of the file",
        )
    place = named.__module__ if module.__package__ else file
    return f"{place}:{named.__qualname__}"


def _environment() -> dict[str, str]:
    """Return an environment in which modules are found as they are here."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_PYTEST)}
    return {**kept, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
