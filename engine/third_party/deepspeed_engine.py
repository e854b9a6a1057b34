"""Adapters of DeepSpeed's ZeRO stages 1, 2 and 3, in float32."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any, ClassVar

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # else `initialize` does, and its memory is taken for the model's
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_local_grad, safe_get_local_optimizer_state
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import (
    Capability,
    Engine,
    Masters,
    NoGradient,
    OptimizerFactory,
    Plan,
    PreparedModel,
    Shard,
    shard_of,
)

_NOTHING = torch.empty(0)
# On a CPU it would compile collectives of its own over shared memory at first use, which takes a minute.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


class PreparedDeepSpeed(PreparedModel):
    """Whole parameters, and a piece of the flattened gradients and states that may begin in the middle of one."""

    masters = Masters.SHARE
    options: ClassVar[Mapping[str, int]] = {}

    def __init__(self, model: nn.Module, stage: int) -> None:
        super().__init__(model)
        self._stage = stage

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Pass model and optimizer to DeepSpeed together; its default is to clip gradients at a norm of 1."""
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self._stage, **self.options},
        }
        given = factory(self.module.parameters())
        self._updated = {id(p) for group in given.param_groups for p in group["params"]}
        self._engine, *_ = deepspeed.initialize(model=self.module, optimizer=given, config=config)
        self.module = self._engine
        super().optimizer(lambda _: self._engine.optimizer)

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
        found = {name: self.piece(p, self.gradient(p)) for name, p in self._trained()}
        return dict.fromkeys(self.owned_parameters()) | found

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        """Read the state of the pieces; single numbers are of a whole group of parameters."""
        states = self._engine.optimizer.optimizer.state.values()
        items = [(k, v) for state in states for k, v in state.items() if isinstance(v, torch.Tensor)]
        numbers = {f"{n}/{k}": shard_of(v) for k, v in items if not v.dim() for n, _ in self._trained()}
        return numbers | {
            f"{name}/{key}": self.piece(p, self.state(p, key))
            for key in {k for k, v in items if v.dim()}
            for name, p in self._trained()
        }

    # Any, here and below: a parameter to which DeepSpeed has given attributes, and what it returns.
    def gradient(self, p: Any) -> Any:
        """Return this rank's piece of a gradient."""
        return p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group) if p._hp_mapping else _NOTHING

    def state(self, p: Any, key: str) -> Any:
        """Return this rank's piece of a state."""
        return p._hp_mapping.get_hp_fragment(key) if p._hp_mapping else _NOTHING

    def piece(self, p: Any, mine: torch.Tensor) -> Shard:
        """Place a piece in the flattened whole."""
        start = p._hp_mapping.lp_fragment_address.start if p._hp_mapping else 0
        return Shard.flat(mine.detach().flatten(), start, tuple(p.shape))

    def _trained(self) -> Iterator[tuple[str, Any]]:
        parameters: Iterable[tuple[str, Any]] = self.named.named_parameters()
        # What the optimizer was not given has no place in the flat buffers.
        return ((n, p) for n, p in parameters if p.requires_grad and id(p) in self._updated)


class PreparedDeepSpeedZero3(PreparedDeepSpeed):
    """Each parameter is flattened, padded and cut evenly; modules show empty ones while they do not run."""

    no_gradient = NoGradient.ZEROS
    options: ClassVar[Mapping[str, int]] = {
        "reduce_bucket_size": 1,  # a buffer that is always there: by default of 2 GB
        "stage3_param_persistence_threshold": 0,  # by default parameters as small as these stay whole
    }

    def shown_parameters(self) -> Mapping[str, Shard]:
        return self.local_parameters()

    def local_parameters(self) -> Mapping[str, Shard]:
        """Read this rank's pieces."""
        parameters: Iterable[tuple[str, Any]] = self.named.named_parameters()
        return {name: self.piece(p, p.ds_tensor) for name, p in parameters}

    def gradient(self, p: Any) -> Any:
        return safe_get_local_grad(p)

    def state(self, p: Any, key: str) -> Any:
        """Ask DeepSpeed."""
        return safe_get_local_optimizer_state(p, key)

    def piece(self, p: Any, mine: torch.Tensor) -> Shard:
        """Leave the padding out."""
        start = min(dist.get_rank() * p.ds_tensor.ds_numel, p.ds_numel)
        return Shard.flat(mine.detach().flatten()[: p.ds_numel - start].clone(), start, tuple(p.ds_shape))


class DeepSpeedZero1(Engine):
    """Stage 1: optimizer state is shared out; gradients are reduced with the last microbatch."""

    name, stage = "deepspeed.zero1", 1
    prepared_type: ClassVar[type[PreparedDeepSpeed]] = PreparedDeepSpeed
    needs_processes = True
    preload = (__name__,)
    capabilities = frozenset({Capability.ZERO1, Capability.ACCUMULATE})

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Refuse what is beyond it; DeepSpeed wants the optimizer with the model."""
        plan.refuse_beyond(self.capabilities)
        return self.prepared_type(model, self.stage)

    def version(self) -> str:
        """Name DeepSpeed's release."""
        return f"deepspeed {version('deepspeed')}"


class DeepSpeedZero2(DeepSpeedZero1):
    """Stage 2: gradients are shared out as well, in each microbatch."""

    name, stage = "deepspeed.zero2", 2
    capabilities = frozenset({Capability.ZERO2})


class DeepSpeedZero3(DeepSpeedZero1):
    """Stage 3: parameters are shared out too, and gathered for each module."""

    name, stage = "deepspeed.zero3", 3
    prepared_type = PreparedDeepSpeedZero3
    capabilities = frozenset({Capability.SHARD, Capability.UNUSED})
