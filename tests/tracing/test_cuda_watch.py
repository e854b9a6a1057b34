"""The watch of CUDA streams: events of torch's trace, waits of nccl, and engines and mutants under the watch.

No device is needed: torch's trace is fired by `tests.tracing.traced_streams` as C++ fires it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.cuda import _gpu_trace

from shardproof import Op, Phase, Watch
from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.harness.torch_compat import cuda as torch_cuda
from shardproof.harness.torch_compat.cuda import reporting_streams, stream_handle
from shardproof.harness.torch_compat.dispatch import device_kernel, raw_access
from shardproof.harness.tracing.collectives.call import Call
from shardproof.harness.tracing.races.clock import Clock
from shardproof.harness.tracing.races.cuda_streams import CudaRaceWatch, watched_cuda_streams
from shardproof.harness.tracing.races.race_report import RaceKind
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.training.watches import watching
from tests.ledgers import made_call
from tests.tracing.orders import NO_ORDERS, ORDERS, Ordering, write_here_read_there
from tests.tracing.test_race_mutants import EXPECTED, SHARDED, race_reports, racing_training
from tests.tracing.traced_streams import (
    TracedEvent,
    TracedStream,
    drive_traced,
    recorded_streams,
    traced_device,
)

RAW, REUSE = RaceKind.READ_AFTER_WRITE, RaceKind.REUSE
Found = list[tuple[RaceKind, str, str]]
NCCL = 77
"""The handle of the stream on which a group's collectives run."""


@contextmanager
def _watched(recorder: Recorder | None = None) -> Iterator[CudaRaceWatch]:
    asked = frozenset({Watch.RACES})
    with traced_device(), watching(asked, recorder or Recorder(), "cuda") as watches:
        assert isinstance(watches.races, CudaRaceWatch)
        yield watches.races


def _races(body: Callable[[CudaRaceWatch], object]) -> Found:
    with _watched() as watch:
        body(watch)
    return [(race.kind, race.first.operator, race.second.operator) for race in watch.report().races]


def _stream() -> Any:
    return TracedStream()  # Any: torch would have its own type, which needs a device


# Streams, events and the host ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_wait_orders_streams(order: Ordering) -> None:
    assert _races(lambda _: write_here_read_there(torch.cuda, order)) == []


@pytest.mark.parametrize("order", NO_ORDERS.values(), ids=NO_ORDERS)
def test_streams_without_a_wait_for_the_write_race(order: Ordering) -> None:
    assert _races(lambda _: write_here_read_there(torch.cuda, order)) == [(RAW, "add_", "sum")]


def test_an_event_is_its_last_record_and_a_new_one_by_an_old_handle_is_none() -> None:
    def recorded_again(_: CudaRaceWatch) -> None:
        side, tensor, event = _stream(), torch.ones(4), TracedEvent()
        event.record()
        tensor.add_(1)
        event.record()
        side.wait_event(event)
        with torch.cuda.stream(side):
            tensor.sum()

    def handed_out_again(_: CudaRaceWatch) -> None:
        side, tensor = _stream(), torch.ones(4)
        tensor.add_(1)
        ended = TracedEvent()
        ended.record()
        handle = ended.cuda_event
        del ended
        new = TracedEvent()
        assert new.cuda_event == handle
        side.wait_event(new)
        with torch.cuda.stream(side):
            tensor.sum()

    assert _races(recorded_again) == []
    assert _races(handed_out_again) == [(RAW, "add_", "sum")]


def test_waits_of_the_harness_itself_order_nothing() -> None:
    recorder = Recorder()

    def order(here: Any, there: Any) -> None:
        with recorder.during(Phase.OBSERVE, step=0):
            there.wait_stream(here)
            here.synchronize()
            here.record_event().synchronize()
            torch.cuda.synchronize()

    with _watched(recorder) as watch:
        side, tensor = _stream(), torch.ones(4)
        tensor.add_(1)
        order(torch.cuda.current_stream(), side)
        with torch.cuda.stream(side):
            tensor.sum()
    assert [race.kind for race in watch.report().races] == [RAW]


def test_waits_of_the_transport_order_nothing() -> None:
    def body(_: CudaRaceWatch) -> None:
        side, tensor = _stream(), torch.ones(4)
        tensor.add_(1)
        with raw_access():
            side.wait_stream(torch.cuda.current_stream())
            torch.cuda.synchronize()
        with torch.cuda.stream(side):
            tensor.sum()

    assert _races(body) == [(RAW, "add_", "sum")]


@pytest.mark.parametrize("is_saved", [False, True])
def test_autograd_keeps_gradients_for_the_stream_that_takes_them(is_saved: bool) -> None:
    """A node runs on the stream of its forward; memory that autograd did not make, it does not keep."""

    def body(_: CudaRaceWatch) -> None:
        side, main = _stream(), torch.cuda.current_stream()
        leaf, factor = torch.ones(4, requires_grad=True), torch.ones(4)
        product = leaf * (factor if is_saved else 2.0)

        def go_to_side(gradient: torch.Tensor) -> None:
            side.wait_stream(main)
            selected.enter_context(torch.cuda.stream(side))

        product.register_hook(go_to_side)
        with ExitStack() as selected:
            (product * product.detach()).sum().backward()
        leaf.grad = None
        del factor, product
        torch.zeros(4)

    kinds = [kind for kind, *_ in _races(body)]
    assert kinds == ([REUSE] if is_saved else [])


def test_streams_go_by_the_names_that_the_engine_gave_them() -> None:
    unheard_of = _stream()
    with _watched() as watch:
        copy_stream = torch.cuda.Stream()
        with torch.cuda.stream(copy_stream):
            tensor = torch.ones(4)
        with torch.cuda.stream(unheard_of):
            tensor.sum()
        tensor.add_(1)
    names = {touch.stream for race in watch.report().races for touch in (race.first, race.second)}
    assert names == {"the default stream", "stream 1 (copy_stream)", "stream 2"}
    assert watch.report().num_streams == 3


def test_the_current_stream_is_torchs_own() -> None:
    with _watched() as watch, pytest.raises(AttributeError, match=r"torch\.cuda\.stream"):
        watch.selected = 1


@pytest.mark.parametrize("records", [False, True])
def test_released_memory_is_kept_by_record_stream(records: bool) -> None:
    def body(_: CudaRaceWatch) -> None:
        side, tensor = _stream(), torch.ones(4)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.sum()
        if records:
            tensor.record_stream(side)
            assert recorded_streams.pop() == (tensor.data_ptr(), side.cuda_stream)
        del tensor
        torch.zeros(4)

    assert _races(body) == ([] if records else [(REUSE, "sum", "zeros")])


def test_an_unwatched_thread_uses_streams_as_ever() -> None:
    with traced_device(), watched_cuda_streams(Recorder()) as watch:
        stream = torch.cuda.Stream()
        torch.ones(4).record_stream(cast(Any, stream))
        assert recorded_streams.pop()[1] == stream.cuda_stream
        assert stream.query()
        assert stream.record_event().query()
    assert watch.report().num_touches == 0


# Collectives --------------------------------------------------------------------------------------------------


def _all_reduce(tensor: torch.Tensor, group: str = "world", *, is_async: bool = True) -> Call:
    whole = ((tensor,),)
    return made_call(Op.ALL_REDUCE, whole, whole, group_name=group, is_async=is_async)


def _by_nccl(watch: CudaRaceWatch, call: Call, own_stream: int = NCCL) -> tuple[Clock | None, TracedEvent]:
    """Issue a call as nccl runs it; return the clock that the interceptor knows a wait by, and the event of its end."""
    stream = TracedStream(handle=own_stream)
    done = watch.issued(call)
    stream.wait_stream(torch.cuda.current_stream())
    end = stream.record_event()
    watch.handed_over()
    return done, end


def _waits_by_interceptor(watch: CudaRaceWatch, done: Clock | None, end: TracedEvent) -> None:
    watch.waited(done)


def _waits_in_cpp(watch: CudaRaceWatch, done: Clock | None, end: TracedEvent) -> None:
    end.wait()


def _waits_for_the_wrong_one(watch: CudaRaceWatch, done: Clock | None, end: TracedEvent) -> None:
    TracedStream(handle=NCCL + 1).record_event().wait()


@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        (_waits_by_interceptor, []),
        (_waits_in_cpp, []),
        (_waits_for_the_wrong_one, [(RAW, "all_reduce", "sum")]),
        (lambda watch, done, end: None, [(RAW, "all_reduce", "sum")]),
    ],
    ids=["interceptor", "c++", "wrong", "none"],
)
def test_the_result_of_a_collective_is_waited_for(
    wait: Callable[[CudaRaceWatch, Clock | None, TracedEvent], None], expected: Found
) -> None:
    def body(watch: CudaRaceWatch) -> None:
        tensor = torch.ones(4)
        done, end = _by_nccl(watch, _all_reduce(tensor))
        wait(watch, done, end)
        tensor.sum()

    assert _races(body) == expected


def test_an_earlier_event_of_the_carrier_is_no_wait_for_a_later_collective() -> None:
    def body(watch: CudaRaceWatch) -> None:
        first, second = torch.ones(4), torch.ones(4)
        _, end = _by_nccl(watch, _all_reduce(first))
        _by_nccl(watch, _all_reduce(second))
        end.wait()
        first.sum()
        second.sum()

    assert _races(body) == [(RAW, "all_reduce", "sum")]


@pytest.mark.parametrize(
    ("group", "expected"), [("world", []), ("pairs", [(RAW, "all_reduce", "all_reduce")])]
)
def test_collectives_of_one_group_are_in_order_and_those_of_two_are_not(group: str, expected: Found) -> None:
    def body(watch: CudaRaceWatch) -> None:
        tensor = torch.ones(4)
        own_stream = {"world": NCCL, "pairs": NCCL + 1}
        _by_nccl(watch, _all_reduce(torch.ones(4), group), own_stream[group])
        _by_nccl(watch, _all_reduce(tensor), NCCL)
        _by_nccl(watch, _all_reduce(tensor, group), own_stream[group])

    kinds = {(first, second) for _, first, second in _races(body)}
    assert kinds == {(first, second) for _, first, second in expected}


def test_waits_after_a_collective_was_handed_over_are_the_engines_own() -> None:
    def body(watch: CudaRaceWatch) -> None:
        tensor, side = torch.ones(4), _stream()
        _by_nccl(watch, _all_reduce(tensor))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.sum()

    assert _races(body) == [(RAW, "all_reduce", "sum")]


@pytest.mark.parametrize("by_a_stream_of_nccls", [False, True])
def test_a_synchronous_collective_is_on_the_current_stream(by_a_stream_of_nccls: bool) -> None:
    def body(watch: CudaRaceWatch) -> None:
        tensor, side = torch.ones(4), _stream()
        if by_a_stream_of_nccls:  # which the current one waits for at once
            _, end = _by_nccl(watch, _all_reduce(tensor, is_async=False))
            end.wait()
        else:
            watch.issued(_all_reduce(tensor, is_async=False))
            watch.handed_over()
        tensor.sum()
        with torch.cuda.stream(side):
            tensor.sum()

    assert _races(body) == [(RAW, "all_reduce", "sum")]


# The way to torch ---------------------------------------------------------------------------------------------


class _Deaf:
    """A listener without methods for events."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} here")


def test_an_error_of_a_listener_is_raised_and_not_only_logged() -> None:
    with (
        pytest.raises(RuntimeError, match="no event_recorded here"),
        reporting_streams(cast(Any, _Deaf()), lambda: True),
    ):
        TracedEvent().record()


def test_callbacks_of_torch_are_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch_cuda, "_is_registered", False)
    names = {
        "torch._C:_activate_gpu_trace": lambda: asked.append("activate"),
        "torch.cuda._gpu_trace": _gpu_trace,
    }
    monkeypatch.setattr(torch_cuda, "private", names.__getitem__)
    for name in ("EventRecord", "EventWait", "DeviceSynchronization"):
        monkeypatch.setattr(getattr(_gpu_trace, f"{name}Callbacks"), "callback_list", [])
    for _ in range(2):
        with reporting_streams(cast(Any, _Deaf()), lambda: True):
            pass
    assert asked == ["activate"]
    assert len(_gpu_trace.EventRecordCallbacks.callback_list) == 1


def test_no_watch_listens_afterwards_and_torch_is_as_it_was() -> None:
    before = (torch.cuda.Stream.__new__, torch.cuda.Stream.query, torch.cuda.Event.query)
    with _watched() as watch:
        pass
    TracedEvent().record(TracedStream())
    assert watch.report().num_streams == 1
    assert (torch.cuda.Stream.__new__, torch.cuda.Stream.query, torch.cuda.Event.query) == before


def test_a_stream_without_a_handle_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        stream_id, device_index, device_type = 3, 0, 1

    class Made:
        def __init__(self, *, stream_id: int, device_index: int, device_type: int) -> None:
            self.cuda_stream = 100 * stream_id + 10 * device_index + device_type

    monkeypatch.setattr(torch.cuda, "Stream", Made)
    assert stream_handle(Stream()) == 301


def test_operators_of_engines_have_kernels_of_a_device_to_look_into() -> None:
    import torch.distributed.fsdp  # which defines them

    for name in ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"):
        operator = getattr(torch.ops.fsdp, name).default
        assert device_kernel(operator, "cpu") is not None
        assert device_kernel(operator, "cuda") is not None


# Engines ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch.fsdp2", "shardproof.engine.adapters.reference:ReferenceOnStreams"])
def test_honest_engines_are_silent(engine: str, tmp_path: Path) -> None:
    for report in race_reports(
        engine, racing_training(SHARDED), tmp_path / "world", drive_traced, kind="processes"
    ):
        assert report.races == ()
        assert report.num_touches > 100
        assert report.num_collectives >= 10
        assert report.num_streams >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "GathersBeforeTheCopyIn",
        "ReadsGathersUnderWay",
        "ReducesBeforeGradientsAreThere",
        "GathersWhileTheStepWrites",
        "TakesReductionsAsDone",
    ],
)
def test_mutants_are_found_as_on_a_cpu(name: str, tmp_path: Path) -> None:
    (engine,) = (mutant.engine_spec for mutant in MUTANTS if mutant.name == name)
    expected = EXPECTED[name]
    for report in race_reports(engine, expected.training, tmp_path / "world", drive_traced, kind="processes"):
        assert set(expected.races) <= expected.found_in(report), "\n".join(map(str, report.races))
