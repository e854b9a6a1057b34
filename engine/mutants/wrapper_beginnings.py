"""Mutants by whose hands wrapped parameters begin wrongly, or are wrapped without the warning that is due."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
)

from engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine
from engine.contract import WrapperNames
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import WRAPPED
from engine.mutants.wrapper_names import leaving_out, with_options


@mutant(
    after="pytorch/pytorch#105840",
    kills_on=Condition(plan=WRAPPED, because="models with memory need none"),
    trace=Trace.STATE,
)
class IgnoresTheInitialiser(FullyShardedDataParallelEngine):
    """Param_init_fn is never called.

    Reported: with param_init_fn a model began with other values than those that it was given.
    """

    names: ClassVar[WrapperNames] = leaving_out("param_init_fn")


def _empty(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.zero_()


@mutant(
    after="EvolvingLMMs-Lab/lmms-engine#185",
    kills_on=Condition(plan=WRAPPED, because="models with memory are left as they are"),
    trace=Trace.STATE,
)
class NeverResets(FullyShardedDataParallelEngine):
    """Modules without memory are left at zeros.

    Reported: what was made without memory was never initialised.
    """

    names: ClassVar[WrapperNames] = with_options(lambda module, options: {"param_init_fn": _empty, **options})


class _Lossy(FullyShardedDataParallel):
    # Any: arguments of the wrapper.
    def __init__(self, module: nn.Module, **options: Any) -> None:
        lost = [m for m in module.modules() for b in m.buffers(recurse=False) if b.is_meta]
        super().__init__(module, **options)
        for owner in lost:
            for name, buffer in list(owner.named_buffers(recurse=False)):
                setattr(owner, name, buffer.to("meta"))


@mutant(
    after="verl-project/verl#7834",
    kills_on=Condition(plan=WRAPPED, because="models with memory are left as they are"),
    trace=Trace.CRASH,
)
class LeavesBuffersWithoutMemory(FullyShardedDataParallelEngine):
    """Buffers without memory are left without.

    Reported: what was made without memory was not what it should be once it had some.
    """

    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Lossy)


@mutant(
    after="allenai/OLMo-core#319",
    kills_on=Condition(plan=WRAPPED, because="ranks that start alike need no broadcast"),
    trace=Trace.STATE,
)
class StartsEachRankOnItsOwn(FullyShardedDataParallelEngine):
    """Sync_module_states has no effect.

    Reported: ranks were initialised apart, and nothing was broadcast.
    """

    names: ClassVar[WrapperNames] = leaving_out("sync_module_states")


class _Silent(FullyShardedDataParallel):
    # Any: arguments of the wrapper.
    def __init__(self, module: nn.Module, **options: Any) -> None:
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            super().__init__(module, **options)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().__init__(module, **options)


@mutant(
    after="pytorch/pytorch#109385",
    kills_on=Condition(world_size=1, plan=WRAPPED, because="other modules are wrapped silently, and rightly"),
    trace=Trace.STATE,
)
class WrapsContainersSilently(FullyShardedDataParallelEngine):
    """A list of modules is wrapped without a warning.

    Reported: modules ran on shards, for what gathers them hangs on a forward that is not called.
    """

    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Silent)
