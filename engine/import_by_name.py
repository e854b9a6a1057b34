"""Loads an object that a user names: ``package.module:attr`` or ``path/to/file.py:attr``. Does not import torch."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType

# Ranks that are threads may load the same file at once; the lock keeps them from a half-executed module. It is
# re-entrant because a file may load another.
_LOADING = threading.RLock()


class EngineUnavailableError(ImportError):
    """A module raises this when it cannot work here; the message is the cause: "needs torch >= 2.14"."""


class LoadError(Exception):
    """The name cannot be loaded; the message is the cause: a typo, a missing package, a failing import."""


def load(name: str) -> object:
    """Return the attribute that ``name`` names; raises LoadError with the cause if it cannot be loaded."""
    location, colon, attribute = name.rpartition(":")
    if not colon:
        raise LoadError(f"expected package.module:attr or path/to/file.py:attr, got {name!r}")
    module = _module(location)
    found = getattr(module, attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise LoadError(f"expected {attribute!r} in {location}, which does not define it{hint}")
    return found


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line, of bounded length."""
    try:
        return " ".join(str(error).split())[:500]
    except Exception:  # a message that cannot be built must not hide the error
        return "(its message cannot be shown)"


def _module(location: str) -> ModuleType:
    try:
        if location.endswith(".py"):
            with _LOADING:
                return _file(Path(location))
        return importlib.import_module(location)
    except (Exception, SystemExit) as error:  # a user's module may raise anything, or exit
        raise LoadError(_why_not_imported(location, error)) from error


def _why_not_imported(location: str, error: BaseException) -> str:
    if isinstance(error, EngineUnavailableError):
        return str(error)
    missing = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else ""
    if missing and missing not in sys.modules:
        return f"{missing} is not installed, or not on the path (importing {location})"
    if isinstance(error, SystemExit):
        return f"importing {location} called sys.exit({error.code!r})"
    return f"importing {location} failed: {type(error).__name__}: {one_line(error)}"


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], n=1)
        hint = f"did you mean {near[0]}?" if near else f"see the files in {path.resolve().parent}"
        raise FileNotFoundError(f"expected a Python file at {path.resolve()}; {hint}")
    name = f"_shardproof_engine_{path.resolve().as_posix().replace('/', '_').removesuffix('.py')}"
    if name in sys.modules:
        return sys.modules[name]
    source = importlib.util.spec_from_file_location(name, path)
    if source is None or source.loader is None:
        raise ImportError(f"{path} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(source)
    sys.modules[name] = module  # before execution: dataclasses in the file look their module up
    try:
        source.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
