"""Each hang in worlds of threads and of processes is explained rightly, and soon after the deadline."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardproof import Case, Cell, RankContext, Schedule, Source, Training, TrialSession, WorldSpec
from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.records.hang import HangReport, RankActivity
from shardproof.harness.records.record import Record, Verdict, from_json, to_json
from shardproof.harness.records.saved_result import keep_result, load_kept
from shardproof.harness.training.rank_body import drive_rank
from shardproof.harness.verdicts.judgement import Judgement, judge_failure
from shardproof.harness.worlds.launch import World

DEADLINE_S = 3.0
PROMISED_S = 2.0  # the promised delay after the deadline within which a hang is explained
TRAINING = Training(problem=MLP_EVEN, optimizer=SGD, schedule=Schedule(steps=3))
MINE = "engine/mutants/hangs.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The facts of a mutant: the call that honest ranks wait in, the activity of the odd rank, and where they part.

    ``position`` is that of the first difference in the group concerned; None for a message.
    """

    mutant: str
    odd_call: str
    position: int | None
    call: str = "all_reduce"
    odd: RankActivity = RankActivity.WAITING
    is_cycle: bool = True
    site: str = MINE
    frame: str = ""
    odd_rank: int = -1


TRUTHS = [
    Truth(mutant="SkipsACountOnTheLastRank", odd_call="all_reduce #7", position=1),
    Truth(mutant="TakesTwoGroupsInTurn", odd_call="all_reduce #0", position=0),
    Truth(mutant="ReducesInTheWrongGroup", odd_call="all_reduce #0", position=0),
    Truth(
        mutant="NeverComesToAnEnd",
        call="all_gather",
        odd=RankActivity.OUTSIDE,
        odd_call="reduce_scatter #1",
        position=2,
        is_cycle=False,
        site="torch/distributed/fsdp/_fully_shard/",
        frame="in _search",
    ),
    Truth(
        mutant="LocksItselfOut",
        odd=RankActivity.OUTSIDE,
        odd_call="all_reduce #6",
        position=1,
        is_cycle=False,
        frame="in agree",
    ),
    Truth(
        mutant="SendsToNobody",
        odd_call="send #0",
        position=7,
        site="engine/contract.py",
        odd_rank=0,
    ),
    Truth(mutant="CountsFewerParametersOnTheLastRank", odd_call="all_gather #0", position=5),
    Truth(
        mutant="SkipsABackwardOnTheLastRank",
        odd=RankActivity.RETURNED,
        odd_call="all_reduce #6",
        position=7,
        is_cycle=False,
        site="engine/contract.py",
    ),
]
by_truth = pytest.mark.parametrize("truth", TRUTHS, ids=lambda t: t.mutant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A judgement, and its delay after the deadline: negative where it came before the deadline."""

    judgement: Judgement
    late_s: float


# Any: a rank's body takes any arguments.
def run(
    body: Callable[..., Any], *args: Any, world: str, folder: Path, deadline_s: float = DEADLINE_S
) -> Explained:
    """Run ranks to their end; the clock runs as the world's does, from when all processes are there."""
    place = World(WorldSpec.parse(world, deadline_s=deadline_s), folder)
    started = time.monotonic()
    try:
        result = place.run(body, *args, folder=folder)
    finally:
        place.close()
    keep_result(result, folder)
    judgement = judge_failure(load_kept(folder))
    return Explained(judgement=judgement, late_s=time.monotonic() - started - deadline_s)


def explain(truth: Truth, world: str, folder: Path) -> Explained:
    return run(
        drive_rank, TRAINING, f"shardproof.engine.mutants.hangs:{truth.mutant}", world=world, folder=folder
    )


def check(truth: Truth, explained: Explained, size: int) -> HangReport:
    """Hold an explanation against the truth, rank by rank."""
    judgement, hang = explained.judgement, explained.judgement.hang
    assert explained.late_s <= PROMISED_S
    assert judgement.verdict is Verdict.HUNG, judgement.headline
    assert hang is not None
    assert "\n" not in judgement.headline
    assert judgement.headline.startswith(hang.summary)
    assert [rank.rank for rank in hang.ranks] == list(range(size))
    odd = hang.ranks[truth.odd_rank]
    assert odd.rank in hang.suspects
    assert bool(hang.cycle) is truth.is_cycle
    assert odd.doing is truth.odd
    assert odd.call is not None
    assert f"{odd.call.op} #{odd.call.position}" == truth.odd_call
    for rank in hang.ranks:
        if rank is not odd:
            assert rank.doing is RankActivity.WAITING
            assert rank.call is not None
            assert rank.call.op == truth.call
            assert rank.call.site.startswith(truth.site)
            assert odd.rank in rank.awaits
        if rank.doing is not RankActivity.RETURNED:
            assert rank.stack
    assert truth.frame in (odd.frames or ("",))[0]
    return hang


def test_every_mutant_that_hangs_is_here() -> None:
    assert {truth.mutant for truth in TRUTHS} == {
        mutant.name for mutant in MUTANTS if mutant.engine_spec.startswith("shardproof.engine.mutants.hangs:")
    }


@by_truth
def test_threads_are_explained(truth: Truth, tmp_path: Path) -> None:
    hang = check(truth, explain(truth, "threads:4", tmp_path), 4)
    odd = truth.odd_rank % 4
    assert hang.suspects == (odd,)
    assert hang.difference is not None
    assert hang.difference.position == truth.position
    made, absent = hang.difference.sides
    assert made.ranks == tuple(r for r in range(4) if r != odd)
    assert absent.ranks == (odd,)
    assert absent.call is None


@by_truth
def test_processes_are_explained(truth: Truth, tmp_path: Path) -> None:
    hang = check(truth, explain(truth, "processes:2", tmp_path), 2)
    if truth.is_cycle:
        assert (
            hang.suspects == hang.cycle == (0, 1)
        )  # neither of two ranks that wait for each other is the suspect


def test_threads_and_processes_are_explained_alike(tmp_path: Path) -> None:
    truth = next(t for t in TRUTHS if t.mutant == "SkipsABackwardOnTheLastRank")
    threads, processes = (explain(truth, w, tmp_path / w[:4]) for w in ("threads:2", "processes:2"))
    assert threads.judgement.hang is not None
    assert processes.judgement.hang is not None
    assert threads.judgement.hang.summary == processes.judgement.hang.summary
    assert threads.judgement.hang.difference == processes.judgement.hang.difference
    parted = processes.judgement.hang.difference
    assert parted is not None
    assert [(side.ranks, side.call and side.call.step) for side in parted.desynchronised] == [
        ((0,), 1),
        ((1,), 2),
    ]


def hold_the_interpreter(context: RankContext) -> None:
    """Match a regular expression for ever on the last rank, in C, so that no other Python code runs in its process."""
    if context.rank == context.size - 1:
        re.match(r"(a+)+$", "a" * 60 + "b")
    dist.barrier()


def stop_the_process(context: RankContext) -> None:
    """Let the last rank's process ignore all signals but one."""
    if context.rank == context.size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def leave_one_and_occupy_another(context: RankContext) -> None:
    """Return on rank 1, compute for ever on rank 2, and wait for both on rank 0."""
    if context.rank == 2:
        while True:
            pass
    if context.rank == 0:
        dist.barrier()


@pytest.mark.parametrize(
    ("body", "world"),
    [
        (hold_the_interpreter, "threads:2"),
        (hold_the_interpreter, "processes:2"),
        (stop_the_process, "processes:2"),
    ],
)
def test_a_process_that_does_not_answer_is_ended_in_time(
    body: Callable[[RankContext], None], world: str, tmp_path: Path
) -> None:
    explained = run(body, world=world, folder=tmp_path, deadline_s=1.0)
    assert explained.late_s <= PROMISED_S
    assert explained.judgement.verdict is Verdict.HUNG
    assert explained.judgement.hang is not None
    odd = explained.judgement.hang.ranks[1]
    assert odd.doing is RankActivity.OUTSIDE
    assert odd.frames == (() if body is stop_the_process else odd.frames[:1])
    assert all(body.__name__ in frame for frame in odd.frames)


def test_a_rank_that_is_stopped_for_the_deadlock_of_others_is_reported_with_its_stack(tmp_path: Path) -> None:
    explained = run(leave_one_and_occupy_another, world="threads:3", folder=tmp_path, deadline_s=30.0)
    assert explained.late_s < -20, "a deadlock must be reported at once, not at the deadline"
    hang = explained.judgement.hang
    assert hang is not None
    assert [r.doing for r in hang.ranks] == [
        RankActivity.WAITING,
        RankActivity.RETURNED,
        RankActivity.OUTSIDE,
    ]
    assert hang.ranks[2].ended == "stopped because of another rank"
    assert "leave_one_and_occupy_another" in hang.ranks[2].frames[0]
    assert hang.suspects == (1, 2)
    assert hang.ranks[0].awaits == (1, 2)
    assert " for rank 1 (returned; no call before) and rank 2 (in no call, at " in hang.summary


def test_the_record_has_the_hang_report_and_no_oracle_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a hang must be reported without an oracle")

    monkeypatch.setattr("shardproof.harness.runner.oracles.ask_oracle", refuse)
    session = TrialSession(Source(folder=tmp_path))
    cell = Cell(
        engine="shardproof.engine.mutants.hangs:TakesTwoGroupsInTurn", world=WorldSpec.parse("threads:2")
    )
    record = session.run(Case(id="case", training=TRAINING, laws=()), cell, suite="", command="")
    session.close()
    assert record.verdict is Verdict.HUNG
    assert record.hang is not None
    assert from_json(Record, to_json(record), where="here") == record
    again = TrialSession(Source(folder=tmp_path, is_replay=True))
    assert (
        again.run(Case(id="case", training=TRAINING, laws=()), cell, suite="", command="").hang == record.hang
    )
