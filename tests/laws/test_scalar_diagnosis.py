"""Wrong scalars, clipped gradients, stale computations and shifted rows are recognised by their names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shardproof import Clip, Evidence, Schedule, Shard, Training
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN
from shardproof.harness.laws.diagnosis import UNSTRUCTURED, looks_like
from shardproof.harness.laws.structure import RankShard
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.oracle.oracle_observation import (
    LOSSES,
    NORM,
    OracleObservation,
    Quantity,
    TensorKey,
)
from tests.simulated_engine import evidence_of, oracle_of, row_shard, simulate, whole

WORLD_SIZE = 4
CLIPPED = Training(
    problem=MLP_EVEN,
    optimizer=SGD,
    schedule=Schedule(steps=3, microbatches=2, clip=Clip(max_norm=0.1)),
)
PLAIN = Training(problem=MLP_EVEN, optimizer=SGD, schedule=Schedule(steps=3, microbatches=2))
STEP = 1


@pytest.fixture(scope="module")
def clipped() -> OracleObservation:
    return oracle_of(CLIPPED, WORLD_SIZE)


@pytest.fixture(scope="module")
def plain() -> OracleObservation:
    return run_oracle(PLAIN, WORLD_SIZE)


def evidence(training: Training, oracle: OracleObservation) -> Evidence:
    """Return evidence of honest ranks that hold rows of gradients before clipping."""
    ranks = simulate(replace(training, schedule=replace(training.schedule, steps=0)), WORLD_SIZE)
    return evidence_of(training, WORLD_SIZE, ranks=ranks, oracle=oracle)


def norm_of(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


def gradients(oracle: OracleObservation, rank: int | None = None) -> dict[str, torch.Tensor]:
    """Return the gradients before clipping, or one rank's own."""
    pieces = oracle.steps[STEP].contributions
    if rank is not None:
        return {name: p[:, rank].sum(0) for name, p in pieces.items()}
    return {name: p.sum((0, 1)) / WORLD_SIZE for name, p in pieces.items()}


def norm_of_rows(oracle: OracleObservation, rank: int) -> float:
    return norm_of([row_shard(g, rank, WORLD_SIZE).tensor for g in gradients(oracle).values()])


NORMS: dict[str, tuple[Callable[[OracleObservation, float], float], str]] = {
    "replicas": (lambda o, n: 2 * n, "4^(1/2) x the reference: each element is counted 4 times"),
    "pairs": (lambda o, n: math.sqrt(2) * n, "2^(1/2) x the reference: each element is counted 2 times"),
    "averaged": (
        lambda o, n: n / math.sqrt(2),
        "the reference / 2^(1/2): the powers are averaged over 2 ranks, not added",
    ),
    "own rows": (lambda o, n: norm_of_rows(o, 1), "the norm of this rank's shards alone"),
    "own data": (
        lambda o, n: norm_of([*gradients(o, 1).values()]),
        "the norm of this rank's own gradients, not synchronised",
    ),
    "squared": (lambda o, n: n**2, "the sum of the powers, without the root"),
    "parts": (
        lambda o, n: sum(norm_of([g]) for g in gradients(o).values()),
        "the sum of the parameters' norms",
    ),
    "after": (lambda o, n: 0.1, "the norm after clipping"),
    "third": (lambda o, n: 1.37 * n, UNSTRUCTURED),
}


@pytest.mark.parametrize("defect", NORMS)
def test_names_the_defect_of_a_norm(clipped: OracleObservation, defect: str) -> None:
    rule, text = NORMS[defect]
    norm = clipped.steps[STEP].norm
    assert norm is not None
    wrong = whole(torch.tensor(rule(clipped, float(norm)), dtype=torch.float64))
    place = TensorKey(quantity=Quantity.NORM, step=STEP, name=NORM)
    assert looks_like(evidence(CLIPPED, clipped), place, RankShard(rank=1, shard=wrong)) == text


def test_names_half_a_norm_in_a_world_of_two() -> None:
    training = replace(CLIPPED, problem=MLP_UNEVEN)
    oracle = oracle_of(training, 2)
    norm = oracle.steps[STEP].norm
    assert norm is not None
    place = TensorKey(quantity=Quantity.NORM, step=STEP, name=NORM)
    seen = evidence_of(training, ranks=())
    assert looks_like(seen, place, RankShard(rank=0, shard=whole(norm / 2))) == "half the reference"


def test_names_the_norm_by_which_a_part_was_clipped(clipped: OracleObservation) -> None:
    name, right = next((n, g) for n, g in clipped.steps[STEP].gradients.items() if g is not None)
    place = TensorKey(quantity=Quantity.GRADIENT, step=STEP, name=name)
    norm = float(clipped.steps[STEP].norm or 0.0)
    told = looks_like(evidence(CLIPPED, clipped), place, RankShard(rank=1, shard=whole(right * 0.8)))
    assert told == (
        f"a constant factor 0.8 of the reference, as if clipped by a norm of {norm / 0.8:.6g} instead of {norm:.6g}"
    )


GRADIENTS: dict[str, tuple[Callable[[OracleObservation, torch.Tensor], torch.Tensor], str]] = {
    "never": (lambda o, g: g, "the value before clipping"),
    "own rows": (
        lambda o, g: g * 0.1 / norm_of_rows(o, 1),
        "clipped by the norm of this rank's shards alone",
    ),
    "own data": (
        lambda o, g: g * 0.1 / norm_of([*gradients(o, 1).values()]),
        "clipped by the norm of this rank's own gradients, not synchronised",
    ),
}


@pytest.mark.parametrize("defect", GRADIENTS)
def test_names_the_defect_of_a_clipped_gradient(clipped: OracleObservation, defect: str) -> None:
    rule, text = GRADIENTS[defect]
    name = "layers.1.weight"
    wrong = row_shard(rule(clipped, gradients(clipped)[name]), 1, WORLD_SIZE)
    place = TensorKey(quantity=Quantity.GRADIENT, step=STEP, name=name)
    assert looks_like(evidence(CLIPPED, clipped), place, RankShard(rank=1, shard=wrong)) == text


LOSSES_OF: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], str]] = {
    "mean": (lambda now, before: now.mean(1), "the mean over the ranks"),
    "sum": (lambda now, before: now.sum(1), "the sum over the ranks"),
    "stale": (lambda now, before: before[:, 1], "the previous step's value (stale)"),
    "times ranks": (lambda now, before: 4 * now[:, 1], "exactly 4 x the reference, the number of ranks"),
    "by microbatches": (
        lambda now, before: now[:, 1] / 2,
        "the reference / 2: divided by the number of microbatches",
    ),
    "swapped": (lambda now, before: now[:, 1].flip(0), "permuted: "),
}


@pytest.mark.parametrize("defect", LOSSES_OF)
def test_names_the_defect_of_a_loss(plain: OracleObservation, defect: str) -> None:
    rule, text = LOSSES_OF[defect]
    wrong = rule(plain.steps[STEP].losses, plain.steps[STEP - 1].losses).unsqueeze(1)
    shard = Shard(tensor=wrong, offsets=(0, 1), global_shape=(2, WORLD_SIZE))
    place = TensorKey(quantity=Quantity.LOSS, step=STEP, name=LOSSES)
    assert looks_like(evidence(PLAIN, plain), place, RankShard(rank=1, shard=shard)).startswith(text)


@pytest.mark.parametrize(
    ("counted", "text"),
    [
        (1.0, "counts 2 updates fewer than were made"),
        (5.0, "counts 2 updates more than were made"),
        (3.5, UNSTRUCTURED),
    ],
)
def test_names_the_updates_that_a_counter_lacks(counted: float, text: str) -> None:
    oracle = run_oracle(replace(PLAIN, optimizer=ADAMW), WORLD_SIZE)
    place = TensorKey(quantity=Quantity.OPTIMIZER_STATE, step=2, name="layers.1.weight/step")
    shard = whole(torch.tensor(counted))
    assert looks_like(evidence(PLAIN, oracle), place, RankShard(rank=1, shard=shard)) == text


def test_names_a_gradient_computed_with_last_steps_parameters() -> None:
    """The reference is a separate training: one step on the next step's data, with parameters never updated."""
    frozen = replace(PLAIN, optimizer=replace(SGD, name="frozen", lr=0.0))
    oracle, unmoved = run_oracle(PLAIN, WORLD_SIZE), run_oracle(frozen, WORLD_SIZE)
    name = "layers.1.weight"
    wrong = unmoved.steps[1].gradients[name]
    assert wrong is not None
    place = TensorKey(quantity=Quantity.GRADIENT, step=1, name=name)
    shard = row_shard(wrong.float(), 2, WORLD_SIZE)
    diagnosis = looks_like(evidence(PLAIN, oracle), place, RankShard(rank=2, shard=shard))
    assert diagnosis == "computed with last step's parameters"


def test_names_the_rank_whose_rows_a_rank_holds(plain: OracleObservation) -> None:
    name = "layers.1.weight"
    right = plain.steps[0].parameters[name]
    theirs, mine = row_shard(right, 3, WORLD_SIZE), row_shard(right, 1, WORLD_SIZE)
    shard = replace(mine, tensor=theirs.tensor.float())
    place = TensorKey(quantity=Quantity.PARAMETER, step=0, name=name)
    rows, chunk = right.shape[0], right.shape[0] // WORLD_SIZE
    assert looks_like(evidence(PLAIN, plain), place, RankShard(rank=1, shard=shard)) == (
        f"rows {chunk}..{2 * chunk - 1} hold those of the reference at {3 * chunk}..{rows - 1}, the share of rank 3"
    )
