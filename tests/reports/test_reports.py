"""Reports show every record and every verdict, whatever text an engine writes into its messages."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.harness.records.hang import Side
from shardproof.harness.records.record import LawRecord, OutcomeRecord, Record, UnusedExpectation, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports import junit, markdown, page, terminal
from shardproof.reports.causes import causes
from shardproof.reports.evidence import bar, hang_steps, ledger_rows, outcome_groups, state_cards
from shardproof.reports.matrix import arrange, label
from shardproof.reports.summary import Conclusion, conclude, tally
from shardproof.reports.text import clip, duration, one_line, printable, ranks, size
from shardproof.reports.verdict_style import MARKS
from shardproof.reports.write import write_reports
from tests.pages import index_of, pieces_of, unpacked
from tests.sample_records import FOOTER, HEADER, WORST, write_run
from tests.sample_runs import CALL, ENTRY, HOSTILE, a_hang, a_record, a_run, one_of_each


def shown_page(run: Run) -> str:
    return unpacked(page.render(run))


def whole(run: Run) -> str:
    return terminal.render(run, is_verbose=True)


RENDERERS = [whole, markdown.render, junit.render, shown_page]
NAMES = ("terminal", "markdown", "junit", "page")


class _Page(HTMLParser):
    """Collects the visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.depth = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.depth += tag == "details"
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if "href" in found else []
        self.sources += [found[name] for name in ("src", "srcset", "data", "action") if name in found]
        self.sources += [name for name in found if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "details"


def test_every_verdict_has_a_mark_of_its_own() -> None:
    assert set(MARKS) == set(Verdict)
    assert len({mark.letter for mark in MARKS.values()}) == len(Verdict)
    assert len({mark.sign for mark in MARKS.values()}) == len(Verdict)
    assert all(len(mark.letter) == 1 and mark.letter.isascii() for mark in MARKS.values())


def test_what_is_not_declared_stands_beside_the_score() -> None:
    passed, opted_out = a_record("a"), a_record("b", Verdict.UNSUPPORTED)
    assert tally([passed, opted_out]).score == "1 of 1 declared passed (100.0%), 1 not declared"
    assert tally([passed] * 1999 + [a_record("b", Verdict.FAILED)]).percent == "99.9%"
    for render in RENDERERS:
        assert "UNSUPPORTED" in render(a_run(passed, opted_out))
    for render in (whole, markdown.render, shown_page):
        assert "1 not declared" in render(a_run(passed, opted_out))


@pytest.mark.parametrize("verdict", Verdict)
def test_a_run_concludes_as_its_worst_verdict(verdict: Verdict) -> None:
    expected = Conclusion.CONFORMING if verdict.is_conforming else Conclusion.NOT_CONFORMING
    assert conclude(a_run(a_record("a"), a_record("b", verdict))) is expected


@pytest.mark.parametrize("render", RENDERERS, ids=NAMES)
def test_a_known_failure_is_reported_with_its_reason_and_apart_from_passes(
    render: Callable[[Run], str],
) -> None:
    known = a_record("parity/b", Verdict.KNOWN_FAILURE, expectation=ENTRY)
    text = render(a_run(a_record("parity/a"), known))
    for words in ("KNOWN_FAILURE", ENTRY.reason, ENTRY.link, "2031-02-03"):
        assert words in text, words
    assert ENTRY.reason not in render(a_run(a_record("parity/a"), a_record("parity/b")))
    assert tally([a_record(), known]).score == "1 of 2 declared passed (50.0%)"
    assert conclude(a_run(a_record(), known)) is Conclusion.CONFORMING


@pytest.mark.parametrize("render", RENDERERS, ids=NAMES)
def test_a_stale_expectation_makes_a_run_red_and_an_idle_one_does_not(render: Callable[[Run], str]) -> None:
    def ending(*, is_stale: bool) -> Run:
        unused = UnusedExpectation(expectation=ENTRY, why="unused because", is_stale=is_stale)
        return a_run(a_record(), footer=replace(FOOTER, unused=(unused,)))

    stale, idle = ending(is_stale=True), ending(is_stale=False)
    assert (conclude(stale), conclude(idle)) == (Conclusion.NOT_CONFORMING, Conclusion.CONFORMING)
    assert "unused because" in render(stale)
    assert render is junit.render or "unused because" in render(idle)
    failures = [ElementTree.fromstring(junit.render(run)).get("failures") for run in (stale, idle)]
    assert failures == ["1", "0"]


@pytest.mark.parametrize("render", RENDERERS, ids=NAMES)
def test_gradients_shown_as_zeros_are_counted_for_each_engine(render: Callable[[Run], str]) -> None:
    shown = [a_record(case, engine="flat", declared_zeros=n) for case, n in (("p/a", 4), ("p/b", 3))]
    text = render(a_run(*shown, a_record("p/c")))
    words = "flat: 7 gradients in 2 records are zeros instead of None"
    assert (words in text) is (render is not junit.render)
    assert "zeros instead of None" not in render(a_run(a_record("p/c")))


def test_the_share_of_records_that_a_law_judged_is_a_table() -> None:
    silent = LawRecord(law="reads are silent", held=True, summary="")
    run = a_run(a_record("p/a", laws=(silent,)), a_record("p/b"), a_record("p/c", laws=()))
    assert "| reads are silent | 1 of 2 | 50% |" in markdown.render(run)


def test_only_an_address_becomes_a_link() -> None:
    for link in ("javascript:alert(1)", 'https://x" onclick="y', "https://x y", HOSTILE):
        record = a_record(verdict=Verdict.KNOWN_FAILURE, expectation=replace(ENTRY, link=link))
        seen = _Page(shown_page(a_run(record)))
        assert all(found.startswith("#") for found in seen.links), seen.links
        assert seen.sources == []
    record = a_record(verdict=Verdict.KNOWN_FAILURE, expectation=ENTRY)
    assert ENTRY.link in _Page(shown_page(a_run(record))).links
    assert f"<{ENTRY.link}>" in markdown.render(a_run(record))


def test_a_run_that_is_not_whole_does_not_conform() -> None:
    assert conclude(a_run(a_record(), footer=None)) is Conclusion.INCOMPLETE
    assert conclude(a_run(a_record(), problems=("a record is missing",))) is Conclusion.INCOMPLETE
    assert conclude(a_run()) is Conclusion.EMPTY


@pytest.mark.parametrize("render", RENDERERS, ids=NAMES)
def test_interruption_and_problems_are_reported(render: Callable[[Run], str]) -> None:
    text = render(a_run(a_record(), footer=None, problems=("a record is missing",)))
    assert "interrupted" in text
    assert "a record is missing" in text
    assert "interrupted" not in render(a_run(a_record()))


@pytest.mark.parametrize("render", RENDERERS, ids=NAMES)
def test_a_record_that_does_not_conform_is_reported_with_its_headline(render: Callable[[Run], str]) -> None:
    text = render(one_of_each()).replace("\\", "")
    for verdict in Verdict:
        assert str(verdict) in text
        assert verdict.is_conforming or f"headline of {verdict}" in text


def test_every_record_is_in_exactly_one_cell() -> None:
    run = a_run(
        a_record("parity/b"), a_record("parity/a"), a_record("parity/b", engine="torch.fsdp2"), a_record("x")
    )
    matrix = arrange(run)
    assert [column.engine for column in matrix.columns] == ["torch.fsdp2", "torch.ddp"], "the header's order"
    rows = {row.case: [len(cell) for cell in row.cells] for suite in matrix.suites for row in suite.rows}
    assert rows == {"parity/b": [1, 1], "parity/a": [0, 1], "x": [0, 1]}


def test_two_records_of_one_cell_are_both_shown() -> None:
    run = a_run(a_record(), a_record(verdict=Verdict.FAILED))
    assert ".F" in whole(run)
    assert "`.F`" not in markdown.render(a_run(a_record()))
    assert "`.F`" in markdown.render(run)
    index = index_of(page.render(run))
    assert [record[:2] for record in index["records"]] == [[0, 0], [0, 0]]


def test_the_terminal_matrix_reads_line_by_line() -> None:
    lines = whole(a_run(a_record(), a_record(engine="torch.fsdp2", verdict=Verdict.HUNG))).splitlines()
    row = next(line for line in lines if "single::matches[mlp]" in line)
    assert row.split() == ["single::matches[mlp]", "H", "."]
    assert lines[-1] == "Not conforming: 1 of 2 declared passed (50.0%) in 1 min 00 s, 1 not conforming"


def test_a_label_distinguishes_a_case_from_its_neighbours() -> None:
    assert label("parity/test_x.py::test_y[a-b]", "parity") == "x::y[a-b]"
    assert label("parity/free-form", "parity") == "free-form"


def test_junit_counts_its_elements() -> None:
    root = ElementTree.fromstring(junit.render(one_of_each()))
    kinds = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    assert kinds == {
        f"parity/case-{v}": []
        if v is Verdict.PASSED
        else ["skipped"]
        if v.is_conforming
        else ["error"]
        if v is Verdict.ERRORED
        else ["failure"]
        for v in Verdict
    }
    for suite in (root, *root.iter("testsuite")):
        assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["11", "7", "1"]
    assert [suite.get("skipped") for suite in root.iter("testsuite")] == ["2"]
    assert root.get("skipped") is None, "which Jenkins' schema does not have"


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(), max_size=60))
def test_junit_is_xml_for_any_text_of_an_engine(message: str) -> None:
    record = a_record(message, Verdict.CRASHED, engine=message, headline=message, duration_s=math.nan)
    run = a_run(
        replace(record, outcomes=(OutcomeRecord(rank=0, kind=message, text=message),)), problems=(message,)
    )
    text = junit.render(run)
    root = ElementTree.fromstring(text.encode("utf-8"))
    assert root.get("tests") == "2"


@pytest.mark.parametrize("render", RENDERERS, ids=NAMES)
def test_hostile_text_stays_text(render: Callable[[Run], str]) -> None:
    record = a_record(
        HOSTILE,
        Verdict.FAILED,
        HOSTILE,
        HOSTILE,
        suite=HOSTILE,
        worst=replace(WORST, name=HOSTILE, looks_like=HOSTILE),
        laws=(LawRecord(law=HOSTILE, held=False, summary=HOSTILE, details=(HOSTILE,)),),
        outcomes=(OutcomeRecord(rank=0, kind=HOSTILE, text=HOSTILE),),
        hang=a_hang(HOSTILE),
        command=HOSTILE,
        expectation=replace(ENTRY, reason=HOSTILE, link=HOSTILE, expiry=HOSTILE),
    )
    text = render(a_run(record, problems=(HOSTILE,)))
    text.encode("utf-8")
    assert not set("\x00\x1b\ufffe\u202e") & set(text)
    if render is not shown_page:
        return
    seen, clean = _Page(text), _Page(shown_page(a_run(a_record(verdict=Verdict.FAILED), problems=("p",))))
    assert seen.tags.count("script") == clean.tags.count("script") == 3, "the index, one piece, the program"
    assert seen.depth == 0


@pytest.mark.parametrize("render", RENDERERS, ids=NAMES)
def test_a_hang_report_folds_ranks_in_one_state(render: Callable[[Run], str]) -> None:
    record = a_record(verdict=Verdict.HUNG, hang=a_hang("engine.py:7 in reduce"))
    visible_text = html.unescape(re.sub(r"</?\w[^>]*>", " ", render(a_run(record))))
    words = " ".join(visible_text.replace("\\", "").split())
    for part in (
        "ranks 0-2",
        "waiting in a call",
        "rank 3",
        "in no call",
        "all_reduce #4",
        "engine.py:7 in reduce",
        "the first difference",
        "never made one; in no call, at engine.py:7 in reduce",
        "rank 0 -> rank 3 -> rank 0",
    ):
        assert part in words, part


def test_ranks_in_one_state_are_folded_and_suspects_come_last() -> None:
    blamed_first = replace(a_hang("x"), suspects=(0, 1, 2))
    assert [p.ranks for p in state_cards(blamed_first)] == ["rank 3", "ranks 0-2"]
    assert [p.is_suspect for p in state_cards(blamed_first)] == [False, True]
    assert [dict(p.facts).get("waits for") for p in state_cards(a_hang("x"))] == ["rank 3", None]


def test_straying_is_reported_before_the_difference() -> None:
    hang = a_hang("x")
    assert hang.difference is not None
    early = replace(CALL, position=2)
    desynchronised = (Side(ranks=(0, 1, 2), call=early), Side(ranks=(3,), call=replace(early, step=3)))
    astray = replace(hang, difference=replace(hang.difference, desynchronised=desynchronised))
    assert [step.number for step in hang_steps(astray)] == ["#2", "#4"]
    assert [step.number for step in hang_steps(hang)] == ["#3", "#4"]
    assert [names for names, _ in hang_steps(astray)[0].sides] == ["ranks 0-2", "rank 3"]
    assert hang_steps(replace(hang, difference=None)) == ()


def test_markdown_tables_survive_pipes() -> None:
    text = markdown.render(a_run(a_record("a|b`c|d", Verdict.FAILED)))
    row = next(line for line in text.splitlines() if line.startswith("| `") and "a" in line and "c" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 3


def test_markdown_fits_the_limit_of_a_forge_and_keeps_failures() -> None:
    passing = [a_record(f"parity/passing-{i}" + "x" * 90, headline="\u20ac" * 300) for i in range(4000)]
    failing = [a_record(f"parity/failing-{i}", Verdict.FAILED, headline=f"fault {i}.") for i in range(50)]
    text = markdown.render(a_run(*passing, *failing))
    assert len(text.encode()) <= markdown.LIMIT_BYTES
    assert all(f"fault {i}." in text for i in range(50))
    match = re.search(r"Left out for length: the detail of (\d+) PASSED\.", text)
    assert match is not None
    assert int(match[1]) + len(re.findall("^- .*passing-", text, re.M)) == 4000
    assert "4000 PASSED" in text


def test_markdown_counts_failures_that_do_not_fit() -> None:
    stack = "x" * 4000
    failing = [
        a_record(
            f"parity/{i}",
            Verdict.CRASHED,
            outcomes=tuple(OutcomeRecord(rank=r, kind="Raised", text=f"{r}{stack}") for r in range(8)),
        )
        for i in range(100)
    ]
    text = markdown.render(a_run(*failing))
    assert len(text.encode()) <= markdown.LIMIT_BYTES
    match = re.search(r"the detail of (\d+) CRASHED", text)
    assert match is not None
    assert int(match[1]) + text.count("\n### `") == 100


def test_markdown_stays_small_with_any_header() -> None:
    huge = "|" * 300_000
    header = replace(HEADER, command=huge, versions={huge: huge}, git_head=huge)
    run = Run(
        header=header,
        records=(a_record(huge, Verdict.FAILED, huge, huge),),
        footer=None,
        problems=(huge,) * 200,
    )
    assert len(markdown.render(run).encode()) <= markdown.LIMIT_BYTES


def test_the_page_needs_nothing_but_itself() -> None:
    text = shown_page(one_of_each())
    seen = _Page(text)
    assert seen.sources == []
    assert all(link.startswith("#") for link in seen.links)
    assert not {"link", "img", "iframe", "base", "object"} & set(seen.tags)
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_the_index_leads_from_each_cell_to_its_evidence() -> None:
    records = [a_record(f"parity/{i}", list(Verdict)[i % len(Verdict)]) for i in range(300)]
    text = page.render(a_run(*records))
    index = index_of(text)
    cases = [case for suite in index["suites"] for _, case in suite["cases"]]
    pieces = pieces_of(text)
    assert len(index["records"]) == sum(map(len, pieces)) == 300
    for number, (row, column, verdict, *_) in enumerate(index["records"]):
        evidence = pieces[number // index["perPiece"]][number % index["perPiece"]]
        assert f"<code>{cases[row]}</code>" in evidence
        record = next(r for r in records if r.case == cases[row])
        assert index["columns"][column] == [record.engine, record.world]
        assert index["verdicts"][verdict][0] == record.verdict


def test_a_record_is_found_by_its_expectation_and_its_threads() -> None:
    hang = a_hang("engine.py:7 in reduce")
    call = replace(CALL, thread="reducer-1")
    hang = replace(hang, ranks=(replace(hang.ranks[0], call=call), *hang.ranks[1:]))
    run = a_run(
        a_record("parity/a", Verdict.HUNG, hang=hang),
        a_record("parity/b", Verdict.KNOWN_FAILURE, expectation=ENTRY),
    )
    index = index_of(page.render(run))
    hung, known = (index["texts"][record[5]] for record in index["records"])
    assert "reducer-1" in hung
    assert ENTRY.reason in known
    assert ENTRY.link in known


def test_the_page_holds_the_evidence() -> None:
    text = shown_page(a_run(a_record(verdict=Verdict.FAILED)))
    for words in (
        "gradient 0.weight[2, 0] on rank 3 at step 1",
        "exactly 4 x the reference",
        "75 x what is allowed",
        "rank 2 first",
        "all 4 ranks",
        "pytest -k mlp",
        "1.0 GiB",
        "2.13.0",
    ):
        assert words in text, words


def test_a_page_of_many_records_is_small() -> None:
    records = [a_record(f"parity/{i}", list(Verdict)[i % len(Verdict)]) for i in range(2000)]
    text = page.render(a_run(*records))
    assert len(text) < 1_000_000
    assert len(_Page(text).tags) < 500, "no markup for each record"


def test_records_that_fail_alike_are_one_cause() -> None:
    alike = [
        a_record(f"parity/{i}", Verdict.FAILED, headline=f"step {i}, gradient '{i}.weight': zero")
        for i in range(18)
    ]
    other = a_record("parity/x", Verdict.FAILED, headline="the losses differ")
    elsewhere = a_record("parity/0", Verdict.FAILED, engine="torch.fsdp2", headline=alike[0].headline)
    run = a_run(*alike, other, elsewhere, a_record("parity/y"))
    folded = causes(run.records)
    assert [len(cause.records) for cause in folded] == [18, 1, 1]
    assert [cause.engine for cause in folded] == ["torch.ddp", "torch.ddp", "torch.fsdp2"]
    rendered = terminal.render(run)
    assert rendered.count("gradient '0.weight': zero") == 2, "once for each engine"
    assert "gradient '5.weight': zero" not in rendered
    assert "12 more" in rendered
    assert "all 18 records that fail alike" in page.render(run)


def test_a_different_diagnosis_is_another_cause() -> None:
    def failing(case: str, looks_like: str) -> Record:
        record = a_record(case, Verdict.FAILED, headline=f"step 0, gradient: {looks_like}; at [0]")
        return replace(record, worst=replace(WORST, looks_like=looks_like))

    run = a_run(failing("a", "zero"), failing("b", "the previous step's value (stale)"), failing("c", "zero"))
    assert [[r.case for r in cause.records] for cause in causes(run.records)] == [["a", "c"], ["b"]]


def test_the_score_is_over_what_is_declared() -> None:
    counted = tally([a_record("a"), a_record("b", Verdict.UNSUPPORTED), a_record("c", Verdict.KNOWN_FAILURE)])
    assert (counted.declared, counted.percent) == (2, "50.0%")


def test_the_ledger_is_folded_only_over_ranks_that_agree() -> None:
    whole = ledger_rows(a_record())
    assert [(row.ranks, row.is_split) for row in whole] == [("all 4 ranks", False)]
    odd = a_record().ledger
    changed = a_record(ledger=(*odd[:3], replace(odd[3], count=3)))
    assert [(row.ranks, row.count) for row in ledger_rows(changed)] == [("ranks 0-2", 2), ("rank 3", 3)]
    short = a_record(ledger=odd[:1])
    assert [row.ranks for row in ledger_rows(short)] == ["all 4 ranks"], (
        "ranks without lines did as rank 0 did"
    )
    nothing = replace(odd[3], op="none", count=0, num_bytes=0)
    idle = a_record(ledger=(*odd[:3], nothing))
    assert [(row.ranks, row.is_split) for row in ledger_rows(idle)] == [("ranks 0-2", True), ("rank 3", True)]


def test_outcomes_with_a_cause_come_first() -> None:
    ends = [("Abandoned", ""), ("Raised", "boom"), ("Abandoned", "")]
    record = a_record(outcomes=tuple(OutcomeRecord(rank=r, kind=k, text=t) for r, (k, t) in enumerate(ends)))
    assert [(g.ranks, g.kind) for g in outcome_groups(record)] == [
        ("rank 1", "Raised"),
        ("ranks 0, 2", "Abandoned"),
    ]


@pytest.mark.parametrize(
    ("ratio", "percent", "is_within"),
    [
        (0.0, 0.0, True),
        (1e-9, 0.0, True),
        (1.0, 50.0, True),
        (1.01, 50.1, False),
        (10.0, 66.7, False),
        (1e9, 100.0, False),
        (math.inf, 100.0, False),
        (math.nan, 100.0, False),
    ],
)
def test_the_bar_is_logarithmic_with_allowed_in_the_middle(
    ratio: float, percent: float, is_within: bool
) -> None:
    drawn = bar(replace(WORST, ratio=ratio))
    assert (drawn.percent, drawn.is_within) == (percent, is_within)


def test_text_is_spelt_for_people() -> None:
    assert ranks([3, 0, 1, 6]) == "ranks 0-1, 3, 6"
    assert ranks([5]) == "rank 5"
    assert [size(n) for n in (0, 1023, 1024, 3 * 2**30)] == ["0 B", "1023 B", "1.0 KiB", "3.0 GiB"]
    assert [duration(s) for s in (0.5, 61, 7200)] == ["0.50 s", "1 min 01 s", "2 h 00 min"]
    assert printable("a\x1b[1;31mb\x1b[0m\nc\td") == "ab\nc\td"
    assert one_line("a\n  b") == "a b"
    assert len(one_line("x" * 1000)) == 300
    assert clip("a" * 50 + "b" * 50, 20) == f"{'a' * 10}\n... 80 characters left out ...\n{'b' * 10}"


def test_reports_are_written_beside_the_records(tmp_path: Path) -> None:
    write_run(tmp_path, a_record(headline=HOSTILE))
    written = write_reports(tmp_path).paths
    assert [path.name for path in written] == [
        "report.html",
        "report.md",
        "junit.xml",
        "ctrf.json",
        "summary.md",
        "badge.json",
        "badge.svg",
    ]
    assert all(path.stat().st_size for path in written)
    assert write_reports(tmp_path).paths == written, "reports may be written again"
