"""The fixtures keep their promises: same weights everywhere, different data, exactness, and sensitivity."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import cast

import pytest
import torch

from shardproof import Evidence, Plan, Schedule, Training, groups_of
from shardproof.fixtures import chain
from shardproof.fixtures.batches import PADDING
from shardproof.fixtures.optimizers import ADAMW, EXACT_SGD, SGD, AdamW, Sgd
from shardproof.fixtures.problems import EXACT_LINEAR, MLP_UNEVEN, PROBLEMS, TRANSFORMER, ModelProblem
from shardproof.harness.laws.communication.order import mistakable
from shardproof.harness.laws.tolerance import allowed_error
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.oracle.oracle_observation import OracleObservation, Quantity, TensorKey
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.invoke import call_pytest
from shardproof.suites import tower

any_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)

# The smallest known real defect moves parameters by this share of their largest element.
SMALLEST_DEFECT = 1.2e-4


@any_problem
def test_builds_equal_weights_whatever_the_default_generator_holds(problem: ModelProblem) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = problem.build().state_dict()
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    second = problem.build().state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@any_problem
def test_is_a_value_that_survives_pickling(problem: ModelProblem) -> None:
    again = pickle.loads(pickle.dumps(problem))
    assert again == problem
    assert hash(again) == hash(problem)


@pytest.mark.parametrize("optimizer", [SGD, ADAMW, EXACT_SGD], ids=lambda o: o.name)
def test_optimizers_are_values_that_survive_pickling(optimizer: Sgd | AdamW) -> None:
    assert pickle.loads(pickle.dumps(optimizer)) == optimizer


@any_problem
def test_units_are_submodules(problem: ModelProblem) -> None:
    model = problem.build()
    assert all(list(model.get_submodule(unit).parameters()) for unit in problem.units)


@any_problem
def test_data_differs_between_all_places_and_repeats_at_each(problem: ModelProblem) -> None:
    places = [(s, m, r) for s in range(3) for m in range(4) for r in range(8)]
    batches = [problem.batch(step=s, microbatch=m, rank=r) for s, m, r in places]
    seen = {b.inputs[0].numpy().tobytes() for b in batches}
    # Two rows of four values in -1..1 may coincide by chance; real data may not.
    assert len(seen) == len(places) or (problem.is_exact and len(seen) > 0.9 * len(places))
    again = problem.batch(step=1, microbatch=2, rank=3)
    assert torch.equal(again.inputs[0], batches[places.index((1, 2, 3))].inputs[0])


@any_problem
def test_num_items_counts_the_addends_of_the_loss(problem: ModelProblem) -> None:
    for rank in range(4):
        count = problem.num_items(step=1, microbatch=0, rank=rank)
        target = problem.batch(step=1, microbatch=0, rank=rank).target
        is_token = target.dtype == torch.int64
        assert count == (int((target != PADDING).sum()) if is_token else target.shape[0])


@any_problem
def test_neighbours_have_different_numbers_of_items(problem: ModelProblem) -> None:
    counts = [problem.num_items(step=0, microbatch=0, rank=rank) for rank in range(2)]
    assert (counts[0] != counts[1]) is not problem.is_exact


def test_uneven_problem_has_a_parameter_with_fewer_rows_than_ranks() -> None:
    rows = [p.shape[0] for p in MLP_UNEVEN.build().parameters()]
    assert min(rows) == 1
    assert all(size % world_size for size in rows for world_size in (2, 3, 4))


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_exact_problem_is_the_same_in_float32_and_float64(world_size: int, microbatches: int) -> None:
    schedule = Schedule(steps=2, microbatches=microbatches)
    training = Training(problem=EXACT_LINEAR, optimizer=EXACT_SGD, schedule=schedule)
    oracle = run_oracle(training, world_size)
    assert oracle.is_exact
    assert set(oracle.noise.values()) == {0.0}


@pytest.mark.parametrize("steps", [3, 4])
def test_exact_problem_rounds_when_trained_for_too_long(steps: int) -> None:
    training = Training(
        problem=EXACT_LINEAR, optimizer=EXACT_SGD, schedule=Schedule(steps=steps, microbatches=4)
    )
    assert not run_oracle(training, 8).is_exact


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda o: o.name)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@any_problem
def test_allowed_error_of_parameters_is_below_the_smallest_real_defect(
    problem: ModelProblem, world_size: int, optimizer: Sgd | AdamW
) -> None:
    training = Training(problem=problem, optimizer=optimizer)
    oracle = run_oracle(training, world_size)
    for step, seen in enumerate(oracle.steps):
        for name, value in seen.parameters.items():
            allowed = allowed_error(oracle, TensorKey(quantity=Quantity.PARAMETER, step=step, name=name))
            assert allowed < SMALLEST_DEFECT / 2 * value.abs().max().item(), name


def test_decoder_never_sees_the_future() -> None:
    model = TRANSFORMER.build()
    (text,) = TRANSFORMER.batch(step=0, microbatch=0, rank=0).inputs
    changed = text.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 37
    assert torch.equal(model(text)[:, :-1], model(changed)[:, :-1])
    assert not torch.equal(model(text)[:, -1], model(changed)[:, -1])


@pytest.mark.parametrize("name", chain.__all__)
@pytest.mark.parametrize("world_size", range(1, 9))
def test_units_of_chains_differ_in_size_on_up_to_eight_ranks(name: str, world_size: int) -> None:
    problem = getattr(chain, name)
    training = Training(problem=problem, optimizer=SGD, plan=Plan(units=problem.units))
    unjudged = cast(OracleObservation, None)
    evidence = Evidence(training=training, world_size=world_size, ranks=(), oracle=unjudged)
    assert list(mistakable(groups_of(training), evidence)) == []


@pytest.mark.parametrize("world_size", range(1, 17))
@pytest.mark.parametrize("step", range(4))
def test_rows_for_the_wrapper_cancel_on_no_number_of_ranks(world_size: int, step: int) -> None:
    """If rows cancelled, gradients would be roundings, which an optimizer that divides by them turns into steps."""
    summed = sum(tower.batch(rank, step) for rank in range(world_size))
    assert isinstance(summed, torch.Tensor)
    assert bool(summed.sum(0).all())


# The base of the finalization mutants.


ENGINE = "shardproof.engine.adapters.manual_finalization:ManualFinalizationEngine"


@pytest.mark.slow
def test_it_passes_each_case_of_finalization(tmp_path: Path) -> None:
    cases = "suites/data_parallel/test_finalization.py"
    assert call_pytest([cases, f"--engine={ENGINE}", "--world=threads:2", f"--out={tmp_path}"]) == 0
    assert {record.verdict for record in read_run(tmp_path).records} == {Verdict.PASSED}
