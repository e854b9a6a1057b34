"""Integers that each dtype represents singly: a sum must lose nothing that its own dtype can represent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardproof import FOUR_OR_MORE_EVEN, POWERS_OF_TWO, SEVERAL, Accumulation, Capability, Holding
from shardproof import HoldingBack, Layout, Offload, Problem, Training, Trial
from shardproof.fixtures.optimizers import EXACT_SGD
from shardproof.fixtures.precision import EXACT_LATE, EXACT_OVERFLOW, EXACT_SMALL, EXACT_WIDE
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

pytestmark = pytest.mark.worlds(POWERS_OF_TWO)

# Computed in bfloat16, and summed over microbatches in the reduce dtype.
IN_FLOAT32: dict[str, Any] = {
    "compute_dtype": torch.bfloat16,
    "reduce_dtype": torch.float32,
    "accumulation": Accumulation.LAST_MICROBATCH,
    "microbatches": 4,
}


# Any: as for `train`.
def _training(problem: Problem, **asked: Any) -> Training:
    # One step: the parameters of a second would need more bits than forward has.
    return train(problem, EXACT_SGD, steps=1, **asked)


@pytest.mark.rows("C02")
@pytest.mark.kills("ReducesInBfloat16")
@pytest.mark.worlds(SEVERAL)
def test_reduces_in_float32_without_a_loss(trial: Trial) -> None:
    trial.holds(_training(EXACT_WIDE, reduce_dtype=torch.float32), *PARITY)


@pytest.mark.rows("C03")
@pytest.mark.kills("DividesFloat16AfterTheSum", "ReducesInBfloat16")
@pytest.mark.worlds(SEVERAL)
def test_reduces_in_float16_without_overflow(trial: Trial) -> None:
    trial.holds(_training(EXACT_OVERFLOW, reduce_dtype=torch.float16), *PARITY)


@pytest.mark.rows("C08")
@pytest.mark.kills("AccumulatesInBfloat16")
@parametrize("offload", Offload.NONE, Offload.CPU, ids=["device", "host"])
def test_accumulates_in_the_dtype_of_the_reduction(trial: Trial, offload: Offload) -> None:
    trial.holds(_training(EXACT_WIDE, offload=offload, **IN_FLOAT32), *PARITY)


@pytest.mark.rows("C04")
@pytest.mark.kills("AccumulatesInBfloat16")
def test_reduces_fresh_and_accumulated_gradients_together(trial: Trial) -> None:
    unused = frozenset({Capability.UNUSED})
    trial.holds(_training(EXACT_LATE, units=(), demands=unused, **IN_FLOAT32), *PARITY)


@pytest.mark.rows("T30")
@pytest.mark.kills("SumsReplicasInTheReduceDtype")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_small_microbatches_count_where_the_all_reduce_waits(trial: Trial) -> None:
    script = HoldingBack(units=EXACT_SMALL.units, holding=Holding.REPLICAS)
    asked = {"layout": Layout.HYBRID, "reduce_dtype": torch.bfloat16, "microbatches": 4}
    trial.holds(_training(EXACT_SMALL, script=script, **asked), *PARITY)


@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@parametrize(
    "layout",
    param(Layout.HYBRID, kills="NeverSynchronisesReplicas"),
    param(Layout.REPLICATE, kills="HalvesTheLastRank"),
)
def test_a_parameter_that_is_used_late_counts_where_the_all_reduce_waits(
    trial: Trial, layout: Layout
) -> None:
    script = HoldingBack(units=("",), holding=Holding.REPLICAS)
    unused = frozenset({Capability.UNUSED})
    training = _training(EXACT_LATE, layout=layout, units=(), demands=unused, script=script, microbatches=4)
    trial.holds(training, *PARITY)
