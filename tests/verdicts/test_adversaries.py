"""Engines that deceive or leave processes behind are red for the right reason, and an honest one is green.

test_world_ends.py tests ends after the result without an engine, hangs among them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardproof import (
    Deterministic,
    HoldsItsShare,
    Layout,
    MatchesOracle,
    Plan,
    SendsItsGradients,
    TrialSession,
    Watch,
)
from shardproof.fixtures.problems import MLP_WIDE
from shardproof.harness.records.record import Record, Verdict
from shardproof.suites.training import train
from tests import judging
from tests.judging import LAWS, TWO_STEPS

SOON_S = 15.0  # far from the deadline, for busy machines
WHOLE, SHARDED = Plan(layout=Layout.REPLICATE), Plan(layout=Layout.SHARD)
PROCESSES, THREADS = "processes:2", "threads:2"


pytestmark = pytest.mark.usefixtures("warm")


def judged(session: TrialSession, engine: str, world: str, plan: Plan = WHOLE) -> Record:
    """Judge an engine, by default one of `tests.verdicts.adversaries`, by the laws that smoke asks for."""
    name = engine if ":" in engine else f"tests.verdicts.adversaries:{engine}"
    training = replace(TWO_STEPS, plan=plan)
    return judging.judged(session, name, world, training, laws=(*LAWS, HoldsItsShare()), within_s=SOON_S)


@pytest.mark.parametrize("world", [THREADS, PROCESSES])
def test_the_honest_engine_passes(session: TrialSession, world: str) -> None:
    record = judged(session, "Averages", world)
    assert record.verdict is Verdict.PASSED, record.headline
    refused = judged(session, "Averages", world, SHARDED)
    assert refused.verdict is Verdict.UNSUPPORTED


@pytest.mark.parametrize("world", [THREADS, PROCESSES])
def test_wholes_that_are_shown_as_shards_are_counted(session: TrialSession, world: str) -> None:
    record = judged(session, "shardproof.engine.mutants.refusals:ShowsSlicesOfWholes", world, SHARDED)
    assert record.verdict is Verdict.FAILED
    assert re.match(
        r"memory between steps is explained by the layout: rank \d, step 0, after the last backward: "
        r"expected at most \d+ bytes .*, got \d+ bytes; the largest: ",
        record.headline,
    ), record.headline
    held = {law.law: law.held for law in record.laws}
    assert held[HoldsItsShare().name], "the adapter must show a share"
    assert held[MatchesOracle().name], "the shown share must be right"


@pytest.mark.parametrize(
    ("engine", "world", "verdict", "headline"),
    [
        (
            "leaves_a_detached_child",
            THREADS,
            Verdict.FAILED,
            "^ranks 0, 1 left processes behind: 'sleep 600'",
        ),
        ("dies_beside_a_daemon", PROCESSES, Verdict.CRASHED, "^rank 1 was killed by SIGKILL; rank 1 left "),
        (
            "aborts_when_groups_are_destroyed",
            PROCESSES,
            Verdict.CRASHED,
            "^rank 1 was killed by SIGABRT after ",
        ),
    ],
)
def test_a_failure_after_the_result_is_reported_at_once(
    session: TrialSession, engine: str, world: str, verdict: Verdict, headline: str
) -> None:
    record = judged(session, engine, world)
    assert record.verdict is verdict, record.headline
    assert re.search(headline, record.headline), record.headline


def _judged_by_growth(session: TrialSession, engine: str) -> Record:
    training = train(MLP_WIDE, layout=Layout.SHARD, steps=1, watch=frozenset({Watch.ALLOCATOR}))
    return judging.judged(session, f"tests.verdicts.evasions:{engine}", PROCESSES, training)


def test_memory_that_no_operator_of_the_rank_made_is_counted_in_its_process(session: TrialSession) -> None:
    record = _judged_by_growth(session, "KeepsWholesOfAThread")
    assert record.verdict is Verdict.FAILED, record.headline
    assert "expected the process to have grown by at most" in record.headline


def test_memory_that_neither_census_nor_allocator_sees_passes(session: TrialSession) -> None:
    """Show the limits that docs/threat-model.md names; a change that closes one changes this test and the page."""
    for record in (
        judged(session, "tests.verdicts.evasions:BlindsItsCensus", THREADS, SHARDED),
        _judged_by_growth(session, "KeepsWholesInAMapping"),
        _judged_by_growth(session, "ImportsALargePackage"),
    ):
        assert record.verdict is Verdict.PASSED, record.headline


def test_who_trains_fewer_steps_than_asked_fails(session: TrialSession) -> None:
    record = judged(session, "tests.verdicts.evasions:TrainsOneStep", THREADS)
    assert record.verdict is Verdict.FAILED
    assert "step 1, loss 'loss': rank 0: expected a tensor, the name is missing" in record.headline


def test_a_copy_to_update_that_is_not_there_shows_on_four_ranks(session: TrialSession) -> None:
    engine = "tests.verdicts.evasions:DeclaresACopyToUpdate"
    assert judged(session, engine, THREADS, SHARDED).verdict is Verdict.PASSED, (
        "the limit that the page names"
    )
    record = judged(session, engine, "threads:4", SHARDED)
    assert record.verdict is Verdict.FAILED
    assert record.headline.startswith("memory between steps is explained by the layout: ")


def test_collectives_of_a_backend_are_unseen_and_changes_by_reads_are_seen(
    session: TrialSession,
) -> None:
    engine = "tests.verdicts.evasions:AveragesUnseenWhenRead"
    assert judged(session, engine, PROCESSES).verdict is Verdict.PASSED, "the limit that the page names"
    schedule = replace(TWO_STEPS.schedule, repeats=2, are_repeats_read=False)
    training = replace(TWO_STEPS, schedule=schedule)
    record = judging.judged(session, engine, PROCESSES, training, laws=(Deterministic(),))
    assert record.verdict is Verdict.FAILED, record.headline
    assert "read at its end alone, differs from the first" in record.headline


@pytest.mark.parametrize("world", [THREADS, PROCESSES])
def test_a_refusal_that_leaves_a_child_fails_for_the_child(session: TrialSession, world: str) -> None:
    record = judged(session, "RefusesAndLeavesAChild", world, SHARDED)
    assert record.verdict is Verdict.FAILED
    assert re.search(
        r"^needs SHARD, .*; refused, and then: ranks? .*1 left processes behind: 'sleep 600'", record.headline
    )
    assert "went ahead" not in record.headline


@pytest.mark.parametrize("world", [THREADS, PROCESSES])
@pytest.mark.parametrize(
    ("engine", "headline"),
    [
        (
            "ExchangesThroughTheStore",
            r"^gradients cross between the ranks: step 0: expected at least 7456 bytes out of 2 ranks .*, got 8;",
        ),
        (
            "UpdatesOnTheFirstRank",
            r"^matches the oracle: step 0, gradient 'layers.0.weight': rank 1: exp",
        ),
    ],
)
def test_right_values_that_did_not_cross_fail(
    session: TrialSession, engine: str, headline: str, world: str
) -> None:
    laws = (*LAWS, SendsItsGradients())
    record = judging.judged(session, f"tests.verdicts.evasions:{engine}", world, TWO_STEPS, laws=laws)
    assert record.verdict is Verdict.FAILED, record.headline
    assert re.search(headline, record.headline), record.headline


@pytest.mark.parametrize("engine", ["PatchesTensors", "RemovesItsOutput"])
def test_what_an_engine_changes_in_its_process_is_no_error_of_ours(
    session: TrialSession, engine: str
) -> None:
    assert judged(session, f"tests.verdicts.evasions:{engine}", THREADS).verdict is Verdict.PASSED


def test_an_engine_whose_path_is_relative_may_move_away(
    session: TrialSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "away.py").write_text("from tests.verdicts.evasions import MovesAway\n")
    monkeypatch.chdir(tmp_path)
    assert judged(session, "away.py:MovesAway", THREADS).verdict is Verdict.PASSED


def test_loaders_with_workers_are_refused_where_ranks_are_threads(session: TrialSession) -> None:
    engine = "tests.verdicts.evasions:LoadsDataInWorkers"
    record = judged(session, engine, THREADS)
    assert record.verdict is Verdict.CRASHED
    assert "expected num_workers=0 where ranks are threads of one process" in record.headline
    assert judging.judged(session, engine, PROCESSES, TWO_STEPS).verdict is Verdict.PASSED


@pytest.mark.parametrize("world", [THREADS, PROCESSES])
def test_files_that_a_rank_leaves_are_named(session: TrialSession, world: str) -> None:
    record = judged(session, "leaves_files", world)
    assert record.verdict is Verdict.PASSED, record.headline
    found = re.search(
        r"^left behind:\nin the temporary folder: '\w+\.cache' \(100 bytes\)\n"
        r"in shared memory:.* '(left-\d+)' \(200 bytes\)",
        record.output,
    )
    assert found, record.output
    Path("/dev/shm", found[1]).unlink()
