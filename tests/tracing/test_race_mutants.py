"""The watch names operators, unit and streams of each kind of racing mutant, and reports no honest engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof import RankContext, Schedule, Training, Watch, WorldSpec, launch
from shardproof.engine.contract import Accumulation, Grouping, Layout, Plan, Reshard
from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.fixtures.chain import CHAIN
from shardproof.fixtures.optimizers import SGD
from shardproof.harness.records.saved_result import keep_result, load_kept
from shardproof.harness.tracing.races import streams
from shardproof.harness.tracing.races.race_report import RaceKind, RaceReport
from shardproof.harness.training.rank_body import drive_rank

SHARDED = Plan(
    layout=Layout.SHARD, units=CHAIN.units, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD
)
HYBRID = replace(SHARDED, layout=Layout.HYBRID)
BFLOAT16 = replace(HYBRID, reduce_dtype=torch.bfloat16)
PAIRS = replace(SHARDED, reshard=Reshard.TO_PAIRS)
# Kind, the two operators, and the unit of the second one.
Found = tuple[RaceKind, str, str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The findings that identify a mutant: the stream that should have waited, for which one, and the operators."""

    races: tuple[Found, ...]
    waiting: str
    awaited: str
    plan: Plan = SHARDED

    @property
    def training(self) -> Training:
        return racing_training(self.plan)

    def found_in(self, report: RaceReport) -> set[Found]:
        """Return the races between the two streams."""
        return {
            (race.kind, race.first.operator, race.second.operator, race.second.unit)
            for race in report.races
            if self.waiting in race.second.stream and self.awaited in race.first.stream
        }


BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
RAW, REUSE = RaceKind.READ_AFTER_WRITE, RaceKind.REUSE
DEFAULT = "the default stream"
EXPECTED = {
    "GathersBeforeTheCopyIn": Expected(
        races=tuple((RAW, "_foreach_copy_", "all_gather", unit) for unit in ("", *BLOCKS)),
        waiting="all_gather_stream",
        awaited="all_gather_copy_in_stream",
    ),
    "ReadsGathersUnderWay": Expected(
        races=tuple((RAW, "all_gather", "split_with_sizes_copy", unit) for unit in ("", *BLOCKS)),
        waiting=DEFAULT,
        awaited="the all_gather's own stream",
    ),
    "ReducesBeforeGradientsAreThere": Expected(
        races=tuple((RAW, "_chunk_cat", "reduce_scatter", unit) for unit in BLOCKS),
        waiting="reduce_scatter_stream",
        awaited=DEFAULT,
    ),
    "GathersWhileTheStepWrites": Expected(
        races=((RAW, "add_", "cat", ""),),
        waiting="gather_stream",
        awaited=DEFAULT,
    ),
    "TakesReductionsAsDone": Expected(
        races=((RAW, "reduce_scatter", "clone", None),),
        waiting=DEFAULT,
        awaited="the reduce_scatter's own stream",
    ),
    "FreesReducedOutputs": Expected(
        races=tuple((REUSE, "_to_copy", "reduce_scatter", unit) for unit in BLOCKS[:-1]),
        waiting="the reduce_scatter's own stream",
        awaited="all_reduce_stream",
        plan=BFLOAT16,
    ),
}
SPECS = {mutant.name: mutant.engine_spec for mutant in MUTANTS}


def racing_training(plan: Plan, microbatches: int = 1) -> Training:
    schedule = Schedule(steps=2, microbatches=microbatches)
    return Training(
        problem=CHAIN, optimizer=SGD, plan=plan, schedule=schedule, watch=frozenset({Watch.RACES})
    )


def race_reports(
    engine: str,
    training: Training,
    folder: Path,
    body: Callable[..., object] = drive_rank,
    kind: str = "threads",
) -> list[RaceReport]:
    """Train on two ranks, or as many as the plan needs; return each rank's report."""
    is_small = training.plan.layout is not Layout.HYBRID and training.plan.reshard is not Reshard.TO_PAIRS
    spec = WorldSpec.parse(f"{kind}:2" if is_small else f"{kind}:4")
    keep_result(launch(spec, body, training, engine, folder=folder), folder)
    reports = [rank.race_report for rank in load_kept(folder).ranks]
    assert len(reports) == spec.size
    found = [report for report in reports if report is not None]
    assert len(found) == spec.size
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_finds_the_operators_and_the_unit_of_each_mutant(name: str, tmp_path: Path) -> None:
    expected = EXPECTED[name]
    for report in race_reports(SPECS[name], expected.training, tmp_path / "world"):
        assert set(expected.races) <= expected.found_in(report), "\n".join(map(str, report.races))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [SHARDED, HYBRID, BFLOAT16, PAIRS], ids=["shard", "hybrid", "bf16", "pairs"])
@pytest.mark.parametrize(
    "engine",
    ["torch.fsdp2", "torch.fsdp1", "reference", "shardproof.engine.adapters.reference:ReferenceOnStreams"],
    ids=["fsdp2", "fsdp1", "reference", "reference-on-streams"],
)
def test_honest_engines_are_silent(engine: str, plan: Plan, tmp_path: Path) -> None:
    if engine == "torch.fsdp1" and plan is PAIRS:
        plan = replace(SHARDED, accumulation=Accumulation.LAST_MICROBATCH)  # it knows of no pairs
    for report in race_reports(engine, racing_training(plan, microbatches=2), tmp_path / "world"):
        assert report.races == ()
        assert report.num_touches > 100
        assert report.num_collectives >= 10


def _drive_without_record_stream(context: RankContext, training: Training, engine: str) -> str | None:
    """Train FSDP1 as torch runs it on a CPU, without `record_stream`; in the world's own process."""
    module: Any = streams  # mypy lets no module use an import that `streams` does not export
    module.guards_of_record_stream = list
    return drive_rank(context, training, engine)


@pytest.mark.slow
def test_fsdp1_is_right_by_record_stream_alone(tmp_path: Path) -> None:
    recorded = race_reports("torch.fsdp1", racing_training(SHARDED), tmp_path / "recorded")
    unrecorded = race_reports(
        "torch.fsdp1", racing_training(SHARDED), tmp_path / "unrecorded", _drive_without_record_stream
    )
    assert [report.races for report in recorded] == [(), ()]
    for report in unrecorded:
        pairs = {(r.kind, r.first.operator, r.second.operator, r.second.unit) for r in report.races}
        assert (REUSE, "addmm", "all_gather", "blocks.1") in pairs
