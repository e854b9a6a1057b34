"""Timelines are read from a world's files, exported for trace viewers, and drawn as pictures."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from examples.timelines import DRAWINGS, RACES, Drawing, draw_picture, observe
from shardproof.harness.cli.main import main
from shardproof.harness.records.rank_timeline import (
    COMPUTE,
    CollectiveSpan,
    RaceMark,
    Timeline,
    TimePoint,
    UnitSpan,
    read_timeline,
)
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import RunWriter
from shardproof.reports import page
from shardproof.reports.perfetto import trace_events
from shardproof.reports.timeline_svg import draw, lay_out, pictures
from shardproof.reports.write import write_reports
from tests.pages import unpacked
from tests.sample_records import HEADER
from tests.sample_runs import a_record, a_run

Event = dict[str, Any]  # Any: JSON

# Required fields of each kind of event in the format's documentation, besides name, ph, ts, pid and tid.
NEEDED: dict[str, set[str]] = {
    "X": {"dur"},
    "M": {"args"},
    "i": {"s"},
    "b": {"id2", "cat"},
    "e": {"id2", "cat"},
    "s": {"id", "cat"},
    "t": {"id", "cat"},
    "f": {"id", "cat", "bp"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files of a world of two ranks, whose engine reads gathers before they are there."""
    world = tmp_path_factory.mktemp("world")
    observe(RACES, world)
    return world


@cache
def _timeline(folder: Path) -> Timeline:
    return read_timeline(folder)


def test_a_world_is_read_rank_by_rank(folder: Path) -> None:
    timeline = _timeline(folder)
    assert [rank.rank for rank in timeline.ranks] == [0, 1]
    for rank in timeline.ranks:
        assert rank.lanes[:2] == (COMPUTE, "all_gather_stream")
        assert rank.races
        assert {s.unit for s in rank.unit_spans} == {"", "blocks.0", "blocks.1", "blocks.2", "blocks.3"}
        assert all(s.first.at_ns <= s.last.at_ns for s in rank.unit_spans)
        assert any(p.landed is not None for p in rank.collectives)
    assert read_timeline(folder / "nowhere").ranks == ()


def test_every_event_has_the_fields_of_the_format(folder: Path) -> None:
    events = trace_events(_timeline(folder))
    assert {e["ph"] for e in events} == set(NEEDED) - {"t"}  # with two ranks an arrow has no step
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid"} | NEEDED[event["ph"]] <= event.keys(), event
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        assert event.get("s") in {None, "t"}
    json.dumps(events, allow_nan=False)
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events} <= names


def test_times_are_microseconds_from_the_first(folder: Path) -> None:
    timeline = _timeline(folder)
    events = trace_events(timeline)
    assert min(e["ts"] for e in events) == 0
    spell, *_ = timeline.ranks[0].unit_spans
    of_first_rank = min(e["pid"] for e in events)
    slices = [e for e in events if e["ph"] == "X" and e["cat"] == "compute" and e["pid"] == of_first_rank]
    first = min(slices, key=lambda e: e["ts"])
    assert first["dur"] == pytest.approx((spell.last.at_ns - spell.first.at_ns) / 1000)


def test_ends_match_beginnings_and_arrows_start_and_end_in_slices(folder: Path) -> None:
    events = trace_events(_timeline(folder))
    by_id: dict[tuple[str, object], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "bestf":
            by_id[event["cat"], _identifier(event)].append(event)
    assert {cat for cat, _ in by_id} == {"collective", "flight", "ranks", "race"}
    for same_id in by_id.values():
        kinds = "".join(e["ph"] for e in same_id)
        assert kinds in {"be", "sf"} or set(kinds[1:-1]) == {"t"}, kinds
        assert len({e["name"] for e in same_id}) == 1
    slices = [(e["pid"], e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"]
    for event in (e for e in events if e["ph"] in "stf"):
        place = (event["pid"], event["tid"])
        assert any(place == (p, t) and a <= event["ts"] <= b for p, t, a, b in slices), event


def _identifier(event: Event) -> object:
    """An arrow may lead from process to process, an asynchronous event stays in its own."""
    return event["id"] if "id" in event else (event["pid"], event["id2"]["local"])


def test_perfetto_takes_the_identifiers(folder: Path) -> None:
    """Perfetto takes numbers for arrows, one thread for a tid whatever the process, and no thread for tid 0."""
    events = trace_events(_timeline(folder))
    assert all(type(e["id"]) is int for e in events if e["ph"] in "stf")
    assert all(int(e["id2"]["local"], 16) >= 0 for e in events if e["ph"] in "be")
    process_of = {e["tid"]: e["pid"] for e in events}
    assert 0 not in process_of
    assert {(e["pid"], e["tid"]) for e in events} == {(pid, tid) for tid, pid in process_of.items()}


def _crowded(timeline: Timeline) -> Timeline:
    """Return events that follow within nanoseconds, so that an instant event has no room."""

    def at_once(moment: TimePoint) -> TimePoint:
        return replace(moment, at_ns=moment.place)

    def spell(it: UnitSpan) -> UnitSpan:
        return replace(it, first=at_once(it.first), last=at_once(it.last))

    def collective(it: CollectiveSpan) -> CollectiveSpan:
        return replace(it, issued=at_once(it.issued), landed=it.landed and at_once(it.landed))

    def clash(it: RaceMark) -> RaceMark:
        return replace(it, first=at_once(it.first), second=at_once(it.second))

    return Timeline(
        ranks=tuple(
            replace(
                rank,
                phases=tuple(map(spell, rank.phases)),
                unit_spans=tuple(map(spell, rank.unit_spans)),
                collectives=tuple(map(collective, rank.collectives)),
                races=tuple(map(clash, rank.races)),
            )
            for rank in timeline.ranks
        )
    )


@pytest.mark.parametrize("change", [lambda t: t, _crowded], ids=["as_it_was", "crowded"])
def test_slices_of_a_thread_nest(folder: Path, change: Callable[[Timeline], Timeline]) -> None:
    """Viewers drop a slice that begins inside another and ends after it."""
    threads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in trace_events(change(_timeline(folder))):
        if event["ph"] == "X":
            first, last = (round(1000 * us) for us in (event["ts"], event["ts"] + event["dur"]))
            threads[event["tid"]].append((first, last))
    for slices in threads.values():
        ends: list[int] = []
        for first, last in sorted(slices, key=lambda s: (s[0], -s[1])):
            ends = [end for end in ends if end > first]
            assert all(last <= end for end in ends)
            ends.append(last)


def test_both_touches_of_each_race_are_marked(folder: Path) -> None:
    timeline = _timeline(folder)
    instants = [e for e in trace_events(timeline) if e["ph"] == "i"]
    assert len(instants) == 2 * sum(len(rank.races) for rank in timeline.ranks)
    assert {e["args"]["race"] for e in instants} == {str(c.race) for r in timeline.ranks for c in r.races}


def test_the_same_collective_is_in_the_same_column_of_every_rank(folder: Path) -> None:
    timeline = _timeline(folder).of_step(1)
    layout = lay_out(timeline)
    columns = defaultdict(set)
    for rank in timeline.ranks:
        places = [s.first.place for s in rank.unit_spans]
        assert [layout.column(rank.rank, p) for p in sorted(places)] == sorted(
            layout.column(rank.rank, p) for p in places
        )
        for collective in rank.collectives:
            columns[collective.key].add(layout.column(rank.rank, collective.issued.place))
    assert columns
    assert all(len(found) == 1 for found in columns.values())


def test_ranks_that_disagree_are_drawn(folder: Path) -> None:
    timeline = _timeline(folder).of_step(1)
    one, other = timeline.ranks
    part = Timeline(ranks=(one, replace(other, collectives=other.collectives[3:])))
    assert lay_out(part).width > 0
    assert lay_out(Timeline(ranks=(one,))).width > 0


def test_a_picture_is_whole_and_shows_the_race(folder: Path) -> None:
    picture = draw(_timeline(folder))
    root = ElementTree.fromstring(picture)
    assert root.tag.endswith("svg")
    assert picture.count('class="touch"') == 2 * picture.count('class="clash"') > 0
    assert "reuse of released memory" in picture
    assert len(picture) < 60_000
    assert draw(Timeline(ranks=())) == ""


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: drawing.file.stem)
def test_the_pictures_of_pages_match_those_of_runs(drawing: Drawing, tmp_path: Path) -> None:
    drawn = draw_picture(observe(drawing, tmp_path))
    assert drawing.file.read_text(encoding="utf-8") == drawn, "run python -m examples.timelines, and look"


def _kept_run(folder: Path, path: Path) -> Record:
    writer = RunWriter(path, HEADER)
    (path / "observations").mkdir()
    (path / "observations" / "it").symlink_to(folder)
    record = a_record("races/x.py::test_it[one]", Verdict.FAILED)
    kept = replace(record, observation="observations/it")
    writer.append(kept)
    return kept


def test_the_page_draws_failures(folder: Path, tmp_path: Path) -> None:
    record = _kept_run(folder, tmp_path / "run")
    run = a_run(record)
    drawn = pictures(run, tmp_path / "run").drawn
    assert list(drawn) == [record.key]
    assert 'class="touch"' in unpacked(page.render(run, drawn))
    assert "<svg" not in unpacked(page.render(run))
    write_reports(tmp_path / "run")
    assert 'class="touch"' in unpacked((tmp_path / "run" / "report.html").read_text())


def test_the_command_writes_the_trace(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _kept_run(folder, tmp_path / "run")
    out = tmp_path / "trace.json"
    assert (
        main(["timeline", str(tmp_path / "run"), "--case", "test_it", "--rank", "1", "--out", str(out)]) == 0
    )
    trace = json.loads(out.read_text())
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 1"]
    assert len({e["pid"] for e in trace["traceEvents"]}) == 1
    assert "race(s)" in capsys.readouterr().out
    assert main(["timeline", str(tmp_path / "run"), "--case", "test_if"]) == 2
    assert "try --case 'races/x.py::test_it[one]'" in capsys.readouterr().err
    assert main(["timeline", str(tmp_path / "run"), "--rank", "7"]) == 2
    assert "got those of rank(s) [0, 1]" in capsys.readouterr().err
