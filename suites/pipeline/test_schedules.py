"""Data-parallel stages of a pipeline are right under every order of microbatches, and reduced once a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardproof import FOURS, FOUR_OR_MORE_EVEN, Accumulation, AllWaited, Between, Count, Exactly, Grouping
from shardproof import Layout, MatchesOracle, Microbatches, Nothing, Op, Per, Phase, PipelineOrder, Pipelined
from shardproof import Plan, RanksAgree, Resume, Schedule, Select, StateForm, Training, Trial, num_stages
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.pipeline import STAGED
from shardproof.suites.closed_forms import ClosedForm
from shardproof.suites.params import parametrize
from shardproof.suites.vocabulary import PARITY

NUM_MICROBATCHES = 4
SENDS = Select(ops=(Op.SEND,), axis="pipe")
RECEIVES = Select(ops=(Op.RECV,), axis="pipe")
SCATTERS = Select(ops=(Op.REDUCE_SCATTER,), axis="data")
SUMS = Select(ops=(Op.ALL_REDUCE,), axis="data")
EARLY = Select(ops=(Op.REDUCE_SCATTER, Op.ALL_REDUCE), microbatches=Microbatches.ALL_BUT_LAST)


def _messages_per_rank(training: Training, world_size: int) -> int:
    """Count an activation and a gradient per microbatch and pair of neighbours, over the ranks of the ring."""
    neighbours = num_stages(training) - 1
    return 2 * neighbours * training.schedule.microbatches // training.plan.pipeline_stages


def _groups_per_rank(training: Training, world_size: int) -> int:
    """Count a rank's units, and the root of the first or the last stage, which has a layer of its own."""
    return len(training.problem.units) // training.plan.pipeline_stages + 1


MESSAGES = ClosedForm(name="messages between neighbouring stages", formula=_messages_per_rank)
GROUPS = ClosedForm(name="communication groups of a rank's stages", formula=_groups_per_rank)
THE_MESSAGES = (
    Count(select=SENDS, expected=Exactly(MESSAGES), per=Per.STEP),
    Count(select=RECEIVES, expected=Exactly(MESSAGES), per=Per.STEP),
    AllWaited(select=RECEIVES),
)
every_order = parametrize("order", *PipelineOrder)


@pytest.mark.rows("T31")
@pytest.mark.kills("ReducesEveryMicrobatchOfAPipeline")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@every_order
def test_sharded_stages_train_as_one_model(trial: Trial, order: PipelineOrder) -> None:
    last = Select(ops=SCATTERS.ops, axis="data", phases=(Phase.BACKWARD,), microbatches=Microbatches.LAST)
    trial.holds(
        _training(Layout.SHARD, order),
        MatchesOracle(),
        Count(select=last, expected=Exactly(GROUPS)),
        Nothing(select=EARLY),
        AllWaited(select=SCATTERS),
        *THE_MESSAGES,
        RanksAgree(),
    )


@pytest.mark.rows("R15")
@pytest.mark.kills(
    "ReducesEveryMicrobatchOfAPipeline",
    "ReducesBeforeTheLastBackward",
)
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@every_order
def test_replicated_stages_train_as_one_model(trial: Trial, order: PipelineOrder) -> None:
    last = Select(ops=SUMS.ops, axis="data", phases=(Phase.BACKWARD,), microbatches=Microbatches.LAST)
    trial.holds(
        _training(Layout.REPLICATE, order),
        MatchesOracle(),
        Count(select=last, expected=Between(order.stages_per_rank, GROUPS)),
        Nothing(select=EARLY),
        AllWaited(select=last),
        *THE_MESSAGES,
        RanksAgree(),
    )


@pytest.mark.kills("IgnoresTheComputeDtype")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
@every_order
def test_stages_compute_in_bfloat16(trial: Trial, order: PipelineOrder, layout: Layout) -> None:
    training = _training(layout, order)
    plan = replace(training.plan, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    trial.holds(replace(training, plan=plan), *PARITY)


@pytest.mark.kills("ScalesByTheTensorRanks")
@pytest.mark.worlds(FOURS)
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
@every_order
def test_stages_of_cut_tensors_train_as_one_model(trial: Trial, order: PipelineOrder, layout: Layout) -> None:
    trial.holds(_training(layout, order, tensor_parallel=2), *PARITY)


@pytest.mark.kills("LosesStateOfOtherRanks")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
@every_order
def test_stages_resume_from_files(trial: Trial, order: PipelineOrder, layout: Layout) -> None:
    training = _training(layout, order)
    resume = Resume(after_steps=1, plan=training.plan, form=StateForm.FILES)
    trial.holds(replace(training, resume=resume), *PARITY)


# Any: fields of a plan.
def _training(layout: Layout, order: PipelineOrder, **others: Any) -> Training:
    plan = Plan(
        layout=layout,
        pipeline_stages=2,
        units=STAGED.units,
        # DDP makes its own buckets; in sharded layouts each block is a group.
        grouping=Grouping.REQUIRED if layout is Layout.SHARD else Grouping.HINT,
        accumulation=Accumulation.LAST_MICROBATCH,
        **others,
    )
    schedule = Schedule(microbatches=NUM_MICROBATCHES)
    return Training(
        problem=STAGED, optimizer=SGD, plan=plan, schedule=schedule, script=Pipelined(order=order)
    )
