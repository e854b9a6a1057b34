"""Noise that hides a simple defect makes a run vacuous; rounding of the model itself hides none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from shardproof import Evidence, MatchesOracle, Plan, Schedule, Training
from shardproof.fixtures.layers import linear
from shardproof.fixtures.mlps import AUTOCAST
from shardproof.fixtures.optimizers import ADAMW, EXACT_SGD, SGD
from shardproof.fixtures.problems import EXACT_LINEAR, MLP_UNEVEN, SINGLE_GROUP
from shardproof.fixtures.random_draws import DROPPED
from shardproof.harness.laws.tolerance import MULTIPLE, allowed_error
from shardproof.harness.oracle.absolute_error import largest
from shardproof.harness.oracle.oracle_observation import OracleObservation, PieceSizes, Quantity, TensorKey
from shardproof.harness.verdicts.simple_defects import hidden_because
from shardproof.harness.verdicts.vacuity import vacuous_because
from tests.simulated_engine import Honest, Moment, accumulate, evidence_of, oracle_of, ring_mean

TRAINING = Training(problem=MLP_UNEVEN, optimizer=SGD)
ROUNDING = Training(problem=AUTOCAST, optimizer=SGD)
NAME = "layers.1.weight"


@pytest.fixture(scope="module")
def oracle() -> OracleObservation:
    return oracle_of(TRAINING, 3)


def asking(oracle: OracleObservation, training: Training = TRAINING) -> Evidence:
    return evidence_of(training, 3, ranks=(), oracle=oracle)


def noisy(
    oracle: OracleObservation, quantity: Quantity, of: Callable[[int, str], float], name: str | None = None
) -> Evidence:
    """Set the noise of one quantity by (step, name), divided by the multiple that tolerance applies."""
    noise = {
        place: of(place.step, place.name) / MULTIPLE
        if place.quantity is quantity and name in {None, place.name}
        else value
        for place, value in oracle.noise.items()
    }
    return asking(replace(oracle, noise=noise))


def gradient(oracle: OracleObservation, step: int, name: str) -> float:
    found = oracle.steps[step].gradients[name]
    assert found is not None
    return largest(found)


def test_an_allowed_error_of_half_a_gradient_hides_a_factor(oracle: OracleObservation) -> None:
    for share, is_hidden in ((0.45, False), (0.55, True)):
        found = hidden_because(
            noisy(oracle, Quantity.GRADIENT, lambda s, n, f=share: f * gradient(oracle, s, n), NAME)  # type: ignore[misc]  # bound now
        )
        assert ("a wrong factor would pass" in (found or "")) is is_hidden
        if found is not None and is_hidden:
            assert f"gradient {NAME!r} in step" in found
            assert "1.1 x what halving it would change" in found


def test_one_step_that_shows_a_defect_is_enough(oracle: OracleObservation) -> None:
    later = noisy(oracle, Quantity.GRADIENT, lambda step, _: 0.0 if step == 1 else 1e6)
    assert hidden_because(later) is None


def test_the_most_hidden_tensor_is_named(oracle: OracleObservation) -> None:
    wild = noisy(oracle, Quantity.GRADIENT, lambda _, name: 1e9 if name == NAME else 1e3)
    assert NAME in (hidden_because(wild) or "")


def test_a_share_of_one_rank_must_show_in_some_tensor(oracle: OracleObservation) -> None:
    def of_last_rank(step: int, name: str) -> float:
        return 1.5 * oracle.steps[step].sizes[name].of_ranks[2] / 3

    faint = replace(
        oracle,
        steps=tuple(
            replace(s, sizes={n: _fainter(sizes) for n, sizes in s.sizes.items()}) for s in oracle.steps
        ),
    )
    everywhere = noisy(faint, Quantity.GRADIENT, lambda s, n: 1e-2 * of_last_rank(s, n))
    assert "the share of one rank changes: a missing rank would pass" in (hidden_because(everywhere) or "")
    asked = replace(everywhere.oracle, plan=Plan(reduce_dtype=torch.float16))
    assert hidden_because(asking(asked)) is None
    somewhere = noisy(faint, Quantity.GRADIENT, lambda s, n: 1e-2 * of_last_rank(s, n), NAME)
    assert "share of one rank" not in (hidden_because(somewhere) or "")


def _fainter(sizes: PieceSizes) -> PieceSizes:
    """Scale the contribution of the last rank to a hundredth."""
    *others, last = sizes.of_ranks
    return replace(sizes, of_ranks=(*others, 0.01 * last))


def test_an_allowed_error_of_all_updates_hides_that_they_are_missing(oracle: OracleObservation) -> None:
    def moved(step: int, name: str) -> float:
        return largest(oracle.steps[step].parameters[name] - oracle.initial[name])

    assert hidden_because(noisy(oracle, Quantity.PARAMETER, lambda s, n: 0.9 * moved(s, n))) is None
    found = hidden_because(noisy(oracle, Quantity.PARAMETER, lambda s, n: 1.1 * moved(s, n), NAME))
    assert f"parameter {NAME!r} in step" in (found or "")
    assert "a frozen parameter would pass" in (found or "")


def test_an_allowed_error_of_bfloat16_hides_reductions_where_none_were_asked(
    oracle: OracleObservation,
) -> None:
    coarse = torch.finfo(torch.bfloat16).eps
    evidence = noisy(oracle, Quantity.GRADIENT, lambda s, n: coarse * gradient(oracle, s, n), NAME)
    assert "a reduction in bfloat16 changes" in (hidden_because(evidence) or "")
    asked = replace(evidence.oracle, plan=Plan(reduce_dtype=torch.bfloat16))
    assert hidden_because(asking(asked)) is None
    alone = oracle_of(TRAINING, 1)
    lonely = noisy(alone, Quantity.GRADIENT, lambda s, n: coarse * gradient(alone, s, n), NAME)
    assert hidden_because(lonely) is None


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda o: o.name)
def test_low_precision_that_was_asked_for_hides_no_other_defect(optimizer: object) -> None:
    for plan in (Plan(reduce_dtype=torch.bfloat16), Plan(compute_dtype=torch.bfloat16)):
        training = replace(TRAINING, plan=plan, optimizer=optimizer)  # type: ignore[arg-type]  # one of the two
        assert hidden_because(asking(oracle_of(training, 3), training)) is None


def test_exact_trainings_hide_nothing() -> None:
    training = Training(problem=EXACT_LINEAR, optimizer=EXACT_SGD, schedule=Schedule(steps=2))
    assert hidden_because(asking(oracle_of(training, 4), training)) is None


def test_draws_that_differ_would_be_vacuous() -> None:
    training = replace(TRAINING, problem=DROPPED)
    oracle = oracle_of(training, 3)
    assert hidden_because(asking(oracle, training)) is None
    differ = noisy(oracle, Quantity.GRADIENT, lambda s, n: MULTIPLE * gradient(oracle, s, n))
    assert "a wrong factor would pass" in (hidden_because(differ) or "")


# Rounding of the model's own


class RoundsReductions(Honest):
    def gradient(self, pieces: torch.Tensor, moment: Moment) -> torch.Tensor | None:
        return ring_mean(accumulate(pieces).bfloat16()).float()


class RoundsLater(Honest):
    """Rounds as a model whose weights round to other values once they differ in one bit."""

    def gradient(self, pieces: torch.Tensor, moment: Moment) -> torch.Tensor | None:
        honest = ring_mean(accumulate(pieces))
        return honest * (1 + 2**-9) if moment.step else honest


def judged(engine: Honest, training: Training = ROUNDING) -> tuple[bool, str | None]:
    evidence = evidence_of(training, 3, engine)
    return MatchesOracle().judge(evidence).record.held, vacuous_because(evidence)


def test_rounding_of_the_model_is_no_fault() -> None:
    assert judged(Honest()) == (True, None)
    assert judged(RoundsLater()) == (True, None)


def test_a_reduction_that_rounds_like_the_model_is_not_mistaken_for_it() -> None:
    holds, reason = judged(RoundsReductions())
    assert holds
    assert "a reduction in bfloat16 changes" in (reason or "")
    assert "x what" in (reason or "")


def test_only_models_that_round_more_than_their_reduction_are_computed_once_more(
    oracle: OracleObservation,
) -> None:
    assert oracle.first is None
    low = Plan(compute_dtype=torch.bfloat16)
    assert oracle_of(replace(TRAINING, plan=low), 3).first is None
    assert oracle_of(replace(TRAINING, plan=replace(low, reduce_dtype=torch.float32)), 3).first is not None
    rounding = oracle_of(ROUNDING, 3)
    assert rounding.first is not None
    for name, noise in rounding.first.noise.items():
        place = TensorKey(quantity=Quantity.GRADIENT, step=0, name=name)
        assert 100 * MULTIPLE * noise < allowed_error(rounding, place)


class Matrices(nn.Module):
    """Two matrices and no vector, which Muon would refuse."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            linear(16, 24, generator, bias=False), linear(24, 8, generator, bias=False)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(rows)
        return output


@dataclass(frozen=True, slots=True)
class OrthogonalUpdates:
    """An optimizer that computes its updates in bfloat16."""

    name: str = "muon"

    def __call__(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(params, lr=0.01)


class Freezes(Honest):
    def updated(self, before: torch.Tensor, after: torch.Tensor, moment: Moment) -> torch.Tensor:
        return before if moment.name == "layers.1.weight" else after


def test_rounding_of_the_optimizer_is_noise_of_parameters_alone() -> None:
    problem = replace(SINGLE_GROUP, name="matrices", model=Matrices)
    training = Training(problem=problem, optimizer=OrthogonalUpdates())
    assert judged(Honest(), training) == (True, None)
    for engine in (RoundsReductions(), Freezes()):
        assert not judged(engine, training)[0]
