"""What is under way is waited for and left alone until then, in whatever order ranks and results come.

All of it is asked of every other case as well. Results of a world of threads are late, so that an engine which does
without one never has it by luck; and there the order of ranks is drawn from a seed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, THREE_OR_MORE, Accumulation, Grouping, Layout
from shardproof import LeavesBuffersAlone, Plan, Reshard, ResultsAreWaitedFor, Schedule, Training, Trial
from shardproof.fixtures.chain import CHAIN
from shardproof.fixtures.optimizers import SGD
from shardproof.suites.params import param
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

pytestmark = pytest.mark.worlds(SEVERAL)


LAWS = (LeavesBuffersAlone(), ResultsAreWaitedFor(), *PARITY)
SHARDED = Plan(
    layout=Layout.SHARD, units=CHAIN.units, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD
)


@pytest.mark.kills("ReadsBucketsTooEarly", "ForgetsTheWorkOfANorm")
def test_waits_for_results_whatever_the_layout(trial: Trial) -> None:
    trial.holds(train(CHAIN), *LAWS)


@pytest.mark.kills("ClearsTheReduceInput", "FreesTheInputOfAReduction", "FillsTheGatherOutput")
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(SHARDED, id="shard"),
        param(replace(SHARDED, layout=Layout.HYBRID), id="hybrid", worlds=FOUR_OR_MORE_EVEN),
        pytest.param(replace(SHARDED, accumulation=Accumulation.EVERY_MICROBATCH), id="microbatches"),
    ],
)
def test_leaves_buffers_alone(trial: Trial, plan: Plan) -> None:
    num = 1 if plan.accumulation is Accumulation.LAST_MICROBATCH else 3
    training = Training(problem=CHAIN, optimizer=SGD, plan=plan, schedule=Schedule(microbatches=num))
    trial.holds(training, *LAWS)


@pytest.mark.kills("TrustsTheOrderOfArrival")
@pytest.mark.worlds(THREE_OR_MORE)
def test_learns_the_same_in_whatever_order_ranks_come(trial: Trial) -> None:
    trial.holds(Training(problem=CHAIN, optimizer=SGD, plan=Plan(units=CHAIN.units), schedules=6), *LAWS)
