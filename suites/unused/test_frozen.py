"""Frozen parameters are gathered like others, get no gradient, do not change, and are freed again."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Count, Exactly, HoldsItsShare, Reshard, Trial
from shardproof.fixtures.idle import FROZEN
from shardproof.fixtures.optimizers import ADAMW
from shardproof.suites.closed_forms import NUM_GROUPS
from shardproof.suites.training import train, train_sharded
from shardproof.suites.vocabulary import GATHERS_IN_FORWARD, PARITY, REDUCE_SCATTERS

# Those of the units with a trained parameter: the adapter's and the head's.
NUM_TRAINED = 2


@pytest.mark.kills("TrainsFrozenParameters")
def test_trains_around_frozen_parameters(trial: Trial) -> None:
    """With AdamW: its weight decay would move a frozen parameter with a gradient of zeros."""
    trial.holds(train(FROZEN, ADAMW), *PARITY)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("NeverFreesFrozenUnits", "TrainsFrozenParameters")
def test_frees_frozen_units_and_reduces_none_of_them(trial: Trial) -> None:
    trial.holds(
        train_sharded(FROZEN, reshard=Reshard.AFTER_FORWARD),
        *PARITY,
        HoldsItsShare(),
        Count(select=GATHERS_IN_FORWARD, expected=Exactly(NUM_GROUPS)),
        Count(select=REDUCE_SCATTERS, expected=Exactly(NUM_TRAINED)),
    )
