"""Parameters that are frozen and unfrozen once the model is prepared."""

from __future__ import annotations


import pytest
import torch

from shardproof import SEVERAL, Accumulation, Bytes, Evaluation, Eventful, Exactly, Freeze, Interlude
from shardproof import Layout, Nothing, Op, Overlaps, Phase, Plan, Problem, Reshard, Resume, Select, StateForm
from shardproof import Training, Trial, Watch
from shardproof.fixtures.chain import CHAIN, CHECKPOINTED_CHAIN
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN, TRANSFORMER
from shardproof.suites.closed_forms import ClosedForm, all_parameters
from shardproof.suites.params import parametrize
from shardproof.suites.training import train, train_sharded
from shardproof.suites.vocabulary import PARITY, REDUCE_SCATTERS

FIRST, BLOCK = CHAIN.units[:2]


def _freezing(parts: tuple[str, ...], steps: tuple[int, ...], *, evaluates: bool = False) -> Eventful:
    evaluation = ((Interlude.BEFORE, Evaluation.NO_GRAD),) if evaluates else ()
    return Eventful(moves=((Interlude.BEFORE, Freeze(parts=parts, steps=steps)), *evaluation))


@pytest.mark.kills("SettlesForEverWhatIsFrozen")
@parametrize("steps", (0,), (1, 2), (0, 2, 3), ids=["first", "later", "by_turns"])
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
def test_freezes_and_unfreezes_units(trial: Trial, layout: Layout, steps: tuple[int, ...]) -> None:
    script = _freezing(parts=("layers.0", "layers.2"), steps=steps, evaluates=True)
    trial.holds(train(MLP_UNEVEN, ADAMW, layout=layout, steps=5, script=script), *PARITY)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SettlesForEverWhatIsFrozen", "ReducesWhatIsFrozen")
@parametrize("problem", CHAIN, CHECKPOINTED_CHAIN)
@parametrize("reshard", Reshard.AFTER_FORWARD, Reshard.KEEP)
def test_reduces_nothing_of_a_frozen_unit(trial: Trial, problem: Problem, reshard: Reshard) -> None:
    script = _freezing(parts=(BLOCK,), steps=(1, 3))
    reductions = Select(ops=(Op.REDUCE_SCATTER,), units=(BLOCK,), steps=(1, 3))
    trial.holds(
        train_sharded(problem, reshard=reshard, steps=5, script=script), *PARITY, Nothing(select=reductions)
    )


@pytest.mark.kills("LosesTheStateOfWhatIsFrozen")
@parametrize("form", StateForm.WHOLE, StateForm.SHARES)
def test_resumes_what_is_frozen_when_its_state_loads(trial: Trial, form: StateForm) -> None:
    """It trained before, and trains again two steps later, from the state that it had."""
    script = _freezing(parts=("layers.0",), steps=(1, 2))
    layout = Layout.NATIVE if form is StateForm.WHOLE else Layout.SHARD
    plan = Plan(units=MLP_EVEN.units, layout=layout)
    resume = Resume(after_steps=1, plan=plan, form=form, freezes_first=True)
    trial.holds(train(MLP_EVEN, ADAMW, layout=layout, steps=4, script=script, resume=resume), *PARITY)


FROZEN_PART = "blocks.0.attention"


def _trained_bytes(training: Training, world_size: int) -> int:
    """Count the bytes of all parameters except those of the frozen part, their rows padded to the world."""
    frozen = [name for name in all_parameters(training).names if name.startswith(f"{FROZEN_PART}.")]
    return all_parameters(training, without=frozen).padded_bytes(world_size)


TRAINED = ClosedForm(name="bytes of what trains, padded", formula=_trained_bytes)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SettlesForEverWhatIsFrozen")
def test_sends_what_trains_of_a_unit_alone(trial: Trial) -> None:
    script = _freezing(parts=(FROZEN_PART,), steps=(1,))
    crossing = Select(ops=(Op.REDUCE_SCATTER,), phases=(Phase.BACKWARD,), steps=(1,))
    training = train_sharded(TRANSFORMER, steps=2, script=script)
    trial.holds(training, *PARITY, Bytes(select=crossing, expected=Exactly(TRAINED), minimum=TRAINED))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("WaitsWhereItReduces")
@parametrize("problem", CHAIN, CHECKPOINTED_CHAIN)
def test_reduces_while_backward_goes_on_around_what_is_frozen(trial: Trial, problem: Problem) -> None:
    script = _freezing(parts=(BLOCK,), steps=(1, 3), evaluates=True)
    during = Overlaps(select=REDUCE_SCATTERS, but_for=(FIRST, ""))
    training = train_sharded(problem, steps=4, script=script, watch=frozenset({Watch.RACES}))
    trial.holds(training, *PARITY, during)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SettlesForEverWhatIsFrozen", "ForgetsTheDtypesOfWhatWasFrozen")
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
def test_unfrozen_units_have_the_dtypes_of_the_plan(trial: Trial, layout: Layout) -> None:
    script = _freezing(parts=("layers.0", "layers.2"), steps=(0,), evaluates=True)
    training = train(
        MLP_UNEVEN, layout=layout, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32, script=script
    )
    trial.holds(training, *PARITY)


@pytest.mark.kills("SettlesForEverWhatIsFrozen")
@parametrize("part", "blocks.0.attention", "blocks.1", "token")
def test_freezes_some_parameters_of_a_unit(trial: Trial, part: str) -> None:
    script = _freezing(parts=(part,), steps=(0, 2))
    training = train(
        TRANSFORMER,
        layout=Layout.SHARD,
        steps=4,
        microbatches=2,
        accumulation=Accumulation.LAST_MICROBATCH,
        script=script,
    )
    trial.holds(training, *PARITY)
