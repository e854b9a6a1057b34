"""Mutants whose optimizer does not know what it knew, or whose parameters it had."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import OptimizerFactory

__all__ = [
    "FailsToLoadEmptyShards",
    "LoadsNoBuffers",
    "LoadsNoParameters",
    "LosesOptimizerState",
    "LosesStateOfOtherRanks",
    "PermutesOptimizerState",
    "ResetsTheStepCount",
    "StartsAdamAtStepOne",
    "StepsOldParametersAfterAResume",
]


class _PreparedForgetful(PreparedFullyShard):
    def load_full_state(self, state: dict[str, Any]) -> None:
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.module, model_state_dict=state["model"], options=options)


class LosesOptimizerState(FullyShardEngine):
    """After a resume the optimizer starts from nothing.

    After facebookresearch/fairscale#601: resumed trainings had the weights, and moments of zero.
    """

    name = "mutant.LosesOptimizerState"
    prepared_type = _PreparedForgetful


class _PreparedNarrow(PreparedReference):
    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        for of_parameter in self._built_optimizer().state.values():
            for value in of_parameter.values():
                if isinstance(value, DTensor) and torch.distributed.get_rank():
                    value.to_local().zero_()


class LosesStateOfOtherRanks(ReferenceEngine):
    """After a resume the first rank's shards have their optimizer state, those of the others have none.

    After facebookresearch/fairscale#601: what was saved and loaded was the optimizer state of one rank.
    """

    name = "mutant.LosesStateOfOtherRanks"
    prepared_type = _PreparedNarrow


class _PreparedResetting(PreparedFullyShard):
    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        for of_parameter in self._built_optimizer().state.values():
            if "step" in of_parameter:
                of_parameter["step"] = torch.zeros_like(of_parameter["step"])


class ResetsTheStepCount(FullyShardEngine):
    """After a resume Adam has its moments and corrects their bias as in the first step.

    After databricks/flashoptim#3: the first forward after a resume was right, and the first step was not.
    """

    name = "mutant.ResetsTheStepCount"
    prepared_type = _PreparedResetting


class _PreparedPermuting(PreparedFullyShard):
    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        optimizer = self._built_optimizer()
        parameters = [p for p in self.named.parameters() if p in optimizer.state]
        for index, one in enumerate(parameters):
            twins = [p for p in parameters[index + 1 :] if p.shape == one.shape]
            for other in twins[:1]:
                optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]


class PermutesOptimizerState(FullyShardEngine):
    """After a resume parameters of equal shape have each other's optimizer state.

    After pytorch/pytorch#54736: state was found by an index that meant another parameter.
    """

    name = "mutant.PermutesOptimizerState"
    prepared_type = _PreparedPermuting


class _PreparedOutdated(PreparedFullyShard):
    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        for group in self._built_optimizer().param_groups:
            group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]


class StepsOldParametersAfterAResume(FullyShardEngine):
    """After a resume the optimizer holds parameters that are no longer the model's, and nothing moves.

    After pytorch/pytorch#149205: an optimizer built at the wrong moment had captured other tensors.
    """

    name = "mutant.StepsOldParametersAfterAResume"
    prepared_type = _PreparedOutdated


class _PreparedEarly(PreparedFullyShard):
    def optimizer(self, factory: OptimizerFactory) -> None:
        super().optimizer(factory)
        parameters = [p for p in self.named.parameters() if p.requires_grad]
        kept = [_local(p).clone() for p in parameters]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.step()
        self.zero_grad(set_to_none=True)
        for parameter, before in zip(parameters, kept, strict=True):
            _local(parameter).copy_(before)


class StartsAdamAtStepOne(FullyShardEngine):
    """Before training the optimizer steps once with gradients of zero, to make its state: Adam's count is ahead.

    After NVIDIA/Megatron-LM#5974: the first update was too small, and only with an optimizer that counts.
    """

    name = "mutant.StartsAdamAtStepOne"
    prepared_type = _PreparedEarly


class _PreparedWithItsOwnBuffers(PreparedFullyShard):
    def load_full_state(self, state: dict[str, Any]) -> None:
        kept = [(buffer, buffer.clone()) for buffer in self.named.buffers()]
        super().load_full_state(state)
        for buffer, before in kept:
            buffer.copy_(before)


class LoadsNoBuffers(FullyShardEngine):
    """After a resume parameters and optimizer are as they were, and buffers as they are in a fresh model.

    After huggingface/accelerate#3898: what loads a state knew sharded parameters, and buffers are not sharded.
    """

    name = "mutant.LoadsNoBuffers"
    prepared_type = _PreparedWithItsOwnBuffers


class _PreparedWithItsOwnParameters(PreparedFullyShard):
    @torch.no_grad()
    def load_full_state(self, state: dict[str, Any]) -> None:
        kept = [(shard, shard.clone()) for shard in map(_local, self.named.parameters())]
        super().load_full_state(state)
        for shard, before in kept:
            shard.copy_(before)


class LoadsNoParameters(FullyShardEngine):
    """After a resume the optimizer is as it was, and the parameters are those of a fresh model.

    After NVIDIA/Megatron-LM#2769: the first loss after a checkpoint was loaded was that of an untrained model.
    """

    name = "mutant.LoadsNoParameters"
    prepared_type = _PreparedWithItsOwnParameters


class _PreparedOfSlices(PreparedReference):
    def load_full_state(self, state: dict[str, Any]) -> None:
        whole = dict(state["model"])  # torch puts what it loads in place of what it was given
        super().load_full_state(state)
        for name, parameter in self.owned_parameters().items():
            if isinstance(parameter, DTensor):
                rank, num_ranks = parameter.device_mesh.get_local_rank(-1), parameter.device_mesh.size(-1)
                chunks = whole[name].chunk(num_ranks)
                # For a rank beyond the last chunk there is a piece of no dims but the first.
                piece = chunks[rank] if rank < len(chunks) else chunks[0].new_empty(0)
                parameter.to_local().detach().copy_(piece)


class FailsToLoadEmptyShards(ReferenceEngine):
    """A whole state dict cannot be loaded where a rank owns no row of a parameter: the shapes do not match.

    After pytorch/pytorch#136228: of fewer rows than ranks, the last ranks' empty shards had lost the other dims.
    """

    name = "mutant.FailsToLoadEmptyShards"
    prepared_type = _PreparedOfSlices


def _local(parameter: nn.Parameter) -> torch.Tensor:
    whole = parameter.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole
