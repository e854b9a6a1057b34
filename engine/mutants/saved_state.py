"""Mutants that lose optimizer state in a resume, or are wrong in evaluation and in recomputed forwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import OptimizerFactory, Plan, Shard
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import (
    Stale,
    changing,
    keeping_group_options,
    local,
    set_group_options,
    unchanged,
)
from shardproof.engine.mutants.rare_triggers import Remembering
from shardproof.engine.reference.fsdp_module import FSDPModule
from shardproof.engine.reference.torch_private import inside_backward


@mutant(after="facebookresearch/fairscale#601", phase="state loaded")
class LosesOptimizerState(FullyShardEngine):
    """A resumed optimizer has no state."""

    class Prepared(PreparedFullyShard):
        def load_full_state(self, state: dict[str, Any]) -> None:
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(self.module, model_state_dict=state["model"], options=options)


@mutant(after="NVIDIA/Megatron-LM#1359", trace=Trace.STATE)
class RoundsWhatItLoads(FullyShardEngine):
    """Parameters and optimizer state are rounded to the compute dtype when they are loaded."""

    class Prepared(PreparedFullyShard):
        def load_full_state(self, state: dict[str, Any]) -> None:
            super().load_full_state(state)
            dtype = self.plan.compute_dtype
            moments = [t for of in self.built_optimizer().state.values() for t in of.values() if t.dim()]
            with torch.no_grad():
                for tensor in [] if dtype is None else [*self.named.parameters(), *moments]:
                    tensor.copy_(tensor.to(dtype))


@mutant(after="NVIDIA-NeMo/RL#4183", phase="step")
class ShowsTheStateOfTheStepBefore(DistributedDataParallelEngine):
    """Optimizer state is read as it was before the last step."""

    class Prepared(PreparedDdp):
        _before: Mapping[str, Shard] = {}

        def step(self) -> None:
            now = super().local_optimizer_state()
            self._before = {name: replace(s, tensor=s.tensor.clone()) for name, s in now.items()}
            super().step()

        def local_optimizer_state(self) -> Mapping[str, Shard]:
            return self._before or super().local_optimizer_state()


class _SpoilingWhatItLoads(PreparedReference):
    """Loads state as the reference engine does, and spoils it then."""

    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        self.spoil()

    def load_shared_state(self, state: dict[str, Any]) -> None:
        super().load_shared_state(state)
        self.spoil()

    def spoil(self) -> None:
        raise NotImplementedError


@mutant(after="facebookresearch/fairscale#601", phase="state loaded")
class LosesStateOfOtherRanks(ReferenceEngine):
    """A resumed optimizer has only the state of the first rank."""

    class Prepared(_SpoilingWhatItLoads):
        def spoil(self) -> None:
            for of_parameter in self.built_optimizer().state.values():
                for value in of_parameter.values():
                    if isinstance(value, DTensor) and torch.distributed.get_rank():
                        value.to_local().zero_()


@mutant(after="pytorch/torchdistx#4", phase="state saved")
class SavesUnderNamesOfItsOwn(FullyShardEngine):
    """Names in a whole state have a prefix, which loading removes."""

    class Prepared(PreparedFullyShard):
        def full_state(self) -> dict[str, Any]:
            state = super().full_state()
            return state | {"model": {f"module.{name}": value for name, value in state["model"].items()}}

        def load_full_state(self, state: dict[str, Any]) -> None:
            model = {name.removeprefix("module."): value for name, value in state["model"].items()}
            super().load_full_state(state | {"model": model})


def _turned(values: Mapping[str, Any], *, by: int) -> dict[str, Any]:
    """Exchange the values of names with equal shapes, by this many places."""
    twins: dict[str, list[str]] = {}
    for name, value in values.items():
        tensors = value if isinstance(value, dict) else {"": value}
        twins.setdefault(str([tensor.shape for tensor in tensors.values()]), []).append(name)
    return {
        name: values[names[(index + by) % len(names)]]
        for names in twins.values()
        for index, name in enumerate(names)
    }


@mutant(after="pytorch/xla#9224", phase="state saved")
class SavesMomentsInAnOrderOfItsOwn(FullyShardEngine):
    """A whole state exchanges optimizer state of parameters of one shape, which loading reverses."""

    class Prepared(PreparedFullyShard):
        def full_state(self) -> dict[str, Any]:
            return self._with_moments(super().full_state(), by=1)

        def load_full_state(self, state: dict[str, Any]) -> None:
            super().load_full_state(self._with_moments(state, by=-1))

        def _with_moments(self, state: dict[str, Any], *, by: int) -> dict[str, Any]:
            optimizer = state["optimizer"]
            return state | {"optimizer": optimizer | {"state": _turned(optimizer["state"], by=by)}}


@mutant(after="meta-pytorch/torchrec#1739", phase="prepare")
class FillsTheFirstRankAlone(ReferenceEngine):
    """Of models prepared without memory, only the first rank's is filled with its state."""

    class Prepared(PreparedReference):
        def materialize(self, *given: Any) -> None:  # Any: the contract's own
            super().materialize(*given)
            if torch.distributed.get_rank():
                for parameter in self.owned_parameters().values():
                    local(parameter).fill_(0.25)


@mutant(after="modelscope/ms-swift#9980", trace=Trace.STATE)
class FillsFromAWholeModel(ReferenceEngine):
    """A model prepared without memory is filled from the whole model, which every rank receives first."""

    class Prepared(PreparedReference):
        def materialize(
            self, device: torch.device, state: Mapping[str, torch.Tensor], *given: Any
        ) -> None:  # Any: the contract's own
            received = [
                torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
                for tensor in self.module.state_dict().values()
            ]
            super().materialize(device, state, *given)
            received.clear()


@mutant(after="pytorch/pytorch#140900", phase="state loaded")
class LoadsNoOptionsOfTheLoop(ReferenceEngine):
    """A state that is loaded loses the options of groups that are not the optimizer's own, as schedules add them."""

    class Prepared(PreparedReference):
        def load_full_state(self, state: dict[str, Any]) -> None:
            super().load_full_state(state)
            optimizer = self.built_optimizer()
            for group in optimizer.param_groups:
                for option in group.keys() - optimizer.defaults.keys() - {"params", "param_names"}:
                    del group[option]


@mutant(after="NVIDIA/Megatron-LM#5974", phase="step")
class StartsAdamAtStepOne(FullyShardEngine):
    """The optimizer has stepped once before training."""

    class Prepared(PreparedFullyShard):
        def optimizer(self, factory: OptimizerFactory) -> None:
            super().optimizer(factory)
            parameters = [p for p in self.named.parameters() if p.requires_grad]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            with unchanged(map(local, parameters)):
                self.step()
            self.zero_grad(set_to_none=True)


@mutant(after="hpcaitech/ColossalAI#5151", phase="state loaded")
class RestartsTheLearningRate(FullyShardEngine):
    """A resumed optimizer has the learning rate of a fresh one, whatever a schedule made of it."""

    class Prepared(PreparedFullyShard):
        def load_full_state(self, state: dict[str, Any]) -> None:
            with keeping_group_options(self.built_optimizer()):
                super().load_full_state(state)

        def load_shared_state(self, state: dict[str, Any]) -> None:
            with keeping_group_options(self.built_optimizer()):
                super().load_shared_state(state)


@mutant(after="NVIDIA/Megatron-LM#7468", phase="state loaded")
class LoadsNoWeightDecay(FullyShardEngine):
    """A resumed optimizer decays weights as it was built to, whatever was saved."""

    class Prepared(PreparedFullyShard):
        def load_full_state(self, state: dict[str, Any]) -> None:
            before = [group.get("weight_decay") for group in self.built_optimizer().param_groups]
            super().load_full_state(state)
            for group, decay in zip(self.built_optimizer().param_groups, before, strict=True):
                group.update({} if decay is None else {"weight_decay": decay})


@mutant(after="radixark/Megatron-LM#19", phase="state loaded")
class LoadsAllInOneDtype(FullyShardEngine):
    """A whole state goes through one buffer, in the dtype of the first parameter."""

    class Prepared(PreparedFullyShard):
        def load_full_state(self, state: dict[str, Any]) -> None:
            dtype = next(iter(self.named.parameters())).dtype
            narrowed = {n: v.to(dtype) if v.is_floating_point() else v for n, v in state["model"].items()}
            super().load_full_state({**state, "model": narrowed})


@mutant(after="deepspeedai/DeepSpeed#6878", phase="step")
class MergesParameterGroups(FullyShardEngine):
    """All parameters are updated with the options of the optimizer's first group."""

    class Prepared(PreparedFullyShard):
        def optimizer(self, factory: OptimizerFactory) -> None:
            super().optimizer(factory)
            _merge_groups(self.built_optimizer())


@mutant(after="deepspeedai/DeepSpeed#6878", phase="state loaded")
class MergesParameterGroupsItLoads(FullyShardEngine):
    """All groups of a resumed optimizer have the options of the first."""

    class Prepared(PreparedFullyShard):
        def load_full_state(self, state: dict[str, Any]) -> None:
            super().load_full_state(state)
            _merge_groups(self.built_optimizer())


def _merge_groups(optimizer: torch.optim.Optimizer) -> None:
    first, *others = optimizer.param_groups
    for group in others:
        set_group_options(group, first)


@mutant(after="pytorch/pytorch#143828", trace=Trace.CRASH)
class LosesOptionsBesideAnEmptyGroup(ReferenceEngine):
    """Loading takes the options of a parameter group away that has no parameters."""

    class Prepared(_SpoilingWhatItLoads):
        def spoil(self) -> None:
            for group in self.built_optimizer().param_groups:
                if not group["params"]:
                    del group["betas"]


@mutant(after="pytorch/pytorch#192202", phase="state loaded")
class LosesTheStateOfWhatIsFrozen(ReferenceEngine):
    """Loading drops the state of parameters that are frozen at that time."""

    class Prepared(_SpoilingWhatItLoads):
        def spoil(self) -> None:
            held = self.built_optimizer().state
            for parameter in [p for p in held if not p.requires_grad]:
                del held[parameter]


@mutant(after="wochenlong/lora-scripts-next#320", phase="state loaded")
class LoadsStateByPosition(ReferenceEngine):
    """Optimizer state is loaded in the order of parameters, as if each had some."""

    class Prepared(_SpoilingWhatItLoads):
        def spoil(self) -> None:
            held = self.built_optimizer().state
            parameters = list(self.named.parameters())
            saved = [held.pop(p) for p in parameters if p in held]
            for parameter, state in zip(parameters, saved, strict=False):
                tensors = [
                    value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()
                ]
                if all(tensor.shape == parameter.shape for tensor in tensors):
                    held[parameter] = state


@mutant(after="pytorch/pytorch#51601", trace=Trace.STATE)
class EmptiesWhatItLoads(FullyShardEngine):
    """Loading removes the optimizer state from the caller's dict."""

    class Prepared(PreparedFullyShard):
        def load_full_state(self, state: dict[str, Any]) -> None:
            super().load_full_state(state)
            state["optimizer"] = {"state": {}}


@mutant(after="huggingface/accelerate#3898", phase="state loaded")
class LoadsNoBuffers(FullyShardEngine):
    """A resumed model has the buffers of a fresh one."""

    class Prepared(PreparedFullyShard):
        def load_full_state(self, state: dict[str, Any]) -> None:
            with unchanged(self.named.buffers()):
                super().load_full_state(state)


@mutant(after="NVIDIA/Megatron-LM#2769", phase="state loaded")
class LoadsNoParameters(FullyShardEngine):
    """A resumed model has the parameters of a fresh one."""

    class Prepared(PreparedFullyShard):
        def load_full_state(self, state: dict[str, Any]) -> None:
            with unchanged(map(local, self.named.parameters())):
                super().load_full_state(state)


@mutant(after="pytorch/pytorch#136228", trace=Trace.CRASH)
class FailsToLoadEmptyShards(ReferenceEngine):
    """A whole state dict cannot be loaded if a rank has no row of a parameter."""

    class Prepared(PreparedReference):
        def load_full_state(self, state: dict[str, Any]) -> None:
            whole = dict(state["model"])  # torch replaces the caller's values by those that it loads
            super().load_full_state(state)
            for name, parameter in self.owned_parameters().items():
                if isinstance(parameter, DTensor):
                    rank, num_ranks = parameter.device_mesh.get_local_rank(-1), parameter.device_mesh.size(-1)
                    chunks = whole[name].chunk(num_ranks)
                    # For a rank after the last chunk there is a piece with only the first dim.
                    piece = chunks[rank] if rank < len(chunks) else chunks[0].new_empty(0)
                    parameter.to_local().detach().copy_(piece)


@mutant(after="NVIDIA/Megatron-LM#663", phase="gather")
class EvaluatesWithStaleParameters(FullyShardEngine):
    """Evaluation uses the parameters of the previous step."""

    class Prepared(Stale, PreparedFullyShard):
        """Swaps the older shards in only for evaluation."""

        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns any type
            if self.module.training:
                return PreparedFullyShard.__call__(self, *inputs, **named)
            output = super().__call__(*inputs, **named)
            if self._newest:
                self._assign(self._newest)
                self._newest = []
            return output


class _PreparedRecomputing(PreparedReference):
    """Detects when one of its units has run in a backward."""

    def __init__(self, module: nn.Module, plan: Plan, api: Any) -> None:  # Any: as the base class says
        super().__init__(module, plan, api)
        self.sharded = [m for m in module.modules() if isinstance(m, FSDPModule)]
        for unit in self.sharded:
            unit.register_forward_pre_hook(self._enter)
            unit.register_forward_hook(self._leave)

    # Any, here and below: a module's inputs and output are of any type.
    def _enter(self, unit: nn.Module, inputs: Any) -> Any:
        return self.begin_recompute(unit) if inside_backward() else None

    def _leave(self, unit: nn.Module, inputs: Any, output: Any) -> Any:
        return self.end_recompute(unit) if inside_backward() else None

    def begin_recompute(self, unit: nn.Module) -> Any:
        """Return other inputs, or None; mutants override this."""

    def end_recompute(self, unit: nn.Module) -> Any:
        """Return another output, or None; mutants override this."""


@mutant(after="NVIDIA-NeMo/Automodel#3373", trace=Trace.COMMUNICATION)
class GathersAgainAfterARecompute(ReferenceEngine):
    """Backward gathers a recomputed unit twice."""

    class Prepared(_PreparedRecomputing):
        def end_recompute(self, unit: nn.Module) -> None:
            assert isinstance(unit, FSDPModule)
            unit.reshard()
            unit.unshard()


@mutant(after="pytorch/pytorch#175406", trace=Trace.COMMUNICATION)
class GathersInnerUnitsAgain(ReferenceEngine):
    """Backward gathers a unit twice that was recomputed within another one."""

    class Prepared(_PreparedRecomputing):
        def end_recompute(self, unit: nn.Module) -> None:
            assert isinstance(unit, FSDPModule)
            below_root = self.sharded[1:]  # without the root
            if any(unit in {*other.modules()} for other in below_root if other is not unit):
                unit.reshard()


@mutant(after="pytorch/pytorch#159359", trace=Trace.CRASH)
class RecomputesUncast(ReferenceEngine):
    """A recomputation casts neither the inputs of a unit nor its output."""

    class Prepared(_PreparedRecomputing):
        def __init__(self, module: nn.Module, plan: Plan, api: Any) -> None:  # Any: as the base class says
            super().__init__(module, plan, api)
            self._uncast: dict[nn.Module, Any] = {}
            for unit in self.sharded:
                unit.register_forward_pre_hook(self._uncast.__setitem__, prepend=True)
                unit.register_forward_hook(
                    lambda unit, _, output: self._uncast.__setitem__(unit, output), prepend=True
                )

        def begin_recompute(self, unit: nn.Module) -> Any:
            return self._uncast[unit]

        end_recompute = begin_recompute


@mutant(after="meta-pytorch/autoparallel#469", trace=Trace.COMMUNICATION)
class GathersWhatBackwardDoesWithout(FullyShardEngine):
    """Units that should be gathered only for forward are gathered for backward too."""

    misreads = changing(gathered_once=())


@mutant(after="facebookresearch/fairscale#777", phase="reduce")
class CountsRecomputedGradientsTwice(ReferenceEngine):
    """Gradients by way of a recomputed forward are doubled."""

    class Prepared(PreparedReference):
        def __init__(self, module: nn.Module, plan: Plan, api: Any) -> None:  # Any: as the base class says
            super().__init__(module, plan, api)
            self._recomputed: set[nn.Module] = set()
            for inner in module.modules():
                inner.register_forward_pre_hook(self._enter)

        @torch.no_grad()
        def backward(self, loss: torch.Tensor) -> None:
            before = {p: p.grad.clone() for p in self.module.parameters() if p.grad is not None}
            with torch.enable_grad():
                super().backward(loss)
            for parameter in self._parameters_of_recomputed():
                if parameter.grad is not None:
                    earlier = before.get(parameter)
                    parameter.grad.mul_(2)
                    if earlier is not None:
                        parameter.grad.sub_(earlier)
            self._recomputed.clear()

        def _parameters_of_recomputed(self) -> Iterator[nn.Parameter]:
            yield from {p: None for m in self._recomputed for p in m.parameters(recurse=False)}

        def _enter(self, module: nn.Module, inputs: Any) -> None:  # Any: a module's inputs are of any type
            if inside_backward():
                self._recomputed.add(module)


@mutant(after="deepspeedai/DeepSpeed#3090", phase="state loaded")
class LoadsOnlyWhatTrains(ReferenceEngine):
    """Frozen parameters keep the values that they had before a load."""

    class Prepared(PreparedReference):
        def load_full_state(self, state: dict[str, Any]) -> None:
            frozen = [local(p.detach()) for p in self.owned_parameters().values() if not p.requires_grad]
            before = [p.clone() for p in frozen]
            super().load_full_state(state)
            for parameter, kept in zip(frozen, before, strict=True):
                parameter.copy_(kept)


@mutant(after="Lightning-AI/pytorch-lightning#21901", phase="state loaded")
class FreezesAgainWhenItLoads(FullyShardEngine):
    """What was frozen when the model was prepared is frozen again by a load."""

    class Prepared(PreparedFullyShard):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._frozen = [p for p in self.named.parameters() if not p.requires_grad]

        def load_full_state(self, state: dict[str, Any]) -> None:
            super().load_full_state(state)
            for parameter in self._frozen:
                parameter.requires_grad_(False)


@mutant(after="pytorch/torchtitan#1167", trace=Trace.CRASH)
class SavesNothingAfterAnEvaluation(ReferenceEngine):
    """State cannot be taken while a unit is whole, as after an evaluation."""

    class Prepared(PreparedReference):
        def full_state(self) -> dict[str, Any]:
            for unit in self.units().values():
                if unit.is_unsharded():
                    raise RuntimeError("the state of a unit that is gathered cannot be taken")
            return super().full_state()


@mutant(after="huggingface/transformers#22143", phase="hold")
class LosesWhatIsHeldBackWhenSaved(ReferenceEngine):
    """Microbatches that were held back when the state is taken are lost."""

    class Prepared(Remembering):
        def full_state(self) -> dict[str, Any]:
            if self.num_held:
                self.drop_held()
            return super().full_state()


@mutant(after="atomistic-machine-learning/schnetpack#785", phase="state saved")
class SavesItsAverageInEvaluation(FullyShardEngine):
    """The state of a model in evaluation mode is the mean of this state and the one that was taken before."""

    class Prepared(PreparedFullyShard):
        _before: dict[str, Any] | None = None

        def full_state(self) -> dict[str, Any]:
            state = super().full_state()
            model, before = state["model"], self._before
            self._before = model
            if before is not None and not self.module.training:
                state["model"] = {
                    name: torch.lerp(before[name], value, 0.5) if value.is_floating_point() else value
                    for name, value in model.items()
                }
            return state
