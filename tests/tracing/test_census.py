"""The census counts memory of engines, omits other memory, and is explained by the layout's closed form."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardproof import (
    EachMicrobatch,
    Exercise,
    Law,
    LeavesNothingBehind,
    MemoryIsExplained,
    Phase,
    Ruling,
)
from shardproof.engine.contract import Capability, Copies, Cut, Layout, Plan, Replicas, Shard
from shardproof.fixtures.buffered import HOARD
from shardproof.fixtures.forward_inputs import PACKED
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_DEEP, MLP_EVEN, MLP_UNEVEN
from shardproof.harness.cases.training import Problem, Resume, Schedule, Training
from shardproof.harness.tracing.codec import decode, encode
from shardproof.harness.tracing.memory.census import Census
from shardproof.harness.tracing.memory.memory_report import CensusEntry, CensusTime, LiveStorage
from shardproof.harness.tracing.operators import observing_operators
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.training.layout_memory import StateTensor, explained, form_of, state_bytes
from shardproof.harness.verdicts.judgement import implied, implied_last
from shardproof.suites.training import train
from tests.shell import ROOT, python
from tests.simulated_engine import evidence_of, oracle_of, simulate

SHARD = Plan(layout=Layout.SHARD)
NUMEL_EVEN = 32 * 16 + 32 + 32 * 32 + 32 + 8 * 32 + 8
FLOAT = 4


# Taking -----------------------------------------------------------------------------------------------------


def _taken(census: Census, limit: int = 1 << 30) -> CensusEntry:
    census.take(0, CensusTime.STEPPED, lambda: limit)
    return census.counts[-1]


def test_counts_memory_of_operators_wherever_it_is_kept() -> None:
    census, recorder = _census()
    with observing_operators(made=census.made):
        in_a_closure = (lambda kept: lambda: kept)(torch.zeros(16))
        view_alone = torch.ones(8, 8)[0]
        torch.zeros(1024)  # let go at once
    count = _taken(census)
    assert count.num_bytes == (16 + 64) * FLOAT
    assert [piece.shape for piece in count.largest] == [(8, 8), (16,)]
    assert "test_census.py" in count.largest[0].site
    assert in_a_closure().numel() + view_alone.numel() == 16 + 8
    assert recorder.place.phase is Phase.PREPARE


def test_leaves_out_memory_of_the_user_and_of_the_observer() -> None:
    census, recorder = _census()
    with observing_operators(made=census.made):
        batch = torch.zeros(16)
        census.holds([batch])
        with recorder.during(Phase.OBSERVE):
            copy = batch.clone()
    assert _taken(census).num_bytes == 0
    assert copy.numel() == batch.numel()


def test_counts_a_storage_as_large_as_it_is_now() -> None:
    census, _ = _census()
    with observing_operators(made=census.made):
        gathered = torch.zeros(256)
        gathered.untyped_storage().resize_(0)
    assert _taken(census).num_bytes == 0


def test_waits_for_memory_that_only_a_cycle_keeps() -> None:
    census, _ = _census()
    with observing_operators(made=census.made):
        cycle: list[object] = [torch.zeros(256)]
        cycle.append(cycle)
        del cycle
    assert _taken(census, limit=0).num_bytes == 0


def test_memory_that_stays_is_counted_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardproof.harness.tracing.memory.census._RETRY_S", 0.0)
    census, _ = _census()
    with observing_operators(made=census.made):
        kept = torch.zeros(256)
    assert _taken(census, limit=0).num_bytes == kept.nbytes


def test_waits_once_for_memory_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("shardproof.harness.tracing.memory.census.time.sleep", waits.append)
    census, _ = _census()
    counted = []
    with observing_operators(made=census.made):
        kept = [torch.zeros(256)]
        for _ in range(2):
            counted.append((_taken(census, limit=0).num_bytes, len(waits)))
        kept.append(torch.zeros(16))
        counted.append((_taken(census, limit=0).num_bytes, len(waits)))
    whole = counted[0][1]
    assert whole > 0
    assert counted == [(256 * FLOAT, whole), (256 * FLOAT, whole), (272 * FLOAT, 2 * whole)], (
        "more may go yet"
    )


def test_steps_aside_while_an_engine_is_read() -> None:
    census, _ = _census()
    with observing_operators(made=census.made) as mode:
        assert mode is not None
        with mode.paused():
            assert mode not in _modes()
            unseen = torch.zeros(256)
        assert _modes()[-1] is mode
        kept = torch.zeros(16)
    assert _taken(census).num_bytes == kept.nbytes
    assert unseen.numel() == 256


def test_leaves_the_modes_of_an_engine_alone() -> None:
    census, _ = _census()
    with observing_operators(made=census.made) as mode, FlopCounterMode(display=False) as of_engine:
        assert mode is not None
        before = _modes()
        with mode.paused():
            assert _modes() == before
            assert of_engine.mode is before[-1]


def _modes() -> list[object]:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


def test_compiled_functions_stay_compiled() -> None:
    from torch.utils._python_dispatch import is_in_any_mode_without_ignore_compile_internals

    census, _ = _census()
    before = is_in_any_mode_without_ignore_compile_internals()  # another test's mode may be on
    with observing_operators(made=census.made):
        assert is_in_any_mode_without_ignore_compile_internals() == before


def test_the_compiler_leaves_the_counter_alone() -> None:
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    census, _ = _census()
    with observing_operators(made=census.made):
        doubled = torch.compile(lambda x: x * 2 + 1, backend=backend)(torch.ones(16))
    assert doubled.tolist() == [3.0] * 16
    assert len(compiled) == 1
    assert _taken(census).num_bytes == 16 * FLOAT


def _census() -> tuple[Census, Recorder]:
    recorder = Recorder()
    return Census(recorder), recorder


# Bytes that a layout explains -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_even_shares_are_explained_to_within_the_alignment(num_ranks: int) -> None:
    training = _training()
    found = explained(form_of(training), training, num_ranks, cut=Cut.EVENLY, state=0)
    share = NUMEL_EVEN * FLOAT // num_ranks
    num_parameters, num_groups = 6, 1
    slack = num_parameters * (12 // num_ranks + FLOAT) + num_groups * (num_ranks - 1) * FLOAT
    assert share <= found.parameters <= share + slack
    assert found.gradients == found.parameters
    assert (found.state, found.whole) == (0, 0)


def test_the_padding_of_chunks_is_explained() -> None:
    training = train(PACKED, layout=Layout.SHARD)
    found = explained(form_of(training), training, 2, cut=Cut.CHUNKS, state=0)
    # Rows of 6, 7 and 5 make a chunk of 210, larger than their unit; rows of 8, 4, 4 and 3 divide the others.
    assert found.parameters == (210 + 48 + 16 + 12 + 9) * FLOAT


def test_a_hybrid_layout_is_explained_by_the_ranks_of_one_replica() -> None:
    hybrid = _training(plan=Plan(layout=Layout.HYBRID, replicas=Replicas.TWO))
    pair = explained(form_of(_training()), _training(), 2, cut=Cut.EVENLY, state=0)
    assert explained(form_of(hybrid), hybrid, 4, cut=Cut.EVENLY, state=0) == pair


@pytest.mark.parametrize(
    ("layout", "gradients"),
    [(Layout.ZERO1, 2), (Layout.ZERO2, 1)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_zero_shares_state_and_then_gradients(layout: Layout, gradients: int) -> None:
    training = _training(plan=Plan(layout=layout))
    shares = explained(form_of(_training()), _training(), 2, cut=Cut.EVENLY, state=0)
    found = explained(form_of(training), training, 2, cut=Cut.EVENLY, state=0)
    assert (found.parameters, found.gradients) == (2 * shares.parameters, gradients * shares.gradients)
    with_masters = explained(form_of(training), training, 2, cut=Cut.EVENLY, state=0, copies=Copies.MASTERS)
    assert with_masters.num_bytes - found.num_bytes == shares.parameters


def test_a_surplus_on_one_rank_must_be_missing_on_another() -> None:
    whole, training = NUMEL_EVEN * FLOAT, _training(plan=Plan(layout=Layout.ZERO1))
    more, less = 2 * whole + whole * 3 // 4, 2 * whole + whole // 4
    assert not _ruling(more, less, training=training).record.held, "shares are even"
    assert _ruling(more, less, training=training, cut=Cut.PARAMETERS).record.held
    record = _ruling(more, more, training=training, cut=Cut.PARAMETERS).record
    assert not record.held
    assert "bytes on all ranks together" in record.summary
    assert not _ruling(3 * whole, less, training=training, cut=Cut.PARAMETERS).record.held, (
        "of all parameters"
    )


def test_state_is_shared_like_its_parameter_and_other_state_is_whole() -> None:
    training = _training()
    moment = StateTensor(parameter="layers.0.weight", shape=(32, 16), bytes_per_element=FLOAT)
    step = replace(moment, shape=())
    stranger = replace(moment, shape=(32,))
    found = state_bytes(form_of(training), training, 2, cut=Cut.EVENLY, state=[moment, step, stranger])
    least = 32 * 16 * FLOAT // 2 + FLOAT + 32 * FLOAT
    assert least <= found <= least * 1.05


def test_state_of_parameters_beside_frozen_ones_may_lie_on_one_rank() -> None:
    """FSDP1 flattens a unit's parameters in order: if the first half is frozen, one rank holds all state."""
    frozen = tuple(f"layers.0.{name}" for name in ("weight", "bias"))
    training = _training(replace(MLP_EVEN, name="half_frozen", idle=frozen))
    shapes = {n: tuple(p.shape) for n, p in MLP_EVEN.build().named_parameters() if n not in frozen}
    state = [StateTensor(parameter=n, shape=shape, bytes_per_element=FLOAT) for n, shape in shapes.items()]
    num_bytes = sum(map(prod, shapes.values())) * FLOAT
    found = state_bytes(form_of(training), training, 2, cut=Cut.EVENLY, state=state)
    assert num_bytes * 0.65 < found <= num_bytes


def test_a_frozen_unit_explains_no_state_of_another() -> None:
    frozen = tuple(f"layers.0.{name}" for name in ("weight", "bias"))
    plan = Plan(layout=Layout.SHARD, units=("layers.0",))
    training = _training(replace(MLP_EVEN, name="frozen_unit", idle=frozen), plan)
    shapes = {n: tuple(p.shape) for n, p in MLP_EVEN.build().named_parameters() if n not in frozen}
    state = [StateTensor(parameter=n, shape=shape, bytes_per_element=FLOAT) for n, shape in shapes.items()]
    half = sum(map(prod, shapes.values())) * FLOAT / 2
    assert half <= state_bytes(form_of(training), training, 2, cut=Cut.EVENLY, state=state) <= half * 1.1


def test_buffers_and_ignored_parameters_are_whole() -> None:
    training = _training(HOARD, Plan(layout=Layout.SHARD, ignored=HOARD.idle))
    model = HOARD.build()
    ignored = sum(model.get_parameter(name).nbytes for name in HOARD.idle)
    found = explained(form_of(training), training, 2, cut=Cut.EVENLY, state=0)
    assert found.whole == sum(b.nbytes for b in model.buffers()) + 2 * ignored


# The law ----------------------------------------------------------------------------------------------------


def _training(problem: Problem = MLP_EVEN, plan: Plan = SHARD, steps: int = 1) -> Training:
    return Training(problem=problem, optimizer=SGD, plan=plan, schedule=Schedule(steps=steps))


def _ruling(*of_ranks: int, training: Training | None = None, step: int = 0, cut: Cut = Cut.EVENLY) -> Ruling:
    """Judge ranks that held these numbers of bytes after the step."""
    training = training or _training()
    piece = LiveStorage(num_bytes=4096, shape=(32, 32), operator="clone", site="engine.py:1 in keep")
    ranks = tuple(
        replace(
            seen,
            cut=cut,
            counts=(
                CensusEntry(step=step, moment=CensusTime.STEPPED, num_bytes=num_bytes, largest=(piece,)),
            ),
        )
        for seen, num_bytes in zip(simulate(training, 2), of_ranks, strict=True)
    )
    return MemoryIsExplained().judge(evidence_of(training, ranks=ranks, oracle=oracle_of(_training(), 2)))


SHARES = 3 * NUMEL_EVEN * FLOAT // 2  # parameters, gradients and momentum on one of two ranks


def test_a_share_of_everything_is_explained() -> None:
    assert _ruling(SHARES, SHARES).record.held


@pytest.mark.parametrize("extra", [NUMEL_EVEN * FLOAT // 2, NUMEL_EVEN * FLOAT], ids=["half", "whole"])
def test_a_surplus_on_one_rank_is_reported_with_its_largest_pieces(extra: int) -> None:
    record = _ruling(SHARES, SHARES + extra).record
    assert not record.held
    assert record.summary.startswith("rank 1, step 0, after the optimizer step: expected at most ")
    assert f"got {SHARES + extra} bytes" in record.summary
    assert "4096 bytes of shape [32, 32] from clone at engine.py:1 in keep" in record.summary


@pytest.mark.parametrize("step", [0, 1])
def test_after_a_handover_the_later_plan_explains_what_is_held(step: int) -> None:
    whole = replace(SHARD, layout=Layout.ZERO1)
    resumed = replace(_training(plan=SHARD, steps=2), resume=Resume(after_steps=1, plan=whole))
    assert _ruling(SHARES, SHARES, training=resumed, step=step).record.held
    wholes = 5 * SHARES // 3  # of parameters and gradients, beside a share of momentum
    assert _ruling(wholes, SHARES, training=resumed, step=step).record.held == (step == 1)


@pytest.mark.parametrize("num_units", [2, 3])
def test_two_units_may_be_whole_while_a_model_is_filled(num_units: int) -> None:
    training = replace(_training(), problem=MLP_DEEP, plan=replace(SHARD, units=MLP_DEEP.units))
    form = form_of(training)
    unit = max(sum(map(prod, group.shapes)) * group.bytes_per_element for group in form.groups)
    share = explained(form, training, 2, cut=Cut.EVENLY, state=0).parameters
    entry = CensusEntry(step=0, moment=CensusTime.FILLING, num_bytes=share + num_units * unit, largest=())
    first, second = simulate(training, 2)
    ranks = (first, replace(second, counts=(replace(entry, num_bytes=0),), filled=entry))
    record = (
        MemoryIsExplained().judge(evidence_of(training, ranks=ranks, oracle=oracle_of(training, 2))).record
    )
    reported = f"rank 1, step 0, while the model was filled: expected at most {share + 2 * unit} bytes"
    assert (reported in record.summary) == (num_units > 2)


def test_the_most_bytes_while_a_model_is_filled_are_kept_with_what_was_alive() -> None:
    census, _ = _census()
    with observing_operators(made=census.made):
        before = torch.ones(8)
        with census.filling(explained=1024):
            torch.ones(16)  # let go at once
            torch.ones(4)
        after = torch.ones(64)
    assert census.peak is not None
    assert census.peak.num_bytes == before.nbytes + 16 * FLOAT
    assert [piece.shape for piece in census.peak.largest] == [(16,), (8,)]
    assert after.nbytes > census.peak.num_bytes


def test_observations_without_a_census_are_reported_as_such() -> None:
    record = MemoryIsExplained().judge(evidence_of(_training())).record
    assert record.held
    assert record.summary.startswith("not counted")


_OF_THE_CENSUS = {LeavesNothingBehind(), MemoryIsExplained()}


@pytest.mark.parametrize(
    ("plan", "laws"),
    [
        (SHARD, _OF_THE_CENSUS),
        (Plan(layout=Layout.HYBRID), _OF_THE_CENSUS),
        (Plan(layout=Layout.ZERO1), _OF_THE_CENSUS),
        (Plan(layout=Layout.ZERO2), _OF_THE_CENSUS),
        (Plan(), {LeavesNothingBehind()}),
        (Plan(layout=Layout.REPLICATE), _OF_THE_CENSUS),
        (replace(SHARD, demands=frozenset({Capability.UNIT_STATE})), set()),
    ],
)
def test_every_training_is_held_to_what_its_layout_explains(plan: Plan, laws: set[Law]) -> None:
    training = Training(problem=MLP_UNEVEN, optimizer=ADAMW, plan=plan)
    assert _OF_THE_CENSUS & {*implied(training), *implied_last(training)} == laws


_REDUCED, _STEPPED, _CLEARED = CensusTime.REDUCED, CensusTime.STEPPED, CensusTime.CLEARED


@pytest.mark.parametrize(
    ("counts", "breach"),
    [
        pytest.param(
            [(0, _REDUCED, "a", 8), (0, _STEPPED, "b", 25), (1, _REDUCED, "b", 25)], "", id="as-much"
        ),
        pytest.param(
            [(0, _STEPPED, "b", 8), (0, _CLEARED, "c", 25), (2, _STEPPED, "b", 8)], "", id="shows-less"
        ),
        pytest.param([(0, _STEPPED, "b", 8), (1, _STEPPED, "b", 24)], "", id="a-constant"),
        pytest.param(
            [(0, _STEPPED, "b", 8), (1, _STEPPED, "b", 25)],
            "step 1, after the optimizer step",
            id="left-by-a-step",
        ),
        pytest.param(
            [(0, _REDUCED, "b", 25), (0, _STEPPED, "b", 8), (1, _REDUCED, "b", 25)],
            "step 1, after the last backward",
            id="until-a-step",
        ),
        pytest.param(
            [(0, _CLEARED, "c", 8), (2, _CLEARED, "c", 25)], "step 2, after zero_grad", id="left-by-clearing"
        ),
    ],
)
def test_a_rank_that_shows_the_same_holds_no_more(
    counts: list[tuple[int, CensusTime, str, int]], breach: str
) -> None:
    piece = LiveStorage(num_bytes=16, shape=(4,), operator="cat", site="engine.py:1 in keep")
    training = _training(plan=Plan(layout=Layout.REPLICATE), steps=3)
    entries = tuple(
        CensusEntry(
            step=step, moment=moment, num_bytes=0, largest=(), shown=shown, left_bytes=left, since=(piece,)
        )
        for step, moment, shown, left in counts
    )
    first, second = simulate(training, 2)
    evidence = evidence_of(training, ranks=(first, replace(second, counts=entries)))
    record = LeavesNothingBehind().judge(evidence).record
    assert record.held is not bool(breach)
    if breach:
        assert record.summary.startswith(f"rank 1, {breach}: expected at most 8 bytes, as before")
        assert record.summary.endswith(
            "got 25; since then: 16 bytes of shape [4] from cat at engine.py:1 in keep"
        )


@pytest.mark.parametrize(("extra", "is_single"), [(0, False), (1, False), (1, True)])
def test_a_load_adds_less_than_a_model_that_is_left_behind_would(extra: int, is_single: bool) -> None:
    """Unless parameters are of single elements: counts of their steps take as much memory."""
    training = _training(plan=Plan(layout=Layout.REPLICATE), steps=2)
    first, second = (
        replace(
            rank,
            initial={n: Shard(tensor=torch.ones(1), offsets=(0,), global_shape=(1,)) for n in rank.initial},
        )
        if is_single
        else rank
        for rank in simulate(training, 2)
    )
    left = 8 + sum(shard.tensor.nbytes for shard in second.initial.values()) // 2 + 16 + extra
    piece = LiveStorage(num_bytes=16, shape=(4,), operator="cat", site="engine.py:1 in keep")
    before = CensusEntry(step=0, moment=_REDUCED, num_bytes=0, largest=(piece,), shown="a", left_bytes=8)
    counts = (before, replace(before, step=1, num_loads=1, left_bytes=left))
    ranks = (first, replace(second, counts=counts))
    record = LeavesNothingBehind().judge(evidence_of(training, ranks=ranks)).record
    assert record.held is (is_single or not extra)
    assert record.held or record.summary.endswith(f"got {left}; the largest: {piece}")


def test_names_what_is_alive_since_the_count_with_the_fewest_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardproof.harness.tracing.memory.census._RETRY_S", 0.0)
    census, _ = _census()
    kept = []
    with observing_operators(made=census.made):
        for step in range(3):
            gradient = torch.ones(64)
            kept += [torch.zeros(16)] if step == 1 else []
            census.take(step, CensusTime.REDUCED, None, shown=lambda: "a gradient")
            del gradient
    assert [count.left_bytes for count in census.counts] == [64 * FLOAT, 80 * FLOAT, 80 * FLOAT]
    assert [[piece.shape for piece in count.since] for count in census.counts] == [[], [(16,)], [(16,)]]


def test_an_exercise_that_makes_models_of_its_own_is_not_counted() -> None:
    exercise = Exercise(body=_nothing)
    training = replace(_training(plan=SHARD), script=exercise)
    assert not training.is_counted
    assert replace(training, script=EachMicrobatch()).is_counted


def _nothing(*_: object) -> None:
    """Stand for an exercise."""


def test_counts_travel_as_json() -> None:
    piece = LiveStorage(num_bytes=8, shape=(2,), operator="clone", site="here")
    counts = (CensusEntry(step=1, moment=CensusTime.CLEARED, num_bytes=8, largest=(piece,)),)
    assert decode(tuple[CensusEntry, ...], encode(counts)) == counts


def test_imports_that_overlap_are_no_growth(tmp_path: Path) -> None:
    """The second begins during the first and ends after it: what it takes then is an import's too."""
    (tmp_path / "first.py").write_text("from steps import began, second\nbegan.set(); second.wait()\n")
    (tmp_path / "last.py").write_text(
        "from steps import grow, over, second\nsecond.set(); over.wait(); grow(7)\n"
    )
    (tmp_path / "steps.py").write_text(
        "from threading import Event\nbegan, second, over, size = Event(), Event(), Event(), [0]\n"
        "def grow(number): size[0] += number\n"
    )
    program = (
        "import threading, steps; from shardproof.harness.tracing.memory.process_memory import Growth\n"
        "growth = Growth(lambda: steps.size[0])\n"
        "def one(): import first\n"
        "def other(): import last\n"
        "a, b = threading.Thread(target=one), threading.Thread(target=other)\n"
        "a.start(); steps.began.wait(); b.start(); a.join(); steps.over.set(); b.join()\n"
        "imported = growth.num_bytes; steps.grow(5); print(imported, growth.num_bytes)\n"
    )
    done = python("-c", program, PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))))
    assert done.stdout == "0 5\n", done.stderr
