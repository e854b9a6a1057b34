"""Mutants that go on wrongly: from checkpoints that lack values, or after an exception or an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.reference_zero import PreparedZero2, Zero2Engine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.adapters.torch_zero1 import PreparedZero1, ZeroRedundancyEngine
from shardproof.engine.contract import Copies
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import (
    Stale,
    keeping_group_options,
    local,
    restart_count,
    unchanged,
)
from shardproof.engine.reference.fsdp_state import state_of
from shardproof.engine.reference.zero_checkpoint import file_of


@mutant(after="NVIDIA/Megatron-LM#3510", trace=Trace.STATE)
class GathersNoStateFromEmptyRanks(FullyShardEngine):
    """A rank that owns no element takes no part in gathering the optimizer's state, for which the others wait."""

    class Prepared(PreparedFullyShard):
        def full_state(self) -> dict[str, Any]:
            if any(local(parameter).numel() for parameter in self.built_optimizer().state):
                return super().full_state()
            options = StateDictOptions(full_state_dict=True)
            model = get_model_state_dict(self.module, options=options)
            return {"model": model, "optimizer": {"state": {}, "param_groups": []}}


@mutant(after="deepspeedai/DeepSpeed#7786", phase="state loaded")
class LosesStateInItsCheckpoint(Zero2Engine):
    """The optimizer starts without state after a checkpoint is loaded."""

    class Prepared(PreparedZero2):
        def load_checkpoint(self, folder: Path) -> None:
            super().load_checkpoint(folder)
            self.built_optimizer().state.clear()


@mutant(after="PrimeIntellect-ai/prime-rl#2154", trace=Trace.STATE)
class KeepsWhatItReadFromACheckpoint(Zero2Engine):
    """Copies of the pieces that a checkpoint was read into stay for good."""

    class Prepared(PreparedZero2):
        def load_checkpoint(self, folder: Path) -> None:
            super().load_checkpoint(folder)
            parameters = self.owned_parameters().values()
            self._read = [torch.empty_like(parameter).copy_(parameter) for parameter in parameters]


@mutant(after="NVIDIA/nvidia-resiliency-ext#376", phase="state loaded")
class WritesItsCheckpointInTheNextStep(Zero2Engine):
    """A checkpoint shares tensors with the training until it is written, which is after the next step."""

    class Prepared(PreparedZero2):
        _folder: Path | None = None

        def save_checkpoint(self, folder: Path) -> None:
            super().save_checkpoint(folder)
            self._folder = folder

        def step(self) -> None:
            super().step()
            folder, self._folder = self._folder, None
            if folder is not None:
                super().save_checkpoint(folder)


@mutant(after="NVIDIA/Megatron-LM#6858", trace=Trace.STATE)
class LoadsTheRandomNumbersOfTheFirst(ReferenceEngine):
    """A load gives every rank the state of the first rank's random number generator."""

    class Prepared(PreparedReference):
        def load_full_state(self, state: dict[str, Any]) -> None:
            super().load_full_state(state)
            generator = torch.get_rng_state()
            dist.broadcast(generator, src=0)
            torch.set_rng_state(generator)


@mutant(after="pytorch/pytorch#126948", trace=Trace.STATE)
class LoadsOnlyTheOptionsThatItKnows(ReferenceEngine):
    """A load drops options of parameter groups that the new optimizer's groups do not have."""

    class Prepared(PreparedReference):
        def load_full_state(self, state: dict[str, Any]) -> None:
            optimizer = state["optimizer"]
            known = {"params"}.union(*self.built_optimizer().param_groups)
            groups = [{k: v for k, v in group.items() if k in known} for group in optimizer["param_groups"]]
            super().load_full_state({**state, "optimizer": {**optimizer, "param_groups": groups}})


@mutant(after="NVIDIA/Megatron-LM#5976", phase="state loaded")
class TakesAStepWhereNoneWasSaved(ReferenceEngine):
    """A load of no optimizer state leaves one that has counted a step."""

    class Prepared(PreparedReference):
        def load_full_state(self, state: dict[str, Any]) -> None:
            super().load_full_state(state)
            if state["optimizer"]["state"]:
                return
            optimizer, parameters = self.built_optimizer(), list(self.owned_parameters().values())
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            with unchanged(parameters):
                optimizer.step()
            optimizer.zero_grad()


@mutant(after="NVIDIA-NeMo/Automodel#3814", phase="state loaded")
class KeepsItsOwnExtraState(ReferenceEngine):
    """What modules add to a state is what they had before it is loaded, where it is no tensor."""

    class Prepared(PreparedReference):
        def load_full_state(self, state: dict[str, Any]) -> None:
            own = {n: v for n, v in self.module.state_dict().items() if isinstance(v, dict)}
            super().load_full_state({**state, "model": {**state["model"], **own}})


@mutant(after="deepspeedai/DeepSpeed#4396", phase="state loaded")
class RestartsTheCountInItsCheckpoint(Zero2Engine):
    """The optimizer's count of steps, by which it corrects its moments, starts from zero."""

    class Prepared(PreparedZero2):
        def load_checkpoint(self, folder: Path) -> None:
            super().load_checkpoint(folder)
            restart_count(self.built_optimizer())


@mutant(after="hpcaitech/ColossalAI#5151", phase="state loaded")
class RestartsTheLearningRateInItsCheckpoint(Zero2Engine):
    """The optimizer has the learning rate of a fresh one after a checkpoint is loaded."""

    class Prepared(PreparedZero2):
        def load_checkpoint(self, folder: Path) -> None:
            with keeping_group_options(self.built_optimizer()):
                super().load_checkpoint(folder)


@mutant(after="Modalities/modalities#315", phase="state loaded")
class LosesWhatAScheduleAddedInItsCheckpoint(Zero2Engine):
    """Of options that an optimizer got from a schedule, a loaded one has only those that it knew before."""

    class Prepared(PreparedZero2):
        def load_checkpoint(self, folder: Path) -> None:
            known = [set(group) for group in self.built_optimizer().param_groups]
            super().load_checkpoint(folder)
            for group, names in zip(self.built_optimizer().param_groups, known, strict=True):
                for name in group.keys() - names:
                    del group[name]


@mutant(after="deepspeedai/DeepSpeed#762", phase="state loaded")
class RestoresNoMasters(Zero2Engine):
    """Parameters are loaded, but not the copies that the optimizer updates, which overwrite them in the next step."""

    class Prepared(PreparedZero2):
        def load_checkpoint(self, folder: Path) -> None:
            before = [piece.own.detach().clone() for piece in self.engine.pieces.values()]
            super().load_checkpoint(folder)
            if self.copies is Copies.MASTERS:
                with torch.no_grad():
                    for piece, own in zip(self.engine.pieces.values(), before, strict=True):
                        piece.own.copy_(own)
                # Else the next step would take them from the parameters.
                self.engine.take_weights = lambda: None  # type: ignore[method-assign]  # of this one


@mutant(after="deepspeedai/DeepSpeed#5105", phase="state loaded")
class ReadsTheCheckpointOfItsRank(Zero2Engine):
    """Each rank reads its share from the file of its own rank, however many ranks saved."""

    class Prepared(PreparedZero2):
        def load_checkpoint(self, folder: Path) -> None:
            super().load_checkpoint(folder)
            own_file = torch.load(file_of(folder, self.engine.rank))
            with torch.no_grad():
                for name, piece in self.engine.pieces.items():
                    saved = own_file["pieces"][name]["value"][: piece.own.numel()]
                    piece.own[: saved.numel()].copy_(saved)


_RANKS = "ranks"  # the entry of a state with the number of ranks that saved it


class _PreparedNotingRanks(PreparedFullyShard):
    """Whole states contain the number of ranks that saved them."""

    def full_state(self) -> dict[str, Any]:
        return super().full_state() | {_RANKS: dist.get_world_size()}


@mutant(after="EvolvingLMMs-Lab/lmms-engine#160", phase="state saved")
class SavesOneOfEqualShards(ReferenceEngine):
    """A parameter whose shards are equal is taken for a replicated one, and only one shard of it is saved."""

    class Prepared(PreparedReference):
        def full_state(self) -> dict[str, Any]:
            state, count = super().full_state(), dist.get_world_size()
            merged = {}
            for name, whole in state["model"].items():
                shards = list(whole.chunk(count)) if whole.dim() else []
                are_equal = len(shards) == count and all(torch.equal(shards[0], shard) for shard in shards)
                merged[name] = shards[0] if are_equal and count > 1 else whole
            return state | {"model": merged}


@mutant(after="ServiceNow/Fast-LLM#436", phase="state loaded")
class LosesStateInAnotherWorld(FullyShardEngine):
    """Optimizer state is not restored if another number of ranks saved it."""

    class Prepared(_PreparedNotingRanks):
        def load_full_state(self, state: dict[str, Any]) -> None:
            if state[_RANKS] == dist.get_world_size():
                super().load_full_state(state)
                return
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(self.module, model_state_dict=state["model"], options=options)


@mutant(after="deepspeedai/DeepSpeed#5105", phase="state loaded")
class AlignsStateForTheWorldBefore(FullyShardEngine):
    """Restored moments are shifted by the padding of the world that saved them."""

    class Prepared(_PreparedNotingRanks):
        def load_full_state(self, state: dict[str, Any]) -> None:
            shifted = {
                name: {key: self._shifted(value, state[_RANKS]) for key, value in of_parameter.items()}
                for name, of_parameter in state["optimizer"]["state"].items()
            }
            super().load_full_state(state | {"optimizer": state["optimizer"] | {"state": shifted}})

        def _shifted(self, value: torch.Tensor, num_ranks: int) -> torch.Tensor:
            padding = -value.numel() % num_ranks - -value.numel() % dist.get_world_size()
            return value.flatten().roll(padding).view(value.shape)


@mutant(after="ServiceNow/Fast-LLM#436", phase="state loaded")
class ReadsTheFileOfItsRank(ReferenceEngine):
    """A rank restores only the rows that the same rank saved."""

    class Prepared(PreparedReference):
        _unread: Mapping[str, torch.Tensor] = {}  # the values from before files are read into it

        def shared_state(self) -> dict[str, Any]:
            self._unread = {name: tensor.clone() for name, tensor in self._shards()}
            return super().shared_state() | {_RANKS: torch.tensor(dist.get_world_size())}

        def load_shared_state(self, state: dict[str, Any]) -> None:
            num_ranks = int(state[_RANKS])
            super().load_shared_state({key: value for key, value in state.items() if key != _RANKS})
            rank, size = dist.get_rank(), dist.get_world_size()
            for name, rows in self._shards():
                num_rows = self.owned_parameters()[name].shape[0]
                first = 0 if len(rows) == num_rows else rank * -(-num_rows // size)
                rows_before = -(-num_rows // num_ranks)
                strange = [row for row in range(len(rows)) if (first + row) // rows_before != rank]
                rows[strange] = self._unread[name][strange]

        def _shards(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, parameter in self.owned_parameters().items():
                yield name, local(parameter).detach()


@mutant(after="pytorch/pytorch#137348", phase="gather")
class ComputesWithWhatAnEvaluationSaw(ReferenceEngine):
    """The step after an evaluation computes with the parameters that the evaluation used."""

    class Prepared(Stale, PreparedReference):
        """Continues with old parameters if they were gathered for an evaluation."""

        _has_evaluated = False

        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns any type
            if self.module.training:
                return super().__call__(*inputs, **named)
            self._has_evaluated = True
            return PreparedReference.__call__(self, *inputs, **named)

        def step(self) -> None:
            super().step()
            if not self._has_evaluated:
                self._older = []
            self._has_evaluated = False


@mutant(after="pytorch/pytorch#113203", trace=Trace.CRASH)
class KeepsAnInferenceTensor(ReferenceEngine):
    """State made in inference mode is used for training."""

    class Prepared(PreparedReference):
        _scale: torch.Tensor | None = None

        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns any type
            output = super().__call__(*inputs, **named)
            if self._scale is None:
                self._scale = torch.ones_like(output[:1])
            return output * self._scale


@mutant(after="espnet/espnet#3283", phase="hold")
class LeaksTheFailedIteration(ReferenceEngine):
    """Gradients of an iteration that failed are added to those of the next."""

    class Prepared(PreparedReference):
        def recover(self) -> None:
            for unit in filter(None, map(state_of, self.module.modules())):
                for group in unit.param_groups:
                    vars(group)["drop_gradients"] = group.forget_backward
            super().recover()


@mutant(after="mosaicml/composer#3866", phase="gather")
class NeverRecovers(FullyShardEngine):
    """The state of a failed forward is not cleared."""

    class Prepared(PreparedFullyShard):
        def recover(self) -> None:
            pass


@mutant(after="mflux-community/mflux#447", phase="hold")
class DropsEarlierBackwards(ReferenceEngine):
    """Recovery from a failed forward clears the gradients of the backwards before it."""

    class Prepared(PreparedReference):
        def recover(self) -> None:
            super().recover()
            for parameter in self.owned_parameters().values():
                parameter.grad = None


@mutant(after="pytorch/pytorch#96251", trace=Trace.STATE)
class HandsOutOneStepCount(ReferenceEngine):
    """In the state that it hands out all parameters have one tensor as their step count."""

    class Prepared(PreparedReference):
        def full_state(self) -> dict[str, Any]:
            state = super().full_state()
            of_parameters = list(state["optimizer"]["state"].values())
            for other in (of for of in of_parameters[1:] if "step" in of):
                other["step"] = of_parameters[0].get("step", other["step"])
            return state


@mutant(after="RLinf/RLinf#1033", trace=Trace.STATE)
class KeepsWhatItWroteUntilItSteps(Zero2Engine):
    """A copy that was made for a checkpoint stays until the next step."""

    class Prepared(PreparedZero2):
        _written: Sequence[torch.Tensor] = ()

        def save_checkpoint(self, folder: Path) -> None:
            super().save_checkpoint(folder)
            self._written = [shard.tensor.clone() for shard in self.local_optimizer_state().values()]

        def step(self) -> None:
            super().step()
            self._written = ()


@mutant(after="pytorch/pytorch#158903", trace=Trace.STATE)
class ReceivesColumnsAsRows(ZeroRedundancyEngine):
    """A whole optimizer state has what other ranks hold row by row, though it lies column by column in memory."""

    class Prepared(PreparedZero1):
        def full_state(self) -> dict[str, Any]:
            state = super().full_state()
            held = {value for own in self._zero().optim.state.values() for value in own.values()}
            for own in state["optimizer"]["state"].values():
                for key, value in own.items():
                    if isinstance(value, torch.Tensor) and not value.is_contiguous() and value not in held:
                        own[key] = value.t().reshape(value.shape)
            return state
