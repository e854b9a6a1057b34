"""Engines that shard, and hide whole parameters from the census or blind it. Named by path in test_adversaries.py."""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.refusals import ShowsSlicesOfWholes
from shardproof.harness.tracing.memory.census import Census


# Any: whatever it is called with.
def _count_nothing(*_: Any, **__: Any) -> None:
    """Stand where the census is taken."""


class BlindsItsCensus(ShowsSlicesOfWholes):
    """Replicates, shows slices, and replaces the census that runs beside it in its process."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replace it."""
        Census.take = _count_nothing  # type: ignore[method-assign]  # the fault
        return super().prepare(model, plan, mesh)


def _look(_: object) -> None:
    """Keep it alive as long as the module is."""


class _Keeps(ReferenceEngine):
    def keep(self, wholes: list[torch.Tensor]) -> object:
        """Copy the model to a place where it stays as long as the module does."""
        raise NotImplementedError

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Copy the model, and shard it."""
        kept = self.keep([parameter.detach() for parameter in model.parameters()])
        prepared = super().prepare(model, plan, mesh)
        prepared.module.register_forward_pre_hook(lambda *_: _look(kept))
        return prepared


class KeepsWholesInAMapping(_Keeps):
    """Asks the kernel for memory by itself."""

    def keep(self, wholes: list[torch.Tensor]) -> object:
        """Copy the bytes."""
        mapping = mmap.mmap(-1, sum(whole.nbytes for whole in wholes))
        for whole in wholes:
            mapping.write(ctypes.string_at(whole.data_ptr(), whole.nbytes))
        return mapping


class KeepsWholesOfAThread(_Keeps):
    """Copies the model on a thread of its own."""

    def keep(self, wholes: list[torch.Tensor]) -> object:
        """Copy the tensors."""
        kept: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: kept.extend(whole.clone() for whole in wholes))
        thread.start()
        thread.join()
        return kept
