"""The headline names a mutant's defect where it shows in several tensors: state, other steps, ranks, runs."""

from __future__ import annotations

import re

import pytest

from shardproof import (
    Clip,
    Eventful,
    Interlude,
    Layout,
    LoadWeights,
    MatchesOracle,
    Offload,
    RanksAgree,
    Reshard,
    Training,
    TrialSession,
    Verdict,
)
from shardproof.fixtures.decoders import CHECKPOINTED
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN, SINGLE_GROUP
from shardproof.suites.training import train
from tests.judging import judged

CLIPPED = train(MLP_EVEN, layout=Layout.SHARD, clip=Clip(max_norm=0.1))
TWO_RANKS, PAIRS = "threads:2", "threads:4"
HEADLINES: dict[str, tuple[Training, str, str]] = {
    "saved_state:ShowsTheStateOfTheStepBefore": (
        train(SINGLE_GROUP, SGD),
        TWO_RANKS,
        r"step 2, optimizer state .*: the state of the step before \(stale\);",
    ),
    "unit_control:ComputesWithStaleParameters": (
        train(MLP_EVEN),
        TWO_RANKS,
        r"step 1, loss 'loss' .*: computed with last step's parameters;",
    ),
    "clipping:ClipsByTheLocalNorm": (CLIPPED, TWO_RANKS, r"norm .*: the norm of this rank's shards alone;"),
    "gradient_scale:SumsInsteadOfAveraging": (
        train(MLP_EVEN, layout=Layout.SHARD, reshard=Reshard.AFTER_FORWARD),
        TWO_RANKS,
        r"gradient .*: exactly 2 x the reference: summed over the ranks, not averaged, or added once more;",
    ),
    "saved_state:CountsRecomputedGradientsTwice": (
        train(CHECKPOINTED, units=("blocks.0.inner", "blocks.1.inner")),
        PAIRS,
        r"gradient .*: exactly 2 x the reference: added once more;",
    ),
    "zero_interface:UpdatesTheWeightsOfBeforeALoad": (
        train(
            MLP_EVEN,
            SGD,
            layout=Layout.ZERO2,
            offload=Offload.OPTIMIZER,
            script=Eventful(moves=((Interlude.BEFORE, LoadWeights(step=1)),)),
        ),
        TWO_RANKS,
        r"step 1, parameter .*: updated from what training had made of it: weights that were loaded since are lost;",
    ),
}


@pytest.mark.parametrize("mutant", HEADLINES)
def test_the_headline_names_the_defect(session: TrialSession, mutant: str) -> None:
    training, world, headline = HEADLINES[mutant]
    record = judged(
        session, f"shardproof.engine.mutants.{mutant}", world, training, laws=(MatchesOracle(), RanksAgree())
    )
    assert record.verdict is Verdict.FAILED, record.headline
    assert re.search(headline, record.headline), record.headline
