"""Finds the adapter for a name from the command line: a known name, package.module:attr or path/to/file.py:attr.

Known names are those of built-in engines, of third-party engines with an adapter in this package, and of engines
that installed packages declare under the entry points ``shardproof.engines``. A package cannot override a name of
the first two kinds.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from shardproof.engine.import_by_name import LoadError, load, one_line
from shardproof.engine.names import parse

if TYPE_CHECKING:  # listing the names of engines needs no torch
    from shardproof.engine.contract import Engine
    from shardproof.engine.mutants.mutant import Mutant

# Adapters load on demand: listing engines imports none of them, and a missing package affects no other engine.
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
_OUTSIDE = "shardproof.engine.third_party"
# Their adapters import them; an engine that is not installed is listed, and refused when named.
THIRD_PARTY = {
    "accelerate.ddp": f"{_OUTSIDE}.accelerate_engine:AccelerateDdpEngine",
    "accelerate.fsdp1": f"{_OUTSIDE}.accelerate_engine:AccelerateFsdp1Engine",
    "accelerate.fsdp2": f"{_OUTSIDE}.accelerate_engine:AccelerateFsdp2Engine",
    "colossalai.zero1": f"{_OUTSIDE}.colossalai_engine:LowLevelZero1Engine",
    "colossalai.zero2": f"{_OUTSIDE}.colossalai_engine:LowLevelZero2Engine",
    "deepspeed.zero1": f"{_OUTSIDE}.deepspeed_engine:DeepSpeedZero1",
    "deepspeed.zero2": f"{_OUTSIDE}.deepspeed_engine:DeepSpeedZero2",
    "deepspeed.zero3": f"{_OUTSIDE}.deepspeed_engine:DeepSpeedZero3",
    "fairscale.fsdp": f"{_OUTSIDE}.fairscale_engine:FairscaleEngine",
    "fairscale.sdp": f"{_OUTSIDE}.fairscale_engine:ShardedDdpEngine",
    "ignite.ddp": f"{_OUTSIDE}.ignite_engine:IgniteDdpEngine",
    "lightning.ddp": f"{_OUTSIDE}.lightning_engine:FabricDdpEngine",
    "lightning.fsdp2": f"{_OUTSIDE}.lightning_engine:FabricFsdp2Engine",
    "mcore.ddp": f"{_OUTSIDE}.mcore_engine:MegatronCoreDdpEngine",
    "megatron.fsdp": f"{_OUTSIDE}.megatron_engine:MegatronFsdpEngine",
    "megatron.fsdp.experimental": f"{_OUTSIDE}.megatron_engine:ExperimentalMegatronFsdpEngine",
    "olmo.ddp": f"{_OUTSIDE}.olmo_engine:MultiGroupDdpEngine",
    "pipegoose.ddp": f"{_OUTSIDE}.pipegoose_engine:PipegooseDdpEngine",
    "pipegoose.zero1": f"{_OUTSIDE}.pipegoose_engine:PipegooseZero1Engine",
    "torchft.ddp": f"{_OUTSIDE}.torchft_engine:TorchftDdpEngine",
    "torchft.pure_ddp": f"{_OUTSIDE}.torchft_engine:TorchftPureDdpEngine",
    "torchtitan.simple_fsdp": f"{_OUTSIDE}.torchtitan_engine:SimpleFsdpEngine",
}
# The package to import, if it differs from the first part of the engine's name.
_PACKAGES = {
    "lightning": "lightning_fabric",
    "mcore": "megatron.core",
    "megatron": "megatron_fsdp",
    "olmo": "olmo_core",
}
# How to install it where an extra of this package cannot: it requires an older torch, or many unused packages.
_WITHOUT_EXTRA = {
    "colossalai": "--no-deps colossalai, and what docs/engines/colossalai.zero1.md lists",
    "pipegoose": "--no-deps pipegoose, and what docs/engines/pipegoose.ddp.md lists",
}

ENTRY_POINTS = "shardproof.engines"


@cache
def known_engines() -> Mapping[str, str]:
    """Return the location of each known engine by name: those of this package, and those of installed packages."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)} | THIRD_PARTY | BUILT_IN


def what_is_missing(name: str) -> str:
    """Return the packages to install before a known engine can be imported; empty if nothing is missing."""
    if name not in THIRD_PARTY:
        return ""
    family = name.partition(".")[0]
    package = _PACKAGES.get(family, family)
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of the parent package
        spec = None
    if spec is not None and spec.origin is not None:  # a mere folder of that name has no origin
        return ""
    how = _WITHOUT_EXTRA.get(family, f"'shardproof[{family}]'")
    return f"needs {package}, which is not installed; try pip install {how}"


class EngineNotFoundError(Exception):
    """No adapter has this name; usual causes: a typo, a missing package, a file that fails to import."""

    def __init__(self, spec: str, problem: str) -> None:
        self.spec = spec
        self.problem = problem
        super().__init__(spec, problem)

    def __str__(self) -> str:
        return f"engine {self.spec!r}: {self.problem}"


def check_spelling(spec: str) -> None:
    """Raise EngineNotFoundError for a name that cannot belong to an adapter; imports nothing."""
    name = spec.partition("(")[0]  # without options, see `engine.own_wrapping`
    if name not in known_engines() and ":" not in name:
        raise EngineNotFoundError(spec, _not_built_in(name))


def shipped_mutants() -> tuple[Mutant, ...]:
    """Return the mutants, sorted by name; imports all their modules."""
    from shardproof.engine.mutants.all_mutants import MUTANTS

    return MUTANTS


def resolve(spec: str) -> Engine:
    """Return the adapter that ``spec`` names; raises EngineNotFoundError with the cause if there is none."""
    from shardproof.engine.contract import Engine
    from shardproof.engine.own_wrapping import with_options

    check_spelling(spec)
    try:
        name, options = parse(spec)
    except ValueError as error:
        raise EngineNotFoundError(spec, str(error)) from error
    if missing := what_is_missing(name):
        raise EngineNotFoundError(spec, missing)
    try:
        found = load(known_engines().get(name, name))
    except LoadError as error:
        raise EngineNotFoundError(spec, str(error)) from error
    engine = _made(spec, found) if isinstance(found, type) else found
    if not isinstance(engine, Engine):
        raise EngineNotFoundError(
            spec, f"expected an engine.contract.Engine, got {type(engine).__name__}; subclass Engine"
        )
    try:
        return with_options(engine, options) if options else engine
    except ValueError as error:
        raise EngineNotFoundError(spec, str(error)) from error


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
