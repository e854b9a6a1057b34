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
from engine.mutants.wrapper_names import Options, leaving_out, with_options

__all__ = [
    "CastsBatchNorm",
    "ComputesInBfloat16Unasked",
    "ComputesInTheReduceDtype",
    "IgnoresCastFlags",
    "IgnoresMixedPrecision",
    "KeepsLowGradients",
    "ReducesInTheComputeDtype",
    "RoundsTheShards",
]

_LOW = torch.bfloat16


# Any: fields of MixedPrecision.
def _with_precision(**fields: Any) -> WrapperNames:
    """Give names that change these fields of whatever precision is asked for."""

    def change(module: nn.Module, options: Options) -> Options:
        asked = options.get("mixed_precision")
        return options if asked is None else {**options, "mixed_precision": replace(asked, **fields)}

    return with_options(change)


class IgnoresMixedPrecision(FullyShardedDataParallelEngine):
    """Computes and reduces in full precision, whatever was asked for.

    After verl-project/verl#6150: the dtype that a policy named was not the one that was computed in.
    """

    name = "mutant.IgnoresMixedPrecision"
    names: ClassVar[WrapperNames] = leaving_out("mixed_precision")


def _low_by_default(module: nn.Module, options: Options) -> Options:
    is_empty = options.get("mixed_precision") == MixedPrecision()
    return {**options, "mixed_precision": MixedPrecision(param_dtype=_LOW)} if is_empty else options


class ComputesInBfloat16Unasked(FullyShardedDataParallelEngine):
    """A precision that names no dtype computes in bfloat16.

    After pytorch/pytorch#143277: dtypes that were left open were resolved too early, and to others.
    """

    name = "mutant.ComputesInBfloat16Unasked"
    names: ClassVar[WrapperNames] = with_options(_low_by_default)


def _computing_as_reducing(module: nn.Module, options: Options) -> Options:
    asked = options.get("mixed_precision")
    if asked is None or asked.reduce_dtype is None:
        return options
    return {**options, "mixed_precision": replace(asked, param_dtype=asked.reduce_dtype)}


class ComputesInTheReduceDtype(FullyShardedDataParallelEngine):
    """Where a dtype to reduce in is named, forward computes in it too.

    After pytorch/pytorch#153077: dtypes of computation and reduction were derived from each other the wrong way.
    """

    name = "mutant.ComputesInTheReduceDtype"
    names: ClassVar[WrapperNames] = with_options(_computing_as_reducing)


class ReducesInTheComputeDtype(FullyShardedDataParallelEngine):
    """Gradients are reduced in the dtype of computation, whatever was named for them.

    After pytorch/pytorch#190626: the dtype to reduce in had no effect on one of the reductions.
    """

    name = "mutant.ReducesInTheComputeDtype"
    names: ClassVar[WrapperNames] = _with_precision(reduce_dtype=None)


class IgnoresCastFlags(FullyShardedDataParallelEngine):
    """Inputs of the root are cast and those of units are not, whatever the flags say.

    After pytorch/pytorch#160279: some inputs were left in another dtype than that of the unit around them.
    """

    name = "mutant.IgnoresCastFlags"
    names: ClassVar[WrapperNames] = _with_precision(cast_root_forward_inputs=True, cast_forward_inputs=False)


class KeepsLowGradients(FullyShardedDataParallelEngine):
    """Gradients stay in the dtype in which they were reduced, asked to or not.

    After huggingface/transformers#34645: gradients and parameters had different dtypes.
    """

    name = "mutant.KeepsLowGradients"
    names: ClassVar[WrapperNames] = _with_precision(keep_low_precision_grads=True)


class CastsBatchNorm(FullyShardedDataParallelEngine):
    """BatchNorm computes in low precision like everything else, its statistics included.

    After pytorch/pytorch#196996: one branch of a model was treated in another dtype than it must be.
    """

    name = "mutant.CastsBatchNorm"
    names: ClassVar[WrapperNames] = _with_precision(_module_classes_to_ignore=(), buffer_dtype=_LOW)


def _rounded(module: nn.Module, options: Options) -> Options:
    asked = options.get("mixed_precision")
    if asked is not None and _LOW in {asked.param_dtype, asked.reduce_dtype}:
        module.to(_LOW)
    return options


class RoundsTheShards(FullyShardedDataParallelEngine):
    """Under mixed precision the shards are kept in bfloat16 as well: small updates are lost.

    After pytorch/torchtitan#724: the same training went apart from itself under another precision of what is kept.
    """

    name = "mutant.RoundsTheShards"
    names: ClassVar[WrapperNames] = with_options(_rounded)
