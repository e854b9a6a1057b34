"""The same case in threads and in processes: the same verdict, the same ledger, entry for entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof.engine.contract import Accumulation, Layout, Plan
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.harness.cases.training import Schedule, Training
from shardproof.harness.laws.communication.matching import RanksAgree
from shardproof.harness.laws.parity import MatchesOracle
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.world_result import SavedResult, keep_result, load_kept
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.session import Source, TrialSession
from shardproof.harness.tracing.ledger import Entry, Op, Phase
from shardproof.harness.training.engine_loop import drive_rank
from shardproof.harness.verdicts.case import Case
from shardproof.harness.worlds.launch import launch
from shardproof.harness.worlds.spec import WorldKind, WorldSpec

ENGINES = ["reference", "reference.zero2", "torch.ddp", "torch.fsdp2", "torch.replicate", "torch.zero1"]
LAWS = (MatchesOracle(), RanksAgree())


def _training(plan: Plan, microbatches: int = 3) -> Training:
    return Training(
        problem=MLP_UNEVEN, optimizer=SGD, plan=plan, schedule=Schedule(steps=2, microbatches=microbatches)
    )


ACCUMULATING = _training(Plan(units=MLP_UNEVEN.units, accumulation=Accumulation.LAST_MICROBATCH))
HYBRID = _training(Plan(units=MLP_UNEVEN.units, layout=Layout.HYBRID), microbatches=1)


def _observe(kind: WorldKind, size: int, engine: str, training: Training, folder: Path) -> SavedResult:
    result = launch(WorldSpec(kind=kind, size=size), drive_rank, training, engine, folder=folder)
    keep_result(result, folder)
    return load_kept(folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_verdicts_are_equal(engine: str, tmp_path: Path) -> None:
    session = TrialSession(Source(folder=tmp_path))
    case = Case(id="case", training=ACCUMULATING, laws=LAWS)

    records = [
        session.run(case, Cell(engine=engine, world=WorldSpec(kind=kind, size=2)), suite="", command="")
        for kind in WorldKind
    ]

    assert [r.verdict for r in records] == [Verdict.PASSED] * 2, [r.headline for r in records]
    assert records[0].ledger == records[1].ledger


@pytest.mark.parametrize(
    ("engine", "size", "training"),
    [
        *((engine, 2, ACCUMULATING) for engine in ENGINES),
        ("reference", 3, ACCUMULATING),
        ("torch.fsdp2", 3, ACCUMULATING),
        ("reference", 4, HYBRID),
        ("torch.fsdp2", 4, HYBRID),
    ],
    ids=lambda value: value.plan.layout.name.lower() if isinstance(value, Training) else str(value),
)
def test_ledgers_are_equal(engine: str, size: int, training: Training, tmp_path: Path) -> None:
    threads, processes = (
        _observe(kind, size, engine, training, tmp_path / kind)
        for kind in (WorldKind.THREADS, WorldKind.PROCESSES)
    )

    assert len(threads.ledgers) == len(processes.ledgers) == size
    for in_threads, in_processes in zip(threads.ledgers, processes.ledgers, strict=True):
        assert in_threads == in_processes
        assert _reductions(in_threads), "a training that reduces nothing compares nothing"


def _reductions(ledger: tuple[Entry, ...]) -> list[Entry]:
    return [e for e in ledger if e.op in {Op.ALL_REDUCE, Op.REDUCE_SCATTER}]


def test_each_collective_is_told_by_its_unit(tmp_path: Path) -> None:
    kept = _observe(WorldKind.THREADS, 2, "torch.fsdp2", _training(Plan(units=MLP_UNEVEN.units)), tmp_path)
    for ledger in kept.ledgers:
        for phase, op in ((Phase.FORWARD, Op.ALL_GATHER), (Phase.BACKWARD, Op.REDUCE_SCATTER)):
            told = [e.unit for e in ledger if (e.phase, e.op, e.step, e.microbatch) == (phase, op, 1, 0)]
            expected = list(MLP_UNEVEN.units)
            assert told == (expected if phase is Phase.FORWARD else expected[::-1])
