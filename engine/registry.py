"""From a name on the command line to an adapter: a known name, package.module:attr or path/to/file.py:attr.

Known are the engines that are built in, and those that installed packages name under the entry points
``shardproof.engines``. A package cannot take the name of one that is built in.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from shardproof.engine.import_by_name import LoadError, load, one_line

if TYPE_CHECKING:  # the names of engines are known without torch
    from shardproof.engine.contract import Engine
    from shardproof.engine.mutants.mutant import Mutant

# Adapters load when named, so that listing engines costs no import and one missing package affects no other engine.
BUILT_IN = {
    "reference": "shardproof.engine.adapters.reference:ReferenceEngine",
    "reference.zero2": "shardproof.engine.adapters.reference_zero:Zero2Engine",
    "reference.wrapper": "shardproof.engine.adapters.reference_wrapper:ReferenceWrapperEngine",
    "torch.ddp": "shardproof.engine.adapters.torch_ddp:DistributedDataParallelEngine",
    "torch.fsdp1": "shardproof.engine.adapters.torch_fsdp1:FullyShardedDataParallelEngine",
    "torch.fsdp2": "shardproof.engine.adapters.torch_fsdp2:FullyShardEngine",
    "torch.replicate": "shardproof.engine.adapters.torch_replicate:ReplicateEngine",
    "torch.zero1": "shardproof.engine.adapters.torch_zero1:ZeroRedundancyEngine",
}


ENTRY_POINTS = "shardproof.engines"


@cache
def known_engines() -> Mapping[str, str]:
    """Return where each known engine is, by name: those built in, and those of installed packages."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)} | BUILT_IN


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
    if spec not in known_engines() and ":" not in spec:
        raise EngineNotFoundError(spec, _not_built_in(spec))


def shipped_mutants() -> tuple[Mutant, ...]:
    """Return the engines that are wrong on purpose, sorted by name; imports all their modules."""
    from shardproof.engine.mutants.all_mutants import MUTANTS

    return MUTANTS


def resolve(spec: str) -> Engine:
    """Return the adapter that ``spec`` names; raises EngineNotFoundError with the cause for any that has none."""
    from shardproof.engine.contract import Engine

    check_spelling(spec)
    try:
        found = load(known_engines().get(spec, spec))
    except LoadError as error:
        raise EngineNotFoundError(spec, str(error)) from error
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
            f"{adapter.__name__}() raised {type(error).__name__}: {one_line(error)}; "
            "an adapter's class takes no arguments",
        ) from error


def _not_built_in(spec: str) -> str:
    near = difflib.get_close_matches(spec, known_engines(), n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"expected a known name ({', '.join(sorted(known_engines()))}), package.module:attr or path/to/file.py:attr; "
        f"{hint}See `shardproof list`"
    )
