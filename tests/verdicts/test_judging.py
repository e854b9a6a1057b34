"""Judging reaches each verdict, and no other, with engines made for the purpose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardproof import Case, Evidence, Ruling, Source, TrialSession
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.contract import (
    Accumulation,
    Capability,
    Engine,
    Layout,
    Plan,
    PreparedModel,
    Shard,
    UnsupportedError,
)
from shardproof.engine.registry import BUILT_IN
from shardproof.fixtures.optimizers import SGD
from shardproof.harness.cases.training import LoopOrder, Schedule, Training
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.worlds.spec import OWN_KINDS, WorldKind
from tests.judging import LAWS, judged
from tests.judging import TWO_STEPS as TRAINING

KINDS = list(OWN_KINDS)


class Forgetful(DistributedDataParallelEngine):
    """Declares accumulation and lacks the method behind it: its module has no ``no_sync``."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        return PreparedModel(nn.Sequential(super().prepare(model, plan, mesh).module), named=model)


class Silent(DistributedDataParallelEngine):
    """Accepts every plan, declared or not."""

    capabilities = frozenset({Capability.REPLICATE})

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        return super().prepare(model, Plan(), mesh)


class Mistyped(DistributedDataParallelEngine):
    """Calls its collectives in another order on rank 1."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        tensor = next(model.parameters()).detach().clone()
        if dist.get_rank() == 1:
            dist.broadcast(tensor, 0)
        else:
            dist.all_reduce(tensor)
        return super().prepare(model, plan, mesh)


class Refusing(Engine):
    """Refuses every plan."""

    name = "refusing"
    capabilities = frozenset[Capability]()

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        raise ValueError("I would rather not")


class Crashing(Refusing):
    """Declares every capability, then refuses."""

    capabilities = frozenset(Capability)


class RefusesOnOneRank(DistributedDataParallelEngine):
    """Refuses on rank 0 and goes ahead on rank 1."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        if dist.get_rank() == 0:
            plan.refuse_beyond(self.capabilities)
        return PreparedDdp(model)


class RefusesTooLate(Silent):
    """Trains a step before it refuses."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        return _PreparedRefusing(super().prepare(model, plan, mesh).module, named=model)


class _PreparedRefusing(PreparedDdp):
    def step(self) -> None:
        raise UnsupportedError([Capability.SHARD])


class SynchronisesWhenRead(DistributedDataParallelEngine):
    """Averages gradients only while the harness reads them."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared.module, DistributedDataParallel)
        prepared.module.require_backward_grad_sync = False
        return _PreparedForShow(prepared.module, named=model)


class _PreparedForShow(PreparedDdp):
    def local_gradients(self) -> Mapping[str, Shard | None]:
        for parameter in self.named.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        return super().local_gradients()


class BrokenLaw:
    """A check that is itself wrong."""

    name = "broken"

    def judge(self, evidence: Evidence) -> Ruling:
        raise KeyError("no such thing")


def _judge(session: TrialSession, engine: str, kind: WorldKind, case: Case) -> Record:
    name = engine if "." in engine or engine in BUILT_IN else f"tests.verdicts.test_judging:{engine}"
    return judged(session, name, f"{kind}:2", case.training, laws=case.laws, deadline_s=5.0)


def _case(training: Training) -> Case:
    return Case(id="case", training=training, laws=LAWS)


def test_clearing_before_stepping_proves_nothing(session: TrialSession) -> None:
    schedule = replace(TRAINING.schedule, order=LoopOrder.ZERO_THEN_STEP)
    case = _case(replace(TRAINING, schedule=schedule))
    record = _judge(session, "torch.fsdp2", WorldKind.THREADS, case)
    assert record.verdict is Verdict.VACUOUS, record.headline


def test_a_training_that_diverges_by_itself_is_no_fault_of_the_engine(session: TrialSession) -> None:
    record = judged(session, "torch.ddp", training=replace(TRAINING, optimizer=replace(SGD, lr=math.nan)))
    assert record.verdict is Verdict.VACUOUS, record.headline
    assert record.headline.startswith("the oracle itself diverged: parameter ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_beyond_the_declared_capabilities_must_be_refused(
    session: TrialSession, kind: WorldKind
) -> None:
    sharded = _case(replace(TRAINING, plan=Plan(layout=Layout.SHARD)))
    assert _judge(session, "Refusing", kind, sharded).verdict is Verdict.UNSUPPORTED
    assert _judge(session, "Silent", kind, sharded).verdict is Verdict.UNSUPPORTED_SILENT


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_must_refuse_before_it_trains(session: TrialSession, kind: WorldKind) -> None:
    sharded = _case(replace(TRAINING, plan=Plan(layout=Layout.SHARD)))
    one_rank = _judge(session, "RefusesOnOneRank", kind, sharded)
    assert one_rank.verdict is Verdict.FAILED
    assert "refused on rank(s) [0]" in one_rank.headline
    too_late = _judge(session, "RefusesTooLate", kind, sharded)
    assert too_late.verdict is Verdict.CRASHED
    assert "instead of refusing before training" in too_late.headline


@pytest.mark.parametrize("kind", KINDS)
def test_synchronising_for_the_reader_is_seen(session: TrialSession, kind: WorldKind) -> None:
    record = _judge(session, "SynchronisesWhenRead", kind, _case(TRAINING))
    assert record.verdict is Verdict.FAILED
    assert "while it was read" in record.headline


def test_an_engine_cannot_patch_its_oracle(session: TrialSession) -> None:
    record = _judge(
        session, "tests.verdicts.patching_engine:PatchesTorch", WorldKind.THREADS, _case(TRAINING)
    )
    assert record.verdict is Verdict.FAILED, record.headline


@pytest.mark.parametrize("kind", KINDS)
def test_refusing_what_is_declared_is_a_failure(session: TrialSession, kind: WorldKind) -> None:
    record = _judge(session, "Crashing", kind, _case(replace(TRAINING, plan=Plan(layout=Layout.SHARD))))
    assert record.verdict is Verdict.CRASHED
    assert "I would rather not" in record.headline


@pytest.mark.parametrize("kind", KINDS)
def test_a_declared_and_missing_method_is_named(session: TrialSession, kind: WorldKind) -> None:
    plan = Plan(accumulation=Accumulation.LAST_MICROBATCH)
    schedule = Schedule(steps=2, microbatches=2)
    record = _judge(session, "Forgetful", kind, _case(replace(TRAINING, plan=plan, schedule=schedule)))
    assert record.verdict is Verdict.CRASHED
    assert "PreparedModel.accumulating" in record.headline


@pytest.mark.parametrize("kind", KINDS)
def test_different_collectives_of_ranks_are_named(session: TrialSession, kind: WorldKind) -> None:
    record = _judge(session, "Mistyped", kind, _case(TRAINING))
    assert record.verdict is Verdict.FAILED, record.headline
    for part in ("all_reduce", "broadcast", "test_judging.py", "rank"):
        assert part in record.headline, record.headline


def test_a_law_that_breaks_is_our_own_fault(session: TrialSession) -> None:
    case = Case(id="case", training=TRAINING, laws=(BrokenLaw(),))
    record = _judge(session, "torch.ddp", WorldKind.THREADS, case)
    assert record.verdict is Verdict.ERRORED
    assert "no such thing" in record.headline


def test_judging_again_needs_no_world(tmp_path: Path) -> None:
    first = TrialSession(Source(folder=tmp_path))
    made = _judge(first, "torch.ddp", WorldKind.THREADS, _case(TRAINING))
    again = TrialSession(Source(folder=tmp_path, is_replay=True))
    read = _judge(again, "torch.ddp", WorldKind.THREADS, _case(TRAINING))
    assert (read.verdict, read.worst, read.laws) == (made.verdict, made.worst, made.laws)
    assert read.verdict is Verdict.PASSED
