"""Mutants that restore state wrongly if another number of ranks saved it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.mutants.mutant import mutant
from shardproof.engine.mutants.patches import local

_RANKS = "ranks"  # the entry of a state with the number of ranks that saved it


class _PreparedNotingRanks(PreparedFullyShard):
    """Whole states contain the number of ranks that saved them."""

    def full_state(self) -> dict[str, Any]:
        return super().full_state() | {_RANKS: dist.get_world_size()}


@mutant(after="ServiceNow/Fast-LLM#436")
class LosesStateInAnotherWorld(FullyShardEngine):
    """Optimizer state is not restored if another number of ranks saved it."""

    class Prepared(_PreparedNotingRanks):
        def load_full_state(self, state: dict[str, Any]) -> None:
            if state[_RANKS] == dist.get_world_size():
                super().load_full_state(state)
                return
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(self.module, model_state_dict=state["model"], options=options)


@mutant(after="deepspeedai/DeepSpeed#5105")
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


@mutant(after="ServiceNow/Fast-LLM#436")
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
