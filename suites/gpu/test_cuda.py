"""Graphs, fused kernels, memory of collectives, which need CUDA; and pinned memory, which needs an accelerator."""

from __future__ import annotations

import pytest
import torch

from shardproof import APART, COPIES, EQUAL, FEW, HOMES, OWN_POOL, OWN_PROCESSES, PINNED, POOL, REPLAY
from shardproof import (
    SEVERAL,
    Buffers,
    CountsCopies,
    Layout,
    MatchesOracle,
    Notes,
    NotesForms,
    Offload,
    RanksAgree,
)
from shardproof import ReplaysAGraph, Trial, WatchesPools, Wire
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.placements import MANY_PARAMETERS
from shardproof.fixtures.problems import MLP_EVEN, TRANSFORMER
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

on_cuda = pytest.mark.device("cuda")
WORLD = "processes:2:cuda"  # for what one device cannot show
WIRES = [param(Wire.SUM, rows="C25"), param(Wire.NATIVE, rows="C26")]


@on_cuda
@pytest.mark.rows("T39")
@pytest.mark.kills("CountsOnTheHost", world="processes:1:cuda")
@pytest.mark.worlds(OWN_PROCESSES)
def test_a_replayed_graph_equals_the_eager_step(trial: Trial) -> None:
    training = train(MLP_EVEN, layout=Layout.SHARD, steps=2, script=ReplaysAGraph())
    trial.holds(training, MatchesOracle(), Notes(subject=REPLAY, value=EQUAL))


@on_cuda
@pytest.mark.rows("C05")
@pytest.mark.kills("CopiesGradientsOneByOne", world=WORLD)
@pytest.mark.worlds(APART)
def test_packs_gradients_of_one_group_together(trial: Trial) -> None:
    training = train(
        MANY_PARAMETERS,
        layout=Layout.SHARD,
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        units=(),
        script=CountsCopies(),
    )
    trial.holds(training, MatchesOracle(), Notes(subject=COPIES, value=FEW), RanksAgree())


@on_cuda
@pytest.mark.rows("C23")
@pytest.mark.kills("BuffersWhereItLikes", world=WORLD)
@pytest.mark.worlds(SEVERAL)
def test_communicates_from_memory_of_the_group(trial: Trial) -> None:
    training = train(MLP_EVEN, layout=Layout.SHARD, buffers=Buffers.GROUP, script=WatchesPools())
    trial.holds(training, MatchesOracle(), Notes(subject=POOL, value=OWN_POOL), RanksAgree())


@on_cuda
@pytest.mark.kills("SumsInsteadOfAveraging", world=WORLD)
@pytest.mark.worlds(SEVERAL)
@parametrize("wire", *WIRES)
def test_trains_the_same_model_over_symmetric_memory(trial: Trial, wire: Wire) -> None:
    trial.holds(train(MLP_EVEN, layout=Layout.SHARD, buffers=Buffers.SYMMETRIC, wire=wire), *PARITY)


@pytest.mark.device("!cpu")
@pytest.mark.rows("T10", "R07")
@pytest.mark.kills("DropsThePinnedCopy", world="threads:2:cuda")
def test_trains_the_same_transformer_from_pinned_memory(trial: Trial) -> None:
    training = train(TRANSFORMER, ADAMW, offload=Offload.PINNED, script=NotesForms())
    trial.holds(
        training,
        MatchesOracle(),
        Notes(subject=HOMES, value="cpu"),
        Notes(subject=PINNED, value="pinned"),
        RanksAgree(),
    )
