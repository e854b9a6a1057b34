"""Laws over values that a script reads: each holds of a right engine, and names the wrong value of another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shardproof import Capability, Clip, Law, Layout, Plan, Resume, Schedule, Training, UnitDtypes
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.cases.scripts.eventful import Eventful, Interlude
from shardproof.harness.cases.scripts.moves import Freeze
from shardproof.harness.cases.training import COMPUTED_IN, OF_ALL_RANKS
from shardproof.harness.laws.runtime import (
    ComputesAsAsked,
    Deterministic,
    ExpectedUnitState,
    HandsOutOneState,
    Notes,
    ShowsTheModel,
    UnitsAre,
)
from shardproof.harness.records.observation import Fact, Observation, StepObservation, digest
from shardproof.harness.records.record import LawRecord
from tests.simulated_engine import evidence_of, oracle_of, simulate

TRAINING = Training(problem=MLP_EVEN, optimizer=SGD, schedule=Schedule(steps=2))
WORLD_SIZE = 2
FREED = UnitsAre(states=(ExpectedUnitState(moment="after forward", unit="layers.0", is_unsharded=False),))
CAST = Notes(subject="output", value="torch.bfloat16")
SHOWN = ShowsTheModel(moments=("after forward",))
Change = Callable[[StepObservation], StepObservation]


def _looked_at(observation: Observation) -> Observation:
    """Add the values that a right engine shows: the parameters from before each update."""
    before = [observation.initial, *(step.parameters for step in observation.steps)]
    facts = (
        Fact(moment="after forward", subject="unit 'layers.0'", value="sharded"),
        Fact(moment="", subject="output", value="torch.bfloat16"),
    )
    steps = tuple(
        replace(step, facts=facts, snapshots={"after forward": shown})
        for step, shown in zip(observation.steps, before, strict=False)
    )
    return replace(observation, steps=steps)


def _rule(law: Law, change: Change = lambda s: s) -> LawRecord:
    """Judge two ranks of which the second shows another value in its last step."""
    first, second = (_looked_at(o) for o in simulate(TRAINING, WORLD_SIZE, layout=Layout.REPLICATE))
    second = replace(second, steps=(*second.steps[:-1], change(second.steps[-1])))
    return law.judge(evidence_of(TRAINING, WORLD_SIZE, ranks=(first, second))).record


@pytest.mark.parametrize("law", [FREED, CAST, SHOWN], ids=lambda law: type(law).__name__)
def test_the_law_holds_of_the_values_of_a_right_engine(law: Law) -> None:
    assert _rule(law).held


@pytest.mark.parametrize(("dtype", "is_asked"), [("float32", True), ("bfloat16", False)])
def test_a_unit_computes_in_its_own_dtype_and_the_root_in_the_plans(dtype: str, is_asked: bool) -> None:
    own = UnitDtypes(unit="layers.0", compute_dtype=torch.float32)
    training = replace(TRAINING, plan=Plan(compute_dtype=torch.bfloat16, unit_dtypes=(own,)))
    first, second = simulate(training, WORLD_SIZE, layout=Layout.REPLICATE)
    facts = (
        Fact(moment="", subject=COMPUTED_IN, value="bfloat16"),
        Fact(moment="layers.0", subject=COMPUTED_IN, value=dtype),
    )
    second = replace(second, steps=tuple(replace(step, facts=facts) for step in second.steps))
    record = ComputesAsAsked().judge(evidence_of(training, WORLD_SIZE, ranks=(first, second))).record
    assert record.held == is_asked
    wrong = "step 0, rank 1: expected unit 'layers.0' to compute in float32, got bfloat16"
    assert record.summary.startswith("2 units" if is_asked else wrong)
    unseen = ComputesAsAsked().judge(evidence_of(training, WORLD_SIZE, ranks=(first, first))).record
    assert unseen.summary == "expected units that compute, none was seen to"


@pytest.mark.parametrize("law", [FREED, CAST, SHOWN], ids=lambda law: type(law).__name__)
def test_the_law_is_broken_where_one_rank_shows_nothing(law: Law) -> None:
    record = _rule(law, lambda step: replace(step, facts=(), snapshots={}))
    assert not record.held
    assert "step 1, rank 1" in record.summary
    assert "got nothing" in record.summary


@pytest.mark.parametrize(
    ("other", "place"),
    [("a=1 b=3", "got other: b"), ("b=2", "got other: a"), (None, "got other: another number of states")],
)
def test_states_that_ranks_hand_out_are_compared(other: str | None, place: str) -> None:
    def judged(handed: str | None) -> LawRecord:
        facts = [Fact(moment="", subject=OF_ALL_RANKS, value=value) for value in ("a=1 b=2", handed) if value]
        first, second = simulate(TRAINING, WORLD_SIZE, layout=Layout.REPLICATE)
        one = replace(first, steps=tuple(replace(step, facts=(facts[0], facts[0])) for step in first.steps))
        two = replace(second, steps=tuple(replace(step, facts=tuple(facts)) for step in second.steps))
        return HandsOutOneState().judge(evidence_of(TRAINING, WORLD_SIZE, ranks=(one, two))).record

    assert judged("a=1 b=2").held
    assert place in judged(other).summary


def test_a_unit_kept_on_one_rank_is_named() -> None:
    kept = Fact(moment="after forward", subject="unit 'layers.0'", value="unsharded")
    record = _rule(FREED, lambda step: replace(step, facts=(kept, *step.facts)))
    assert record.summary == "step 1, rank 1, after forward: expected unit 'layers.0' sharded, got unsharded"


def test_every_note_of_a_subject_counts() -> None:
    other = Fact(moment="", subject="output", value="torch.float32")
    record = _rule(CAST, lambda step: replace(step, facts=(*step.facts, other)))
    assert not record.held
    assert "expected output to be torch.bfloat16, got torch.float32" in record.summary


@pytest.mark.parametrize(
    ("law", "noted", "summary"),
    [
        (
            Notes(subject="calls", value="[1, 1]"),
            "[1, 2]",
            "expected calls to be [1, 1], got [1, 2]: item 1 is 2 instead of 1",
        ),
        (
            Notes(subject="calls", value="[1, 1]"),
            "[1]",
            "expected calls to be [1, 1], got [1]: 1 items instead of 2",
        ),
        (Notes(subject="calls", value="[1, 1]"), "none", "expected calls to be [1, 1], got none"),
        (
            Notes(subject="parameters", value="right", is_explained=True),
            "[3] is 2.5, expected 1.5",
            "parameters: [3] is 2.5, expected 1.5",
        ),
    ],
)
def test_a_difference_in_a_note_is_named(law: Notes, noted: str, summary: str) -> None:
    first, second = (_looked_at(o) for o in simulate(TRAINING, WORLD_SIZE, layout=Layout.REPLICATE))
    facts = (Fact(moment="", subject=law.subject, value=noted),)
    right = (Fact(moment="", subject=law.subject, value=law.value),)
    first = replace(first, steps=tuple(replace(step, facts=right) for step in first.steps))
    second = replace(second, steps=tuple(replace(step, facts=facts) for step in second.steps))
    evidence = evidence_of(TRAINING, WORLD_SIZE, ranks=(first, second))
    assert law.judge(evidence).record.summary == f"step 0, rank 1: {summary} (and 1 more)"


def test_parameters_of_after_the_update_are_not_those_of_before() -> None:
    record = _rule(SHOWN, lambda step: replace(step, snapshots={"after forward": step.parameters}))
    assert not record.held
    assert "step 1, rank 1, after forward: parameter 'layers.0.weight' is off by" in record.summary


def test_a_share_of_another_size_is_off() -> None:
    def halved(step: StepObservation) -> StepObservation:
        shown = dict(step.snapshots["after forward"])
        first = shown["layers.0.weight"]
        shown["layers.0.weight"] = replace(first, tensor=first.tensor * float("nan"))
        return replace(step, snapshots={"after forward": shown})

    assert "is off by inf" in _rule(SHOWN, halved).summary


def test_repetitions_agree_or_the_first_that_differs_is_named() -> None:
    training = replace(TRAINING, schedule=Schedule(steps=2, repeats=3))
    ranks = tuple(simulate(TRAINING, WORLD_SIZE, layout=Layout.REPLICATE))

    def rule(*digests: str) -> LawRecord:
        seen = (ranks[0], replace(ranks[1], repeat_digests=digests))
        seen = (replace(seen[0], repeat_digests=("a", "a", "a")), seen[1])
        oracle = oracle_of(TRAINING, WORLD_SIZE)
        evidence = evidence_of(training, WORLD_SIZE, ranks=seen, oracle=oracle)
        return Deterministic().judge(evidence).record

    assert rule("a", "a", "a").held
    assert rule("a", "a", "b").summary == "rank 1: repetition 2 of 3 differs from the first"
    assert "expected several repetitions, got 1" in rule("a").summary


def test_a_digest_distinguishes_single_bits() -> None:
    first = simulate(TRAINING, WORLD_SIZE, layout=Layout.REPLICATE)[0]
    assert digest(first) == digest(first)
    step = first.steps[-1]
    weight = step.parameters["layers.0.weight"]
    nudged = weight.tensor.clone()
    nudged[0, 0] = nudged[0, 0].nextafter(nudged[0, 0] + 1)
    parameters = {**step.parameters, "layers.0.weight": replace(weight, tensor=nudged)}
    other = replace(first, steps=(*first.steps[:-1], replace(step, parameters=parameters)))
    assert digest(other) != digest(first)


ASKED = {
    Capability.CLIP: {"schedule": Schedule(clip=Clip(max_norm=1.0))},
    Capability.STATE: {"resume": Resume(after_steps=1, plan=Plan())},
}


@pytest.mark.parametrize("capability", ASKED, ids=lambda c: c.name)
def test_a_plan_demands_the_capabilities_of_its_training(capability: Capability) -> None:
    plan = Plan(demands=frozenset({Capability.UNUSED}))
    training = replace(TRAINING, plan=plan, **ASKED[capability])  # type: ignore[arg-type]  # one field each
    assert training.plan.demands == training.needs == {capability, Capability.UNUSED}


def test_the_plan_of_a_resumed_training_demands_them_too() -> None:
    script = Eventful(moves=((Interlude.BEFORE, Freeze(parts=("layers.0",), steps=(1,))),))
    training = replace(TRAINING, script=script, resume=Resume(after_steps=1, plan=Plan()))
    assert training.resume is not None
    assert training.resume.plan is not None
    assert training.resume.plan.demands == {Capability.FREEZE, Capability.UNUSED, Capability.STATE}
