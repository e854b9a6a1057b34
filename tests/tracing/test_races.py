"""Races: the order of clocks, the shadow of memory, the operators that the watch sees, and reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardproof import Layout, NoRaces, Phase, Schedule, Training, Watch
from shardproof.fixtures.chain import CHAIN
from shardproof.fixtures.optimizers import SGD
from shardproof.harness.tracing.codec import decode, encode
from shardproof.harness.tracing.races import streams
from shardproof.harness.tracing.races.clock import Clock, Epoch, HappensBefore
from shardproof.harness.tracing.races.detector import RaceDetector, current_watch
from shardproof.harness.tracing.races.race_report import Race, RaceKind, RaceReport, Touch
from shardproof.harness.tracing.races.shadow import Access, Memory, Span
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.training.watches import watching
from tests.simulated_engine import evidence_of, simulate
from tests.tracing.orders import NO_ORDERS, ORDERS, Ordering, write_here_read_there

# Clocks -----------------------------------------------------------------------------------------------------


def test_a_clock_knows_its_epochs_and_all_before() -> None:
    clock = Clock({1: 3})
    assert clock.knows(Epoch(1, 3))
    assert clock.knows(Epoch(1, 2))
    assert not clock.knows(Epoch(1, 4))
    assert not clock.knows(Epoch(2, 1))


def test_joined_clocks_know_the_epochs_of_either() -> None:
    both = Clock({1: 3, 2: 1}).joined(Clock({1: 2, 3: 5}))
    assert all(both.knows(moment) for moment in (Epoch(1, 3), Epoch(2, 1), Epoch(3, 5)))
    assert not both.knows(Epoch(1, 4))


def test_an_event_orders_only_work_issued_before_it() -> None:
    order = HappensBefore()
    first, second = order.begin(), order.begin()
    before = order.moment(first)
    fired = order.signal(first)
    after = order.moment(first)
    order.wait(second, fired)
    assert order.clock(second).knows(before)
    assert not order.clock(second).knows(after)


def test_waits_are_transitive() -> None:
    order = HappensBefore()
    first, second, third = order.begin(), order.begin(), order.begin()
    start = order.moment(first)
    order.wait(second, order.signal(first))
    order.wait(third, order.signal(second))
    assert order.clock(third).knows(start)


def test_a_wait_of_the_host_orders_streams_that_begin_later() -> None:
    order = HappensBefore()
    first, second = order.begin(), order.begin()
    start = order.moment(first)
    order.host_waits(order.signal(first))
    assert order.clock(second).knows(start)
    assert order.clock(order.begin()).knows(start)


# Memory -----------------------------------------------------------------------------------------------------

WHOLE = Span(0, 8)


def _touch(operator: str, *, is_write: bool) -> Touch:
    return Touch(
        operator=operator,
        is_write=is_write,
        stream="s",
        phase=Phase.FORWARD,
        step=0,
        microbatch=0,
        unit=None,
        site="",
    )


WRITE, READ = _touch("write", is_write=True), _touch("read", is_write=False)


class _Bench:
    """A memory with one piece, key 0, and two streams; ``touch`` returns the kinds of the conflicts."""

    def __init__(self) -> None:
        self.order = HappensBefore()
        self.streams = (self.order.begin(), self.order.begin())
        self.memory = Memory()
        self.memory.allocate(0, self.streams[0])

    def touch(self, touch: Touch, stream: int, span: Span = WHOLE, key: int = 0) -> list[RaceKind]:
        timeline = self.streams[stream]
        access = Access(touch, self.order.moment(timeline), span)
        return [c.kind for c in self.memory.touch(key, access, self.order.clock(timeline))]

    def wait(self, waiting: int, awaited: int) -> None:
        self.order.wait(self.streams[waiting], self.order.signal(self.streams[awaited]))

    def renew(self, pool: int = 0) -> None:
        self.memory.release(0, self.order.clock)
        self.memory.allocate(1, self.streams[pool])


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (WRITE, READ, RaceKind.READ_AFTER_WRITE),
        (READ, WRITE, RaceKind.WRITE_AFTER_READ),
        (WRITE, WRITE, RaceKind.WRITE_AFTER_WRITE),
    ],
    ids=lambda value: str(value) if isinstance(value, RaceKind) else "",
)
def test_touches_of_two_streams_race_unless_one_waits(first: Touch, second: Touch, kind: RaceKind) -> None:
    racing, waiting = _Bench(), _Bench()
    assert racing.touch(first, 0) == []
    assert racing.touch(second, 1) == [kind]
    waiting.touch(first, 0)
    waiting.wait(1, 0)
    assert waiting.touch(second, 1) == []


def test_reads_do_not_race_nor_do_touches_of_other_bytes() -> None:
    bench = _Bench()
    assert bench.touch(WRITE, 0, Span(0, 4)) == []
    assert bench.touch(WRITE, 1, Span(4, 8)) == []
    assert bench.touch(READ, 0, Span(0, 4)) == []
    assert _Bench().touch(READ, 1) == []


def test_a_wait_before_the_touch_orders_nothing() -> None:
    bench = _Bench()
    bench.wait(1, 0)
    bench.touch(WRITE, 0)
    assert bench.touch(READ, 1) == [RaceKind.READ_AFTER_WRITE]


def test_a_read_does_not_hide_the_write_before_it() -> None:
    bench = _Bench()
    bench.touch(WRITE, 0)
    bench.touch(READ, 0)
    assert bench.touch(READ, 1) == [RaceKind.READ_AFTER_WRITE]


@pytest.mark.parametrize("part", [Span(0, 4), Span(4, 8), Span(2, 6)])
def test_a_smaller_write_does_not_hide_a_larger_one(part: Span) -> None:
    for place in (Span(0, 2), Span(6, 8)):
        bench = _Bench()
        bench.touch(WRITE, 0)
        bench.touch(WRITE, 0, part)
        assert bench.touch(READ, 1, place) == [RaceKind.READ_AFTER_WRITE] * (1 + part.meets(place))


def test_a_read_does_not_hide_that_of_another_stream() -> None:
    for first, second in ((0, 1), (1, 0)):
        bench = _Bench()
        bench.touch(READ, first)
        bench.touch(READ, second)
        assert bench.touch(WRITE, second) == [RaceKind.WRITE_AFTER_READ]


def test_unannounced_memory_was_there_before() -> None:
    bench = _Bench()
    assert not bench.memory.is_known(7)
    assert bench.touch(READ, 1, key=7) == []
    assert bench.memory.is_known(7)
    bench.memory.release(7, bench.order.clock)
    bench.memory.release(8, bench.order.clock)  # neither announced nor touched
    bench.memory.allocate(9, bench.streams[0])
    assert bench.touch(WRITE, 0, key=9) == [RaceKind.REUSE]


def test_a_touch_that_races_with_reuse_is_reported_once() -> None:
    bench = _Bench()
    bench.touch(READ, 1)
    bench.renew()
    assert bench.touch(WRITE, 0, key=1) == [RaceKind.REUSE]
    bench.memory.allocate(2, bench.streams[0])
    assert bench.touch(WRITE, 0, key=2) == []


def test_memory_is_not_reused_while_another_stream_uses_it() -> None:
    bench = _Bench()
    bench.touch(WRITE, 0)
    bench.wait(1, 0)
    bench.touch(READ, 1)
    bench.renew()
    assert bench.touch(WRITE, 0, key=1) == [RaceKind.REUSE]


def test_memory_is_reused_by_a_stream_that_has_waited() -> None:
    bench = _Bench()
    bench.touch(READ, 1)
    bench.renew()
    bench.wait(0, 1)  # after the release, before the first touch of the new life
    assert bench.touch(WRITE, 0, key=1) == []


def test_memory_is_reused_by_the_pool_that_it_came_from_alone() -> None:
    bench = _Bench()
    bench.touch(READ, 1)
    bench.renew(pool=1)
    assert bench.touch(WRITE, 0, key=1) == []


def test_the_allocator_waits_for_recorded_streams() -> None:
    bench = _Bench()
    bench.touch(READ, 1)
    bench.memory.record(0, bench.streams[1])
    bench.renew()
    assert bench.touch(WRITE, 0, key=1) == []


# The watch, on operators ------------------------------------------------------------------------------------


@contextmanager
def _watched() -> Iterator[RaceDetector]:
    with watching(frozenset({Watch.RACES}), Recorder()) as watches:
        assert watches.races is not None
        yield watches.races


def _races(body: Callable[[], object]) -> list[tuple[RaceKind, str, str]]:
    """Watch ``body``, which is one rank on its own; return each race's kind and operators."""
    with _watched() as watch:
        body()
    return [(race.kind, race.first.operator, race.second.operator) for race in watch.report().races]


def _side() -> torch.cpu.Stream:
    return torch.cpu.Stream()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_wait_orders_streams(order: Ordering) -> None:
    assert _races(lambda: write_here_read_there(torch.cpu, order)) == []


@pytest.mark.parametrize("order", NO_ORDERS.values(), ids=NO_ORDERS)
def test_streams_without_a_wait_for_the_write_race(order: Ordering) -> None:
    assert _races(lambda: write_here_read_there(torch.cpu, order)) == [
        (RaceKind.READ_AFTER_WRITE, "add_", "sum")
    ]


@pytest.mark.parametrize("is_of_module", [True, False])
def test_a_stream_of_torch_accelerator_waits_for_no_event_of_a_module(is_of_module: bool) -> None:
    def order(device: Any, here: Any, there: Any) -> None:
        recorded_on = here if is_of_module else torch.accelerator.current_stream()
        event = recorded_on.record_event()
        with device.stream(there):
            torch.accelerator.current_stream().wait_event(event)

    expected = [(RaceKind.READ_AFTER_WRITE, "add_", "sum")] if is_of_module else []
    assert _races(lambda: write_here_read_there(torch.cpu, order)) == expected


def test_unwatched_streams_are_idle_as_torchs_own() -> None:
    plain = torch.cpu.current_stream()
    with streams.tracked_streams():  # as another rank of this process wants them
        stream: Any = _side()
        assert stream.record_event() is None
        stream.wait_event(None)
        stream.wait_stream(plain)
        stream.synchronize()
        torch.cpu.synchronize()
        assert stream.query()
        assert torch.cpu.current_stream() is plain
        with torch.cpu.stream(stream):
            torch.ones(4)
        event: Any = torch.cpu.Event()
        event.record(stream)
        event.wait(stream)
        event.synchronize()
        assert event.query()
        assert event.fired is None


def test_events_order_as_streams_do() -> None:
    def body() -> None:
        side, tensor = _side(), torch.ones(4)
        current: Any = (
            torch.cpu.current_stream()
        )  # Any: a watched stream returns an event, torch's own returns None
        side.wait_event(current.record_event())
        tensor.add_(1)  # after the event
        with torch.cpu.stream(side):
            tensor.sum()

    assert _races(body) == [(RaceKind.READ_AFTER_WRITE, "add_", "sum")]


@pytest.mark.parametrize(
    ("is_read", "expected"),
    [
        (False, [(RaceKind.WRITE_AFTER_WRITE, "ones", "add_"), (RaceKind.WRITE_AFTER_READ, "sum", "add_")]),
        (True, []),
    ],
)
def test_a_read_of_the_host_orders_later_work(
    is_read: bool, expected: list[tuple[RaceKind, str, str]]
) -> None:
    def body() -> None:
        with torch.cpu.stream(_side()):
            tensor = torch.ones(4)
            total = tensor.sum()
            if is_read:
                float(total)
        tensor.add_(1)

    assert _races(body) == expected


def test_backward_and_views_are_seen() -> None:
    def body() -> None:
        side, weight = _side(), torch.ones(2, 2, requires_grad=True)
        (weight.view(4) * 2).sum().backward()
        assert weight.grad is not None
        with torch.cpu.stream(side), torch.no_grad():
            weight.grad.t()[0].zero_()

    kinds = {kind for kind, _, second in _races(body) if second == "zero_"}
    assert kinds == {RaceKind.WRITE_AFTER_WRITE}


def _let_go(*, records: bool, waits: bool = False) -> None:
    side, tensor = _side(), torch.ones(4)
    side.wait_stream(torch.cpu.current_stream())
    with torch.cpu.stream(side):
        tensor.sum()
    if records:
        streams.record_stream_of(torch.Tensor.record_stream)(tensor, side)
    if waits:
        torch.cpu.current_stream().wait_stream(side)
    del tensor
    torch.zeros(4)


def test_released_memory_is_kept_recorded_or_raced_for() -> None:
    assert _races(lambda: _let_go(records=False)) == [(RaceKind.REUSE, "sum", "zeros")]
    assert _races(lambda: _let_go(records=True)) == []
    assert _races(lambda: _let_go(records=False, waits=True)) == []


def test_calls_that_raise_for_a_stream_of_the_cpu_raise_under_a_watch_too() -> None:
    def body() -> None:
        with pytest.raises(RuntimeError, match="unknown parameter type"):
            torch.ones(4).record_stream(torch.cpu.current_stream())  # type: ignore[arg-type]

    assert _races(body) == []


@pytest.mark.parametrize("grows", [False, True])
def test_memory_that_is_asked_for_unwritten_is_reused_memory_too(grows: bool) -> None:
    def body() -> None:
        later = torch.empty(0)
        side, tensor = _side(), torch.ones(4)
        side.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(side):
            tensor.sum()
        del tensor
        if grows:
            later.untyped_storage().resize_(16)
            later.set_(later.untyped_storage(), 0, (4,))  # type: ignore[call-overload]  # its stub lacks this form
        else:
            later = torch.empty(4)
        later.fill_(1)

    assert _races(body) == [(RaceKind.REUSE, "sum", "fill_")]


def test_reads_of_the_harness_are_no_touches_and_no_collectives() -> None:
    recorder = Recorder()
    with watching(frozenset({Watch.RACES}), recorder) as watches:
        side, tensor = _side(), torch.ones(4)
        with torch.cpu.stream(side), recorder.during(Phase.OBSERVE, step=0):
            tensor.sum()
            made = torch.ones(4)
        made.sum()
    assert watches.races is not None
    report = watches.races.report()
    assert report.races == ()
    assert report.num_touches == 3  # ones writes; sum reads and writes
    assert current_watch() is None


def test_a_race_is_reported_once_and_counted() -> None:
    def body() -> None:
        side, tensor = _side(), torch.ones(4)
        for _ in range(3):
            tensor.add_(1)
            with torch.cpu.stream(side):
                tensor.sum()

    with _watched() as watch:
        body()
    assert {(race.second.operator, race.count) for race in watch.report().races} >= {("sum", 3)}


def test_memory_that_a_storage_frees_is_released() -> None:
    def body() -> None:
        side, tensor = _side(), torch.ones(4)
        side.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(side):
            tensor.sum()
        tensor.untyped_storage().resize_(0)
        torch.zeros(4)

    assert _races(body) == [(RaceKind.REUSE, "sum", "zeros")]


def test_streams_and_storages_are_torchs_own_again_afterwards() -> None:
    names = ("Stream", "Event", "stream", "current_stream", "synchronize")
    before = [vars(torch.cpu)[name] for name in names]
    with _watched():
        assert torch.get_device_module("cpu").Stream is streams.TrackedStream
    assert [vars(torch.cpu)[name] for name in names] == before
    assert "resize_" not in vars(torch.UntypedStorage)
    assert not isinstance(torch.cpu.Stream(), streams.TrackedStream)


def test_a_race_names_streams_as_the_engine_does() -> None:
    with _watched() as watch:
        copy_stream = _side()
        assert copy_stream is not None
        tensor = torch.ones(4)
        gather_stream = torch.cpu.Stream()
        with torch.cpu.stream(gather_stream):
            tensor.sum()
    (race,) = watch.report().races
    assert race.first.stream == "the default stream"
    assert race.second.stream == "stream 2 (gather_stream)"
    assert "nothing has stream 2 (gather_stream) wait for the default stream" in str(race)
    assert "tests/tracing/test_races.py" in race.second.site


# Reports and the law ----------------------------------------------------------------------------------------

RACE = Race(kind=RaceKind.REUSE, first=READ, second=WRITE, count=2)
REPORT = RaceReport(num_touches=3, num_streams=2, num_collectives=1, races=(RACE,))


def test_a_report_survives_json() -> None:
    assert decode(RaceReport, json.loads(json.dumps(encode(REPORT)))) == REPORT


@pytest.mark.parametrize(
    ("report", "is_held"),
    [
        pytest.param(REPORT, False, id="race"),
        pytest.param(replace(REPORT, races=()), True, id="silence"),
        pytest.param(None, False, id="no watch"),
        pytest.param(replace(REPORT, num_touches=0, races=()), False, id="blind watch"),
    ],
)
def test_the_law_asks_every_rank(report: RaceReport | None, is_held: bool) -> None:
    training = Training(problem=CHAIN, optimizer=SGD, schedule=Schedule(steps=1))
    first, second = simulate(training, 2, layout=Layout.REPLICATE)
    ranks = (replace(first, race_report=replace(REPORT, races=())), replace(second, race_report=report))
    record = NoRaces().judge(evidence_of(training, ranks=ranks)).record
    assert record.held is is_held
    assert is_held or "rank 1" in record.summary
