"""With parameters on the host an engine trains the same model, and keeps gradients there too.

Cases of pinned memory need GPUs: see suites/gpu.
"""

from __future__ import annotations

import pytest

from shardproof import FOUR_OR_MORE_EVEN, HOMES, SEVERAL, Accumulation, Layout, MatchesOracle
from shardproof import MemoryIsExplained, Notes, NotesForms, Offload, RanksAgree, Trial
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_UNEVEN, TRANSFORMER
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train

LAWS = (MatchesOracle(), Notes(subject=HOMES, value="cpu"), RanksAgree())


@pytest.mark.rows("T10", "R07")
@pytest.mark.kills("OffloadsZeros", "OffloadsLastBackwardsGradients", "UpdatesACopy")
def test_trains_the_same_transformer_from_the_host(trial: Trial) -> None:
    trial.holds(train(TRANSFORMER, ADAMW, offload=Offload.CPU, script=NotesForms()), *LAWS)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.rows("T10", "R07")
@pytest.mark.kills("OffloadsZeros", "UpdatesACopy")
@pytest.mark.kills("KeepsOffloadedGradients", world="threads:2:cuda")
@parametrize("offload", Offload.CPU, param(Offload.PINNED, marks=pytest.mark.device("!cpu")))
def test_shards_leave_the_device(trial: Trial, offload: Offload) -> None:
    """Between steps an accelerator holds only buffers."""
    training = train(TRANSFORMER, ADAMW, layout=Layout.SHARD, offload=offload, script=NotesForms())
    trial.holds(training, *LAWS, MemoryIsExplained())


@pytest.mark.rows("T10", "R07")
@pytest.mark.kills("OffloadsLastBackwardsGradients")
def test_adds_microbatches_on_the_host(trial: Trial) -> None:
    trial.holds(train(MLP_UNEVEN, offload=Offload.CPU, microbatches=3, script=NotesForms()), *LAWS)


@pytest.mark.kills("OffloadsZeros", "UpdatesACopy")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_accumulates_over_replicas_on_the_host(trial: Trial) -> None:
    training = train(
        MLP_UNEVEN,
        layout=Layout.HYBRID,
        offload=Offload.CPU,
        accumulation=Accumulation.LAST_MICROBATCH,
        microbatches=3,
        script=NotesForms(),
    )
    trial.holds(training, *LAWS)
