"""A head that runs on chunks of the trunk's output, each with its own backward, in one group with the norm."""

from __future__ import annotations

import pytest
import torch

from shardproof import SEVERAL, Accumulation, ChunksOfTheHead, FlaggedChunks, Microbatches, Nothing, Op, Phase
from shardproof import Problem, Reshard, Select, Trial, TrunkTwiceOnOddSteps
from shardproof.fixtures.decoders import TRUNK_AND_HEAD, TRUNK_AND_TIED_HEAD
from shardproof.fixtures.mlps import WIDENING
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train_sharded
from shardproof.suites.vocabulary import PARITY

UNGROUPED = ("embed", "body", "norm", "head")
EARLY_REDUCTIONS = Select(
    ops=(Op.ALL_REDUCE, Op.REDUCE_SCATTER),
    phases=(Phase.BACKWARD,),
    dtypes=("float32",),
    microbatches=Microbatches.ALL_BUT_LAST,
)


@pytest.mark.rows("T17")
@pytest.mark.kills("CountsTheFirstUseAlone", "NeverReducesParts")
@parametrize(
    "problem, reshard",
    param(TRUNK_AND_HEAD, Reshard.AFTER_FORWARD, id="grouped-freed"),
    param(TRUNK_AND_TIED_HEAD, Reshard.KEEP, id="tied-kept"),
)
def test_every_chunk_adds_to_the_gradient(trial: Trial, problem: Problem, reshard: Reshard) -> None:
    script = ChunksOfTheHead(stop="norm", head="head", num_chunks=3)
    training = train_sharded(problem, reshard=reshard, script=script)
    trial.holds(training, *PARITY)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.rows("T19")
@parametrize(
    "units, reshard",
    param(
        TRUNK_AND_HEAD.units,
        Reshard.KEEP,
        id="grouped-kept",
        kills=("IgnoresTheFlagsOfGroups", "CountsTheFirstUseAlone"),
    ),
    param(UNGROUPED, Reshard.AFTER_FORWARD, id="ungrouped-freed", kills="CountsTheFirstUseAlone"),
)
def test_chunks_accumulate_until_the_last_microbatch(
    trial: Trial, units: tuple[str, ...], reshard: Reshard
) -> None:
    chunks = ChunksOfTheHead(stop="norm", head="head", num_chunks=2)
    script = FlaggedChunks(chunks=chunks, units=units)
    training = train_sharded(
        TRUNK_AND_HEAD,
        units=units,
        reshard=reshard,
        accumulation=Accumulation.LAST_MICROBATCH,
        microbatches=3,
        script=script,
    )
    trial.holds(training, *PARITY, Nothing(select=EARLY_REDUCTIONS))


@pytest.mark.rows("T23")
@pytest.mark.kills("NeverReducesGroupsRunInPart", "ForgetsEarlierForwards")
def test_a_group_run_in_part_is_reduced(trial: Trial) -> None:
    script = TrunkTwiceOnOddSteps(stop="norm")
    training = train_sharded(TRUNK_AND_HEAD, microbatches=2, script=script)
    trial.holds(training, *PARITY)


@pytest.mark.rows("T18")
@pytest.mark.kills("CastsTheFirstInputsAlone")
def test_casts_the_inputs_of_every_module_of_a_group(trial: Trial) -> None:
    trial.holds(train_sharded(WIDENING, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32), *PARITY)
