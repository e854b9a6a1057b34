"""Adapters of DeepSpeed's ZeRO-1 and ZeRO-2, in float32."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import (
    Capability,
    Engine,
    Masters,
    OptimizerFactory,
    Plan,
    PreparedModel,
    Shard,
    shard_of,
)

# On a CPU it would compile collectives of its own over shared memory at first use, which takes a minute.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


class PreparedDeepSpeed(PreparedModel):
    """Whole parameters, and a piece of the flattened gradients and states that may begin in the middle of one."""

    masters = Masters.SHARE

    def __init__(self, model: nn.Module, stage: int) -> None:
        super().__init__(model)
        self._stage = stage

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Pass model and optimizer to DeepSpeed together; its default is to clip gradients at a norm of 1."""
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self._stage},
        }
        self._engine, *_ = deepspeed.initialize(
            model=self.module, optimizer=factory(self.module.parameters()), config=config
        )
        self._optimizer, self.module = self._engine.optimizer, self._engine

    def backward(self, loss: torch.Tensor) -> None:
        """Set whether the step follows: ZeRO-1 reduces only then."""
        self._engine.set_gradient_accumulation_boundary(self.is_last_microbatch)
        self._engine.backward(loss)

    def accumulating(self) -> AbstractContextManager[None]:
        """Do nothing: `backward` has said it."""
        return nullcontext()

    def step(self) -> None:
        """Let the engine step, which also clears gradients."""
        self._engine.step()

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear gradients, always to None."""
        self._engine.zero_grad()

    def local_gradients(self) -> Mapping[str, Shard | None]:
        """Read what this rank has of the averaged gradients."""
        found = self._pieces(lambda p: p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group))
        return dict.fromkeys(self.owned_parameters()) | dict(found)

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        """Read the state of the pieces; single numbers are of a whole group of parameters."""
        states = self._engine.optimizer.optimizer.state.values()
        items = [(k, v) for state in states for k, v in state.items() if isinstance(v, torch.Tensor)]
        numbers = {f"{n}/{k}": shard_of(v) for k, v in items if not v.dim() for n, _ in self._trained()}
        for key in {k for k, v in items if v.dim()}:
            found = self._pieces(partial(_state, key=key))
            numbers |= {f"{name}/{key}": piece for name, piece in found}
        return numbers

    def _trained(self) -> Iterator[tuple[str, Any]]:
        return ((name, p) for name, p in self.named.named_parameters() if p.requires_grad)

    def _pieces(self, read: Callable[[Any], torch.Tensor]) -> Iterator[tuple[str, Shard]]:
        for name, p in self._trained():
            mine = read(p).flatten() if p._hp_mapping else p.new_empty(0)
            start = p._hp_mapping.lp_fragment_address.start if p._hp_mapping else 0
            yield name, Shard.flat(mine.detach(), start, tuple(p.shape))


# Any: a parameter to which DeepSpeed has given attributes.
def _state(p: Any, key: str) -> torch.Tensor:
    piece: torch.Tensor = p._hp_mapping.get_hp_fragment(key)
    return piece


class DeepSpeedZero1(Engine):
    """Stage 1: optimizer state is shared out; gradients are reduced with the last microbatch."""

    name, stage = "deepspeed.zero1", 1
    needs_processes = True
    capabilities = frozenset({Capability.ZERO1, Capability.ACCUMULATE})

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Refuse what is beyond it; DeepSpeed wants the optimizer with the model."""
        plan.refuse_beyond(self.capabilities)
        return PreparedDeepSpeed(model, self.stage)

    def version(self) -> str:
        """Name DeepSpeed's release."""
        return f"deepspeed {version('deepspeed')}"


class DeepSpeedZero2(DeepSpeedZero1):
    """Stage 2: gradients are shared out as well, in each microbatch."""

    name, stage = "deepspeed.zero2", 2
    capabilities = frozenset({Capability.ZERO2})
