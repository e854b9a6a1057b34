"""Engines that own more than wrapping: the arguments that they receive, their refusals, and derived engines."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.contract import Layout, OptimizerFactory, Plan, PreparedModel
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.laws.communication.counts import Nothing
from shardproof.harness.laws.communication.select import Microbatches, Select
from shardproof.harness.laws.law import Law
from shardproof.harness.laws.parity import MatchesOracle
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.runner.engines import describe
from shardproof.harness.runner.session import TrialSession
from shardproof.suites.training import train
from tests.judging import judged

EARLY = Nothing(select=Select(dtypes=("float32",), microbatches=Microbatches.ALL_BUT_LAST))


class RefusesInOptimizer(DistributedDataParallelEngine):
    """Takes model and optimizer together, so that it refuses only when it has both."""

    class Prepared(PreparedDdp):
        """Refuses a plan that is no replication."""

        def optimizer(self, factory: OptimizerFactory) -> None:
            raise NotImplementedError("I shard nothing")

    prepared_type = Prepared

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        return super().prepare(model, Plan(), mesh)


class ReducesOnceAStep(DistributedDataParallelEngine):
    """Communicates in the last microbatch alone, whether or not the plan accumulates."""

    class Prepared(PreparedDdp):
        """Reads in forward whether to reduce, where DDP decides."""

        def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
            ddp: Any = self.module
            ddp.require_backward_grad_sync = self.is_last_microbatch
            output: torch.Tensor = super().__call__(*inputs, **named)
            return output

    prepared_type = Prepared


class ReadsItsEnvironment(DistributedDataParallelEngine):
    """Asks the environment for its rank, as launchers have it."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        variables = [
            int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        ]
        assert variables == [dist.get_rank()] * 2 + [dist.get_world_size()] * 2
        assert os.environ["MASTER_ADDR"] == "127.0.0.1"
        ports = [None] * dist.get_world_size()
        dist.all_gather_object(ports, int(os.environ["MASTER_PORT"]))
        assert len(set(ports)) == 1
        return super().prepare(model, plan, mesh)


class BuildsItsGroup(DistributedDataParallelEngine):
    """Reduces in a group made without `new_group`, so that torch has no table of its ranks."""

    is_alone = False

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        c10d: Any = dist  # torch's stubs lack half of the names below
        rank, size = (0, 1) if self.is_alone else (dist.get_rank(), dist.get_world_size())
        store = c10d.PrefixStore(f"{dist.get_rank() - rank}", c10d.distributed_c10d._get_default_store())
        group = c10d.ProcessGroup(store, rank, size)
        gloo = c10d.ProcessGroupGloo(store, rank, size)
        group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)

        def reduce(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            group.allreduce([bucket.buffer()], c10d.AllreduceOptions()).wait()
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer() / group.size())
            return future

        reduce.__annotations__.clear()  # torch compares them as classes, and here they are strings
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared.module, DistributedDataParallel)
        prepared.module.register_comm_hook(group, reduce)
        return prepared


class BuildsAGroupOfItsOwn(BuildsItsGroup):
    """Reduces in a group of one rank, which no table maps to a global rank."""

    is_alone = True


class NeedsProcesses(DistributedDataParallelEngine):
    """Has globals of which each rank needs its own."""

    needs_processes = True


def _judged(session: TrialSession, engine: type, world: str, *laws: Law, **asked: Any) -> Record:
    training = train(MLP_EVEN, **{"steps": 2, "units": (), **asked})
    return judged(session, f"{__name__}:{engine.__name__}", world, training, laws=(MatchesOracle(), *laws))


def test_parameters_of_the_optimizer_are_read_whatever_modules_show() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    prepared = PreparedModel(model)
    prepared.optimizer(SGD)
    model.weight = nn.Parameter(torch.zeros(2, 2))  # as while it is gathered
    assert prepared.owned_parameters()["weight"] is weight


def test_a_refusal_in_optimizer_is_one(session: TrialSession) -> None:
    record = _judged(session, RefusesInOptimizer, "threads:2", layout=Layout.SHARD)
    assert record.verdict is Verdict.UNSUPPORTED, record.headline
    assert "I shard nothing" in record.headline
    declared = _judged(session, RefusesInOptimizer, "threads:2")
    assert declared.verdict is Verdict.CRASHED, "an engine must not refuse a declared capability"


def test_the_last_microbatch_is_announced(session: TrialSession) -> None:
    record = _judged(session, ReducesOnceAStep, "threads:2", EARLY, microbatches=3)
    assert record.verdict is Verdict.PASSED, record.headline


def test_processes_have_the_environment_of_a_launcher(session: TrialSession) -> None:
    record = _judged(session, ReadsItsEnvironment, "processes:2")
    assert record.verdict is Verdict.PASSED, record.headline


def test_a_group_that_torch_does_not_know_is_read(session: TrialSession) -> None:
    record = _judged(session, BuildsItsGroup, "processes:2")
    assert record.verdict is Verdict.PASSED, record.headline
    other = _judged(session, BuildsAGroupOfItsOwn, "processes:2")
    assert (other.verdict, "global ranks torch does not know" in other.headline) == (Verdict.CRASHED, True)


@pytest.mark.parametrize(
    ("world", "verdict"), [("threads:2", Verdict.UNSUPPORTED), ("processes:2", Verdict.PASSED)]
)
def test_an_engine_that_needs_processes_is_not_judged_in_threads(
    session: TrialSession, world: str, verdict: Verdict
) -> None:
    record = _judged(session, NeedsProcesses, world)
    assert record.verdict is verdict, record.headline
    if verdict is Verdict.UNSUPPORTED:
        assert "processes" in record.headline


class Derived(DistributedDataParallelEngine):
    """DDP under a name and a release of its own."""

    known_as = "torch.ddp"

    def version(self) -> str:
        return "mine 1.0"


def test_a_derived_engine_is_described_with_the_release_of_the_known_one() -> None:
    found = describe(f"{__name__}:Derived")
    assert (found.version, found.known_as) == ("mine 1.0", "torch.ddp")
    assert found.known_version == f"torch {torch.__version__}"
