"""With parameters on the host an engine trains the same model, and keeps gradients there too.

Cases of pinned memory need GPUs: see suites/gpu.
"""

from __future__ import annotations

import pytest

from shardproof import HOMES, SEVERAL, Layout, LossScaling, MatchesOracle
from shardproof import MemoryIsExplained, Notes, NotesForms, Offload, RanksAgree, Trial, Watch
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import EXACT_LINEAR, MLP_UNEVEN, TRANSFORMER
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

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


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("UnscalesWithWhatHasNotArrived", world="threads:2:cuda")
def test_unscales_on_the_host_with_what_has_arrived(trial: Trial) -> None:
    training = train(
        EXACT_LINEAR,
        layout=Layout.SHARD,
        offload=Offload.CPU,
        scaling=LossScaling(overflows_at=1, growth_interval=1),
        watch=frozenset({Watch.RACES}),
    )
    trial.holds(training, *PARITY)
