"""The headline of a mutant names its sin: each named defect in an engine that has it, not only in tensors."""

from __future__ import annotations

import re

import pytest

from shardproof.engine.contract import Layout, Reshard
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN, SINGLE_GROUP
from shardproof.harness.cases.training import Clip, Training
from shardproof.harness.laws.communication.matching import RanksAgree
from shardproof.harness.laws.parity import MatchesOracle
from shardproof.harness.records.record import Verdict
from shardproof.harness.runner.session import TrialSession
from shardproof.suites.training import train
from tests.judging import judged

SHARDED = train(MLP_EVEN, layout=Layout.SHARD, reshard=Reshard.AFTER_FORWARD)
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
    "clipping:NeverClips": (CLIPPED, TWO_RANKS, r"gradient .*: the value before clipping;"),
    "clipping:CountsTheNormOncePerReplica": (
        train(MLP_EVEN, layout=Layout.HYBRID, clip=Clip(max_norm=0.1)),
        PAIRS,
        r"norm .*: 2\^\(1/2\) x the reference: each element is counted 2 times;",
    ),
    "gradient_scale:SumsInsteadOfAveraging": (
        SHARDED,
        TWO_RANKS,
        r"gradient .*: exactly 2 x the reference: summed over the ranks, not averaged, or added once more;",
    ),
    "division:HalvesOneUnit": (SHARDED, TWO_RANKS, r"gradient .*: the reference / 2: "),
    "unit_control:KeepsOneOldGradient": (
        train(MLP_EVEN, units=()),
        TWO_RANKS,
        r"gradient .*: the previous step's value added: gradients not cleared;",
    ),
}


@pytest.mark.parametrize("mutant", HEADLINES)
def test_the_headline_names_the_sin(session: TrialSession, mutant: str) -> None:
    training, world, headline = HEADLINES[mutant]
    spec = f"shardproof.engine.mutants.{mutant}"
    record = judged(session, spec, world, training, laws=(MatchesOracle(), RanksAgree()))
    assert record.verdict is Verdict.FAILED, record.headline
    assert re.search(headline, record.headline), record.headline
