"""Adapters of DeepSpeed's ZeRO stages 1, 2 and 3, in float32."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # else `initialize` imports it, as memory of the model
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_local_grad, safe_get_local_optimizer_state
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import (
    Capability,
    Copies,
    Engine,
    NoGradient,
    Offload,
    OptimizerFactory,
    Plan,
    PreparedModel,
    Tuning,
)
from shardproof.engine.pieces import Piece, PreparedPieces

_NOTHING = torch.empty(0)
_TAG, _UNIVERSAL = "state", "universal"  # of checkpoints
_TUNING: Mapping[Tuning, Mapping[str, int]] = {
    Tuning.NATIVE: {},
    Tuning.OVERLAPPED: {"overlap_comm": True, "reduce_bucket_size": 64},
    Tuning.IN_SEQUENCE: {"overlap_comm": False},
    Tuning.ROUND_ROBIN: {"round_robin_gradients": True},
}
_ON_HOST = {"device": "cpu"}
_OFFLOAD: Mapping[Offload, Mapping[str, Mapping[str, str]]] = {
    Offload.NONE: {},
    Offload.OPTIMIZER: {"offload_optimizer": _ON_HOST},
    Offload.CPU: {"offload_optimizer": _ON_HOST, "offload_param": _ON_HOST},
}
# On a CPU it would compile its own shared-memory collectives at first use, which takes a minute.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


class PreparedDeepSpeed(PreparedPieces):
    """Whole parameters, and a piece of the flattened gradients and states that may begin in the middle of one."""

    copies = Copies.MASTERS
    parameters_are_whole = True
    options: ClassVar[Mapping[str, int]] = {}

    def __init__(self, model: nn.Module, stage: int, plan: Plan) -> None:
        super().__init__(model)
        self._zero_optimization = {
            "stage": stage,
            **_TUNING[plan.tuning],
            **self.options,
            **_OFFLOAD[plan.offload],
        }
        self._max_norm = plan.clip_in_step or 0.0
        self._is_resized = Capability.RESIZED_CHECKPOINTS in plan.needs
        self._has_gradients = False

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Pass model and optimizer to DeepSpeed together; its default is to clip gradients at a norm of 1."""
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": self._max_norm,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": self._zero_optimization,
            "checkpoint": {"load_universal": self._is_resized},
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
        self._has_gradients = True

    def accumulating(self) -> AbstractContextManager[None]:
        """Do nothing: `backward` sets it."""
        return nullcontext()

    def save_checkpoint(self, folder: Path) -> None:
        self._engine.save_checkpoint(folder, tag=_TAG)

    def load_checkpoint(self, folder: Path) -> None:
        """Load it unchanged, or, if it is from another number of ranks, after conversion to a universal one."""
        if self._is_resized and dist.get_rank() == 0:
            workers = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
            folders = {"input_folder": str(folder / _TAG), "output_folder": str(folder / _UNIVERSAL)}
            ds_to_universal.main(Namespace(**folders, **workers, strict=True, inject_missing_state=True))
        dist.barrier()
        self._engine.load_checkpoint(folder, tag=_UNIVERSAL if self._is_resized else _TAG)

    def close(self) -> None:
        """Destroy the engine, whose hooks keep the model otherwise."""
        self._engine.destroy()

    def step(self) -> None:
        """Let the engine step, which also clears gradients."""
        self._engine.step()
        self._has_gradients = False

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear gradients, always to None."""
        self._engine.zero_grad()
        self._has_gradients = False

    # Any, here and below: a parameter with attributes of DeepSpeed, and DeepSpeed's results.
    def is_trained(self, p: Any) -> bool:
        """Return whether the optimizer has the parameter: others have no place in the flat buffers."""
        return p.requires_grad and id(p) in self._updated

    def place_of(self, p: Any) -> Any:
        """Return where this rank's share holds the parameter; None if it does not, or if it has no element."""
        return getattr(p, "_hp_mapping", None)

    def pieces(self) -> Iterator[Piece]:
        parameters: Iterable[tuple[str, Any]] = self.named.named_parameters()
        for name, p in parameters:
            if self.is_trained(p):
                place = self.place_of(p)
                start = place.lp_fragment_address.start if place else 0
                yield Piece(name=name, shape=tuple(p.shape), owner=p, start=start)

    def gradient_of(self, piece: Piece) -> Any:
        """Return the piece's gradient; DeepSpeed (0.19) raises if asked after a step, which clears it."""
        return self.reduced(piece.owner) if self._has_gradients else None

    def reduced(self, p: Any) -> Any:
        """Return this rank's piece of a parameter's gradient, which is there between a backward and the step."""
        place = self.place_of(p)
        return place.get_lp_grad_fragment(p._index_in_param_group) if place else _NOTHING

    def state_of(self, piece: Piece) -> Mapping[str, Any]:
        """Return the state of a piece; single numbers belong to a whole group of parameters."""
        if not self.is_trained(piece.owner):
            return {}
        states = self._engine.optimizer.optimizer.state.values()
        found = {k: v for state in states for k, v in state.items() if isinstance(v, torch.Tensor)}
        return {k: self.fragment(piece.owner, k) if v.dim() else v for k, v in found.items()}

    def fragment(self, p: Any, key: str) -> Any:
        """Return this rank's piece of a state, cut from its group's: its getter fails before the next step."""
        place, zero = self.place_of(p), self._engine.optimizer
        if not place:
            return _NOTHING
        rows = place.hp_fragment_address
        updated = zero.single_partition_of_fp32_groups[place.param_group_index]
        return zero.optimizer.state[updated][key].narrow(0, rows.start, rows.numel)


class PreparedDeepSpeedZero3(PreparedDeepSpeed):
    """Each parameter is flattened, padded and cut evenly; modules have empty ones while they do not run."""

    no_gradient = NoGradient.ZEROS
    parameters_are_whole = False
    options: ClassVar[Mapping[str, int]] = {
        "reduce_bucket_size": 1,  # a permanent buffer: by default of 2 GB
        "stage3_param_persistence_threshold": 0,  # by default parameters as small as these stay whole
    }

    def pieces(self) -> Iterator[Piece]:
        parameters: Iterable[tuple[str, Any]] = self.named.named_parameters()
        for name, p in parameters:
            start = dist.get_rank() * p.ds_tensor.ds_numel
            yield Piece(name=name, shape=tuple(p.ds_shape), owner=p, start=start)

    def value_of(self, piece: Piece) -> torch.Tensor:
        value: torch.Tensor = piece.owner.ds_tensor
        return value

    def reduced(self, p: Any) -> Any:
        return safe_get_local_grad(p) if self.is_trained(p) else None

    def fragment(self, p: Any, key: str) -> Any:
        return safe_get_local_optimizer_state(p, key)


_OF_ALL_STAGES = frozenset(
    {
        Capability.CLIP_IN_STEP,
        Capability.OVERLAP,
        Capability.OPTIMIZER_OFFLOAD,
        Capability.CHECKPOINTS,
        Capability.RESIZED_CHECKPOINTS,
    }
)


class DeepSpeedZero1(Engine):
    """Stage 1: optimizer state is sharded; gradients are reduced with the last microbatch."""

    name, stage = "deepspeed.zero1", 1
    package = "deepspeed"
    prepared_type: ClassVar[type[PreparedDeepSpeed]] = PreparedDeepSpeed
    needs_processes = True
    preload = (__name__,)
    capabilities = _OF_ALL_STAGES | {Capability.ZERO1, Capability.ACCUMULATE, Capability.ROUND_ROBIN}

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Refuse unsupported plans; DeepSpeed takes the optimizer together with the model."""
        plan.refuse_beyond(self.capabilities)
        return self.prepared_type(model, self.stage, plan)


class DeepSpeedZero2(DeepSpeedZero1):
    """Stage 2: gradients are sharded as well, in each microbatch."""

    name, stage = "deepspeed.zero2", 2
    capabilities = _OF_ALL_STAGES | {Capability.ZERO2, Capability.ROUND_ROBIN}


class DeepSpeedZero3(DeepSpeedZero1):
    """Stage 3: parameters are sharded too, and gathered for each module."""

    name, stage = "deepspeed.zero3", 3
    prepared_type = PreparedDeepSpeedZero3
    capabilities = _OF_ALL_STAGES | {Capability.SHARD, Capability.UNUSED, Capability.CPU_OFFLOAD}
