"""Engines that hide memory or messages from the harness. Named by path in test_adversaries.py."""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, TensorDataset

from shardproof import Capability, Copies, Plan, PreparedModel, Shard, Training
from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.adapters.reference_zero import PreparedZero2, Zero2Engine
from shardproof.engine.mutants.refusals import ShowsSlicesOfWholes
from shardproof.engine.reference.zero import Zero2
from shardproof.harness.tracing.memory.census import Census
from tests.verdicts.adversaries import Averages, PreparedAverage


# Any: any arguments.
def _count_nothing(*_: Any, **__: Any) -> None:
    """Stand where the census is taken."""


class BlindsItsCensus(ShowsSlicesOfWholes):
    """Replicates, shows slices, and replaces the census that runs beside it in its process."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        Census.take = _count_nothing  # type: ignore[method-assign]  # the fault
        return super().prepare(model, plan, mesh)


def _look(_: object) -> None:
    """Keep it alive as long as the module is."""


class _Keeps(ReferenceEngine):
    def keep(self, wholes: list[torch.Tensor]) -> object:
        """Copy the model to a place where it stays as long as the module does."""
        raise NotImplementedError

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        kept = self.keep([parameter.detach() for parameter in model.parameters()])
        prepared = super().prepare(model, plan, mesh)
        prepared.module.register_forward_pre_hook(lambda *_: _look(kept))
        return prepared


class KeepsWholesInAMapping(_Keeps):
    """Asks the kernel for memory by itself."""

    def keep(self, wholes: list[torch.Tensor]) -> object:
        mapping = mmap.mmap(-1, sum(whole.nbytes for whole in wholes))
        for whole in wholes:
            mapping.write(ctypes.string_at(whole.data_ptr(), whole.nbytes))
        return mapping


class ImportsALargePackage(_Keeps):
    """Imports a package when it is first needed, and keeps none of the model."""

    def keep(self, wholes: list[torch.Tensor]) -> object:
        from tests.verdicts import large_package

        return large_package


class KeepsWholesOfAThread(_Keeps):
    """Copies the model on a thread of its own."""

    def keep(self, wholes: list[torch.Tensor]) -> object:
        kept: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: kept.extend(whole.clone() for whole in wholes))
        thread.start()
        thread.join()
        return kept


class _PreparedWithoutCopy(PreparedZero2):
    def __init__(self, engine: Zero2, plan: Plan) -> None:
        super().__init__(engine, plan)
        self.copies = Copies.MASTERS

    def local_parameters(self) -> Mapping[str, Shard]:
        return {
            name: Shard.flat(piece.own.detach(), piece.start, tuple(piece.parameter.shape))
            for name, piece in self.engine.pieces.items()
        }


class DeclaresACopyToUpdate(Zero2Engine):
    """Declares SHARD and keeps parameters whole, which takes as much memory on two ranks as a share and its copy."""

    capabilities = frozenset({Capability.SHARD})
    prepared_type = _PreparedWithoutCopy


class _PreparedBackend(PreparedAverage):
    """Averages when the harness reads it, by a method of the backend, beside one collective that the watch sees."""

    is_due = False

    def backward(self, loss: torch.Tensor) -> None:
        PreparedModel.backward(self, loss)
        dist.all_reduce(torch.zeros(1), group=self.group)
        self.is_due = True

    def local_gradients(self) -> Mapping[str, Shard | None]:
        if self.is_due:
            backend: Any = self.group._get_backend(torch.device("cpu"))  # its stub knows no collectives
            for parameter in self.module.parameters():
                assert parameter.grad is not None
                backend.allreduce([parameter.grad]).wait()
                parameter.grad /= dist.get_world_size(self.group)
            self.is_due = False
        return super().local_gradients()


class AveragesUnseenWhenRead(Averages):
    """Is right only if gradients are read in each step."""

    prepared_type = _PreparedBackend


class TrainsOneStep(Averages):
    """Changes the number of steps of the loop in its own process."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Look for the loop's training on the stack."""
        frame = inspect.currentframe()
        while frame is not None:
            training = frame.f_locals.get("training")
            if isinstance(training, Training):
                object.__setattr__(training.schedule, "steps", 1)
            frame = frame.f_back
        return super().prepare(model, plan, mesh)


class _PreparedWithStore(PreparedAverage):
    """Exchanges gradients through the store of the process group: no collective carries them."""

    num_exchanges = 0

    def backward(self, loss: torch.Tensor) -> None:
        PreparedModel.backward(self, loss)
        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
        for number, parameter in enumerate(self.module.parameters()):
            assert parameter.grad is not None
            place = f"{self.num_exchanges}/{number}"
            store.set(f"{place}/{rank}", parameter.grad.numpy().tobytes())  # type: ignore[arg-type]  # lacks bytes
            pieces = [bytearray(store.get(f"{place}/{other}")) for other in range(size)]
            terms = [torch.frombuffer(piece, dtype=torch.float32).view(parameter.shape) for piece in pieces]
            parameter.grad = torch.stack(terms).sum(0) / size
        self.num_exchanges += 1
        dist.all_reduce(torch.zeros(1), group=self.group)


class ExchangesThroughTheStore(Averages):
    """Has the right gradients on every rank, and one small collective in each step."""

    prepared_type = _PreparedWithStore


class _PreparedOnOneRank(PreparedAverage):
    """Reduces gradients to the first rank, which alone updates and then broadcasts its parameters."""

    def backward(self, loss: torch.Tensor) -> None:
        PreparedModel.backward(self, loss)
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            dist.reduce(parameter.grad, 0, group=self.group)
            parameter.grad = parameter.grad / dist.get_world_size() if dist.get_rank() == 0 else None

    def step(self) -> None:
        super().step()
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, 0, group=self.group)


class UpdatesOnTheFirstRank(Averages):
    """The other ranks have no gradients and no state of the optimizer."""

    prepared_type = _PreparedOnOneRank


class PatchesTensors(Averages):
    """Replaces attributes of torch's tensors that their readers need."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        torch.Tensor.nbytes = property(lambda _: 4)  # type: ignore[assignment]  # the fault
        return super().prepare(model, plan, mesh)


class MovesAway(Averages):
    """Changes the current folder of its process."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        os.chdir("/")
        return super().prepare(model, plan, mesh)


class RemovesItsOutput(Averages):
    """Leaves its process without a standard output."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        sys.stdout = None  # as in a process without a console
        return super().prepare(model, plan, mesh)


class _PreparedWithLoader(PreparedAverage):
    def step(self) -> None:
        assert len(list(DataLoader(TensorDataset(torch.zeros(4, 1)), num_workers=1))) == 4
        super().step()


class LoadsDataInWorkers(Averages):
    """Reads data in a process of its own, as training loops do."""

    prepared_type = _PreparedWithLoader
