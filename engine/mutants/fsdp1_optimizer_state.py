"""Mutants of FSDP1's optimizer state dicts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

from shardproof.engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine, PreparedFsdp1
from shardproof.engine.contract import OptimizerFactory, WrapperNames
from shardproof.engine.mutants.mutant import Trace, mutant

# Any, throughout: arguments and results of torch's own methods.

_State = dict[str, Any]


def _saving(change: Callable[[_State], _State]) -> WrapperNames:
    """Return names whose wrapper changes the state of an optimizer that it saves."""

    class Saver(FullyShardedDataParallel):
        @staticmethod
        def optim_state_dict(*args: Any, **kwargs: Any) -> _State:
            return change(FullyShardedDataParallel.optim_state_dict(*args, **kwargs))

    return replace(NAMES, FullyShardedDataParallel=Saver)


def _loading(change: Callable[[_State], _State]) -> WrapperNames:
    """Return names whose wrapper changes every state that is loaded into an optimizer."""

    def changing(name: str) -> Any:
        honest = getattr(FullyShardedDataParallel, name)
        return staticmethod(lambda *args, **kwargs: change(honest(*args, **kwargs)))

    class Loader(FullyShardedDataParallel):
        shard_full_optim_state_dict = changing("shard_full_optim_state_dict")
        scatter_full_optim_state_dict = changing("scatter_full_optim_state_dict")
        flatten_sharded_optim_state_dict = changing("flatten_sharded_optim_state_dict")

        @staticmethod
        def optim_state_dict_to_load(  # type: ignore[override]
            model: nn.Module, optim: Any, osd: Any, *, load_directly: bool = False
        ) -> _State:
            loadable = change(FullyShardedDataParallel.optim_state_dict_to_load(model, optim, osd))
            if load_directly:
                optim.load_state_dict(loadable)
            return loadable

        @staticmethod
        def rekey_optim_state_dict(osd: Any, key: Any, *args: Any, **kwargs: Any) -> _State:  # type: ignore[override]
            keyed = FullyShardedDataParallel.rekey_optim_state_dict(osd, key, *args, **kwargs)
            return change(keyed) if key is OptimStateKeyType.PARAM_ID else keyed

    return replace(NAMES, FullyShardedDataParallel=Loader)


@mutant(after="pytorch/pytorch#96252", trace=Trace.STATE)
class NamesTheWrapperInOptimizerStates(FullyShardedDataParallelEngine):
    """Names in the state of optimizers contain the wrapper's prefix."""

    names = _saving(
        lambda found: found | {"state": {f"_fsdp_wrapped_module.{k}": v for k, v in found["state"].items()}}
    )


def _without_momentum(found: _State) -> _State:
    """Copy a state with zeros in place of every tensor that is not a scalar."""
    kept = copy.deepcopy(found)
    for state in kept.get("state", {}).values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[key] = torch.zeros_like(value)
    return kept


@mutant(after="pytorch/pytorch#76671", trace=Trace.STATE)
class LosesMomentumWhenItSaves(FullyShardedDataParallelEngine):
    """Moments are zero in saved optimizer state."""

    names = _saving(_without_momentum)


@mutant(after="facebookresearch/fairscale#601", trace=Trace.NUMBERS, phase="state loaded")
class LosesMomentum(FullyShardedDataParallelEngine):
    """Moments are zero in loaded optimizer state."""

    names = _loading(_without_momentum)


def _without_steps(loadable: _State) -> _State:
    kept = copy.deepcopy(loadable)
    for state in kept["state"].values():
        if "step" in state:
            state["step"] = torch.zeros_like(torch.as_tensor(state["step"]))
    return kept


@mutant(after="huggingface/accelerate#3971", trace=Trace.NUMBERS, phase="state loaded")
class RestartsTheCountOfSteps(FullyShardedDataParallelEngine):
    """Loaded optimizer state counts its steps from zero."""

    names = _loading(_without_steps)


def _with_the_last_moment(found: _State) -> _State:
    for state in found["state"].values():
        if "exp_avg" in state:
            state["exp_avg"] = state["exp_avg_sq"]
    return found


@mutant(after="pytorch/pytorch#108298", trace=Trace.STATE)
class SavesTheLastMomentAsAll(FullyShardedDataParallelEngine):
    """All moments in saved optimizer state are the last one."""

    names = _saving(_with_the_last_moment)


def _with_one_count(found: _State) -> _State:
    shared = next((state["step"] for state in found["state"].values() if "step" in state), None)
    for state in found["state"].values():
        state["step"] = shared
    return found


@mutant(after="databricks/flashoptim#3", trace=Trace.NUMBERS, phase="state saved")
class SharesTheCountOfSteps(FullyShardedDataParallelEngine):
    """The count of steps in saved optimizer state is one tensor, which all parameters advance."""

    names = _saving(_with_one_count)


@mutant(after="pytorch/pytorch#99117", trace=Trace.NUMBERS, phase="state saved")
class IgnoresTheStateGiven(FullyShardedDataParallelEngine):
    """The optimizer's own state is saved although another was passed."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def optim_state_dict(model: nn.Module, optim: Any, *_: Any, **__: Any) -> _State:
            return FullyShardedDataParallel.optim_state_dict(model, optim)


def _with_permuted_groups(found: _State) -> _State:
    groups = found["param_groups"]
    members = [group["params"] for group in reversed(groups)]
    pairs = zip(groups, members, strict=True)
    return found | {"param_groups": [group | {"params": names} for group, names in pairs]}


@mutant(after="pytorch/pytorch#54736", trace=Trace.STATE)
class PermutesGroups(FullyShardedDataParallelEngine):
    """Parameter groups are saved with each other's members."""

    names = _saving(_with_permuted_groups)


@mutant(after="pytorch/pytorch#54736", trace=Trace.NUMBERS, phase="state saved")
class RekeysToEachOther(FullyShardedDataParallelEngine):
    """Rekeying assigns each parameter the state of another."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def rekey_optim_state_dict(osd: Any, key: Any, *args: Any, **kwargs: Any) -> _State:  # type: ignore[override]
            keyed = FullyShardedDataParallel.rekey_optim_state_dict(osd, key, *args, **kwargs)
            state = dict(keyed["state"])
            shapes: dict[Any, Any] = {}
            for k in sorted(state):
                shape = [v.shape for v in state[k].values() if isinstance(v, torch.Tensor)]
                other = shapes.setdefault(str(shape), k)
                state[k], state[other] = state[other], state[k]
            return keyed | {"state": state}


@mutant(after="mosaicml/composer#3493", phase="step")
class GivesTheOptimizerAllThatTrains(FullyShardedDataParallelEngine):
    """An optimizer of some parameters updates the others too."""

    class Prepared(PreparedFsdp1):
        def optimizer(self, factory: OptimizerFactory) -> None:
            super().optimizer(factory)
            groups = [group["params"] for group in self.built_optimizer().param_groups]
            known = {parameter for group in groups for parameter in group}
            groups[0] += [p for p in self.owned_parameters().values() if p.requires_grad and p not in known]
