"""Parity's arithmetic: honest shards never fail; one wrong element anywhere always fails and is located."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardproof import Evidence, Layout, MatchesOracle, Plan, Ruling, Schedule, Shard, Training
from shardproof.fixtures.optimizers import ADAMW, EXACT_SGD, SGD
from shardproof.fixtures.problems import (
    EXACT_LINEAR,
    MLP_BUFFERS,
    MLP_EVEN,
    MLP_UNEVEN,
    PROBLEMS,
    ModelProblem,
)
from shardproof.harness.laws.tolerance import allowed_error
from shardproof.harness.oracle.oracle_observation import (
    INITIAL_STEP,
    OracleObservation,
    OracleStep,
    Quantity,
    TensorKey,
)
from shardproof.harness.records.observation import Observation, StepObservation
from tests.laws.flat_pieces import flat, flattened
from tests.simulated_engine import Honest, Moment, accumulate, evidence_of, ring_mean, row_shard, whole

# Generated cases share two cores with other processes, so their duration proves nothing.
relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
Shards = Mapping[str, Shard]


def judge(evidence: Evidence) -> Ruling:
    return MatchesOracle().judge(evidence)


@pytest.fixture(scope="module")
def honest() -> Evidence:
    return evidence_of(Training(problem=MLP_UNEVEN, optimizer=ADAMW, schedule=Schedule(microbatches=2)), 4)


# One tensor, any shape, any world


def one_tensor(reference: torch.Tensor, world_size: int, noise: float, shards: list[Shard]) -> Evidence:
    """Build the evidence of a training of one step whose parameter is ``reference`` and nothing else."""
    name, exact = "p", reference.double()
    zeros = torch.zeros(1, world_size, *reference.shape, dtype=torch.float64)
    losses = torch.ones(1, world_size, dtype=torch.float64)
    parameter = TensorKey(quantity=Quantity.PARAMETER, step=0, name=name)
    oracle = OracleObservation(
        world_size=world_size,
        plan=Plan(),
        initial={name: exact},
        steps=(
            OracleStep(
                losses=losses, contributions={name: zeros}, gradients={name: None}, parameters={name: exact}
            ),
        ),
        optimizer_state={},
        buffers=tuple({} for _ in range(world_size)),
        noise={parameter: noise, TensorKey(quantity=Quantity.LOSS, step=0, name="loss"): 0.0},
        scales={
            parameter: reference.abs().max().item() if reference.numel() else 0.0,
            TensorKey(quantity=Quantity.LOSS, step=0, name="loss"): 1.0,
        },
        constants=frozenset(),
        dtypes={TensorKey(quantity=q, step=INITIAL_STEP, name=name): reference.dtype for q in Quantity},
        is_exact=False,
    )
    ranks = tuple(
        Observation(
            rank=rank,
            input_digest=str(rank),
            initial={name: row_shard(reference, rank, world_size)},
            steps=(StepObservation(losses=(1.0,), gradients={name: None}, parameters={name: shard}),),
            optimizer_state={},
            buffers={},
            ledger=(),
        )
        for rank, shard in enumerate(shards)
    )
    training = Training(problem=MLP_EVEN, optimizer=SGD, schedule=Schedule(steps=1))
    return Evidence(training=training, world_size=world_size, ranks=ranks, oracle=oracle)


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3)
worlds = st.integers(1, 9)


def split(reference: torch.Tensor, world_size: int, dim: int) -> list[Shard]:
    """Shard along any dim by torch.chunk's rule; ranks beyond the last chunk own nothing."""
    chunk = -(-reference.shape[dim] // world_size)
    shards = []
    for rank in range(world_size):
        start = min(rank * chunk, reference.shape[dim])
        length = min(chunk, reference.shape[dim] - start)
        offsets = [0] * reference.dim()
        offsets[dim] = start
        shards.append(
            Shard(
                tensor=reference.narrow(dim, start, length).clone(),
                offsets=tuple(offsets),
                global_shape=tuple(reference.shape),
            )
        )
    return shards


def intervals(reference: torch.Tensor, cuts: list[int]) -> list[Shard]:
    """Cut the flattened tensor at the named places; ranks between equal cuts own nothing."""
    ends = [0, *sorted(cuts), reference.numel()]
    whole_of_it = reference.flatten()
    return [
        Shard.flat(whole_of_it[start:stop].clone(), start, tuple(reference.shape))
        for start, stop in pairwise(ends)
    ]


@st.composite
def sharded(draw: st.DrawFn) -> tuple[torch.Tensor, list[Shard]]:
    shape = draw(shapes)
    seed = draw(st.integers(0, 2**31))
    reference = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    world_size = draw(worlds)
    if draw(st.booleans()):
        return reference, [whole(reference) for _ in range(world_size)]
    if draw(st.booleans()):
        cut = st.integers(0, reference.numel())
        return reference, intervals(
            reference, draw(st.lists(cut, min_size=world_size - 1, max_size=world_size - 1))
        )
    return reference, split(reference, world_size, draw(st.integers(0, len(shape) - 1)))


@relaxed
@given(sharded(), st.floats(0, 1e-3))
def test_an_honest_tensor_never_fails(case: tuple[torch.Tensor, list[Shard]], noise: float) -> None:
    reference, shards = case
    assert judge(one_tensor(reference, len(shards), noise, shards)).record.held


@st.composite
def disturbed(draw: st.DrawFn) -> tuple[torch.Tensor, list[Shard], int, tuple[int, ...]]:
    """Pick one element of one rank's non-empty shard; return its rank and local index."""
    reference, shards = draw(sharded())
    rank = draw(st.sampled_from([r for r, s in enumerate(shards) if s.tensor.numel()]))
    local = tuple(draw(st.integers(0, size - 1)) for size in shards[rank].tensor.shape)
    return reference, shards, rank, local


def displace(
    case: tuple[torch.Tensor, list[Shard], int, tuple[int, ...]],
    noise: float,
    times_allowed: float,
    sign: int,
) -> Evidence:
    reference, shards, rank, local = case
    evidence = one_tensor(reference, len(shards), noise, shards)
    allowed = allowed_error(evidence.oracle, TensorKey(quantity=Quantity.PARAMETER, step=0, name="p"))
    shards[rank].tensor[local] += sign * times_allowed * allowed
    return evidence


signs = st.sampled_from([-1, 1])


@relaxed
@given(disturbed(), st.floats(0, 1e-3), st.floats(1.1, 1e6), signs)
def test_one_element_beyond_the_allowed_error_fails_and_is_located(
    case: tuple[torch.Tensor, list[Shard], int, tuple[int, ...]], noise: float, times: float, sign: int
) -> None:
    _, shards, rank, local = case
    ruling = judge(displace(case, noise, times, sign))
    assert not ruling.record.held
    assert ruling.worst is not None
    assert ruling.worst.rank == rank
    assert ruling.worst.index == shards[rank].index_of(local)
    assert ruling.worst.share == pytest.approx(1 / shards[rank].tensor.numel())
    assert ruling.worst.ratio == pytest.approx(times, rel=0.1)


@relaxed
@given(disturbed(), st.floats(0, 1e-3), st.floats(0, 0.9), signs)
def test_one_element_within_the_allowed_error_passes_unless_replicas_differ(
    case: tuple[torch.Tensor, list[Shard], int, tuple[int, ...]], noise: float, times: float, sign: int
) -> None:
    _, shards, rank, local = case
    before = shards[rank].tensor[local].item()
    ruling = judge(displace(case, noise, times, sign))
    has_replica = len(shards) > 1 and shards[rank].is_whole and shards[rank - 1].is_whole
    if has_replica and shards[rank].tensor[local].item() != before:
        assert "replicas diverge" in ruling.record.summary
        assert f"rank {rank} holds" in ruling.record.summary
    else:
        assert ruling.record.held


@relaxed
@given(disturbed(), st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_one_value_that_is_not_finite_fails(
    case: tuple[torch.Tensor, list[Shard], int, tuple[int, ...]], value: float
) -> None:
    reference, shards, rank, local = case
    shards[rank].tensor[local] = value
    ruling = judge(one_tensor(reference, len(shards), 1e3, shards))
    assert not ruling.record.held
    assert ruling.worst is not None
    assert ruling.worst.rank == rank
    assert ruling.worst.looks_like == "NaN or infinity"


@relaxed
@given(sharded(), st.data())
def test_a_shard_that_no_rank_holds_fails(
    case: tuple[torch.Tensor, list[Shard]], data: st.DataObject
) -> None:
    reference, shards = case
    rank = data.draw(st.sampled_from([r for r, s in enumerate(shards) if s.tensor.numel()]))
    if shards[rank].is_whole:
        shards = [replace(s, tensor=s.tensor[:0]) for s in shards]
    else:
        shards[rank] = replace(shards[rank], tensor=shards[rank].tensor.narrow(0, 0, 0))
    ruling = judge(one_tensor(reference, len(shards), 1e3, shards))
    assert "no rank holds" in ruling.record.summary


# Flat pieces

REFERENCE = torch.arange(1.0, 25.0).reshape(2, 3, 4)


def test_a_wrong_flat_piece_is_located_in_the_whole() -> None:
    shards = intervals(REFERENCE, [5, 5, 19])
    shards[2].tensor[8] += 1  # the 13th element
    ruling = judge(one_tensor(REFERENCE, 4, 0.0, shards))
    assert ruling.worst is not None
    assert (ruling.worst.rank, ruling.worst.index, ruling.worst.expected) == (2, (1, 0, 1), 14.0)
    assert "on rank 2 (flat shard at [5]; wrong on 1 of 4 ranks)" in ruling.record.summary


def test_a_gap_between_flat_pieces_fails() -> None:
    shards = intervals(REFERENCE, [5, 19])
    shards[1] = Shard.flat(shards[1].tensor[:-2], 5, (2, 3, 4))
    ruling = judge(one_tensor(REFERENCE, 3, 1e3, shards))
    assert "no rank holds 2 of 24 elements, the first at (1, 1, 1)" in ruling.record.summary


def test_a_flat_piece_with_a_wrong_offset_fails() -> None:
    shards = intervals(REFERENCE, [5, 19])
    shards[1] = replace(shards[1], offsets=(6,))
    assert not judge(one_tensor(REFERENCE, 3, 0.0, shards)).record.held
    shards[1] = replace(shards[1], offsets=(11,))
    summary = judge(one_tensor(REFERENCE, 3, 0.0, shards)).record.summary
    assert "rank 1: expected a shard inside (2, 3, 4), got flat shape (14,) at offset (11,)" in summary


def test_flat_pieces_that_overlap_must_agree_bit_by_bit() -> None:
    shards = [*intervals(REFERENCE, [12]), *intervals(REFERENCE, [6])]
    assert judge(one_tensor(REFERENCE, 4, 1.0, shards)).record.held
    shards[3].tensor[5] += 1e-3  # the 11th element, which rank 0 holds as well
    summary = judge(one_tensor(REFERENCE, 4, 1.0, shards)).record.summary
    assert "replicas diverge: at [0, 2, 3] rank 0 holds 12 and rank 3 holds 12.001" in summary


def test_flat_pieces_and_blocks_are_replicas_of_each_other() -> None:
    shards = [whole(REFERENCE), *intervals(REFERENCE, [12])]
    assert judge(one_tensor(REFERENCE, 3, 1.0, shards)).record.held
    shards[2].tensor[0] += 1e-3
    summary = judge(one_tensor(REFERENCE, 3, 1.0, shards)).record.summary
    assert "replicas diverge: at [1, 0, 0] rank 0 holds 13 and rank 2 holds 13.00" in summary


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_an_honest_engine_passes_in_flat_pieces(problem: ModelProblem) -> None:
    training = Training(problem=problem, optimizer=ADAMW, schedule=Schedule(microbatches=2))
    evidence = evidence_of(training, 4)
    ruling = judge(replace(evidence, ranks=tuple(flattened(o) for o in evidence.ranks)))
    assert ruling.record.held, ruling.record.summary


@pytest.mark.parametrize(
    ("kept", "looks_like"),
    [
        (slice(None), "unchanged since initialisation"),
        (slice(2, 9), "elements of the flattened tensor 132..138, unchanged since initialisation"),
    ],
    ids=["all of it", "some"],
)
def test_a_flat_piece_that_was_not_updated_is_recognised(
    honest: Evidence, kept: slice, looks_like: str
) -> None:
    rank = 1  # whose rows begin at 10, 130 elements on

    def forget(o: Observation) -> Observation:
        shard = flat(o.steps[0].parameters[WEIGHT])
        shard.tensor[kept] = o.initial[WEIGHT].tensor.flatten()[kept]
        return step_with(o, 0, parameters={**o.steps[0].parameters, WEIGHT: shard})

    worst = on_rank(honest, rank, forget).worst
    assert worst is not None
    assert (worst.rank, worst.looks_like) == (rank, looks_like)


# Whole trainings


@pytest.mark.parametrize("layout", [Layout.SHARD, Layout.REPLICATE, Layout.HYBRID], ids=lambda x: x.name)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_an_honest_engine_passes_with_room_to_spare(problem: ModelProblem, layout: Layout) -> None:
    for optimizer in (SGD, ADAMW):
        training = Training(problem=problem, optimizer=optimizer, schedule=Schedule(steps=3, microbatches=3))
        ruling = judge(evidence_of(training, 4, layout=layout))
        assert ruling.record.held, ruling.record.summary
        assert ruling.worst is not None
        assert ruling.worst.ratio < 0.5


def test_the_tensor_closest_to_its_limit_is_reported(honest: Evidence) -> None:
    ruling = judge(honest)
    assert "within the noise of re-ordered sums" in ruling.record.summary
    closest = ruling.worst
    assert closest is not None
    assert closest.ratio == closest.error / closest.allowed
    assert 0 < closest.ratio < 1
    (shard,) = (o.steps[closest.step].parameters[WEIGHT] for o in honest.ranks if o.rank == 0)
    nudged = shard.tensor.clone()
    reference = shard.of(honest.oracle.steps[closest.step].parameters[WEIGHT])
    nudged.view(-1)[0] = reference.reshape(-1)[0] + 0.99 * allowed_error(
        honest.oracle, TensorKey(quantity=Quantity.PARAMETER, step=closest.step, name=WEIGHT)
    )

    def nearly(o: Observation) -> Observation:
        seen = o.steps[closest.step]
        parameters = {**seen.parameters, WEIGHT: replace(shard, tensor=nudged)}
        steps = tuple(replace(seen, parameters=parameters) if s is seen else s for s in o.steps)
        return replace(o, steps=steps)

    worst = on_rank(honest, 0, nearly).worst
    assert worst is not None
    assert (worst.quantity, worst.name) == (Quantity.PARAMETER, WEIGHT)
    assert 0.95 < worst.ratio <= 1


def test_an_exact_training_passes_bit_by_bit() -> None:
    training = Training(problem=EXACT_LINEAR, optimizer=EXACT_SGD, schedule=Schedule(steps=2, microbatches=4))
    evidence = evidence_of(training, 4)
    ruling = judge(evidence)
    assert ruling.record.held
    assert "bitwise" in ruling.record.summary
    shard = evidence.ranks[2].steps[1].parameters["right.weight"]
    shard.tensor[0, 0] = torch.nextafter(shard.tensor[0, 0], torch.tensor(9.0))
    broken = judge(evidence)
    assert broken.worst is not None
    assert (broken.worst.rank, broken.worst.name, broken.worst.index) == (2, "right.weight", (4, 0))
    assert broken.worst.allowed == 0


def step_with(observation: Observation, step: int, **changes: object) -> Observation:
    # object: the fields of StepObservation, whose own types `replace` checks by name only.
    steps = list(observation.steps)
    steps[step] = replace(steps[step], **changes)  # type: ignore[arg-type]
    return replace(observation, steps=tuple(steps))


def on_rank(evidence: Evidence, rank: int, change: Callable[[Observation], Observation]) -> Ruling:
    ranks = list(evidence.ranks)
    ranks[rank] = change(ranks[rank])
    return judge(replace(evidence, ranks=tuple(ranks)))


def without(shards: Mapping[str, Shard | None], name: str) -> dict[str, Shard | None]:
    return {n: s for n, s in shards.items() if n != name}


WEIGHT = "layers.0.weight"


def test_the_wrong_rank_with_the_largest_error_is_reported(honest: Evidence) -> None:
    def off_by(observation: Observation, error: float) -> Observation:
        seen = observation.steps[0].parameters
        shard = replace(seen[WEIGHT], tensor=seen[WEIGHT].tensor + error)
        return step_with(observation, 0, parameters={**seen, WEIGHT: shard})

    for errors in ((0.25, 0.5, 0.125, 0.0), (0.125, 0.25, 0.5, 0.0)):
        ranks = tuple(off_by(o, error) for o, error in zip(honest.ranks, errors, strict=True))
        ruling = judge(replace(honest, ranks=ranks))
        assert ruling.worst is not None
        assert ruling.worst.rank == errors.index(0.5)
        assert "wrong on 3 of 4 ranks" in ruling.record.summary
        assert ruling.worst.error == pytest.approx(0.5, rel=1e-3)
        assert ruling.worst.share == 1


def test_a_missing_name_fails(honest: Evidence) -> None:
    ruling = on_rank(honest, 3, lambda o: step_with(o, 1, parameters=without(o.steps[1].parameters, WEIGHT)))
    assert ruling.record.summary.startswith(f"step 1, parameter {WEIGHT!r}: rank 3: expected a tensor")


def test_an_extra_name_fails(honest: Evidence) -> None:
    def add(o: Observation) -> Observation:
        return replace(o, initial={**o.initial, "module." + WEIGHT: o.initial[WEIGHT]})

    assert "rank 1: unexpected name" in on_rank(honest, 1, add).record.summary


def test_a_missing_gradient_fails(honest: Evidence) -> None:
    def drop(o: Observation) -> Observation:
        return step_with(o, 0, gradients={**o.steps[0].gradients, WEIGHT: None})

    assert "rank 0: expected a tensor, got None" in on_rank(honest, 0, drop).record.summary


def test_a_rank_that_owns_nothing_may_lack_gradient_and_state(honest: Evidence) -> None:
    name = "layers.3.weight"
    assert honest.ranks[3].initial[name].tensor.numel() == 0

    def drop(o: Observation) -> Observation:
        state = {n: s for n, s in o.optimizer_state.items() if not n.startswith(name)}
        o = step_with(o, 0, gradients={**o.steps[0].gradients, name: None})
        return replace(o, optimizer_state=state)

    assert on_rank(honest, 3, drop).record.held
    assert not on_rank(honest, 0, drop).record.held
    first, *others, last = honest.ranks
    at_first, at_last = first.initial[name], last.initial[name]
    first = replace(first, initial={**first.initial, name: at_last})
    last = replace(last, initial={**last.initial, name: at_first})
    moved = replace(honest, ranks=(first, *others, last))  # as if it resumed with other shards
    assert on_rank(moved, 3, drop).record.held
    assert not on_rank(moved, 0, drop).record.held


def test_a_wrong_shape_dtype_or_place_fails(honest: Evidence) -> None:
    def changed(shard: Shard) -> str:
        def change(o: Observation) -> Observation:
            return replace(o, initial={**o.initial, WEIGHT: shard})

        return on_rank(honest, 1, change).record.summary

    shard = honest.ranks[1].initial[WEIGHT]
    assert "expected global shape (37, 13), got (40, 13)" in changed(replace(shard, global_shape=(40, 13)))
    assert "expected torch.float32, got torch.float64" in changed(
        replace(shard, tensor=shard.tensor.double())
    )
    assert "expected a shard inside (37, 13)" in changed(replace(shard, offsets=(36, 0)))
    assert "expected a shard inside (37, 13)" in changed(replace(shard, offsets=(-1, 0)))
    assert "expected a shard inside (37, 13)" in changed(
        replace(shard, tensor=shard.tensor[0], offsets=(10,))
    )
    # In bounds and of the right form, but with other rows than the shard declares.
    assert "initial parameter" in changed(replace(shard, offsets=(11, 0)))


def test_a_missing_step_fails(honest: Evidence) -> None:
    ruling = on_rank(honest, 2, lambda o: replace(o, steps=o.steps[:2]))
    assert ruling.record.summary.startswith("step 2, loss 'loss': rank 2: expected a tensor")


def test_a_missing_loss_fails(honest: Evidence) -> None:
    ruling = on_rank(honest, 2, lambda o: step_with(o, 1, losses=o.steps[1].losses[:1]))
    assert "no rank holds 1 of 8 elements, the first at (1, 2)" in ruling.record.summary


def test_a_wrong_loss_is_located_by_microbatch_and_rank(honest: Evidence) -> None:
    def change(o: Observation) -> Observation:
        return step_with(o, 1, losses=(o.steps[1].losses[0], o.steps[1].losses[1] * 1.001))

    worst = on_rank(honest, 3, change).worst
    assert worst is not None
    assert (worst.quantity, worst.step, worst.index, worst.rank) == (Quantity.LOSS, 1, (1, 3), 3)


def test_wrong_optimizer_state_fails(honest: Evidence) -> None:
    def change(o: Observation) -> Observation:
        step = o.optimizer_state[f"{WEIGHT}/step"]
        return replace(
            o, optimizer_state={**o.optimizer_state, f"{WEIGHT}/step": replace(step, tensor=step.tensor + 1)}
        )

    worst = on_rank(honest, 1, change).worst
    assert worst is not None
    assert (worst.name, worst.got, worst.expected, worst.index) == (f"{WEIGHT}/step", 4.0, 3.0, ())


def test_a_buffer_advanced_twice_fails() -> None:
    evidence = evidence_of(Training(problem=MLP_BUFFERS, optimizer=SGD), 2)
    assert judge(evidence).record.held

    def again(o: Observation) -> Observation:
        count = o.buffers["num_forwards"]
        return replace(o, buffers={**o.buffers, "num_forwards": replace(count, tensor=count.tensor + 1)})

    worst = on_rank(evidence, 1, again).worst
    assert worst is not None
    assert (worst.quantity, worst.rank, worst.got, worst.expected) == (Quantity.BUFFER, 1, 4.0, 3.0)


class WrongFromStepOne(Honest):
    """Computes wrong gradients from step 1 on; all later values are wrong as a consequence."""

    def gradient(self, pieces: torch.Tensor, moment: Moment) -> torch.Tensor | None:
        reduced = ring_mean(accumulate(pieces))
        return reduced * 2 if moment.step and moment.name == "layers.1.bias" else reduced


def test_the_headline_is_the_first_thing_that_went_wrong() -> None:
    training = Training(problem=MLP_EVEN, optimizer=SGD)
    ruling = judge(evidence_of(training, 2, WrongFromStepOne()))
    assert ruling.worst is not None
    assert (ruling.worst.quantity, ruling.worst.step, ruling.worst.name) == (
        Quantity.GRADIENT,
        1,
        "layers.1.bias",
    )
    assert ruling.record.details[0].startswith("step 1, parameter 'layers.1.bias'")
    assert len(ruling.record.details) <= 9


class WrongOnRankThree(Honest):
    """Makes the update of rank 3 wrong by as little as the smallest real defect."""

    def updated(self, before: torch.Tensor, after: torch.Tensor, moment: Moment) -> torch.Tensor:
        return after * (1 + 1.2e-4) if moment.rank == 3 else after


@pytest.mark.parametrize("layout", [Layout.SHARD, Layout.REPLICATE], ids=lambda x: x.name)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda o: o.name)
def test_every_rank_counts_and_a_small_defect_is_large_enough(layout: Layout, optimizer: object) -> None:
    training = Training(problem=MLP_EVEN, optimizer=optimizer)  # type: ignore[arg-type]  # SGD or ADAMW
    worst = judge(evidence_of(training, 4, WrongOnRankThree(), layout)).worst
    assert worst is not None
    assert (worst.rank, worst.quantity, worst.step) == (3, Quantity.PARAMETER, 0)


class ReducesInBfloat16(Honest):
    """Rounds each rank's gradient before the reduction."""

    def gradient(self, pieces: torch.Tensor, moment: Moment) -> torch.Tensor | None:
        return ring_mean(accumulate(pieces).bfloat16()).float()


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if not p.is_exact], ids=lambda p: p.name)
def test_a_reduction_in_bfloat16_fails_unless_asked_for(problem: ModelProblem) -> None:
    training = Training(problem=problem, optimizer=SGD)
    assert not judge(evidence_of(training, 4, ReducesInBfloat16())).record.held
    asked = replace(training, plan=Plan(reduce_dtype=torch.bfloat16))
    ruling = judge(evidence_of(asked, 4, ReducesInBfloat16()))
    assert ruling.record.held, ruling.record.summary


def test_the_text_locates_and_quantifies(honest: Evidence) -> None:
    shard = honest.ranks[1].steps[0].parameters[WEIGHT]
    wrong = shard.tensor.clone()
    wrong[2, 5] += 0.5

    def change(o: Observation) -> Observation:
        return step_with(o, 0, parameters={**o.steps[0].parameters, WEIGHT: replace(shard, tensor=wrong)})

    text = on_rank(honest, 1, change).record.summary
    assert text.startswith(
        f"step 0, parameter {WEIGHT!r} on rank 1 (shard at [10, 0]; wrong on 1 of 4 ranks)"
    )
    assert "at [12, 5] got" in text
    assert "error 0.5, allowed" in text
    assert "0.8% of the shard beyond" in text
