"""Mutants that sin in the state of optimizers of what FullyShardedDataParallel wraps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

from engine.adapters.torch_fsdp1 import FullyShardedDataParallelEngine
from engine.mutants.mutant import Trace, mutant
from engine.mutants.plans import CALLS

# Any, in all that follows: what torch's own methods take and give.


@mutant(after="pytorch/pytorch#96252", kills_on=CALLS, trace=Trace.STATE)
class NamesTheWrapperInOptimizerStates(FullyShardedDataParallelEngine):
    """Names in the state of optimizers tell of the wrapper.

    Reported: a prefix of another wrapper was in the names of an optimizer's state.
    """

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def optim_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
            found = FullyShardedDataParallel.optim_state_dict(*args, **kwargs)
            return found | {"state": {f"_fsdp_wrapped_module.{k}": v for k, v in found["state"].items()}}


def _without_momentum(found: dict[str, Any]) -> dict[str, Any]:
    """Copy a state with zeros in place of every tensor that is no number."""
    kept = copy.deepcopy(found)
    for state in kept.get("state", {}).values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[key] = torch.zeros_like(value)
    return kept


@mutant(after="pytorch/pytorch#76671", kills_on=CALLS, trace=Trace.STATE)
class LosesMomentumWhenItSaves(FullyShardedDataParallelEngine):
    """In the state that is saved of an optimizer, moments are zero.

    Reported: some of an optimizer's parameters had no state where it was looked for.
    """

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def optim_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return _without_momentum(FullyShardedDataParallel.optim_state_dict(*args, **kwargs))


class _Loader(FullyShardedDataParallel):
    """Changes whatever is about to be loaded into an optimizer."""

    @staticmethod
    def changed(loadable: dict[str, Any]) -> dict[str, Any]:
        return loadable

    @classmethod
    def optim_state_dict_to_load(  # type: ignore[override]
        cls, model: nn.Module, optim: Any, osd: Any, *, load_directly: bool = False
    ) -> dict[str, Any]:
        loadable = cls.changed(FullyShardedDataParallel.optim_state_dict_to_load(model, optim, osd))
        if load_directly:
            optim.load_state_dict(loadable)
        return loadable

    @classmethod
    def shard_full_optim_state_dict(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return cls.changed(FullyShardedDataParallel.shard_full_optim_state_dict(*args, **kwargs))

    @classmethod
    def scatter_full_optim_state_dict(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return cls.changed(FullyShardedDataParallel.scatter_full_optim_state_dict(*args, **kwargs))

    @classmethod
    def flatten_sharded_optim_state_dict(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return cls.changed(FullyShardedDataParallel.flatten_sharded_optim_state_dict(*args, **kwargs))

    @classmethod
    def rekey_optim_state_dict(cls, osd: Any, key: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        keyed = FullyShardedDataParallel.rekey_optim_state_dict(osd, key, *args, **kwargs)
        return cls.changed(keyed) if key is OptimStateKeyType.PARAM_ID else keyed


@mutant(after="facebookresearch/fairscale#601", kills_on=CALLS, trace=Trace.NUMBERS)
class LosesMomentum(FullyShardedDataParallelEngine):
    """What is loaded into an optimizer has moments of zero.

    Reported: resumed training went on as if from scratch.
    """

    class Wrapper(_Loader):
        @staticmethod
        def changed(loadable: dict[str, Any]) -> dict[str, Any]:
            return _without_momentum(loadable)


@mutant(after="huggingface/accelerate#3971", kills_on=CALLS, trace=Trace.NUMBERS)
class RestartsTheCountOfSteps(FullyShardedDataParallelEngine):
    """What is loaded into an optimizer counts its steps from zero.

    Reported: the count of steps could not be found in what was saved.
    """

    class Wrapper(_Loader):
        @staticmethod
        def changed(loadable: dict[str, Any]) -> dict[str, Any]:
            kept = copy.deepcopy(loadable)
            for state in kept["state"].values():
                if "step" in state:
                    state["step"] = torch.zeros_like(torch.as_tensor(state["step"]))
            return kept


@mutant(after="pytorch/pytorch#108298", kills_on=CALLS, trace=Trace.STATE)
class SavesTheLastMomentAsAll(FullyShardedDataParallelEngine):
    """All moments in the state that is saved of an optimizer are the last one.

    Reported: states were gathered one after the other into one buffer.
    """

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def optim_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
            found = FullyShardedDataParallel.optim_state_dict(*args, **kwargs)
            for state in found["state"].values():
                if "exp_avg" in state:
                    state["exp_avg"] = state["exp_avg_sq"]
            return found


@mutant(after="databricks/flashoptim#3", kills_on=CALLS, trace=Trace.NUMBERS)
class SharesTheCountOfSteps(FullyShardedDataParallelEngine):
    """The count of steps in the state that is saved of an optimizer is one tensor, which all parameters advance.

    Reported: the first forward after a resume was exact, and the first step exploded.
    """

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def optim_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
            found = FullyShardedDataParallel.optim_state_dict(*args, **kwargs)
            shared = next((state["step"] for state in found["state"].values() if "step" in state), None)
            for state in found["state"].values():
                state["step"] = shared
            return found


@mutant(after="pytorch/pytorch#99117", kills_on=CALLS, trace=Trace.NUMBERS)
class IgnoresTheStateGiven(FullyShardedDataParallelEngine):
    """The state of the optimizer is saved although another was given.

    Reported: what was taken from the state given, and what from the optimizer, was mixed up.
    """

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def optim_state_dict(model: nn.Module, optim: Any, *_: Any, **__: Any) -> dict[str, Any]:
            return FullyShardedDataParallel.optim_state_dict(model, optim)


@mutant(after="pytorch/pytorch#54736", kills_on=CALLS, trace=Trace.STATE)
class PermutesGroups(FullyShardedDataParallelEngine):
    """Groups of parameters are saved with each other's members.

    Reported: parameters that take turns in groups were numbered in another order.
    """

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def optim_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
            found = FullyShardedDataParallel.optim_state_dict(*args, **kwargs)
            groups = found["param_groups"]
            members = [group["params"] for group in reversed(groups)]
            pairs = zip(groups, members, strict=True)
            return found | {"param_groups": [group | {"params": names} for group, names in pairs]}


@mutant(after="pytorch/pytorch#54736", kills_on=CALLS, trace=Trace.NUMBERS)
class RekeysToEachOther(FullyShardedDataParallelEngine):
    """Rekeyed, a parameter's state is that of another.

    Reported: the numbers of parameters did not belong to the state that they came with.
    """

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def rekey_optim_state_dict(osd: Any, key: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            keyed = FullyShardedDataParallel.rekey_optim_state_dict(osd, key, *args, **kwargs)
            state = dict(keyed["state"])
            shapes: dict[Any, Any] = {}
            for k in sorted(state):
                shape = [v.shape for v in state[k].values() if isinstance(v, torch.Tensor)]
                other = shapes.setdefault(str(shape), k)
                state[k], state[other] = state[other], state[k]
            return keyed | {"state": state}
