"""Complex parameters and buffers are those of one process, whatever the layout and the optimizer."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Accumulation, Capability, Layout, Trial
from shardproof.fixtures.complex_numbers import ROTARY, SPECTRAL
from shardproof.fixtures.optimizers import ADAMW, SGD, AdamW, Sgd
from shardproof.suites.params import parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

COMPLEX = frozenset({Capability.COMPLEX})


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ForgetsUnsavedBuffers")
def test_turns_by_a_complex_buffer(trial: Trial) -> None:
    trial.holds(train(ROTARY), *PARITY)


@pytest.mark.kills("DropsImaginaryParts")
@parametrize("optimizer", SGD, ADAMW)
def test_trains_complex_parameters(trial: Trial, optimizer: Sgd | AdamW) -> None:
    trial.holds(train(SPECTRAL, optimizer, demands=COMPLEX), *PARITY)


@pytest.mark.kills("DropsImaginaryParts")
@parametrize("accumulation", *Accumulation)
def test_accumulates_complex_gradients(trial: Trial, accumulation: Accumulation) -> None:
    trial.holds(train(SPECTRAL, accumulation=accumulation, demands=COMPLEX, microbatches=3), *PARITY)


@pytest.mark.kills("DropsImaginaryParts")
def test_replicates_complex_parameters(trial: Trial) -> None:
    trial.holds(train(SPECTRAL, ADAMW, layout=Layout.REPLICATE, demands=COMPLEX), *PARITY)
