"""A prepared model that is converted once trains in the new dtype; during training and back, nothing has changed."""

from __future__ import annotations

import pytest
import torch

from shardproof import EVEN, SEVERAL, Accumulation, Convert, Eventful, Grouping, Interlude, Layout
from shardproof import MatchesOracle, Trial
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN
from shardproof.fixtures.decoders import TIED
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

WIDER = (torch.float64,)
drops = pytest.mark.kills("ConvertsWithoutGradients")


@pytest.mark.kills("OptimizesWhatItConverted")
@parametrize(
    "moment",
    param(Interlude.BEFORE, id="before_forward"),
    param(Interlude.BETWEEN, marks=drops),
    param(Interlude.END, id="before_step", marks=drops),
)
@parametrize("dtypes", (), WIDER, ids=["same", "wider"])
def test_a_conversion_and_back_changes_nothing(
    trial: Trial, moment: Interlude, dtypes: tuple[torch.dtype, ...]
) -> None:
    script = Eventful(moves=((moment, Convert(dtypes=dtypes)),))
    trial.holds(train(MLP_UNEVEN, ADAMW, microbatches=2, script=script), *PARITY)


@drops
@parametrize("units", ("layers.0,layers.1", "layers.2"), ("layers.0",), ids=["joint", "nested"])
def test_a_conversion_changes_no_unit(trial: Trial, units: tuple[str, ...]) -> None:
    script = Eventful(moves=((Interlude.END, Convert(dtypes=WIDER)),))
    training = train(
        MLP_UNEVEN,
        layout=Layout.SHARD,
        units=units,
        grouping=Grouping.REQUIRED,
        microbatches=2,
        script=script,
    )
    trial.holds(training, *PARITY)


@drops
@parametrize("layout", Layout.SHARD, param(Layout.HYBRID, worlds=EVEN))
def test_tied_parameters_stay_tied(trial: Trial, layout: Layout) -> None:
    script = Eventful(moves=((Interlude.END, Convert(dtypes=WIDER)),))
    trial.holds(train(TIED, layout=layout, script=script), *PARITY)


@drops
@parametrize("dtypes", (), WIDER, ids=["same", "wider"])
def test_gradients_that_wait_for_their_reduction_outlive_a_conversion(
    trial: Trial, dtypes: tuple[torch.dtype, ...]
) -> None:
    script = Eventful(moves=((Interlude.EACH, Convert(dtypes=dtypes)),))
    accumulation = Accumulation.LAST_MICROBATCH
    trial.holds(train(MLP_UNEVEN, microbatches=3, accumulation=accumulation, script=script), *PARITY)


@pytest.mark.kills("ForgetsTheReduceDtypeOnceConverted")
@pytest.mark.worlds(SEVERAL)
def test_reduces_in_the_dtype_asked_for_once_converted(trial: Trial) -> None:
    trial.holds(train(MLP_EVEN, reduce_dtype=torch.float32, convert=torch.float64), MatchesOracle())


@pytest.mark.rows("T06", "R04")
@pytest.mark.kills("ReducesInTheDtypeOfBefore")
def test_trains_in_float64_once_converted(trial: Trial) -> None:
    trial.holds(train(MLP_UNEVEN, ADAMW, microbatches=2, convert=torch.float64), *PARITY)
