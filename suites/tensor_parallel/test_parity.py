"""Tensors that a tensor-parallel axis has sharded: trained as one model, reduced only over the data axes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shardproof import FOURS, FOUR_OR_MORE_EVEN, Accumulation, AllWaited, Clip, Count, Exactly, Grouping
from shardproof import Layout, MatchesOracle, Microbatches, Nothing, Offload, Op, Per, Phase, Problem
from shardproof import RanksAgree, Reshard, Select, Sizes, Training, Trial, Window
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.tensor_parallel import CUT_TRANSFORMER, STACK_16, STACK_17, STACK_3, STACK_5
from shardproof.fixtures.tensor_parallel import STACK_5_CHECKPOINTED
from shardproof.suites.closed_forms import NUM_GROUPS
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train, train_sharded
from shardproof.suites.vocabulary import ACROSS_REPLICAS, PARITY

GATHERS = Select(ops=(Op.ALL_GATHER,), axis="data", phases=(Phase.FORWARD,))
GATHERS_AGAIN = Select(ops=(Op.ALL_GATHER,), axis="data", phases=(Phase.BACKWARD,))
SCATTERS = Select(ops=(Op.REDUCE_SCATTER,), axis="data", phases=(Phase.BACKWARD,))
SUMS = Select(ops=(Op.ALL_REDUCE,), axis="data", phases=(Phase.BACKWARD,))
NORMS, AXES = Select(phases=(Phase.STEP,)), ("data", "tensor")
ONE_PAIR = Sizes(name="one rank of data", allows=lambda size: size == 2)
ONCE_PER_GROUP = Exactly(NUM_GROUPS)
SEEN_IN_EVERY_WIDTH = ("ScalesByTheTensorRanks", "KeepsNormsOnTheirTensorRank", "SwapsTheCutsOfOneDim")

uneven = pytest.mark.kills(*SEEN_IN_EVERY_WIDTH, "LosesTheLastRowsOfUnevenPieces")
even = pytest.mark.kills(*SEEN_IN_EVERY_WIDTH)


@pytest.mark.rows("T32")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@parametrize(
    "problem",
    param(STACK_3, marks=uneven),
    param(STACK_16, marks=even),
    param(STACK_17, marks=uneven),
    param(STACK_5_CHECKPOINTED, marks=uneven),
)
def test_shards_of_cut_tensors_train_as_one_model(trial: Trial, problem: Problem) -> None:
    trial.holds(
        _training(problem, Layout.SHARD, reshard=Reshard.AFTER_FORWARD),
        MatchesOracle(),
        Count(select=GATHERS, expected=ONCE_PER_GROUP),
        Count(select=GATHERS_AGAIN, expected=ONCE_PER_GROUP),
        Count(select=SCATTERS, expected=ONCE_PER_GROUP),
        AllWaited(select=SCATTERS),
        RanksAgree(),
    )


@pytest.mark.kills("ScalesByTheTensorRanks", "KeepsNormsOnTheirTensorRank")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_a_transformer_trains_whose_ranks_share_out_positions(trial: Trial) -> None:
    trial.holds(train(CUT_TRANSFORMER, layout=Layout.SHARD, tensor_parallel=2, steps=2), *PARITY)


@pytest.mark.rows("T32")
@pytest.mark.kills("KeepsNormsOnTheirTensorRank", "LosesTheLastRowsOfUnevenPieces", "SwapsTheCutsOfOneDim")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_shards_of_cut_tensors_accumulate(trial: Trial) -> None:
    before = Select(ops=SCATTERS.ops, axis="data", microbatches=Microbatches.ALL_BUT_LAST)
    training = train_sharded(
        STACK_5,
        ADAMW,
        tensor_parallel=2,
        reshard=Reshard.KEEP,
        accumulation=Accumulation.LAST_MICROBATCH,
        steps=2,
        microbatches=3,
    )
    trial.holds(
        training,
        MatchesOracle(),
        Count(select=SCATTERS, expected=ONCE_PER_GROUP, per=Per.STEP),
        Nothing(select=before),
        Nothing(select=GATHERS_AGAIN),
        RanksAgree(),
    )


@pytest.mark.rows("T32")
@pytest.mark.kills("ClipsOnOneTensorRank")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@parametrize("norm_type", 1.0, 2.0, 3.0, math.inf, ids=["1", "2", "3", "inf"])
def test_clips_by_the_norm_over_all_axes(trial: Trial, norm_type: float) -> None:
    clip = Clip(max_norm=0.5, norm_type=norm_type)
    training = train(STACK_5, layout=Layout.SHARD, tensor_parallel=2, steps=2, clip=clip)
    trial.holds(
        training,
        MatchesOracle(),
        *(Count(select=replace(NORMS, axis=axis), expected=Exactly(1), per=Per.STEP) for axis in AXES),
    )


@pytest.mark.kills("CommunicatesAlone")
@pytest.mark.worlds(ONE_PAIR)
@parametrize("offload", Offload.NONE, Offload.CPU, ids=["device", "host"])
def test_one_rank_of_data_communicates_nothing_of_it(trial: Trial, offload: Offload) -> None:
    training = train(STACK_5, layout=Layout.SHARD, tensor_parallel=2, steps=2, offload=offload)
    trial.holds(training, MatchesOracle(), Nothing(select=Select(axis="data", window=Window.TRAINING)))


@pytest.mark.rows("T34")
@pytest.mark.worlds(FOURS)
@pytest.mark.kills("ScalesByTheTensorRanks", "KeepsNormsOnTheirTensorRank", "NeverSynchronisesReplicas")
@parametrize("problem", STACK_5)
def test_replicas_of_shards_of_cut_tensors_train_as_one_model(trial: Trial, problem: Problem) -> None:
    trial.holds(
        _training(problem, Layout.HYBRID, reshard=Reshard.AFTER_FORWARD),
        MatchesOracle(),
        Count(select=ACROSS_REPLICAS, expected=ONCE_PER_GROUP),
        AllWaited(select=ACROSS_REPLICAS),
        RanksAgree(),
    )


@pytest.mark.rows("R17")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.kills("ScalesByTheTensorRanks", "KeepsNormsOnTheirTensorRank")
@parametrize("problem", STACK_5, STACK_16, STACK_5_CHECKPOINTED)
def test_replicas_of_cut_tensors_train_as_one_model(trial: Trial, problem: Problem) -> None:
    trial.holds(
        _training(problem, Layout.REPLICATE),
        MatchesOracle(),
        Count(select=SUMS, expected=ONCE_PER_GROUP),
        Nothing(select=Select(ops=(Op.ALL_GATHER, Op.REDUCE_SCATTER), axis="data")),
        AllWaited(select=SUMS),
        RanksAgree(),
    )


def _training(problem: Problem, layout: Layout, reshard: Reshard = Reshard.NATIVE) -> Training:
    # Two steps show the effect of one on the next; DTensors take too long for more.
    return train(
        problem, layout=layout, tensor_parallel=2, grouping=Grouping.REQUIRED, reshard=reshard, steps=2
    )
