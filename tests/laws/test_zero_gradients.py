"""An engine may show zeros for absent gradients if it declares that; any other value is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from shardproof import MatchesOracle, Schedule, Training, TrialSession, Verdict
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.contract import Capability, Layout, NoGradient, Plan, Shard, shard_of
from shardproof.fixtures.idle import SOMETIMES
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.records.observation import Observation, StepObservation
from tests.judging import judged
from tests.simulated_engine import evidence_of, row_shard, simulate

WORLD_SIZE = 4
STEP = 1
PLAIN = Training(problem=MLP_EVEN, optimizer=SGD, schedule=Schedule(steps=3))


class _Zeros(PreparedDdp):
    def local_gradients(self) -> Mapping[str, Shard | None]:
        owned, shown = self.owned_parameters(), super().local_gradients()
        return {n: shard_of(torch.zeros_like(owned[n])) if s is None else s for n, s in shown.items()}


class _DeclaredZeros(_Zeros):
    no_gradient = NoGradient.ZEROS


class ShowsZeros(DistributedDataParallelEngine):
    """Shows zeros without declaring it."""

    prepared_type = _Zeros


class DeclaresZeros(DistributedDataParallelEngine):
    """Shows zeros and declares it."""

    prepared_type = _DeclaredZeros


class _FilledWithZeros(_DeclaredZeros):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.named.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class StepsOnZeros(DistributedDataParallelEngine):
    """Passes zeros to its optimizer, as it declares, where no rank has a gradient."""

    prepared_type = _FilledWithZeros


def test_a_parameter_moved_by_weight_decay_on_declared_zeros_is_named(session: TrialSession) -> None:
    plan = Plan(units=SOMETIMES.units, demands=frozenset({Capability.UNUSED}))
    training = Training(problem=SOMETIMES, optimizer=ADAMW, plan=plan, schedule=Schedule(steps=2))
    record = judged(session, f"{__name__}:StepsOnZeros", training=training, laws=(MatchesOracle(),))
    assert record.verdict is Verdict.FAILED
    assert "moved, although no rank used it: weight decay or momentum" in record.headline


@pytest.mark.parametrize(
    ("engine", "verdict", "text"),
    [
        (DeclaresZeros, Verdict.PASSED, "gradients are zeros instead of None, as the engine declares"),
        (ShowsZeros, Verdict.FAILED, "expected None, got zeros"),
    ],
    ids=["declared", "undeclared"],
)
def test_an_engine_declares_zeros_in_its_adapter(
    session: TrialSession, engine: type, verdict: Verdict, text: str
) -> None:
    demands = frozenset({Capability.UNUSED})
    training = Training(
        problem=SOMETIMES,
        optimizer=SGD,
        plan=Plan(units=SOMETIMES.units, demands=demands),
        schedule=Schedule(steps=4),
    )
    record = judged(session, f"{__name__}:{engine.__name__}", training=training, laws=(MatchesOracle(),))
    assert (record.verdict, text in record.headline) == (verdict, True), record.headline
    assert bool(record.declared_zeros) is (engine is DeclaresZeros)


NAME = "layers.1.weight"


def without_a_gradient(oracle: OracleObservation, step: int) -> OracleObservation:
    """Return the oracle of a training in which no loss reaches a parameter in one step."""
    steps = list(oracle.steps)
    steps[step] = replace(steps[step], gradients={**steps[step].gradients, NAME: None})
    return replace(oracle, steps=tuple(steps))


def showing(
    ranks: tuple[Observation, ...], tensor: torch.Tensor, no_gradient: NoGradient
) -> tuple[Observation, ...]:
    """Return the observations of ranks that show a gradient of the parameter after step 1."""

    def shown(rank: int, step: int, seen: StepObservation) -> StepObservation:
        shard = row_shard(tensor, rank, WORLD_SIZE)
        return seen if step != STEP else replace(seen, gradients={**seen.gradients, NAME: shard})

    return tuple(
        replace(o, no_gradient=no_gradient, steps=tuple(shown(o.rank, i, s) for i, s in enumerate(o.steps)))
        for o in ranks
    )


@pytest.mark.parametrize(
    ("scale", "declared", "text"),
    [
        (0.0, NoGradient.ZEROS, None),
        (0.0, NoGradient.NONE, "expected None, got zeros"),
        (1.0, NoGradient.ZEROS, "expected None, got the gradient of step 0 (stale)"),
        (1.0, NoGradient.NONE, "expected None, got the gradient of step 0 (stale)"),
        (1.37, NoGradient.ZEROS, "expected None, got a tensor with values up to"),
    ],
)
def test_zeros_for_no_gradient_are_right_where_declared_and_nothing_else_is(
    scale: float, declared: NoGradient, text: str | None
) -> None:
    plain = run_oracle(PLAIN, WORLD_SIZE)
    before = plain.steps[0].gradients[NAME]
    assert before is not None
    ranks = showing(simulate(PLAIN, WORLD_SIZE, layout=Layout.SHARD), scale * before.float(), declared)
    seen = evidence_of(PLAIN, WORLD_SIZE, ranks=ranks, oracle=without_a_gradient(plain, STEP))
    record = MatchesOracle().judge(seen).record
    if text is None:
        assert record.held
        assert "4 gradients are zeros instead of None, as the engine declares" in record.summary
    else:
        assert not record.held
        assert text in record.summary
