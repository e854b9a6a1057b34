"""One case has the same verdict and the same ledger in threads and in processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardproof import Accumulation, Layout, Training, TrialSession, Verdict, launch
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.harness.records.saved_result import SavedResult, keep_result, load_kept
from shardproof.harness.tracing.ledger import Entry, Op, Phase
from shardproof.harness.training.rank_body import drive_rank
from shardproof.harness.worlds.spec import OWN_KINDS, WorldKind, WorldSpec
from shardproof.suites.training import train
from tests.judging import judged

ENGINES = ["reference", "reference.zero2", "torch.ddp", "torch.fsdp2", "torch.replicate", "torch.zero1"]


ACCUMULATING = train(MLP_UNEVEN, steps=2, microbatches=3, accumulation=Accumulation.LAST_MICROBATCH)
HYBRID = train(MLP_UNEVEN, steps=2, layout=Layout.HYBRID)


def _observe(kind: WorldKind, size: int, engine: str, training: Training, folder: Path) -> SavedResult:
    result = launch(WorldSpec(kind=kind, size=size), drive_rank, training, engine, folder=folder)
    keep_result(result, folder)
    return load_kept(folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_verdicts_are_equal(engine: str, session: TrialSession) -> None:
    records = [judged(session, engine, f"{kind}:2", ACCUMULATING) for kind in OWN_KINDS]

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
        assert _reductions(in_threads), "a training without reductions compares nothing"


def _reductions(ledger: tuple[Entry, ...]) -> list[Entry]:
    return [e for e in ledger if e.op in {Op.ALL_REDUCE, Op.REDUCE_SCATTER}]


def test_each_collective_is_recorded_with_its_unit(tmp_path: Path) -> None:
    kept = _observe(WorldKind.THREADS, 2, "torch.fsdp2", train(MLP_UNEVEN, steps=2, microbatches=3), tmp_path)
    for ledger in kept.ledgers:
        for phase, op in ((Phase.FORWARD, Op.ALL_GATHER), (Phase.BACKWARD, Op.REDUCE_SCATTER)):
            found = [e.unit for e in ledger if (e.phase, e.op, e.step, e.microbatch) == (phase, op, 1, 0)]
            expected = list(MLP_UNEVEN.units)
            assert found == (expected if phase is Phase.FORWARD else expected[::-1])
