"""A rank's course is read as it was written, in one order with calls and waits, and is no part of the ledger."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from shardproof.engine.contract import Plan, Roots, UnitDtypes
from shardproof.harness.tracing.codec import encode
from shardproof.harness.tracing.events import (
    EventKind,
    EventLog,
    TraceEvent,
    collectives_in_flight,
    compute_spans,
)
from shardproof.harness.tracing.journal import read_journal
from shardproof.harness.tracing.ledger import CallSummary, Op, Phase
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.tracing.unit_hooks import ComputeDtypes, watching_units


def a_call() -> CallSummary:
    return CallSummary(
        op=Op.ALL_GATHER,
        group_name="g",
        group=(0, 1),
        dtype="float32",
        shapes=((2,),),
        num_bytes=16,
        reduce_op=None,
        peer=None,
        is_async=True,
        site="engine.py:1",
    )


def names_of(events: EventLog) -> list[str]:
    return [event.what.name + (f" {event.unit}" if event.unit else "") for event in events]


def test_marks_calls_and_waits_lie_in_one_order(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "journal")
    with recorder.during(Phase.FORWARD, step=3, microbatch=1):
        recorder.enter_unit("a")
        seq = recorder.issued(a_call())
        recorder.mark(EventKind.PLACED, seq=seq, stream="s")
        recorder.mark(EventKind.COMPUTES, "a")
        recorder.waited(seq)
        recorder.leave_unit("a")
    recorder.close()
    events = read_journal(tmp_path / "journal").events
    order = ["BEGAN", "ENTERED a", "ISSUED a", "PLACED", "COMPUTES a", "WAITED", "LEFT a", "ENDED"]
    assert names_of(events) == order
    assert {(m.phase, m.step, m.microbatch) for m in events} == {(Phase.FORWARD, 3, 1)}
    assert [m.seq for m in events if m.seq is not None] == [0, 0, 0]
    assert events[3].stream == "s"
    times = [m.at_ns for m in events]
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize("group", [(0, 1), tuple(range(0, 400, 2))], ids=["short", "long"])
def test_an_entry_is_written_as_the_codec_writes_it(tmp_path: Path, group: tuple[int, ...]) -> None:
    recorder = Recorder(tmp_path / "journal")
    with recorder.during(Phase.BACKWARD, step=1, microbatch=0):
        recorder.enter_unit("a")
        recorder.issued(replace(a_call(), group=group))
    recorder.close()
    lines = map(json.loads, (tmp_path / "journal").read_text().splitlines())
    (written,) = (line["entry"] for line in lines if "entry" in line)
    (entry,) = read_journal(tmp_path / "journal").ledger
    assert written == json.loads(json.dumps(encode(entry)))
    assert list(written) == list(encode(entry))


def test_times_and_marks_are_no_part_of_the_ledger(tmp_path: Path) -> None:
    for name, events in (("plain", 0), ("marked", 5)):
        recorder = Recorder(tmp_path / name)
        seq = recorder.issued(a_call())
        for _ in range(events):
            recorder.mark(EventKind.COMPUTES, "a")
        recorder.waited(seq)
        recorder.close()
    assert read_journal(tmp_path / "plain").ledger == read_journal(tmp_path / "marked").ledger


def test_the_last_call_of_a_killed_rank_is_recorded_with_the_marks_before_it(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "journal")
    recorder.mark(EventKind.COMPUTES, "a")
    recorder.issued(a_call())
    recorder.mark(EventKind.LEFT, "a")  # never written: nothing was called after it
    assert names_of(read_journal(tmp_path / "journal").events) == ["COMPUTES a", "ISSUED"]
    recorder.close()


def test_a_watcher_looks_before_each_call_and_mark_but_not_while_the_harness_reads(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "journal")
    with recorder.watched_by(lambda: recorder.note(EventKind.RESHARDED, "a")):
        recorder.issued(a_call())
        with recorder.during(Phase.OBSERVE):
            recorder.issued(a_call())
    recorder.issued(a_call())
    recorder.close()
    looked = names_of(read_journal(tmp_path / "journal").events)
    assert looked == ["RESHARDED a", "ISSUED", "BEGAN", "ISSUED", "ENDED", "ISSUED"]


def events(*words: str) -> EventLog:
    """Write a course: ``computes a`` and the like, in backward where a word is in capitals."""
    made = []
    for at, word in enumerate(words):
        what, _, unit = word.partition(" ")
        phase = Phase.BACKWARD if what.isupper() else Phase.FORWARD
        made.append(
            TraceEvent(
                what=EventKind[what.upper()], at_ns=at, phase=phase, step=0, microbatch=0, unit=unit or None
            )
        )
    return tuple(made)


@pytest.mark.parametrize(
    ("course", "expected"),
    [
        pytest.param(
            "entered a, computes a, left a", [("a", 1, 2)], id="a unit computes when hooks are through"
        ),
        pytest.param(
            "entered a, computes a, entered b, computes b, left b, left a",
            [("a", 1, 2), ("b", 3, 4), ("a", 4, 5)],
            id="a unit around another computes before and after it",
        ),
        pytest.param(
            "BEGAN, BACKWARD_ENTERED b, BACKWARD_STARTED b, BACKWARD_ENDED b, BACKWARD_ENTERED a, "
            "BACKWARD_STARTED a, ENDED",
            [("b", 2, 3), ("a", 5, 6)],
            id="backward ends with the gradients of inputs or the phase",
        ),
        pytest.param(
            "BACKWARD_ENTERED b, BACKWARD_STARTED b, BACKWARD_ENTERED a, BACKWARD_STARTED a, BACKWARD_ENDED a, "
            "BACKWARD_ENDED b",
            [("b", 1, 2), ("a", 3, 4)],
            id="another unit's turn ends backward too",
        ),
        pytest.param(
            "BACKWARD_ENTERED a, BACKWARD_STARTED a, ENTERED a, COMPUTES a, LEFT a, BACKWARD_ENDED a",
            [("a", 1, 2), ("a", 3, 4), ("a", 4, 5)],
            id="a forward that runs again is part of backward",
        ),
        pytest.param(
            "BACKWARD_ENTERED a, BACKWARD_STARTED a, ENTERED a, COMPUTES a, BACKWARD_ENDED a, BACKWARD_ENTERED b",
            [("a", 1, 2), ("a", 3, 4)],
            id="one that is broken off as well",
        ),
        pytest.param("computes a, left a, BACKWARD_ENDED a, BACKWARD_STARTED b", [], id="strays are none"),
    ],
)
def test_stretches_of_compute(course: str, expected: list[tuple[str, int, int]]) -> None:
    assert [(s.unit, s.first, s.last) for s in compute_spans(events(*course.split(", ")))] == expected


def test_watched_streams_decide_the_end_of_a_flight(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "journal")
    first, second = recorder.issued(a_call()), recorder.issued(a_call())
    recorder.waited(first)
    recorder.close()
    unwatched = collectives_in_flight(read_journal(tmp_path / "journal").events)
    assert [(f.seq, f.issued, f.landed) for f in unwatched] == [(0, 0, 2), (1, 1, None)]
    recorder = Recorder(tmp_path / "journal")
    recorder.mark(EventKind.JOINED, seq=second)
    recorder.close()
    watched = collectives_in_flight(read_journal(tmp_path / "journal").events)
    assert [(f.seq, f.landed) for f in watched] == [(0, None), (1, 3)]


class _Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(rows))


def test_units_record_when_they_compute(tmp_path: Path) -> None:
    model = nn.Sequential(_Tanh(), _Tanh())
    recorder = Recorder(tmp_path / "journal")
    with watching_units(model, ("0", "1"), recorder):
        rows = torch.ones(1, 2)
        with recorder.during(Phase.FORWARD, step=0):
            loss = model(rows).sum()
        with recorder.during(Phase.BACKWARD, step=0):
            loss.backward()
    recorder.close()
    events = read_journal(tmp_path / "journal").events
    computed = [(s.unit, s.is_backward) for s in compute_spans(events)]
    # The root returns its last child's output, so that its backward is not recorded.
    assert [c for c in computed if c[0]] == [("0", False), ("1", False), ("1", True), ("0", True)]


def test_the_dtypes_in_which_units_compute_are_those_of_their_own_parameters() -> None:
    inner, last = nn.Linear(2, 2).double(), nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), inner), last)
    seen = ComputeDtypes()
    with seen.watching(model, Plan(units=("0.1", "0"), ignored=("1.bias",))):
        last(torch.ones(1, 2))  # no unit
        assert seen.take() == []
        inner(torch.ones(1, 2).double())
        assert seen.take() == [("0.1", torch.float64)]
        with pytest.raises(RuntimeError), torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(1, 3))  # hooks come before the error
        assert seen.take() == [("", torch.bfloat16), ("0", torch.bfloat16)]
        last.bias.data = last.bias.data.double()
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 3))
        assert seen.take() == [("", torch.float32), ("0", torch.float32)]
    inner(torch.ones(1, 2).double())
    assert seen.take() == []


def test_parts_of_one_unit_compute_in_its_dtype() -> None:
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ComputeDtypes()
    with seen.watching(model, Plan(units=("0,1",))):
        model(torch.ones(1, 2))
    assert seen.take() == [("", torch.float32), ("0,1", torch.float32)]  # the root by what it is given


def test_a_unit_is_given_numbers_in_its_dtype_unless_the_plan_leaves_them_as_they_are() -> None:
    model, seen = nn.Sequential(nn.Identity(), nn.Identity()), ComputeDtypes()
    left = UnitDtypes(unit="1", compute_dtype=torch.bfloat16, casts_inputs=False)
    for dtypes, found in (((), [("1", torch.float64)]), ((left,), [])):
        with seen.watching(model, Plan(units=("1",), unit_dtypes=dtypes)):
            model[1](input=torch.ones(1, 2).double())
        assert seen.take() == found
    with seen.watching(model, Plan(units=("1",), roots=Roots.EACH_UNIT)):
        model(torch.ones(1, 2))
    assert seen.take() == [("1", torch.float32)]
