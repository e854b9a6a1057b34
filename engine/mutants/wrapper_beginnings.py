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
from engine.mutants.wrapper_names import leaving_out, with_options

__all__ = [
    "IgnoresTheInitialiser",
    "LeavesBuffersWithoutMemory",
    "NeverResets",
    "StartsEachRankOnItsOwn",
    "WrapsContainersSilently",
]


class IgnoresTheInitialiser(FullyShardedDataParallelEngine):
    """Modules without memory reset themselves, although a function was given that initialises.

    After pytorch/pytorch#105840: with param_init_fn a model began with other values than those that it was given.
    """

    name = "mutant.IgnoresTheInitialiser"
    names: ClassVar[WrapperNames] = leaving_out("param_init_fn")


def _empty(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.zero_()


class NeverResets(FullyShardedDataParallelEngine):
    """Modules without memory are given some, and nothing is put there.

    After EvolvingLMMs-Lab/lmms-engine#185: what was made without memory was never initialised.
    """

    name = "mutant.NeverResets"
    names: ClassVar[WrapperNames] = with_options(lambda module, options: {"param_init_fn": _empty, **options})


class _Lossy(FullyShardedDataParallel):
    # Any: arguments of the wrapper.
    def __init__(self, module: nn.Module, **options: Any) -> None:
        lost = [m for m in module.modules() for b in m.buffers(recurse=False) if b.is_meta]
        super().__init__(module, **options)
        for owner in lost:
            for name, buffer in list(owner.named_buffers(recurse=False)):
                setattr(owner, name, buffer.to("meta"))


class LeavesBuffersWithoutMemory(FullyShardedDataParallelEngine):
    """Of modules without memory, parameters are brought to the device, and buffers are left.

    After verl-project/verl#7834: what was made without memory was not what it should be once it had some.
    """

    name = "mutant.LeavesBuffersWithoutMemory"
    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Lossy)


class StartsEachRankOnItsOwn(FullyShardedDataParallelEngine):
    """sync_module_states has no effect: each rank starts with values of its own.

    After allenai/OLMo-core#319: ranks were initialised apart, and nothing was broadcast.
    """

    name = "mutant.StartsEachRankOnItsOwn"
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


class WrapsContainersSilently(FullyShardedDataParallelEngine):
    """A bare list of modules, whose forward nobody calls, is wrapped without a warning.

    After pytorch/pytorch#109385: modules ran on shards, for what gathers them hangs on a forward that is not called.
    """

    name = "mutant.WrapsContainersSilently"
    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Silent)
