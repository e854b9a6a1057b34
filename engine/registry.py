"""From a name on the command line to an adapter: built-in name, package.module:attr or path/to/file.py:attr."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names of engines are known without torch
    from engine.contract import Engine
    from engine.mutants.mutant import Mutant

# Adapters load when named, so that listing engines costs no import and one missing package hurts nobody else.
BUILT_IN = {
    "reference": "engine.adapters.reference:ReferenceEngine",
    "reference.wrapper": "engine.adapters.reference_wrapper:ReferenceWrapperEngine",
    "torch.ddp": "engine.adapters.torch_ddp:DistributedDataParallelEngine",
    "torch.fsdp1": "engine.adapters.torch_fsdp1:FullyShardedDataParallelEngine",
    "torch.fsdp2": "engine.adapters.torch_fsdp2:FullyShardEngine",
    "torch.replicate": "engine.adapters.torch_replicate:ReplicateEngine",
}


# Ranks that are threads resolve the same engine at once, and none may see a file half executed. Re-entrant: a
# file may itself resolve another.
_LOADING = threading.RLock()


class EngineUnavailableError(ImportError):
    """Raised by an adapter's module that cannot serve here; its text is the cause: "needs torch >= 2.14"."""


class EngineNotFoundError(Exception):
    """No adapter answers to this name; usual causes: a typo, a missing package, a file that fails to import."""

    def __init__(self, spec: str, problem: str) -> None:
        self.spec = spec
        self.problem = problem
        super().__init__(spec, problem)

    def __str__(self) -> str:
        return f"engine {self.spec!r}: {self.problem}"


def check_spelling(spec: str) -> None:
    """Raise EngineNotFoundError for a name that nothing can answer to; imports nothing."""
    if spec not in BUILT_IN and ":" not in spec:
        raise EngineNotFoundError(spec, _not_built_in(spec))


def shipped_mutants() -> tuple[Mutant, ...]:
    """Return the engines that are wrong on purpose, sorted by name; imports all their modules."""
    from engine.mutants.registry import MUTANTS

    return MUTANTS


def resolve(spec: str) -> Engine:
    """Return the adapter that ``spec`` names; raises EngineNotFoundError with the cause for any that has none."""
    from engine.contract import Engine

    check_spelling(spec)
    location, _, attribute = BUILT_IN.get(spec, spec).rpartition(":")
    module = _load(spec, location)
    found = getattr(module, attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise EngineNotFoundError(
            spec, f"expected {attribute!r} in {location}, which does not define it{hint}"
        )
    engine = _made(spec, found) if isinstance(found, type) else found
    if not isinstance(engine, Engine):
        raise EngineNotFoundError(
            spec, f"expected an engine.contract.Engine, got {type(engine).__name__}; subclass Engine"
        )
    return engine


def _made(spec: str, adapter: type) -> object:
    try:
        return adapter()
    except (Exception, SystemExit) as error:  # a constructor may raise anything
        raise EngineNotFoundError(
            spec,
            f"{adapter.__name__}() raised {type(error).__name__}: {_one_line(error)}; "
            "an adapter's class takes no arguments",
        ) from error


def _not_built_in(spec: str) -> str:
    near = difflib.get_close_matches(spec, BUILT_IN, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"expected a built-in name ({', '.join(sorted(BUILT_IN))}), package.module:attr or path/to/file.py:attr; "
        f"{hint}See `shardproof list`"
    )


def _load(spec: str, location: str) -> ModuleType:
    try:
        if location.endswith(".py"):
            with _LOADING:
                return _load_file(Path(location))
        return importlib.import_module(location)
    except (
        Exception,
        SystemExit,
    ) as error:  # a user's module may raise anything on import, or end the process
        raise EngineNotFoundError(spec, _why_not_imported(location, error)) from error


def _why_not_imported(location: str, error: BaseException) -> str:
    if isinstance(error, EngineUnavailableError):
        return str(error)
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and error.name.partition(".")[0] not in sys.modules
    ):
        return f"{error.name.partition('.')[0]} is not installed, or not on the path (importing {location})"
    if isinstance(error, SystemExit):
        return f"importing {location} called sys.exit({error.code!r})"
    return f"importing {location} failed: {type(error).__name__}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())[:500]
    except Exception:  # a message that cannot be built must not hide the error
        return "(its message cannot be shown)"


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"expected a Python file at {path.resolve()}; try an absolute path")
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
