"""The headline of a mutant names its sin: each named defect in an engine that has it, not only in tensors."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import Layout, Reshard
from shardproof.fixtures.checkpointed import CHECKPOINTED
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN, SINGLE_GROUP
from shardproof.harness.cases.training import Clip, Training
from shardproof.harness.laws.communication.counts import Count
from shardproof.harness.laws.communication.matching import RanksAgree
from shardproof.harness.laws.parity import MatchesOracle
from shardproof.harness.records.record import Verdict
from shardproof.harness.runner.session import TrialSession
from shardproof.suites.communication.test_sharded import GATHERS_IN_BACKWARD, ONCE_PER_GROUP
from shardproof.suites.training import train, train_sharded
from tests.judging import judged


class _PreparedReversed(PreparedFullyShard):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.named.parameters():
            assert isinstance(parameter.grad, DTensor)
            rows = parameter.grad.to_local().detach()
            rows.copy_(rows.flip(0))


class ReversesRows(FullyShardEngine):
    """The rows of each rank's gradients are in reverse order."""

    prepared_type = _PreparedReversed


class _PreparedHalved(PreparedFullyShard):
    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        return super().clip_grad_norm_(max_norm, norm_type) / 2


class HalvesTheNorm(FullyShardEngine):
    """Clips by the norm, and returns half of it."""

    prepared_type = _PreparedHalved


class _PreparedClipping(PreparedDdp):
    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.1)
        super().step()


class ClipsByDefault(DistributedDataParallelEngine):
    """Clips gradients in its own step, unasked; they are right before it."""

    prepared_type = _PreparedClipping


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
    "saved_state:CountsRecomputedGradientsTwice": (
        train(CHECKPOINTED, units=("blocks.0.inner", "blocks.1.inner")),
        PAIRS,
        r"gradient .*: exactly 2 x the reference: added once more;",
    ),
    "ReversesRows": (SHARDED, TWO_RANKS, r"gradient .*: permuted: rows of the reference in another order;"),
    "HalvesTheNorm": (CLIPPED, TWO_RANKS, r"norm .*: half the reference;"),
    "ClipsByDefault": (
        train(MLP_EVEN),
        TWO_RANKS,
        r"step 0, parameter .*: updated by 0\.\d+ x the reference's update;",
    ),
}


@pytest.mark.parametrize("mutant", HEADLINES)
def test_the_headline_names_the_sin(session: TrialSession, mutant: str) -> None:
    training, world, headline = HEADLINES[mutant]
    spec = f"shardproof.engine.mutants.{mutant}" if ":" in mutant else f"{__name__}:{mutant}"
    record = judged(session, spec, world, training, laws=(MatchesOracle(), RanksAgree()))
    assert record.verdict is Verdict.FAILED, record.headline
    assert re.search(headline, record.headline), record.headline


def test_a_unit_that_is_gathered_twice_is_named(session: TrialSession) -> None:
    training = train_sharded(MLP_EVEN, reshard=Reshard.AFTER_FORWARD)
    laws = (Count(select=GATHERS_IN_BACKWARD, expected=ONCE_PER_GROUP),)
    engine = "shardproof.engine.mutants.gradient_sync:GathersOnceMoreInBackward"
    record = judged(session, engine, TWO_RANKS, training, laws=laws)
    assert record.verdict is Verdict.FAILED
    assert re.search(r"got \d+.*, 2 of unit 'layers\.\d'", record.headline), record.headline
