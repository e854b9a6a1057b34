"""Mutants whose own checkpoints lack values, or are read at the wrong place."""

from __future__ import annotations

from pathlib import Path

import torch

from shardproof.engine.adapters.reference_zero import PreparedZero2, Zero2Engine
from shardproof.engine.contract import Masters
from shardproof.engine.mutants.mutant import mutant
from shardproof.engine.mutants.patches import keeping_group_options, restart_count
from shardproof.engine.reference.zero_checkpoint import file_of


@mutant(after="deepspeedai/DeepSpeed#7786")
class LosesStateInItsCheckpoint(Zero2Engine):
    """The optimizer starts without state after a checkpoint is loaded."""

    class Prepared(PreparedZero2):
        def load_checkpoint(self, folder: Path) -> None:
            super().load_checkpoint(folder)
            self.built_optimizer().state.clear()


@mutant(after="deepspeedai/DeepSpeed#4396")
class RestartsTheCountInItsCheckpoint(Zero2Engine):
    """The optimizer's count of steps, by which it corrects its moments, starts from zero."""

    class Prepared(PreparedZero2):
        def load_checkpoint(self, folder: Path) -> None:
            super().load_checkpoint(folder)
            restart_count(self.built_optimizer())


@mutant(after="hpcaitech/ColossalAI#5151")
class RestartsTheLearningRateInItsCheckpoint(Zero2Engine):
    """The optimizer has the learning rate of a fresh one after a checkpoint is loaded."""

    class Prepared(PreparedZero2):
        def load_checkpoint(self, folder: Path) -> None:
            with keeping_group_options(self.built_optimizer()):
                super().load_checkpoint(folder)


@mutant(after="deepspeedai/DeepSpeed#762")
class RestoresNoMasters(Zero2Engine):
    """Parameters are loaded, but not the copies that the optimizer updates, which overwrite them in the next step."""

    class Prepared(PreparedZero2):
        def load_checkpoint(self, folder: Path) -> None:
            before = [piece.own.detach().clone() for piece in self.engine.pieces.values()]
            super().load_checkpoint(folder)
            if self.masters is Masters.SHARE:
                with torch.no_grad():
                    for piece, own in zip(self.engine.pieces.values(), before, strict=True):
                        piece.own.copy_(own)
                # Else the next backward would take them from the parameters.
                self.engine.take_weights = lambda: None  # type: ignore[method-assign]  # of this one


@mutant(after="deepspeedai/DeepSpeed#5105")
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
