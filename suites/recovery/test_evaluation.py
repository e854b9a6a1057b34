"""Evaluations before and during training do not change it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from shardproof import POWERS_OF_TWO, Actor, Capability, Evaluation, Eventful, Interlude, Layout
from shardproof import Placement, Trial
from shardproof.fixtures.placements import DIVISIBLE_MLP
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

# The root has the last layer: engines keep its parameters longest.
UNITS = MLP_EVEN.units[:-1]
both_layouts = parametrize("layout", Layout.REPLICATE, Layout.SHARD)


@pytest.mark.kills("ComputesWithWhatAnEvaluationSaw")
@both_layouts
def test_an_evaluation_before_the_step_leaves_nothing_stale(trial: Trial, layout: Layout) -> None:
    script = Eventful(moves=((Interlude.END, Evaluation.NO_GRAD),))
    trial.holds(train(MLP_EVEN, layout=layout, units=UNITS, script=script), *PARITY)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatesBetween:
    """Evaluates each microbatch between its forward and its backward."""

    demands: ClassVar[frozenset[Capability]] = frozenset()

    def play(self, actor: Actor) -> None:
        """Keep a graph alive while the model runs without one."""
        for microbatch in range(actor.num_microbatches):
            loss = actor.loss(microbatch, actor.forward(microbatch, *actor.batch(microbatch).inputs))
            actor.evaluate(microbatch)
            actor.backward(microbatch, loss)


@parametrize(
    "layout",
    param(Layout.REPLICATE, kills="ComputesWithWhatAnEvaluationSaw"),
    param(Layout.SHARD, kills="EvaluatesWithStaleParameters"),
)
def test_an_evaluation_between_forward_and_backward_changes_nothing(trial: Trial, layout: Layout) -> None:
    trial.holds(train(MLP_EVEN, layout=layout, units=UNITS, script=EvaluatesBetween()), *PARITY)


@pytest.mark.kills("KeepsAnInferenceTensor")
@both_layouts
def test_trains_after_an_evaluation_in_inference_mode(trial: Trial, layout: Layout) -> None:
    script = Eventful(moves=((Interlude.BEFORE, Evaluation.INFERENCE),))
    trial.holds(train(MLP_EVEN, layout=layout, units=UNITS, script=script), *PARITY)


@pytest.mark.kills("KeepsAnInferenceTensor")
@pytest.mark.worlds(POWERS_OF_TWO)
def test_evaluates_shards_of_another_dim_in_inference_mode(trial: Trial) -> None:
    script = Eventful(moves=((Interlude.BEFORE, Evaluation.INFERENCE),))
    trial.holds(
        train(DIVISIBLE_MLP, layout=Layout.SHARD, placement=Placement.LARGEST, script=script), *PARITY
    )
