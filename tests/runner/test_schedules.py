"""Schedules: a seed decides an order, one of equal schedules is kept, and a seed repeats the defect that it shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardproof import Case, Cell, MatchesOracle, Returned, Source, TrialSession, UsageError, Verdict
from shardproof.engine.contract import Grouping, Layout, Plan, Reshard
from shardproof.fixtures.chain import CHAIN
from shardproof.fixtures.optimizers import SGD
from shardproof.harness.cases.training import Schedule, Training, Watch
from shardproof.harness.cli.main import main
from shardproof.harness.laws.communication.buffers import LeavesBuffersAlone, ResultsAreWaitedFor
from shardproof.harness.runner.options import RunOptions
from shardproof.harness.runner.schedules import load_schedules, run_schedules
from shardproof.harness.training.rank_body import drive_rank
from shardproof.harness.worlds.launch import World, launch
from shardproof.harness.worlds.rank import RankContext, journal_path
from shardproof.harness.worlds.spec import WorldKind, WorldSpec
from tests.judging import judged

THREADS = WorldSpec(kind=WorldKind.THREADS, size=3)
SHARDED = Plan(
    layout=Layout.SHARD, units=CHAIN.units, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD
)
TRAINING = Training(problem=CHAIN, optimizer=SGD, plan=Plan(units=CHAIN.units), schedule=Schedule(steps=1))
CASE = Case(id="case", training=TRAINING, laws=(MatchesOracle(),))
LATE = "shardproof.engine.mutants.late"
ARRIVAL = Cell(engine=f"{LATE}:TrustsTheOrderOfArrival", world=THREADS)
SEED_THAT_FAILS, NUM_REPLAYS = 1, 20


def _arrivals(context: RankContext) -> list[int]:
    """Return the order in which messages of other ranks reached rank 0."""
    if context.rank:
        dist.send(torch.tensor(float(context.rank)), dst=0)
        return []
    return [_received() for _ in range(context.size - 1)]


def _received() -> int:
    message = torch.empty(())
    dist.recv(message)
    return int(message)


def _polls(context: RankContext) -> int:
    """Count polls that find no result yet, after all ranks have called."""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    dist.barrier()
    assert work is not None
    num_polls = 0
    while not work.is_completed():
        num_polls += 1
    return num_polls


def _values(world: World, body: Any, seed: int, folder: Path) -> list[Any]:
    result = world.run(body, folder=folder / f"{body.__name__}{seed}", seed=seed)
    assert result.is_clean, result
    return [o.value for o in result.outcomes if isinstance(o, Returned)]


def test_seeds_order_arrivals_and_hold_results_back(tmp_path: Path) -> None:
    world = World(WorldSpec(kind=WorldKind.THREADS, size=4), tmp_path)
    try:
        orders = {seed: tuple(_values(world, _arrivals, seed, tmp_path)[0]) for seed in range(12)}
        again = {seed: tuple(_values(world, _arrivals, seed, tmp_path / "again")[0]) for seed in range(12)}
        polls = [max(_values(world, _polls, seed, tmp_path)) for seed in range(8)]
    finally:
        world.close()
    assert orders == again
    assert len(set(orders.values())) > 3
    assert polls[0] == 0  # the default holds no result back from a rank that polls
    assert max(polls) > 0


def test_a_seed_repeats_journals_to_the_byte(tmp_path: Path) -> None:
    training = replace(TRAINING, plan=SHARDED)
    for run in ("one", "two"):
        world = replace(THREADS, seed=5)
        assert launch(world, drive_rank, training, "reference", folder=tmp_path / run).is_clean
    for rank in range(3):
        one, two = (_lines(tmp_path / run, rank) for run in ("one", "two"))
        assert one == two


def _lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Read a journal without times."""
    lines = [json.loads(line) for line in journal_path(folder, rank).read_text().splitlines()]
    for line in lines:
        line.pop("at_ns", None)
        line["marks"] = [(what, *place) for what, _, *place in line.get("marks", [])]
    return lines


def test_a_seed_that_shows_a_defect_shows_it_every_time(tmp_path: Path) -> None:
    def with_seed(seed: int, folder: str) -> tuple[Verdict, str]:
        session = TrialSession(Source(folder=tmp_path / folder), RunOptions(seed=seed))
        record = session.run(CASE, ARRIVAL, suite="", command="")
        session.close()
        return record.verdict, record.headline

    assert with_seed(0, "by default")[0] is Verdict.PASSED
    results = [with_seed(SEED_THAT_FAILS, f"replay {i}") for i in range(NUM_REPLAYS)]
    assert {verdict for verdict, _ in results} == {Verdict.FAILED}
    assert len({headline for _, headline in results}) == 1
    assert results[0][1].startswith(f"under schedule {SEED_THAT_FAILS}: matches the oracle: step 0, gradient")


def test_exploring_finds_the_seed_and_names_the_command_to_repeat(tmp_path: Path) -> None:
    session = TrialSession(Source(folder=tmp_path), RunOptions(num_schedules=4))
    record = session.run(CASE, ARRIVAL, suite="", command="pytest case")
    session.close()
    assert record.verdict is Verdict.FAILED
    assert record.command == f"pytest case --schedule-seed={SEED_THAT_FAILS}"
    again = TrialSession(Source(folder=tmp_path, is_replay=True), RunOptions(num_schedules=4))
    offline = again.run(CASE, ARRIVAL, suite="", command="pytest case")
    assert replace(offline, duration_s=0.0) == replace(record, duration_s=0.0)


def test_schedules_with_equal_results_are_kept_once(tmp_path: Path) -> None:
    run_schedules(THREADS, range(4), drive_rank, TRAINING, "torch.ddp", folder=tmp_path / "honest")
    assert [s.seed for s in load_schedules(tmp_path / "honest")] == [0]
    run_schedules(THREADS, range(4), drive_rank, TRAINING, ARRIVAL.engine, folder=tmp_path / "mutant")
    assert SEED_THAT_FAILS in [s.seed for s in load_schedules(tmp_path / "mutant")]


def _fails_under_seed_2(context: RankContext, training: Training) -> str | None:
    if context.folder.name == "schedule-2":
        raise ValueError("no")
    return drive_rank(context, training, "torch.ddp")


def test_exploring_stops_at_a_failing_world(tmp_path: Path) -> None:
    run_schedules(THREADS, range(5), _fails_under_seed_2, TRAINING, folder=tmp_path)
    assert [s.seed for s in load_schedules(tmp_path)] == [0, 2]
    assert not load_schedules(tmp_path)[1].saved.result.is_clean


def test_an_early_read_of_a_result_is_named_by_a_watched_run(session: TrialSession) -> None:
    record = judged(session, f"{LATE}:ReadsBucketsTooEarly", training=TRAINING, laws=CASE.laws)
    assert record.verdict is Verdict.FAILED
    assert "NaN or infinity" in record.headline
    assert "read after write: all_reduce writes on the all_reduce's own stream" in record.headline
    assert "then clone reads on the default stream" in record.headline
    assert "engine/mutants/late.py" in record.headline


@pytest.mark.parametrize(
    ("name", "law", "word"),
    [
        ("ClearsTheReduceInput", LeavesBuffersAlone(), "its input was overwritten"),
        ("FreesTheInputOfAReduction", LeavesBuffersAlone(), "its input was freed"),
        ("FillsTheGatherOutput", LeavesBuffersAlone(), "its output was written to"),
        ("ForgetsTheWorkOfANorm", ResultsAreWaitedFor(), "no wait for all_reduce"),
    ],
)
def test_harm_is_reported_with_collective_unit_parameters_and_site(
    name: str, law: LeavesBuffersAlone | ResultsAreWaitedFor, word: str, session: TrialSession
) -> None:
    is_ddp = isinstance(law, ResultsAreWaitedFor)
    training = TRAINING if is_ddp else replace(TRAINING, plan=SHARDED)
    record = judged(session, f"{LATE}:{name}", training=training, laws=())
    assert record.verdict is Verdict.FAILED
    (found,) = [ruling for ruling in record.laws if ruling.law == law.name]
    assert word in found.summary
    assert any(" of blocks." in detail for detail in found.details)
    if not is_ddp:
        # No number shows the harm: the call had read the values before.
        assert MatchesOracle().name not in {ruling.law for ruling in record.laws if not ruling.held}
        assert "parameters" not in found.summary
        assert ".weight" in found.summary or "gain" in found.summary
        assert "before the wait at engine/reference/" in found.summary


def test_effort_is_checked_and_spelt() -> None:
    with pytest.raises(UsageError, match="--schedules: expected a number from 1 on, got 0"):
        RunOptions(num_schedules=0)
    with pytest.raises(UsageError, match="--schedule-seed: expected a number from 0 on, got -3"):
        RunOptions(seed=-3)
    processes = replace(THREADS, kind=WorldKind.PROCESSES)
    assert [*RunOptions(seed=3, num_schedules=2).seeds(TRAINING, THREADS)] == [3, 4]
    assert [*RunOptions().seeds(replace(TRAINING, schedules=3), THREADS)] == [0, 1, 2]
    assert [*RunOptions(seed=3, num_schedules=2).seeds(TRAINING, processes)] == [3]
    assert RunOptions(is_thorough=True).applied(TRAINING).watch == {Watch.RACES, Watch.LIFETIMES}
    assert RunOptions(is_thorough=True).options(0) == ("--thorough",)


def test_the_command_line_accepts_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["run", "--engine=torch.ddp", "--suite=smoke", "-k=trains", "--keep=all", "--schedules"]
    assert main([*common, "0"]) == 2
    assert "--schedules: expected a number from 1 on" in capsys.readouterr().err
    out = tmp_path / "run"
    assert main([*common, "2", "--schedule-seed=4", "--thorough", f"--out={out}"]) == 0
    (record,) = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert record["command"].endswith("--schedule-seed=4 --thorough")
    assert "streams wait for each other" in {law["law"] for law in record["laws"]}
    assert main(["judge", str(out)]) == 0
