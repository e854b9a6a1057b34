"""Parity's headline names each known defect, and names no defect that it does not know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from shardproof import Clip, Evidence, Layout, MatchesOracle, Plan, Schedule, Shard, Training
from shardproof.fixtures.optimizers import ADAMW, EXACT_SGD, SGD
from shardproof.fixtures.problems import EXACT_LINEAR, MLP_EVEN, MLP_UNEVEN
from shardproof.harness.laws import diagnosis
from shardproof.harness.laws.diagnosis import UNSTRUCTURED
from shardproof.harness.laws.structure import RankShard
from shardproof.harness.laws.tolerance import allowed_error
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.oracle.oracle_observation import (
    INITIAL_STEP,
    LOSSES,
    NORM,
    OracleObservation,
    Quantity,
    TensorKey,
)
from shardproof.harness.records.record import TensorRecord
from tests.simulated_engine import Honest, Moment, accumulate, evidence_of, ring_mean, row_shard, whole

WORLD_SIZE = 4
TRAINING = Training(problem=MLP_EVEN, optimizer=SGD, schedule=Schedule(steps=3, microbatches=3))
layouts = pytest.mark.parametrize(
    "layout", [Layout.SHARD, Layout.REPLICATE, Layout.HYBRID], ids=lambda x: x.name
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongGradient(Honest):
    """An engine that reduces gradients by another rule."""

    rule: Callable[[torch.Tensor, Moment], torch.Tensor | None]

    def gradient(self, pieces: torch.Tensor, moment: Moment) -> torch.Tensor | None:
        return self.rule(pieces, moment)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongUpdate(Honest):
    """An engine whose parameters after the step follow another rule of (before, after, moment)."""

    rule: Callable[[torch.Tensor, torch.Tensor, Moment], torch.Tensor]

    def updated(self, before: torch.Tensor, after: torch.Tensor, moment: Moment) -> torch.Tensor:
        return self.rule(before, after, moment)


def mean(pieces: torch.Tensor) -> torch.Tensor:
    return ring_mean(accumulate(pieces))


def doubled(pieces: torch.Tensor, moment: Moment) -> torch.Tensor:
    total = torch.zeros_like(pieces[0, 0])
    for of_ranks in pieces:
        total = 2 * total + ring_mean(of_ranks)
    return total


def running_sums(pieces: torch.Tensor, moment: Moment) -> torch.Tensor:
    return ring_mean(accumulate(pieces.cumsum(0)))


class Stale(Honest):
    """Returns the gradient that it reduced in the step before, because it did not wait for the reduction."""

    def __init__(self) -> None:
        self.late: dict[tuple[int, str], torch.Tensor] = {}

    def gradient(self, pieces: torch.Tensor, moment: Moment) -> torch.Tensor | None:
        now = mean(pieces)
        before = self.late.get((moment.rank, moment.name), now)
        self.late[moment.rank, moment.name] = now
        return before


def in_dtype(dtype: torch.dtype) -> Callable[[torch.Tensor, Moment], torch.Tensor]:
    return lambda pieces, moment: ring_mean(accumulate(pieces).to(dtype)).float()


def added_in_bfloat16(pieces: torch.Tensor, moment: Moment) -> torch.Tensor:
    total = torch.zeros_like(pieces[0], dtype=torch.bfloat16)
    for piece in pieces:
        total += piece.bfloat16()
    return total.float().mean(0)


def half(pieces: torch.Tensor, moment: Moment) -> torch.Tensor:
    start = moment.rank // 2 * 2
    return accumulate(pieces)[start : start + 2].mean(0)


def every_other(pieces: torch.Tensor, moment: Moment) -> torch.Tensor:
    return accumulate(pieces)[moment.rank % 2 :: 2].mean(0)


GRADIENTS: dict[str, tuple[Callable[[torch.Tensor, Moment], torch.Tensor | None], str]] = {
    "sum": (lambda p, m: mean(p) * WORLD_SIZE, "exactly 4 x the reference: summed over the ranks"),
    "divided twice": (
        lambda p, m: mean(p) / WORLD_SIZE,
        "the reference / 4: divided by the world size twice",
    ),
    "last": (lambda p, m: ring_mean(p[-1]), "only the last microbatch"),
    "first": (lambda p, m: ring_mean(p[0]), "only the first microbatch"),
    "mean of microbatches": (
        lambda p, m: ring_mean(p.mean(0)),
        "the reference / 3: averaged over the microbatches, not summed",
    ),
    "once for each microbatch": (
        lambda p, m: 3 * mean(p),
        "exactly 3 x the reference: multiplied by the number of microbatches",
    ),
    "own": (lambda p, m: accumulate(p)[m.rank], "only this rank's own gradient: not synchronised"),
    "own divided": (
        lambda p, m: accumulate(p)[m.rank] / WORLD_SIZE,
        "only this rank's own gradient / world size",
    ),
    "doubled": (doubled, "each earlier microbatch counted again (doubled per microbatch)"),
    "running sums": (running_sums, "each earlier microbatch counted again (running sums added)"),
    "zero": (lambda p, m: torch.zeros_like(p[0, 0]), "zero"),
    "factor": (lambda p, m: mean(p) * 1.25, "a constant factor 1.25 of the reference"),
    "slight factor": (lambda p, m: mean(p) * 1.001, "a constant factor 1.001 of the reference"),
    "bfloat16": (in_dtype(torch.bfloat16), "rounded to bfloat16"),
    "float16": (in_dtype(torch.float16), "rounded to float16"),
    "added in bfloat16": (added_in_bfloat16, "microbatches added up in bfloat16"),
    "halves": (half, "synchronised within ranks"),
    "strides": (every_other, "synchronised within ranks"),
    "rank 2 absent": (
        lambda p, m: accumulate(p)[[0, 1, 3]].sum(0) / WORLD_SIZE,
        "without the contribution of rank 2",
    ),
    "rows reversed": (lambda p, m: mean(p).flip(0), "permuted: "),
    "last twice": (lambda p, m: mean(p) + ring_mean(p[-1]), "microbatch 2 added once more"),
    "middle left out": (lambda p, m: mean(p[[0, 2]]), "without microbatch 1"),
    "rank 1 twice": (
        lambda p, m: (accumulate(p).sum(0) + accumulate(p)[1]) / WORLD_SIZE,
        "the contribution of rank 1 added once more",
    ),
    "twice": (lambda p, m: 2 * mean(p), "exactly 2 x the reference: added once more"),
    "one piece halved": (
        lambda p, m: mean(p) - p[1, 2] / (2 * WORLD_SIZE),
        "a sum in which microbatch 1 of rank 2 counts 0.5 times",
    ),
    "rank 3 thrice, rank 0 never": (
        lambda p, m: mean(p) + (2 * accumulate(p)[3] - accumulate(p)[0]) / WORLD_SIZE,
        "a sum in which rank 0 counts 0 times, rank 3 counts 3 times",
    ),
    "noisy": (
        lambda p, m: mean(p) * (1 + torch.linspace(-1, 1, mean(p).numel()).view(mean(p).shape) ** 3),
        UNSTRUCTURED,
    ),
    "nan": (lambda p, m: mean(p) * torch.nan, "NaN or infinity"),
}
UPDATES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor, Moment], torch.Tensor], str]] = {
    "frozen": (lambda b, a, m: b, "unchanged since initialisation"),
    "stale": (lambda b, a, m: b if m.step == 1 else a, "the previous step's value (stale)"),
    "zero": (lambda b, a, m: torch.zeros_like(a), "zero"),
    "world size times": (
        lambda b, a, m: b + WORLD_SIZE * (a - b),
        "updated by 4 x the gradient that was read",
    ),
    "scaled": (lambda b, a, m: b + 0.37 * (a - b), "updated by 0.37 x the reference's update"),
    "applied twice": (
        lambda b, a, m: b + 2 * (a - b),
        "updated by 2 x the reference's update: added once more",
    ),
    "columns reversed": (lambda b, a, m: a.flip(-1), "permuted: "),
    "decayed": (lambda b, a, m: 0.999 * a, "a constant factor 0.999 of the reference"),
    "bfloat16": (lambda b, a, m: a.bfloat16().float(), "rounded to bfloat16"),
    "noisy": (lambda b, a, m: a + 1e-3 * torch.linspace(-1, 1, a.numel()).view(a.shape) ** 3, UNSTRUCTURED),
}


def looks_like(
    oracle: OracleObservation, place: TensorKey, rank: int, shard: Shard, training: Training = TRAINING
) -> str:
    evidence = Evidence(training=training, world_size=oracle.world_size, ranks=(), oracle=oracle)
    return diagnosis.looks_like(evidence, place, RankShard(rank=rank, shard=shard))


@pytest.fixture(scope="module")
def oracle() -> OracleObservation:
    return run_oracle(TRAINING, WORLD_SIZE)


def headline(oracle: OracleObservation, engine: Honest, layout: Layout) -> TensorRecord:
    ruling = MatchesOracle().judge(evidence_of(TRAINING, WORLD_SIZE, engine, layout, oracle=oracle))
    assert not ruling.record.held
    assert ruling.worst is not None
    return ruling.worst


@layouts
@pytest.mark.parametrize("defect", GRADIENTS)
def test_names_the_defect_of_a_gradient(oracle: OracleObservation, defect: str, layout: Layout) -> None:
    rule, phrase = GRADIENTS[defect]
    worst = headline(oracle, WrongGradient(rule=rule), layout)
    assert (worst.quantity, worst.step) == (Quantity.GRADIENT, 0)
    assert worst.looks_like.startswith(phrase)


@layouts
def test_names_the_part_that_is_wrong(oracle: OracleObservation, layout: Layout) -> None:
    worst = headline(oracle, WrongGradient(rule=lambda p, m: mean(p).clamp(min=0)), layout)
    assert worst.looks_like.endswith("elements, zero")


@layouts
@pytest.mark.parametrize("defect", UPDATES)
def test_names_the_defect_of_a_parameter(oracle: OracleObservation, defect: str, layout: Layout) -> None:
    rule, phrase = UPDATES[defect]
    worst = headline(oracle, WrongUpdate(rule=rule), layout)
    assert (worst.quantity, worst.step) == (Quantity.PARAMETER, 1 if defect == "stale" else 0)
    assert worst.looks_like.startswith(phrase)


@layouts
def test_names_a_stale_gradient(oracle: OracleObservation, layout: Layout) -> None:
    worst = headline(oracle, Stale(), layout)
    assert (worst.quantity, worst.step) == (Quantity.GRADIENT, 1)
    assert worst.looks_like == "the previous step's value (stale)"


@pytest.mark.parametrize(
    ("rule", "group"), [(half, "[2, 3]"), (every_other, "[1, 3]")], ids=["half", "stride"]
)
def test_names_the_ranks_that_were_synchronised(
    oracle: OracleObservation, rule: Callable[[torch.Tensor, Moment], torch.Tensor], group: str
) -> None:
    def only_rank_3(pieces: torch.Tensor, moment: Moment) -> torch.Tensor:
        return rule(pieces, moment) if moment.rank == 3 else mean(pieces)

    worst = headline(oracle, WrongGradient(rule=only_rank_3), Layout.REPLICATE)
    assert worst.rank == 3
    assert worst.looks_like == f"synchronised within ranks {group} only: one mesh axis is missing"


def without_last_share(before: torch.Tensor, after: torch.Tensor, moment: Moment) -> torch.Tensor:
    chunk = -(-before.shape[0] // WORLD_SIZE)
    return torch.cat([after[: 3 * chunk], before[3 * chunk :]])


@pytest.mark.parametrize("layout", [Layout.SHARD, Layout.REPLICATE], ids=lambda x: x.name)
def test_names_the_share_whose_rows_never_change(oracle: OracleObservation, layout: Layout) -> None:
    worst = headline(oracle, WrongUpdate(rule=without_last_share), layout)
    assert "the share of rank 3" in worst.looks_like
    assert "unchanged" in worst.looks_like
    rows = MLP_EVEN.build().get_parameter(worst.name).shape[0]
    assert f"rows {rows * 3 // 4}..{rows - 1}" in worst.looks_like


def test_names_a_gradient_that_was_not_cleared(oracle: OracleObservation) -> None:
    def keep(pieces: torch.Tensor, moment: Moment) -> torch.Tensor:
        reduced = mean(pieces)
        return reduced if moment.step == 0 or moment.previous is None else reduced + moment.previous

    worst = headline(oracle, WrongGradient(rule=keep), Layout.SHARD)
    assert worst.step == 1
    assert worst.looks_like == "the previous step's value added: gradients not cleared"


def test_names_the_rank_whose_data_a_loss_is_of(oracle: OracleObservation) -> None:
    column = oracle.steps[0].losses[:, 2:3].clone()
    shard = Shard(tensor=column, offsets=(0, 1), global_shape=(3, WORLD_SIZE))
    place = TensorKey(quantity=Quantity.LOSS, step=0, name=LOSSES)
    assert looks_like(oracle, place, 1, shard) == "the loss of rank 2's data"


def test_names_the_step_whose_norm_was_kept() -> None:
    schedule = Schedule(steps=3, clip=Clip(max_norm=0.1))
    training = Training(problem=MLP_UNEVEN, optimizer=SGD, schedule=schedule)
    oracle = run_oracle(training, 2)
    norms = [step.norm for step in oracle.steps]
    for kept, expected in (
        (0, "the norm of step 0 (stale)"),
        (1, "the norm of step 1 (stale)"),
        (2, UNSTRUCTURED),
    ):
        norm = norms[kept]
        assert norm is not None
        wrong = whole(norm.float() * (1 if kept < 2 else 1.37))
        place = TensorKey(quantity=Quantity.NORM, step=2, name=NORM)
        assert looks_like(oracle, place, 0, wrong, training) == expected


def test_an_initial_parameter_has_no_training_defect(oracle: OracleObservation) -> None:
    initial = oracle.initial["layers.0.weight"].float()
    place = TensorKey(quantity=Quantity.INITIAL, step=INITIAL_STEP, name="layers.0.weight")
    assert looks_like(oracle, place, 0, whole(2 * initial)) == "a constant factor 2 of the reference"
    flipped = looks_like(oracle, place, 0, whole(initial.flip(0)))
    assert flipped == "permuted: rows of the reference in another order"
    assert looks_like(oracle, place, 0, whole(initial**2)) == UNSTRUCTURED


def test_one_element_fits_no_constant_factor() -> None:
    training = Training(problem=MLP_UNEVEN, optimizer=SGD)
    oracle = run_oracle(training, 2)
    gradient = oracle.steps[0].gradients["layers.3.bias"]
    assert gradient is not None
    assert gradient.numel() == 1
    place = TensorKey(quantity=Quantity.GRADIENT, step=0, name="layers.3.bias")
    wrong = row_shard(gradient.float() * 1.37, 0, 2)
    assert looks_like(oracle, place, 0, wrong) == UNSTRUCTURED


def test_a_defect_near_the_noise_has_no_name(oracle: OracleObservation) -> None:
    """The reference itself fits within the noise, as a factor of 1; a name must explain the error."""
    place = TensorKey(quantity=Quantity.GRADIENT, step=0, name="layers.1.weight")
    gradient = oracle.steps[0].gradients["layers.1.weight"]
    assert gradient is not None
    off = gradient.float()
    off[3, 4] += 1.5 * allowed_error(oracle, place)
    assert looks_like(oracle, place, 0, whole(off)) == UNSTRUCTURED


def test_names_a_defect_of_an_exact_training() -> None:
    training = Training(problem=EXACT_LINEAR, optimizer=EXACT_SGD, schedule=Schedule(steps=2, microbatches=2))
    oracle = run_oracle(training, 4)
    gradient = oracle.steps[1].gradients["left.weight"]
    assert gradient is not None
    place = TensorKey(quantity=Quantity.GRADIENT, step=1, name="left.weight")
    assert looks_like(oracle, place, 0, whole(4 * gradient.float())).startswith("exactly 4 x the reference")
    off = gradient.float()
    off[0, 0] += 2.0**-13
    assert looks_like(oracle, place, 0, whole(off)) == UNSTRUCTURED


FACTORS: dict[str, tuple[Callable[[torch.Tensor, Moment], torch.Tensor], float, str]] = {
    "summed": (
        lambda p, m: ring_mean(p[0]) * WORLD_SIZE,
        8,
        "exactly 8 x the reference: summed over the ranks, not divided by the factor 8",
    ),
    "twice": (lambda p, m: ring_mean(p[0]) / 16, 8, "the reference / 8: divided by the factor 8 twice"),
    "twice by the world size": (
        lambda p, m: ring_mean(p[0]) / WORLD_SIZE,
        WORLD_SIZE,
        "the reference / 4: divided by the factor 4 twice",
    ),
    "twice or averaged": (
        lambda p, m: ring_mean(p[0]),
        2,
        "the reference / 2: divided by the factor 2 twice, or averaged over the 4 ranks: the factor 2 is ignored",
    ),
    "ignored": (
        lambda p, m: ring_mean(p[0]),
        8,
        "exactly 2 x the reference: averaged over the 4 ranks: the factor 8 is ignored, or added once more",
    ),
    "ignored one": (
        lambda p, m: ring_mean(p[0]),
        1,
        "the reference / 4: averaged over the 4 ranks: the factor 1 is ignored",
    ),
    "both": (
        lambda p, m: ring_mean(p[0]) / 8,
        8,
        "the reference / 4: averaged over the 4 ranks, and divided by the factor 8 too",
    ),
    "own": (lambda p, m: p[0, m.rank] / 8, 8, "only this rank's own gradient / 8: averaged, never added"),
}


@pytest.mark.parametrize("defect", FACTORS)
def test_names_the_factor_and_its_error(defect: str) -> None:
    rule, factor, text = FACTORS[defect]
    plan = Plan(divide_factor=factor)
    training = Training(problem=MLP_EVEN, optimizer=SGD, plan=plan, schedule=Schedule(steps=1))
    worst = MatchesOracle().judge(evidence_of(training, WORLD_SIZE, WrongGradient(rule=rule))).worst
    assert worst is not None
    assert worst.looks_like == text


def test_an_engine_that_divides_as_asked_is_right() -> None:
    plan = Plan(divide_factor=8)
    training = Training(problem=MLP_EVEN, optimizer=SGD, plan=plan, schedule=Schedule(steps=2))
    honest = WrongGradient(rule=lambda p, m: ring_mean(p[0]) * (WORLD_SIZE / 8))
    assert MatchesOracle().judge(evidence_of(training, WORLD_SIZE, honest)).record.held


@pytest.mark.parametrize("defect", ["sum", "last", "own", "bfloat16"])
def test_gradients_name_the_defect_under_adamw_too(defect: str) -> None:
    """AdamW's parameters hide a factor; the raw gradient does not."""
    training = Training(problem=MLP_EVEN, optimizer=ADAMW, schedule=Schedule(steps=1, microbatches=3))
    rule, phrase = GRADIENTS[defect]
    worst = MatchesOracle().judge(evidence_of(training, WORLD_SIZE, WrongGradient(rule=rule))).worst
    assert worst is not None
    assert worst.looks_like.startswith(phrase)


def test_recognises_rounding_in_every_microbatch_by_its_size(oracle: OracleObservation) -> None:
    def rounded(pieces: torch.Tensor, moment: Moment) -> torch.Tensor:
        return torch.stack([ring_mean(of_ranks.bfloat16()).float() for of_ranks in pieces]).sum(0)

    worst = headline(oracle, WrongGradient(rule=rounded), Layout.SHARD)
    assert "rounding to bfloat16" in worst.looks_like


def test_a_missing_reduction_dtype_is_no_excuse() -> None:
    """An engine may round a reduction in bfloat16; the headline still names a sum in place of an average."""
    plan = Plan(reduce_dtype=torch.bfloat16)
    training = Training(problem=MLP_EVEN, optimizer=SGD, plan=plan, schedule=Schedule(steps=1))

    def verdict(engine: Honest) -> str | None:
        ruling = MatchesOracle().judge(evidence_of(training, 2, engine))
        return None if ruling.record.held or ruling.worst is None else ruling.worst.looks_like

    honest = in_dtype(torch.bfloat16)
    assert verdict(WrongGradient(rule=honest)) is None
    summed = WrongGradient(rule=lambda p, m: 2 * in_dtype(torch.bfloat16)(p, m))
    assert (verdict(summed) or "").startswith("exactly 2 x the reference")
