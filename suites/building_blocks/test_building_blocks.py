"""Attention, experts, recurrences, adapters, low precision: blocks of common models train as in one process."""

from __future__ import annotations

import pytest

from shardproof import APART, AllWaited, Capability, NamedOptimizer, Plan, Schedule, Select, Training, Trial
from shardproof import UserModel, UserOptimizer, ZeroGrad
from shardproof.fixtures.building_blocks import BLOCKS
from shardproof.fixtures.few_bits import FEW_BITS
from shardproof.fixtures.optimizers import ADAMW
from shardproof.suites.params import param, parametrize
from shardproof.suites.vocabulary import PARITY

LAWS = (*PARITY, AllWaited(select=Select()))
WITH_OPTIMIZER = {
    "DecoderInBfloat16",
    "LowRankAdapters",
    "OrthogonalUpdates",
    "SomeParameters",
    "SparseEmbeddings",
}
DRAWING = {"MaskedEncoder"}  # other devices draw other numbers than the oracle
SPARSE = [b for b in BLOCKS if Capability.SPARSE_GRADIENTS in b.demands]  # threads exchange dense tensors

# If the model itself rounds in bfloat16, a reduction in bfloat16 does not show: such a run does not pass.
KILLS = {
    "ReducesInBfloat16": {"Float64Table", "OrthogonalUpdates", "SomeParameters"},
    "CountsOneUseInLowPrecision": {"ReusedBfloat16"},
}


@pytest.mark.kills("SumsInsteadOfAveraging", "ForgetsToSynchroniseOneParameter")
@parametrize(
    "block",
    *[
        param(block, id=block.name, marks=pytest.mark.device("cpu") if block.name in DRAWING else ())
        for block in BLOCKS
        if block not in SPARSE
    ],
)
def test_trains_each_block(trial: Trial, block: UserModel) -> None:
    trial.holds(_training(block, microbatches=2), *LAWS)


@pytest.mark.worlds(APART)
@pytest.mark.kills(
    "KeepsItsOwnSparseGradients",
    "SumsSparseGradients",
    "CountsEachRowOnce",
    "ClearsNoSparseGradients",
    "RefusesSparseGradientsWithoutRows",
)
@parametrize("block", *[param(block, id=block.name) for block in SPARSE])
def test_trains_what_has_sparse_gradients(trial: Trial, block: UserModel) -> None:
    trial.holds(_training(block, microbatches=2), *LAWS)


@pytest.mark.kills("SumsInsteadOfAveraging")
@parametrize(
    "block",
    *[
        param(block, id=block.name, kills=tuple(k for k, shown in KILLS.items() if block.name in shown))
        for block in FEW_BITS
    ],
)
def test_trains_in_the_dtypes_of_the_model(trial: Trial, block: UserModel) -> None:
    trial.holds(_training(block, microbatches=1), *LAWS)


def _training(block: UserModel, microbatches: int) -> Training:
    own = UserOptimizer(spec=block.spec, digest=block.digest)
    optimizer: NamedOptimizer = own if block.name in WITH_OPTIMIZER else ADAMW
    plan = Plan(units=block.units, demands=block.demands)
    schedule = Schedule(microbatches=microbatches, zero_grad=ZeroGrad.ALTERNATE)
    return Training(problem=block, optimizer=optimizer, plan=plan, schedule=schedule)
