"""The ZeRO-2 of the reference engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import (
    Capability,
    Copies,
    Engine,
    Offload,
    OptimizerFactory,
    Plan,
    PreparedModel,
    Tuning,
)
from shardproof.engine.pieces import Piece, PreparedPieces
from shardproof.engine.reference import zero_checkpoint
from shardproof.engine.reference.zero import Zero2


class PreparedZero2(PreparedPieces):
    """Keeps parameters whole; the optimizer has this rank's piece of each."""

    parameters_are_whole = True

    def __init__(self, engine: Zero2, plan: Plan) -> None:
        super().__init__(engine.module)
        self.engine = engine
        self.copies = Copies.NONE if plan.offload is Offload.NONE else Copies.MASTERS
        self._max_norm = plan.clip_in_step

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Build it over the pieces, and over what does not train as it is: loops count their parameter groups."""
        own = {name: piece.own for name, piece in self.engine.pieces.items()}
        everything = [own.get(name, parameter) for name, parameter in self.named.named_parameters()]
        PreparedModel.optimizer(self, lambda _: factory(everything))

    def backward(self, loss: torch.Tensor) -> None:
        """Let the engine run backward, since that is when it reduces."""
        self.engine.backward(loss)

    def step(self) -> None:
        """Clip if the plan asks for it, then let the engine update the pieces and share them."""
        self.clip()
        self.engine.step(self.built_optimizer())

    def clip(self) -> None:
        """Clip if the plan requests it."""
        if self._max_norm is not None:
            self.engine.clip(self._max_norm)

    def accumulating(self) -> AbstractContextManager[None]:
        """Use the engine's own context."""
        return self.engine.no_sync()

    def save_checkpoint(self, folder: Path) -> None:
        zero_checkpoint.save(self.engine, self.built_optimizer(), folder)

    def load_checkpoint(self, folder: Path) -> None:
        zero_checkpoint.load(self.engine, self.built_optimizer(), folder)

    def pieces(self) -> Iterator[Piece]:
        for name, piece in self.engine.pieces.items():
            yield Piece(name=name, shape=tuple(piece.parameter.shape), owner=piece.own, start=piece.start)


class Zero2Engine(Engine):
    """Reduce-scatters gradients, by default after backward, and gathers parameters in the optimizer step."""

    name = "reference.zero2"
    capabilities = frozenset(
        {
            Capability.ZERO1,
            Capability.ZERO2,
            Capability.ACCUMULATE,
            Capability.SUM_OF_FORWARDS,
            Capability.MIXED_DTYPES,
            Capability.MEMORY_FORMATS,
            Capability.PARAMETER_ORDER,
            Capability.LOADED_WEIGHTS,
            Capability.LATE_PARAMETERS,
            Capability.OWN_BUFFERS,
            Capability.CLIP_IN_STEP,
            Capability.OVERLAP,
            Capability.ROUND_ROBIN,
            Capability.RANK_DEPENDENT_ORDER,
            Capability.OPTIMIZER_OFFLOAD,
            Capability.CHECKPOINTS,
            Capability.RESIZED_CHECKPOINTS,
        }
    )
    prepared_type: ClassVar[type[PreparedZero2]] = PreparedZero2
    engine_type: ClassVar[type[Zero2]] = Zero2

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Take the whole model; units do not apply."""
        plan.refuse_beyond(self.capabilities)
        engine = self.engine_type(
            model,
            mesh.get_group(),
            overlaps=plan.tuning is Tuning.OVERLAPPED,
            takes_turns=plan.tuning is Tuning.ROUND_ROBIN,
            offloads=plan.offload is Offload.OPTIMIZER,
        )
        return self.prepared_type(engine, plan)
