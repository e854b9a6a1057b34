"""A wrong update after a right gradient is explained by what the optimizer makes of other state or options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardproof import Evidence, LossScaling, Origin, RanksBefore, Schedule, StateForm, Training
from shardproof.fixtures.optimizers import ADAMW, GROUPED, SCHEDULED
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.laws.diagnosis import looks_like
from shardproof.harness.laws.structure import RankShard
from shardproof.harness.oracle.oracle_observation import OracleObservation, OracleStep, Quantity, TensorKey
from tests.simulated_engine import evidence_of, oracle_of, simulate, whole

NAME = "layers.0.weight"
Optimizer = torch.optim.Optimizer


def _count_one_more(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}


def _lose_state(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    optimizer.state.clear()


def _take_rate_of_vectors(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    matrices, vectors = optimizer.param_groups
    matrices["lr"] = vectors["lr"]


def _keep_first_rate(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    optimizer.param_groups[0]["lr"] = GROUPED.lr / 3


def _decay_nothing(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.0


def _scale(factor: float) -> Callable[[Optimizer, nn.Parameter], None]:
    def scale(optimizer: Optimizer, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad *= factor

    return scale


PLAIN = Training(problem=MLP_EVEN, optimizer=ADAMW, schedule=Schedule(steps=2))
GROUPS = replace(PLAIN, optimizer=SCHEDULED)
MOVED = replace(PLAIN, origin=Origin(steps=2, ranks=RanksBefore.HALF, form=StateForm.FILES))
SHORT = replace(PLAIN, schedule=Schedule(steps=2, microbatches=3, short_steps=(1,)))
SCALED = replace(PLAIN, schedule=Schedule(steps=2, scaling=LossScaling(init_scale=4.0)))


@pytest.mark.parametrize(
    ("training", "step", "change", "text"),
    [
        (PLAIN, 0, _count_one_more, "updated as if the optimizer had counted a step more"),
        (PLAIN, 1, _lose_state, "updated as if the optimizer's state were lost"),
        (MOVED, 0, _lose_state, "updated as if the optimizer's state were lost"),
        (GROUPS, 1, _take_rate_of_vectors, "updated with the 'lr' of another parameter group"),
        (GROUPS, 1, _keep_first_rate, "updated with the learning rate of the step before"),
        (GROUPS, 1, _decay_nothing, "updated without weight decay"),
        (SHORT, 1, _scale(2 / 3), "updated by 2/3, as if by 3 microbatches, x the gradient"),
        (SCALED, 1, _scale(4.0), "updated by the loss scale x the gradient"),
        (PLAIN, 1, _scale(1.37), "unstructured difference"),
    ],
)
def test_names_what_the_optimizer_was_given(
    training: Training, step: int, change: Callable[[Optimizer, nn.Parameter], None], text: str
) -> None:
    oracle = oracle_of(training, 2)
    parameter = nn.Parameter(oracle.initial[NAME].clone())
    optimizer = training.optimizer([parameter])
    make = getattr(training.optimizer, "scheduler", None)
    schedule = None if make is None else make(optimizer)
    for now, seen in enumerate(oracle.steps[: step + 1]):
        parameter.grad = _gradient(seen).clone()
        if now == step:
            change(optimizer, parameter)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    shard = RankShard(rank=0, shard=whole(parameter.detach().float()))
    place = TensorKey(quantity=Quantity.PARAMETER, step=step, name=NAME)
    assert looks_like(_with_right_gradients(training, oracle), place, shard).startswith(text)


def _gradient(seen: OracleStep) -> torch.Tensor:
    gradient = seen.gradients[NAME]
    assert gradient is not None
    return gradient


def _with_right_gradients(training: Training, oracle: OracleObservation) -> Evidence:
    (rank, *_) = simulate(PLAIN, 2)
    steps = tuple(
        replace(seen, gradients={NAME: whole(_gradient(expected).float())})
        for seen, expected in zip(rank.steps, oracle.steps, strict=True)
    )
    return evidence_of(training, ranks=(replace(rank, steps=steps),), oracle=oracle)
