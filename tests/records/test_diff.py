"""A comparison of two runs finds every class of change, groups it by cause and shows it; durations are no change."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof import Verdict
from shardproof.harness.cli.main import main
from shardproof.harness.records.diff.comparability import ComparedRun
from shardproof.harness.records.diff.comparison import Comparison, News, compare, steady
from shardproof.harness.records.diff.traffic import Traffic, traffic_changes
from shardproof.harness.records.record import Expectations, LawRecord, LedgerLine, OutcomeRecord, Record
from shardproof.harness.records.run import Run
from shardproof.reports.change_groups import groups
from shardproof.reports.diff_json import VERSION, render_json
from shardproof.reports.diff_text import LIMIT_BYTES, WIDTH, render, render_markdown, summary
from tests import sample_records
from tests.sample_records import HEADER, write_run
from tests.sample_runs import ENTRY, HOSTILE, a_record, a_run
from tests.shell import python

RENDERERS: list[Callable[[Comparison], str]] = [render, render_markdown, render_json]
CASE = "parity/test_single.py::test_matches[mlp]"


def compared(before: Run, after: Run, **options: tuple[str, ...]) -> Comparison:
    return compare(
        ComparedRun(folder="runs/old", run=before), ComparedRun(folder="runs/new", run=after), **options
    )


def changed(before: Record, after: Record) -> Comparison:
    return compared(a_run(before), a_run(after))


def news(before: Record, after: Record) -> tuple[News, ...]:
    (change,) = changed(before, after).changes
    return change.news


def with_calls(record: Record, count: int, num_bytes: int = 8, **changes: str) -> Record:
    lines = (replace(line, count=count, num_bytes=num_bytes) for line in record.ledger)
    return replace(record, ledger=tuple(replace(line, **changes) for line in lines))  # type: ignore[arg-type]


def with_header(run: Run, **changes: object) -> Run:
    return replace(run, header=replace(run.header, **changes))  # type: ignore[arg-type]  # fields of Header


# Classes of change


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (Verdict.PASSED, Verdict.FAILED, News.WORSE),
        (Verdict.PASSED, Verdict.VACUOUS, News.WORSE),
        (Verdict.PASSED, Verdict.NOT_RUN, News.WORSE),
        (Verdict.PASSED, Verdict.UNSUPPORTED, News.WORSE),
        (Verdict.PASSED, Verdict.KNOWN_FAILURE, News.WORSE),
        (Verdict.UNSUPPORTED, Verdict.UNSUPPORTED_SILENT, News.WORSE),
        (Verdict.HUNG, Verdict.PASSED, News.BETTER),
        (Verdict.KNOWN_FAILURE, Verdict.UNEXPECTED_PASS, News.BETTER),
        (Verdict.FAILED, Verdict.CRASHED, News.OTHER_VERDICT),
        (Verdict.PASSED, Verdict.UNEXPECTED_PASS, News.OTHER_VERDICT),
        (Verdict.UNSUPPORTED, Verdict.KNOWN_FAILURE, News.WORSE),
        (Verdict.KNOWN_FAILURE, Verdict.FAILED, News.OTHER_VERDICT),
        (Verdict.FAILED, Verdict.KNOWN_FAILURE, News.OTHER_VERDICT),
    ],
)
def test_a_verdict_gets_worse_or_better_or_only_differs(
    before: Verdict, after: Verdict, expected: News
) -> None:
    assert news(a_record(verdict=before), a_record(verdict=after)) == (expected,)


def test_another_expectation_is_a_verdict_change() -> None:
    known = a_record(verdict=Verdict.KNOWN_FAILURE, expectation=ENTRY)
    hung = replace(known, expectation=replace(ENTRY, verdict=Verdict.HUNG))
    moved = replace(known, expectation=replace(ENTRY, number=9, expiry="2040-01-01", version="torch >=3"))
    assert news(known, hung) == (News.OTHER_VERDICT,)
    assert "KNOWN_FAILURE (FAILED) -> KNOWN_FAILURE (HUNG)" in render(changed(known, hung))
    assert changed(known, moved).changes == (), (
        "the place and condition of an entry are no change of a record"
    )


def test_a_known_failure_that_breaks_another_law_got_worse() -> None:
    known = a_record(verdict=Verdict.KNOWN_FAILURE, expectation=ENTRY)
    more = (*known.laws, LawRecord(law="order", held=False, summary="differs"))
    headline = f"expectation excuses 'matches', not 'order'; {known.headline}"
    failed = replace(known, verdict=Verdict.FAILED, headline=headline)
    assert news(known, replace(failed, laws=more)) == (News.WORSE,)
    assert news(replace(failed, laws=more), known) == (News.BETTER,)
    assert news(known, failed) == (News.OTHER_VERDICT,)


def test_a_pass_against_an_expectation_is_no_worse_than_a_pass() -> None:
    passed = a_record(headline="51 tensors agree", laws=())
    against = replace(
        passed,
        verdict=Verdict.UNEXPECTED_PASS,
        headline="remove the expectation; 52 tensors agree",
        expectation=ENTRY,
    )
    assert news(passed, against) == (News.OTHER_VERDICT,)


def test_a_known_crash_is_the_same_with_an_expired_expectation_and_worse_with_another_error() -> None:
    known = a_record(
        verdict=Verdict.KNOWN_FAILURE,
        headline="rank 0 raised KeyError",
        laws=(),
        expectation=replace(ENTRY, verdict=Verdict.CRASHED),
    )
    expired = "expectation expired on 2031-02-03; rank 0 raised KeyError"
    crashed = replace(known, verdict=Verdict.CRASHED, headline=expired)
    assert news(known, crashed) == (News.OTHER_VERDICT,)
    assert news(known, replace(crashed, headline="rank 0 raised OSError")) == (News.WORSE,)


def test_another_headline_of_the_same_verdict_is_news_of_its_own() -> None:
    failed = a_record(verdict=Verdict.FAILED, headline="count: expected 4, got 5")
    assert news(failed, replace(failed, headline="count: expected 4, got 6")) == (News.EXPLANATION,)


def test_another_broken_law_is_news_though_the_headline_is_the_same() -> None:
    before = a_record(verdict=Verdict.FAILED)
    after = replace(before, laws=(*before.laws, LawRecord(law="order", held=False, summary="differs")))
    (change,) = changed(before, after).changes
    assert (change.news, change.newly_broken, change.no_longer_broken) == (
        (News.EXPLANATION,),
        ("order",),
        (),
    )
    assert "newly broken: order" in render(changed(before, after))
    assert "no longer broken: order" in render(changed(after, before))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("raised at engine/contract.py:131 in backward", "raised at engine/contract.py:140 in backward"),
        ("<Group object at 0x7f01>", "<Group object at 0x7fab>"),
        (
            "at [18, 0] got 0.26, expected 0.13, error 0.1, allowed 5e-07, 100.0% of the shard beyond",
            "at [2, 1] got 2, expected 1, error 1, allowed 0, 99.5% of the shard beyond",
        ),
        ("rank 0 holds 1.5e-05", "rank 0 holds 1.25"),
    ],
)
def test_a_headline_may_vary_in_numbers_that_no_change_causes(before: str, after: str) -> None:
    assert steady(before) == steady(after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("rank 0 raised KeyError", "rank 1 raised KeyError"),
        ("expected 4 collectives, got 5", "expected 4 collectives, got 6"),
        ("51 tensors agree", "40 tensors agree"),
        ("step 0, gradient 'a.weight'", "step 0, gradient 'b.weight'"),
    ],
)
def test_a_headline_keeps_numbers_that_a_change_causes(before: str, after: str) -> None:
    assert steady(before) != steady(after)


def test_one_gather_more_is_news_though_both_pass() -> None:
    before = a_record(headline="agree: 2 calls; matches: 51 tensors agree")
    after = replace(with_calls(before, 3, 12), headline="agree: 3 calls; matches: 51 tensors agree")
    assert news(before, after) == (News.COMMUNICATION,), "the headline counts the same calls"
    assert "all_gather in forward over data, float32: 2 -> 3 calls, 8 B -> 12 B" in render(
        changed(before, after)
    )
    fewer = replace(after, headline="agree: 3 calls; matches: 40 tensors agree")
    assert news(before, fewer) == (News.EXPLANATION, News.COMMUNICATION), "fewer tensors prove less"


def test_bytes_and_dtypes_are_news_at_the_same_count() -> None:
    record = a_record()
    assert news(record, with_calls(record, 2, 16)) == (News.COMMUNICATION,)
    text = render(changed(record, with_calls(record, 2, dtype="bfloat16")))
    assert "float32: gone, 2 calls, 8 B" in text
    assert "bfloat16: new, 2 calls, 8 B" in text


def test_a_rank_without_lines_did_as_rank_0_did() -> None:
    (first, *_) = a_record().ledger
    once = a_record(ledger=(first,))
    assert traffic_changes(a_record(), once) == ()
    (everywhere,) = traffic_changes(once, replace(once, ledger=(replace(first, count=5),)))
    assert (everywhere.ranks, everywhere.is_everywhere) == ((0, 1, 2, 3), True)
    apart = replace(once, ledger=(first, replace(first, rank=2, count=5)))
    (change,) = traffic_changes(once, apart)
    assert (change.ranks, change.is_everywhere) == ((2,), False)
    assert (change.before, change.after) == (Traffic(count=2, num_bytes=8), Traffic(count=5, num_bytes=8))
    assert "on rank 2" in render(changed(once, apart))


def test_a_rank_that_communicates_nothing_differs_from_one_like_rank_0() -> None:
    (first, *_) = a_record().ledger
    silent = LedgerLine(rank=3, phase="", op="none", axis="", dtype="", count=0, num_bytes=0)
    before, after = a_record(ledger=(first,)), a_record(ledger=(first, silent))
    (change,) = traffic_changes(before, after)
    assert (change.ranks, change.after) == ((3,), Traffic(count=0, num_bytes=0))


def test_a_ledger_that_was_cut_short_is_not_compared_but_counted() -> None:
    hung = a_record(verdict=Verdict.HUNG)
    found = changed(hung, with_calls(hung, 7))
    assert (found.changes, found.num_unmeasured) == ((), 1)
    assert "1 record not compared" in render(found)
    raised = a_record(verdict=Verdict.FAILED, outcomes=(OutcomeRecord(rank=0, kind="Raised", text=""),))
    assert changed(raised, with_calls(raised, 7)).num_unmeasured == 1


def test_a_record_that_one_run_lacks_is_new_or_gone() -> None:
    found = compared(a_run(a_record("a"), a_record("b")), a_run(a_record("b"), a_record("c")))
    assert [(c.case, c.news) for c in found.changes] == [("a", (News.GONE,)), ("c", (News.NEW,))]
    assert found.num_unchanged == 1


def test_a_changed_verdict_and_changed_communication_are_both_news() -> None:
    after = with_calls(a_record(verdict=Verdict.FAILED), 3)
    assert news(a_record(), after) == (News.WORSE, News.COMMUNICATION)


def test_durations_observations_commands_and_versions_are_no_change() -> None:
    before = a_record()
    after = replace(
        before, duration_s=9.0, observation="elsewhere", command="again", engine_version="2.15.0", worst=None
    )
    newer = with_header(a_run(after), versions={"python": "3.12", "torch": "2.15.0"}, started_at="later")
    found = compared(a_run(before), newer)
    assert found.changes == ()
    assert [(s.name, s.before, s.after) for s in found.settings] == [
        ("python", "3.11", "3.12"),
        ("torch", "2.13.0", "2.15.0"),
        ("torch.ddp", "2.13.0", "2.15.0"),
    ]


def test_of_several_records_of_one_cell_the_worst_is_compared() -> None:
    good, bad = a_record(), a_record(verdict=Verdict.FAILED)
    assert compared(a_run(good, bad), a_run(bad)).changes == ()
    assert compared(a_run(bad, good), a_run(bad)).changes == ()


# Properties

CELLS = st.tuples(
    st.sampled_from(["e", "f"]), st.sampled_from(["s/a", "s/b"]), st.sampled_from(["threads:2"])
)
LINES = st.builds(
    LedgerLine,
    rank=st.integers(0, 1),
    phase=st.just("forward"),
    op=st.sampled_from(["all_gather", "none"]),
    axis=st.just("data"),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    count=st.integers(0, 2),
    num_bytes=st.integers(0, 2),
)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    made = [
        sample_records.a_record(
            draw(st.sampled_from(Verdict)),
            engine=engine,
            case=case,
            world=world,
            headline=draw(st.sampled_from(["count: 1", "count: 2", HOSTILE])),
            laws=(LawRecord(law="count", held=draw(st.booleans()), summary=""),),
            ledger=tuple(draw(st.lists(LINES, max_size=3))),
            expectation=draw(st.sampled_from([None, ENTRY, replace(ENTRY, reason="Other.")])),
        )
        for engine, case, world in sorted(draw(st.sets(CELLS)))
    ]
    return a_run(*made)


MIRRORED = {
    News.WORSE: News.BETTER,
    News.BETTER: News.WORSE,
    News.NEW: News.GONE,
    News.GONE: News.NEW,
}


@given(runs())
def test_a_run_does_not_differ_from_itself(run: Run) -> None:
    found = compared(run, run)
    assert found.changes == ()
    assert found.num_unchanged == len(run.records)


@given(runs(), runs())
def test_the_other_way_round_everything_is_mirrored(a: Run, b: Run) -> None:
    there, back = compared(a, b), compared(b, a)
    mirrored = [tuple(MIRRORED.get(n, n) for n in change.news) for change in there.changes]
    assert mirrored == [change.news for change in back.changes]
    for one, other in zip(there.changes, back.changes, strict=True):
        assert (one.before, one.after) == (other.after, other.before)
        assert one.newly_broken == other.no_longer_broken
        assert {(t.ranks, t.dtype, t.before, t.after) for t in one.traffic} == {
            (t.ranks, t.dtype, t.after, t.before) for t in other.traffic
        }


@given(runs(), runs())
def test_every_change_is_in_a_group_for_each_of_its_news(a: Run, b: Run) -> None:
    found = compared(a, b)
    grouped = [(g.news, c.engine, c.case, c.world) for g in groups(found) for c in g.changes]
    assert sorted(grouped) == sorted((n, c.engine, c.case, c.world) for c in found.changes for n in c.news)


# Groups


def test_one_cause_in_many_cases_is_shown_once() -> None:
    before = [a_record(f"parity/{i:02}") for i in range(50)]
    found = compared(a_run(*before), a_run(*(with_calls(r, 3, 12) for r in before)))
    (group,) = groups(found)
    assert len(group.changes) == 50
    text = render(found)
    assert text.count("all_gather in forward over data, float32: 2 -> 3 calls, 8 B -> 12 B") == 1
    assert "... and 45 more cases" in text
    assert len(json.loads(render_json(found))["changes"]) == 50


def test_communication_that_changed_by_different_amounts_is_shown_as_a_range() -> None:
    before = [a_record(f"parity/{i}") for i in range(3)]
    after = [with_calls(record, 3 + i, 12 + i) for i, record in enumerate(before)]
    (group,) = groups(compared(a_run(*before), a_run(*after)))
    assert [line.text for line in group.lines] == [
        "all_gather in forward over data, float32: +1 to +3 calls, +4 B to +6 B"
    ]


def test_failures_alike_but_for_names_and_numbers_are_one_group() -> None:
    before = [a_record(f"parity/{i}") for i in range(3)]
    after = [
        a_record(f"parity/{i}", Verdict.FAILED, headline=f"step {i}, gradient 'layers.{i}.weight' differs")
        for i in range(3)
    ]
    (group,) = groups(compared(a_run(*before), a_run(*after)))
    assert (group.title, len(group.changes), group.is_example) == ("PASSED -> FAILED", 3, True)
    other = [*after[:2], a_record("parity/2", Verdict.FAILED, headline="ranks disagree")]
    assert len(groups(compared(a_run(*before), a_run(*other)))) == 2


def test_engines_are_never_in_one_group() -> None:
    old = [a_record(engine=engine) for engine in ("torch.ddp", "torch.fsdp2")]
    new = [a_record(engine=r.engine, verdict=Verdict.FAILED) for r in old]
    assert [g.engine for g in groups(compared(a_run(*old), a_run(*new)))] == ["torch.ddp", "torch.fsdp2"]


def test_the_most_urgent_comes_first() -> None:
    before = a_run(a_record("a"), a_record("b", Verdict.FAILED), a_record("c"), a_record("d"))
    after = a_run(a_record("a", Verdict.FAILED), a_record("b"), with_calls(a_record("c"), 9), a_record("e"))
    assert [group.news for group in groups(compared(before, after))] == [
        News.WORSE,
        News.BETTER,
        News.COMMUNICATION,
        News.NEW,
        News.GONE,
    ]


# Differences that make runs hard to compare


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engines": ("torch.fsdp2", "torch.ddp", "mine")}, "engines in B only: mine"),
        ({"worlds": ("threads:4",)}, "worlds in A only: processes:2"),
        ({"seed": 7}, "schedule seeds differ (0, 7)"),
        ({"num_schedules": 20}, "numbers of schedules differ (1, 20)"),
        ({"is_thorough": True}, "only B was made with --thorough"),
        (
            {"expectations": Expectations(source="", today="", entries=(ENTRY,))},
            "A was made without known failures",
        ),
    ],
)
@pytest.mark.parametrize("show", RENDERERS, ids=lambda show: show.__name__)
def test_runs_made_differently_are_compared_with_a_warning(
    show: Callable[[Comparison], str], changes: dict[str, object], words: str
) -> None:
    found = compared(a_run(a_record()), with_header(a_run(a_record()), **changes))
    assert found.changes == ()
    assert len(found.warnings) == 1
    assert words in found.warnings[0]
    assert words in show(found).replace("\\", "").replace("\n  ", " ")


def test_other_known_failures_are_a_warning_wherever_the_file_is() -> None:
    def expecting(source: str, *numbers: int) -> Run:
        entries = tuple(
            replace(ENTRY, case=f"parity/{n}", number=place) for place, n in enumerate(numbers, start=1)
        )
        return with_header(
            a_run(), expectations=Expectations(source=source, today="2030-01-01", entries=entries)
        )

    assert compared(expecting("a", 1, 2), expecting("b", 2, 1)).warnings == ()
    assert compared(expecting("a", 1, 2), expecting("a", 2, 3, 4)).warnings == (
        "known failures differ: 1 entries in A only, 2 in B only",
    )


def test_an_interrupted_run_is_compared_with_a_warning() -> None:
    found = compared(
        a_run(a_record("a"), a_record("b")), a_run(a_record("a"), footer=None, problems=("cut",))
    )
    assert found.warnings == (
        "B was interrupted: records missing there may only not have been reached",
        "B: cut",
    )
    assert [change.news for change in found.changes] == [(News.GONE,)]


def test_only_the_engines_asked_for_are_compared() -> None:
    before = a_run(a_record(), a_record(engine="mine"))
    after = a_run(a_record(verdict=Verdict.FAILED), a_record(engine="mine"))
    assert compared(before, after, engines=("mine",)).changes == ()
    assert len(compared(before, after, engines=("torch.ddp",)).changes) == 1


# Renderings


@pytest.mark.parametrize("show", RENDERERS, ids=lambda show: show.__name__)
def test_hostile_text_stays_text(show: Callable[[Comparison], str]) -> None:
    before = a_record(HOSTILE, engine=HOSTILE)
    failed = a_record(HOSTILE, Verdict.FAILED, HOSTILE, HOSTILE)
    after = with_calls(replace(failed, engine_version=HOSTILE), 9, op=HOSTILE, axis=HOSTILE)
    text = show(compared(a_run(before), with_header(a_run(after, problems=(HOSTILE,)), git_head=HOSTILE)))
    text.encode("utf-8")
    assert not set("\x00\x1b\ufffe\u202e") & set(text)
    if show is render_markdown:
        prose = re.sub(r"(`+).+?\1(?!`)", "", text)
        assert "<script" not in prose.replace("\\<", "")


@pytest.mark.parametrize("width", [40, 80, WIDTH])
def test_lines_fit_the_terminal(width: int) -> None:
    before = [a_record(f"parity/{'long_' * 40}{i}", headline="h" * 300) for i in range(40)]
    after = [a_record(r.case, Verdict.FAILED, headline="word " * 90 + "x" * i) for i, r in enumerate(before)]
    text = render(compared(a_run(*before), a_run(*after)), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "... and 10 more groups" in text


def test_markdown_fits_a_comment_and_counts_omitted_changes() -> None:
    before = [a_record(f"parity/{i}", headline="fine") for i in range(2000)]
    after = [
        a_record(r.case, Verdict.FAILED, headline=f"{'ab'[i % 2] * (i % 300 + 1)} & " * 40, world=r.world)
        for i, r in enumerate(before)
    ]
    run = with_header(a_run(*after), versions={f"p{i}": "*" * 300 for i in range(500)})
    run = replace(run, problems=tuple(f"{i} {'_' * 300}" for i in range(500)))
    text = render_markdown(compared(a_run(*before), run))
    assert len(text.encode()) < LIMIT_BYTES
    shown = text.count("PASSED -\\> FAILED")
    left_out = int(re.findall(r"left out for length: (\d+) under \*Worse\*", text)[0])
    assert shown + left_out == len(groups(compared(a_run(*before), run)))
    assert re.search(r"and \d+ more warnings", text)
    assert re.search(r"and \d+ more \|", text)
    assert "2000 records changed" in text


def test_json_has_these_fields_and_no_others() -> None:
    found = changed(a_record(), with_calls(a_record(verdict=Verdict.FAILED, expectation=ENTRY), 3))
    plain = json.loads(render_json(found))
    assert plain["version"] == VERSION == 1
    assert set(plain) == {
        "version",
        "is_changed",
        "before",
        "after",
        "settings",
        "warnings",
        "counts",
        "num_unchanged",
        "num_unmeasured",
        "changes",
    }
    assert set(plain["counts"]) == {str(n) for n in News}
    assert set(plain["before"]) == {
        "folder",
        "started_at",
        "is_interrupted",
        "engines",
        "worlds",
        "versions",
        "verdicts",
    }
    (change,) = plain["changes"]
    assert change == {
        "engine": "torch.ddp",
        "case": CASE,
        "world": "threads:4",
        "news": ["worse", "communication"],
        "before": {
            "verdict": "PASSED",
            "headline": "headline",
            "broken_laws": ["matches"],
            "engine_version": "2.13.0",
            "expectation": None,
        },
        "after": {
            "verdict": "FAILED",
            "headline": "headline",
            "broken_laws": ["matches"],
            "engine_version": "2.13.0",
            "expectation": {"verdict": "FAILED", "reason": ENTRY.reason, "link": ENTRY.link},
        },
        "communication": [
            {
                "ranks": [0, 1, 2, 3],
                "phase": "forward",
                "op": "all_gather",
                "axis": "data",
                "dtype": "float32",
                "before": {"count": 2, "num_bytes": 8},
                "after": {"count": 3, "num_bytes": 8},
            }
        ],
    }


def test_the_summary_counts_each_kind_of_news() -> None:
    assert summary(changed(a_record(), a_record())) == "Nothing changed: 1 record alike"
    assert summary(changed(a_record(), with_calls(a_record(verdict=Verdict.HUNG), 3))) == (
        "1 record changed (1 worse), 0 alike"
    )


# The command


def test_exit_codes_report_whether_a_record_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = replace(HEADER, versions={"torch": "2.15.0"})
    old = write_run(tmp_path / "old", a_record())
    same = write_run(tmp_path / "same", a_record(duration_s=3.0), header=newer)
    bad = write_run(tmp_path / "bad", a_record(verdict=Verdict.FAILED))
    assert main(["diff", old, same]) == 0
    assert "Nothing changed" in capsys.readouterr().out
    assert main(["diff", old, bad]) == 1
    assert "PASSED -> FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["old", "nowhere"], ["expected a folder with run.jsonl", "got no such folder"]),
        (["old", "."], ["expected a folder with run.jsonl", "No such file"]),
        (["old", "old"], ["expected the folders of two runs", "got the same folder twice", "try"]),
        (["old", "bad/../old"], ["got the same folder twice"]),
        (["old", "bad", "--engine", "torch.dpd"], ["--engine 'torch.dpd'", "try --engine torch.ddp"]),
    ],
)
def test_wrong_usage_is_named(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "old", a_record())
    write_run(tmp_path / "bad", a_record(verdict=Verdict.FAILED))
    monkeypatch.chdir(tmp_path)
    assert main(["diff", *arguments]) == 2
    printed = capsys.readouterr().err
    assert [word for word in words if word not in printed] == []


@pytest.mark.parametrize("form", ["terminal", "markdown", "json"])
def test_the_comparison_can_be_written_to_a_file(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, bad = (
        write_run(tmp_path / "old", a_record()),
        write_run(tmp_path / "bad", a_record(verdict=Verdict.FAILED)),
    )
    file = tmp_path / "diff.txt"
    assert main(["diff", old, bad, "--format", form, "--out", str(file)]) == 1
    assert capsys.readouterr().out == f"1 record changed (1 worse), 0 alike\nwrote {file}\n"
    assert main(["diff", old, bad, "--format", form]) == 1
    printed = capsys.readouterr().out
    assert form == "terminal" or printed == file.read_text(), "a terminal may be narrower than a file"


def test_comparing_needs_no_torch(tmp_path: Path) -> None:
    old, bad = (
        write_run(tmp_path / "old", a_record()),
        write_run(tmp_path / "bad", a_record(verdict=Verdict.FAILED)),
    )
    program = (
        "import sys; from shardproof.harness.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit('torch' if 'torch' in sys.modules else code)"
    )
    done = python("-c", program, "diff", old, bad)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
