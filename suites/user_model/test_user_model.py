"""The promises of every engine, on a user's model: it trains like one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardproof import AFTER_MORE, EVEN, SEVERAL, Accumulation, AllWaited, Between, Bytes, Capability, Clip
from shardproof import Count, Evaluation, Eventful, Exactly, Grouping
from shardproof import HoldsItsShare, Interlude, Layout, LossScaling, MatchesOracle, NamedOptimizer, Nothing
from shardproof import OnlyThese, Op, Origin, Phase, Plan, Probe, RanksAgree, RanksBefore, Reshard, Resume
from shardproof import Schedule, Select, StateForm, Training, Trial, UserModel
from shardproof.fixtures.optimizers import SGD
from shardproof.suites.user_model.closed_forms import GATHERED, GATHERED_PADDED, NUM_GATHERED, NUM_REDUCED
from shardproof.suites.user_model.closed_forms import NUM_REDUCED_LEAST, REDUCED_ALIGNED, REDUCED_LEAST
from shardproof.suites.user_model.closed_forms import REDUCED_PADDED

LAWS = (MatchesOracle(), RanksAgree(), AllWaited(select=Select()))
GATHERS_IN_FORWARD = Select(ops=(Op.ALL_GATHER,), phases=(Phase.FORWARD,))
SCATTERS = Select(ops=(Op.REDUCE_SCATTER,), phases=(Phase.BACKWARD,))
MOVING = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE)
FLOATS = ("float32", "float64", "bfloat16", "float16")  # integers are an engine's own bookkeeping
UNTIL_THE_STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.BETWEEN)
GATHERS_IN_BACKWARD = Select(ops=(Op.ALL_GATHER,), phases=(Phase.BACKWARD,))
MOST = 1_000_000  # gathers: how an engine groups parameters is its own choice
Own = tuple[UserModel, NamedOptimizer]


@pytest.mark.kills("SumsInsteadOfAveraging", "ForgetsToSynchroniseOneParameter")
def test_trains_as_one_process_does(trial: Trial, own: Own) -> None:
    trial.proves(_training(own, Plan()), *LAWS)


@pytest.mark.kills("KeepsOnlyTheLastMicrobatch", "DoublesGradientsEveryMicrobatch")
def test_accumulates_microbatches(trial: Trial, own: Own) -> None:
    trial.applies(unless=own[0].unsplit)
    trial.holds(_training(own, Plan(), microbatches=3), *LAWS)


@pytest.mark.kills("KeepsOnlyTheLastMicrobatch")
def test_accumulates_until_the_last_microbatch(trial: Trial, own: Own) -> None:
    trial.applies(unless=own[0].unsplit)
    plan = Plan(accumulation=Accumulation.LAST_MICROBATCH)
    trial.holds(_training(own, plan, microbatches=3), *LAWS)


@pytest.mark.kills("EvaluatesWithStaleParameters")
def test_evaluates_and_drops_forwards_between_steps(trial: Trial, own: Own) -> None:
    """Before each step the model is evaluated, and a forward has no backward, as that of a batch that is skipped."""
    trial.applies(unless=own[0].facts.unevaluated)
    around = Eventful(moves=((Interlude.BEFORE, Evaluation.NO_GRAD), (Interlude.BEFORE, Probe.DROPPED)))
    trial.holds(replace(_training(own, Plan()), script=around), *LAWS)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ReplicatesInsteadOfSharding", "ShowsSlicesOfWholes")
def test_shards(trial: Trial, own: Own) -> None:
    trial.holds(_training(own, Plan(layout=Layout.SHARD)), *LAWS, HoldsItsShare())


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("GathersOnceMoreInBackward", "TakesAllUnitsForOne", "ReducesInBfloat16")
def test_gathers_and_reduces_each_unit_once(trial: Trial, own: Own) -> None:
    trial.applies(unless=own[0].facts.uncounted)
    plan = Plan(layout=Layout.SHARD, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD)
    size, reduced = Between(GATHERED, GATHERED_PADDED), Between(REDUCED_LEAST, REDUCED_PADDED)
    # An optimizer that looks at whole parameters, as Muon, communicates in its step.
    phases = UNTIL_THE_STEP if Capability.PARAMETER_SHAPES in own[0].demands else ()
    trial.holds(
        _training(own, plan),
        *LAWS,
        Count(select=GATHERS_IN_FORWARD, expected=Exactly(NUM_GATHERED)),
        Count(select=GATHERS_IN_BACKWARD, expected=Between(NUM_REDUCED_LEAST, NUM_GATHERED)),
        Count(select=SCATTERS, expected=Between(NUM_REDUCED_LEAST, NUM_REDUCED)),
        Bytes(select=GATHERS_IN_FORWARD, expected=size, minimum=GATHERED),
        Bytes(select=SCATTERS, expected=reduced, minimum=REDUCED_LEAST),
        OnlyThese(
            selects=(GATHERS_IN_FORWARD, GATHERS_IN_BACKWARD, SCATTERS),
            among=Select(ops=MOVING, phases=phases),
        ),
    )


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ForgetsToSynchroniseOneParameter", "NeverSynchronises")
def test_reduces_each_gradient_of_replicas_once(trial: Trial, own: Own) -> None:
    trial.applies(unless=own[0].facts.uncounted)
    reductions = Select(ops=(Op.ALL_REDUCE,), phases=(Phase.BACKWARD,), dtypes=FLOATS)
    trial.holds(
        _training(own, Plan(layout=Layout.REPLICATE)),
        *LAWS,
        Bytes(select=reductions, expected=Between(REDUCED_LEAST, REDUCED_ALIGNED), minimum=REDUCED_LEAST),
        Nothing(select=Select(ops=(Op.ALL_GATHER, Op.REDUCE_SCATTER))),
    )


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("KeepsWhatItWasAskedToFree")
def test_frees_shards_after_forward(trial: Trial, own: Own) -> None:
    trial.applies(unless=own[0].unsplit)
    training = _training(own, Plan(layout=Layout.SHARD, reshard=Reshard.AFTER_FORWARD))
    # Without units all parameters are the root's, which engines may keep.
    at_least = 1 if own[0].units else 0
    gathers_again = Count(select=GATHERS_IN_BACKWARD, expected=Between(at_least, MOST))
    trial.holds(training, *LAWS, HoldsItsShare(), gathers_again)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("FreesWhatItWasAskedToKeep")
def test_keeps_gathered_until_backward(trial: Trial, own: Own) -> None:
    trial.applies(unless=own[0].unsplit)
    training = _training(own, Plan(layout=Layout.SHARD, reshard=Reshard.KEEP))
    # Engines may free a unit after its first backward, and gather it again for that of an earlier call.
    keeps = () if own[0].facts.uncounted else (Nothing(select=GATHERS_IN_BACKWARD),)
    trial.holds(training, *LAWS, HoldsItsShare(), *keeps)


@pytest.mark.kills("ForgetsToSynchroniseOneParameter")
def test_replicates(trial: Trial, own: Own) -> None:
    trial.holds(_training(own, Plan(layout=Layout.REPLICATE)), *LAWS, HoldsItsShare())


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("NeverSynchronisesReplicas")
def test_shards_two_replicas(trial: Trial, own: Own) -> None:
    trial.holds(_training(own, Plan(layout=Layout.HYBRID)), *LAWS, HoldsItsShare())


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("NeverClips", "ReturnsNoNorm")
def test_clips_by_the_norm_of_the_whole(trial: Trial, own: Own) -> None:
    trial.applies(unless=own[0].unsplit or own[0].facts.unclipped)
    plan = Plan(demands=frozenset({Capability.CLIP}))
    trial.holds(_training(own, plan, clip=Clip(max_norm=0.1)), *LAWS)


@pytest.mark.kills("UnscalesByTheNextScale")
def test_scales_losses_and_unscales_gradients(trial: Trial, own: Own) -> None:
    trial.applies(unless=own[0].facts.unscaled)
    plan = Plan(demands=frozenset({Capability.LOSS_SCALE}))
    training = _training(own, plan)

    trial.holds(replace(training, schedule=replace(training.schedule, scaling=LossScaling())), *LAWS)


@pytest.mark.kills("LosesOptimizerState", "LoadsNoParameters")
def test_resumes_from_its_state(trial: Trial, own: Own) -> None:
    trial.applies(unless=own[0].unsplit or own[0].facts.unsaved)
    plan = Plan(units=own[0].units, demands=own[0].demands | {Capability.STATE})
    training = _training(own, plan)
    trial.holds(replace(training, resume=Resume(after_steps=1, plan=training.plan)), *LAWS)


@pytest.mark.worlds(AFTER_MORE)
@pytest.mark.kills("LosesStateInAnotherWorld", "AlignsStateForTheWorldBefore")
def test_starts_from_what_other_ranks_saved(trial: Trial, own: Own) -> None:
    trial.applies(unless=own[0].unsplit or own[0].facts.unsaved)
    few_bits = "a step of parameters of so few bits differs by more than what is not loaded"
    trial.applies(unless=few_bits if own[0].is_narrow else "")
    plan = Plan(demands=frozenset({Capability.STATE}))
    origin = Origin(steps=1, ranks=RanksBefore.ONE_MORE, form=StateForm.WHOLE)
    trial.holds(replace(_training(own, plan), origin=origin), *LAWS)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("IgnoresTheComputeDtype", "CastsBuffers", "HalvesOneUnit", "ReducesInBfloat16")
def test_computes_in_bfloat16_and_reduces_in_float32(trial: Trial, own: Own) -> None:
    trial.applies(unless=own[0].facts.not_in_bfloat16)
    plan = Plan(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # SGD: an optimizer that divides by the gradient's size turns its roundings into whole steps. Cases above prove the
    # values that it hardly moves.
    model = replace(own[0], still=own[0].facts.slow)
    training = _training((model, SGD), plan)
    trial.holds(training, *LAWS)


def _training(own: Own, plan: Plan, *, microbatches: int = 1, clip: Clip | None = None) -> Training:
    model, optimizer = own
    return Training(
        problem=model,
        optimizer=optimizer,
        plan=replace(plan, units=model.units, demands=plan.demands | model.demands),
        schedule=Schedule(microbatches=microbatches, clip=clip),
    )
