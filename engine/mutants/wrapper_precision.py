"""Mutants that misread mixed_precision of FullyShardedDataParallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import (
    MixedPrecision,
)

from engine.adapters.torch_fsdp1 import FullyShardedDataParallelEngine
from engine.contract import WrapperNames
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import WRAPPED
from engine.mutants.wrapper_names import Options, leaving_out, with_options

_LOW = torch.bfloat16


# Any: fields of MixedPrecision.
def _with_precision(**fields: Any) -> WrapperNames:
    """Give names that change these fields of whatever precision is asked for."""

    def change(module: nn.Module, options: Options) -> Options:
        asked = options.get("mixed_precision")
        return options if asked is None else {**options, "mixed_precision": replace(asked, **fields)}

    return with_options(change)


@mutant(
    after="verl-project/verl#6150",
    kills_on=Condition(plan=WRAPPED, because="only low precision shows it"),
    trace=Trace.STATE,
)
class IgnoresMixedPrecision(FullyShardedDataParallelEngine):
    """Everything is computed and reduced in full precision.

    Reported: the dtype that a policy named was not the one that was computed in.
    """

    names: ClassVar[WrapperNames] = leaving_out("mixed_precision")


def _low_by_default(module: nn.Module, options: Options) -> Options:
    is_empty = options.get("mixed_precision") == MixedPrecision()
    return {**options, "mixed_precision": MixedPrecision(param_dtype=_LOW)} if is_empty else options


@mutant(
    after="pytorch/pytorch#143277",
    kills_on=Condition(plan=WRAPPED, because="a dtype that is named is honoured"),
    trace=Trace.STATE,
)
class ComputesInBfloat16Unasked(FullyShardedDataParallelEngine):
    """A precision that names no dtype computes in bfloat16.

    Reported: dtypes that were left open were resolved too early, and to others.
    """

    names: ClassVar[WrapperNames] = with_options(_low_by_default)


def _computing_as_reducing(module: nn.Module, options: Options) -> Options:
    asked = options.get("mixed_precision")
    if asked is None or asked.reduce_dtype is None:
        return options
    return {**options, "mixed_precision": replace(asked, param_dtype=asked.reduce_dtype)}


@mutant(
    after="pytorch/pytorch#153077",
    kills_on=Condition(plan=WRAPPED, because="without one it is honest"),
    trace=Trace.STATE,
)
class ComputesInTheReduceDtype(FullyShardedDataParallelEngine):
    """Forward computes in the dtype to reduce in.

    Reported: dtypes of computation and reduction were derived from each other the wrong way.
    """

    names: ClassVar[WrapperNames] = with_options(_computing_as_reducing)


@mutant(
    after="pytorch/pytorch#190626",
    kills_on=Condition(plan=WRAPPED, because="it may be that of computation anyway"),
)
class ReducesInTheComputeDtype(FullyShardedDataParallelEngine):
    """The dtype to reduce in has no effect.

    Reported: the dtype to reduce in had no effect on one of the reductions.
    """

    names: ClassVar[WrapperNames] = _with_precision(reduce_dtype=None)


@mutant(
    after="pytorch/pytorch#160279",
    kills_on=Condition(plan=WRAPPED, because="their defaults are honoured"),
    trace=Trace.STATE,
)
class IgnoresCastFlags(FullyShardedDataParallelEngine):
    """The flags that say which inputs are cast have no effect.

    Reported: some inputs were left in another dtype than that of the unit around them.
    """

    names: ClassVar[WrapperNames] = _with_precision(cast_root_forward_inputs=True, cast_forward_inputs=False)


@mutant(
    after="huggingface/transformers#34645",
    kills_on=Condition(plan=WRAPPED, because="only low precision shows it"),
    trace=Trace.STATE,
)
class KeepsLowGradients(FullyShardedDataParallelEngine):
    """Gradients stay in low precision unasked.

    Reported: gradients and parameters had different dtypes.
    """

    names: ClassVar[WrapperNames] = _with_precision(keep_low_precision_grads=True)


@mutant(
    after="pytorch/pytorch#196996",
    kills_on=Condition(plan=WRAPPED, because="only low precision shows it"),
    trace=Trace.STATE,
)
class CastsBatchNorm(FullyShardedDataParallelEngine):
    """BatchNorm computes in low precision.

    Reported: one branch of a model was treated in another dtype than it must be.
    """

    names: ClassVar[WrapperNames] = _with_precision(_module_classes_to_ignore=(), buffer_dtype=_LOW)


def _rounded(module: nn.Module, options: Options) -> Options:
    asked = options.get("mixed_precision")
    if asked is not None and _LOW in {asked.param_dtype, asked.reduce_dtype}:
        module.to(_LOW)
    return options


@mutant(
    after="pytorch/torchtitan#724",
    kills_on=Condition(plan=WRAPPED, because="only low precision shows it"),
    trace=Trace.STATE,
)
class RoundsTheShards(FullyShardedDataParallelEngine):
    """Shards are kept in low precision.

    Reported: the same training went apart from itself under another precision of what is kept.
    """

    names: ClassVar[WrapperNames] = with_options(_rounded)
