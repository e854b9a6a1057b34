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

if TYPE_CHECKING:  # who only asks which engines there are need not wait for torch
    from engine.contract import Engine

__all__ = ["BUILT_IN", "EngineNotFoundError", "resolve"]

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


class EngineNotFoundError(Exception):
    """No adapter answers to this name; usual causes: a typo, a missing package, a file that fails to import."""

    def __init__(self, spec: str, problem: str) -> None:
        self.spec = spec
        self.problem = problem
        super().__init__(spec, problem)

    def __str__(self) -> str:
        return f"engine {self.spec!r}: {self.problem}"


def resolve(spec: str) -> Engine:
    """Return the adapter that ``spec`` names; raises EngineNotFoundError saying what was expected."""
    from engine.contract import Engine

    target = BUILT_IN.get(spec, spec)
    location, colon, attribute = target.rpartition(":")
    if not colon:
        raise EngineNotFoundError(spec, _not_built_in(spec))
    module = _load(spec, location)
    found = getattr(module, attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise EngineNotFoundError(
            spec, f"expected {attribute!r} in {location}, which does not define it{hint}"
        )
    engine = found() if isinstance(found, type) else found
    if not isinstance(engine, Engine):
        raise EngineNotFoundError(
            spec, f"expected an engine.contract.Engine, got {type(engine).__name__}; subclass Engine"
        )
    return engine


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
    except Exception as error:  # a user's module may raise anything on import; all of it is the same news
        raise EngineNotFoundError(
            spec, f"importing {location} failed: {type(error).__name__}: {error}"
        ) from error


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
