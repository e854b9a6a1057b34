"""Mutants of what stands beside FullyShardedDataParallel: precision, policies, state-dict settings, scaler, loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    OptimStateKeyType,
    StateDictType,
    wrap,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine, PreparedFsdp1
from engine.contract import Plan, PreparedModel, WrapperNames
from engine.mutants.wrapper_names import Options, leaving_out, with_options

__all__ = [
    "CastsBatchNorm",
    "ComputesInBfloat16Unasked",
    "ComputesInTheReduceDtype",
    "DividesWrappedGradientsTwice",
    "GivesShardsForWholes",
    "GivesUnitsNoOptions",
    "GivesWholesForShards",
    "IgnoresCastFlags",
    "IgnoresMixedPrecision",
    "IgnoresOverridesOfAPolicy",
    "IgnoresStateConfigs",
    "KeepsLowGradients",
    "KeepsOverflowLocal",
    "NumbersStateByName",
    "ReducesDespiteNoSync",
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


class _Stingy(wrap.ModuleWrapPolicy):
    # Any: options of units.
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        lost = {"sharding_strategy": None, "use_orig_params": True}
        return super()._run_policy(root_module, ignored_modules, {**root_kwargs, **lost})


class GivesUnitsNoOptions(FullyShardedDataParallelEngine):
    """Units by class have the default strategy and show names, whatever the root was given.

    After speechbrain/speechbrain#2010: what was asked of the whole reached the first of its modules alone.
    """

    name = "mutant.GivesUnitsNoOptions"
    names: ClassVar[WrapperNames] = replace(NAMES, ModuleWrapPolicy=_Stingy)


# Any: what a policy's function says.
def _policy_of_answers(function: Any) -> wrap.CustomPolicy:
    return wrap.CustomPolicy(lambda module: bool(function(module)))


class IgnoresOverridesOfAPolicy(FullyShardedDataParallelEngine):
    """Of what a policy's function says of a module, only whether it is a unit counts.

    After NVIDIA/cosmos-framework#162: an option was honoured for some modules, and dropped for the others.
    """

    name = "mutant.IgnoresOverridesOfAPolicy"
    names: ClassVar[WrapperNames] = replace(NAMES, CustomPolicy=_policy_of_answers)


def _with_types(types: Mapping[StateDictType, StateDictType]) -> WrapperNames:
    """Give names that take one type of state dict for another, and no config at all."""

    class Set(FullyShardedDataParallel):
        # Any: configs, and settings.
        @staticmethod
        def set_state_dict_type(module: nn.Module, state_dict_type: StateDictType, *configs: Any) -> Any:
            taken = types.get(state_dict_type, state_dict_type)
            return FullyShardedDataParallel.set_state_dict_type(module, taken)

        @staticmethod
        @contextmanager
        def state_dict_type(
            module: nn.Module, state_dict_type: StateDictType, *configs: Any
        ) -> Iterator[None]:
            taken = types.get(state_dict_type, state_dict_type)
            with FullyShardedDataParallel.state_dict_type(module, taken):
                yield

    return replace(NAMES, FullyShardedDataParallel=Set)


class IgnoresStateConfigs(FullyShardedDataParallelEngine):
    """State dicts are of the type set, and their configs have no effect.

    After Lightning-AI/lightning-thunder#908: what was handed out was not of the form that was asked for.
    """

    name = "mutant.IgnoresStateConfigs"
    names: ClassVar[WrapperNames] = _with_types({})


class GivesShardsForWholes(FullyShardedDataParallelEngine):
    """Who asks for whole state is given shards.

    After facebookresearch/fairscale#601: the local state of an optimizer was taken for the whole.
    """

    name = "mutant.GivesShardsForWholes"
    names: ClassVar[WrapperNames] = _with_types(
        {StateDictType.FULL_STATE_DICT: StateDictType.SHARDED_STATE_DICT}
    )


class GivesWholesForShards(FullyShardedDataParallelEngine):
    """Who asks for shards is given whole state.

    After pytorch/pytorch#136228: state was taken to have another shape than it has.
    """

    name = "mutant.GivesWholesForShards"
    names: ClassVar[WrapperNames] = _with_types(
        {StateDictType.SHARDED_STATE_DICT: StateDictType.FULL_STATE_DICT}
    )


class _Alphabetical(FullyShardedDataParallel):
    # Any: states of optimizers.
    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        *_: Any,
        **__: Any,
    ) -> dict[str, Any]:
        names = [name for name, _ in model.named_parameters()]
        numbers = {name: number for number, name in enumerate(sorted(names))}
        if optim_state_key_type is OptimStateKeyType.PARAM_NAME:
            keys: Mapping[Any, Any] = {number: name for name, number in numbers.items()}
        else:
            keys = numbers
        state, groups = optim_state_dict["state"], optim_state_dict["param_groups"]
        return {
            "state": {keys[key]: value for key, value in state.items()},
            "param_groups": [{**group, "params": [keys[key] for key in group["params"]]} for group in groups],
        }


class NumbersStateByName(FullyShardedDataParallelEngine):
    """The ids of optimizer state follow the alphabet, not the model; there and back nothing is lost.

    After pytorch/pytorch#54736: ids of interleaved parameters were mapped to each other's state.
    """

    name = "mutant.NumbersStateByName"
    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Alphabetical)


class _Local(ShardedGradScaler):
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at this rank's gradients alone."""
        GradScaler.unscale_(self, optimizer)


class KeepsOverflowLocal(FullyShardedDataParallelEngine):
    """A rank skips the step for its own infinite gradients alone.

    After pytorch/pytorch#115710: one rank saw an overflow, and the others kept their scale.
    """

    name = "mutant.KeepsOverflowLocal"
    names: ClassVar[WrapperNames] = replace(NAMES, ShardedGradScaler=_Local)


class _PreparedDivided(PreparedFsdp1):
    divisor = 1

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / self.divisor)


class DividesWrappedGradientsTwice(FullyShardedDataParallelEngine):
    """Gradients are divided by the number of ranks once more.

    After NVIDIA/Megatron-LM#3023: gradients were scaled in two places, each as if the other were not there.
    """

    name = "mutant.DividesWrappedGradientsTwice"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly; divide every loss."""
        prepared = _PreparedDivided(super().prepare(model, plan, mesh).module, model, self.names)
        prepared.divisor = mesh.size()
        return prepared


class _PreparedEager(PreparedFsdp1):
    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext()


class ReducesDespiteNoSync(FullyShardedDataParallelEngine):
    """no_sync has no effect: every microbatch is reduced; the numbers are right.

    After Haian-Jin/LVSM#22: forward ran outside of the context that was to hold reductions back.
    """

    name = "mutant.ReducesDespiteNoSync"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly; hold nothing back."""
        return _PreparedEager(super().prepare(model, plan, mesh).module, model, self.names)
