"""The oracle computes the gradient of the global mean loss, and measures its noise honestly."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from shardproof.engine.contract import Accumulation, Plan
from shardproof.fixtures.few_bits import FEW_BITS
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import EXACT_LINEAR, MLP_BUFFERS, MLP_UNEVEN, TRANSFORMER, ModelProblem
from shardproof.fixtures.programs.model import IGNORED
from shardproof.fixtures.programs.space import SPACE
from shardproof.fixtures.programs.training import training_of
from shardproof.fixtures.random_draws import DROPPED, DROPPED_AND_RECOMPUTED, NOISY
from shardproof.fixtures.thin import EMPTY_ROWS
from shardproof.fixtures.user_model import USER_MODEL
from shardproof.harness.cases.batch import Rows
from shardproof.harness.cases.draws import Seeds, drawing_in
from shardproof.harness.cases.training import (
    Clip,
    LoopOrder,
    Problem,
    Schedule,
    Training,
    ZeroGrad,
    loss_weight,
)
from shardproof.harness.laws.tolerance import MULTIPLE, allowed_error
from shardproof.harness.oracle import oracle_noise
from shardproof.harness.oracle.absolute_error import largest
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.oracle.oracle_actor import Batches, OracleModels
from shardproof.harness.oracle.oracle_observation import (
    LOSSES,
    OracleObservation,
    PieceSizes,
    Quantity,
    TensorKey,
    sizes_of,
)
from shardproof.harness.oracle.reduction_orders import (
    EXACT_ORDER,
    distinct,
    num_reorderings,
    reordering,
)
from shardproof.harness.runner.oracles import arithmetic_of

TRAINING = Training(problem=MLP_UNEVEN, optimizer=SGD, schedule=Schedule(steps=3, microbatches=3))


@pytest.fixture(scope="module")
def oracle() -> OracleObservation:
    return run_oracle(TRAINING, 3)


def test_loss_weight_makes_the_mean_over_ranks_the_global_mean() -> None:
    counts = [MLP_UNEVEN.num_items(step=1, microbatch=m, rank=r) for m in range(3) for r in range(4)]
    assert loss_weight(TRAINING, 4, 1) == 4 / sum(counts)


@pytest.mark.parametrize("problem", [MLP_UNEVEN, TRANSFORMER], ids=lambda p: p.name)
def test_first_gradient_is_that_of_one_global_batch(problem: ModelProblem) -> None:
    training = replace(TRAINING, problem=problem)
    model = problem.build().double()
    places = [(m, r) for m in range(3) for r in range(2)]
    batches = [problem.batch(step=0, microbatch=m, rank=r) for m, r in places]
    inputs = torch.cat([b.inputs[0] for b in batches])
    target = torch.cat([b.target for b in batches])
    if inputs.is_floating_point():
        inputs, target = inputs.double(), target.double()
    count = sum(problem.num_items(step=0, microbatch=m, rank=r) for m, r in places)
    loss = problem.loss(model(inputs), target) / count
    expected = torch.autograd.grad(loss, list(model.parameters()))
    got = run_oracle(training, 2).steps[0].gradients
    for (name, gradient), by_hand in zip(got.items(), expected, strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient, by_hand, rtol=1e-12, atol=1e-14, msg=name)


def test_sizes_are_those_of_contributions(oracle: OracleObservation) -> None:
    for step in oracle.steps:
        assert step.sizes.keys() == step.contributions.keys()
        for name, pieces in step.contributions.items():
            sizes = step.sizes[name]
            # Sums in another order, of float64.
            assert sizes.total == pytest.approx(largest(pieces.sum((0, 1))), rel=1e-12)
            assert sizes.absolute == pytest.approx(largest(pieces.abs().sum((0, 1))), rel=1e-12)
            assert sizes.of_ranks == pytest.approx(
                [largest(own) for own in pieces.sum(0).unbind()], rel=1e-12
            )


def test_sizes_see_the_last_block_and_no_infinity() -> None:
    ones = torch.ones(3, 50_000)
    odd = ones.clone()
    odd[-1, -1], odd[0, 0] = -5.0, torch.inf
    found = sizes_of([[ones, odd], [ones, torch.zeros(()).expand_as(ones)]])
    assert found == PieceSizes(total=3.0, absolute=7.0, of_ranks=(2.0, 5.0))


@pytest.mark.parametrize("problem", [MLP_UNEVEN, FEW_BITS[0], USER_MODEL], ids=lambda p: p.name)
def test_an_oracle_that_explains_nothing_judges_alike(problem: Problem) -> None:
    training = replace(TRAINING, problem=problem)
    full, lean = run_oracle(training, 2), run_oracle(training, 2, explains=False)
    assert (lean.noise, lean.scales, lean.constants) == (full.noise, full.scales, full.constants)
    assert (lean.dtypes, lean.is_exact, lean.draws) == (full.dtypes, full.is_exact, full.draws)
    for place in full.noise:
        assert allowed_error(lean, place) == allowed_error(full, place)
    assert [step.sizes for step in lean.steps] == [step.sizes for step in full.steps]
    assert not lean.state_before
    assert not any(step.contributions or step.lagging for step in lean.steps)


def test_contributions_add_up_to_the_gradient(oracle: OracleObservation) -> None:
    for step in oracle.steps:
        for name, pieces in step.contributions.items():
            gradient = step.gradients[name]
            assert gradient is not None
            assert pieces.shape[:2] == (3, 3)
            torch.testing.assert_close(pieces.sum((0, 1)) / 3, gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("accumulation", list(Accumulation))
def test_factor_of_the_plan_divides_the_sum_over_ranks(
    oracle: OracleObservation, accumulation: Accumulation
) -> None:
    plan = Plan(divide_factor=2, accumulation=accumulation)
    halved = run_oracle(replace(TRAINING, plan=plan, schedule=Schedule(steps=1, microbatches=3)), 3)
    assert halved.divisor == 2
    for name, gradient in halved.steps[0].gradients.items():
        averaged = oracle.steps[0].gradients[name]
        assert gradient is not None
        assert averaged is not None
        torch.testing.assert_close(gradient, averaged * 1.5, rtol=1e-12, atol=1e-14)
        place = TensorKey(quantity=Quantity.GRADIENT, step=0, name=name)
        assert allowed_error(halved, place) < 2 * 1.5 * allowed_error(oracle, place)


def test_losses_are_float64_and_close_to_those_of_float32(oracle: OracleObservation) -> None:
    losses = oracle.steps[0].losses
    assert losses.shape == (3, 3)
    assert losses.dtype == torch.float64
    batch = MLP_UNEVEN.batch(step=0, microbatch=1, rank=2)
    with torch.no_grad():
        loss = MLP_UNEVEN.loss_sum(MLP_UNEVEN.build()(*batch.inputs), batch) * loss_weight(TRAINING, 3, 0)
    assert losses[1, 2].item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("zero_grad", list(ZeroGrad))
def test_how_gradients_are_cleared_changes_nothing(oracle: OracleObservation, zero_grad: ZeroGrad) -> None:
    other = run_oracle(replace(TRAINING, schedule=replace(TRAINING.schedule, zero_grad=zero_grad)), 3)
    for name, value in oracle.steps[-1].parameters.items():
        assert torch.equal(value, other.steps[-1].parameters[name])


def test_clearing_before_the_step_leaves_sgd_where_it_began() -> None:
    training = replace(TRAINING, schedule=replace(TRAINING.schedule, order=LoopOrder.ZERO_THEN_STEP))
    still = run_oracle(training, 2)
    for name, initial in still.initial.items():
        assert torch.equal(initial, still.steps[-1].parameters[name])
        gradient = still.steps[-1].gradients[name]
        assert gradient is not None
        assert gradient.any(), "gradients are read before they are cleared"


def test_buffers_count_the_forwards_of_their_own_rank() -> None:
    schedule = Schedule(steps=3, microbatches=4)
    seen = run_oracle(Training(problem=MLP_BUFFERS, optimizer=SGD, schedule=schedule), 2)
    assert [of_rank["num_forwards"].item() for of_rank in seen.buffers] == [12, 12]


def test_dtypes_are_those_of_the_float32_training() -> None:
    seen = run_oracle(Training(problem=MLP_BUFFERS, optimizer=ADAMW), 1)
    assert seen.dtype(Quantity.PARAMETER, "first.weight") == torch.float32
    assert seen.dtype(Quantity.BUFFER, "num_forwards") == torch.int64
    assert seen.dtype(Quantity.OPTIMIZER_STATE, "first.weight/exp_avg") == torch.float32
    assert seen.steps[0].parameters["first.weight"].dtype == torch.float64


def test_integers_and_initial_parameters_may_not_differ_at_all() -> None:
    seen = run_oracle(Training(problem=MLP_BUFFERS, optimizer=SGD), 2)
    assert allowed_error(seen, TensorKey(quantity=Quantity.BUFFER, step=2, name="num_forwards")) == 0
    assert allowed_error(seen, TensorKey(quantity=Quantity.BUFFER, step=2, name="gain")) > 0
    assert allowed_error(seen, TensorKey(quantity=Quantity.INITIAL, step=-1, name="first.weight")) == 0


def test_noise_is_that_of_float32(oracle: OracleObservation) -> None:
    for place, noise in oracle.noise.items():
        if place.quantity is Quantity.INITIAL:
            assert noise == 0
        elif place.quantity is Quantity.GRADIENT:
            pieces = oracle.steps[place.step].contributions[place.name]
            assert noise < 1e-6 * (pieces.abs().sum((0, 1)) / 3).max().item()
    assert oracle.noise[TensorKey(quantity=Quantity.LOSS, step=0, name=LOSSES)] > 0


def test_noise_is_the_same_every_time(oracle: OracleObservation) -> None:
    assert run_oracle(TRAINING, 3).noise == oracle.noise


def test_noise_does_not_depend_on_which_rank_holds_which_piece() -> None:
    """Swapping two ranks' pieces only re-orders sums, so each result must pass against the other's noise."""
    pieces = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0))
    exact = EXACT_ORDER.reduce(pieces.double(), Plan())
    for plan in (Plan(accumulation=a) for a in Accumulation):
        for number in range(4):
            order = reordering(number, plan)
            noise = (order.reduce(pieces, plan) - exact).abs().max()
            swapped = (order.reduce(pieces[:, [2, 3, 0, 1]], plan) - exact).abs().max()
            assert 0 < swapped < 4 * noise
            assert noise < 4 * swapped


def test_noise_runs_shuffle_rows_and_keep_each_with_its_target() -> None:
    batch = MLP_UNEVEN.batch(step=0, microbatch=0, rank=1)
    plain = {
        (tuple(x.tolist()), tuple(y.tolist())) for x, y in zip(batch.inputs[0], batch.target, strict=True)
    }
    orders = []
    for number in range(4):
        mixed = reordering(number, Plan()).prepare(batch)
        rows = [
            (tuple(x.tolist()), tuple(y.tolist())) for x, y in zip(mixed.inputs[0], mixed.target, strict=True)
        ]
        assert set(rows) == plain
        orders.append(tuple(rows))
    assert len(set(orders)) > 1


def test_noise_runs_take_batches_without_rows() -> None:
    batch = MLP_UNEVEN.batch(step=0, microbatch=0, rank=1)
    empty = Rows(inputs=tuple(tensor[:0] for tensor in batch.inputs), target=batch.target[:0])
    mixed = reordering(0, Plan()).prepare(empty)
    assert mixed.inputs[0].shape == empty.inputs[0].shape
    assert mixed.target.shape == empty.target.shape


def test_reduction_in_bfloat16_allows_errors_of_bfloat16_and_no_more() -> None:
    plan = Plan(reduce_dtype=torch.bfloat16)
    short = run_oracle(replace(TRAINING, plan=plan), 3)
    full = run_oracle(TRAINING, 3)
    for name, gradient in full.steps[0].gradients.items():
        assert gradient is not None
        place = TensorKey(quantity=Quantity.GRADIENT, step=0, name=name)
        scale = (full.steps[0].contributions[name].abs().sum((0, 1)) / 3).max().item()
        assert allowed_error(full, place) < 1e-4 * scale < allowed_error(short, place) < 0.2 * scale


def test_a_gradient_is_known_to_a_step_of_the_dtype_that_it_is_computed_in() -> None:
    plan = Plan(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    oracle = _silent(run_oracle(replace(TRAINING, plan=plan), 2))
    step = torch.finfo(torch.bfloat16).eps
    gradients = [place for place in oracle.noise if place.quantity is Quantity.GRADIENT]
    assert gradients
    for place in gradients:
        assert allowed_error(oracle, place) == pytest.approx(MULTIPLE * step * oracle.scales[place])


def _silent(oracle: OracleObservation) -> OracleObservation:
    """Return an oracle whose noise runs are equal, so that only the floor is allowed."""
    return replace(oracle, noise=dict.fromkeys(oracle.noise, 0.0))


@pytest.mark.parametrize("number", range(8))
def test_a_reduction_in_float64_leaves_gradients_in_the_dtype_of_their_parameters(number: int) -> None:
    plan = Plan(reduce_dtype=torch.float64, accumulation=Accumulation.LAST_MICROBATCH)
    reduced = reordering(number, plan).reduce(torch.ones(3, 2, 4), plan)
    assert reduced.dtype is torch.float32


def test_without_noise_two_roundings_are_allowed_and_one_of_a_gradient_in_the_dtype_of_its_reduction() -> (
    None
):
    short = _silent(run_oracle(replace(TRAINING, plan=Plan(reduce_dtype=torch.bfloat16)), 3))
    full = _silent(run_oracle(TRAINING, 3))
    eps, coarse = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
    for name in full.initial:
        of_gradient = TensorKey(quantity=Quantity.GRADIENT, step=0, name=name)
        scale = (full.steps[0].contributions[name].abs().sum((0, 1)) / 3).max().item()
        assert allowed_error(full, of_gradient) == pytest.approx(MULTIPLE * 2 * eps * scale)
        assert allowed_error(short, of_gradient) == pytest.approx(MULTIPLE * coarse * scale)
        of_parameter = TensorKey(quantity=Quantity.PARAMETER, step=1, name=name)
        history = (short.initial[name], *(short.steps[i].parameters[name] for i in (0, 1)))
        largest = max(value.abs().max().item() for value in history)
        assert allowed_error(short, of_parameter) == pytest.approx(MULTIPLE * 2 * eps * largest)


def test_of_few_bits_a_parameter_may_be_off_by_a_rounding_of_each_update_and_a_state_by_five() -> None:
    (block,) = (block for block in FEW_BITS if block.name == "PureBfloat16")
    oracle = _silent(run_oracle(Training(problem=block, optimizer=ADAMW, plan=Plan(units=block.units)), 2))
    for quantity in (Quantity.PARAMETER, Quantity.OPTIMIZER_STATE):
        places = [
            p
            for p in oracle.noise
            if p.quantity is quantity and oracle.dtype(quantity, p.name) is torch.bfloat16
        ]
        assert places
        for place in places:
            num_roundings = place.step + 1 if quantity is Quantity.PARAMETER else 5
            expected = num_roundings * torch.finfo(torch.bfloat16).eps * oracle.scales[place]
            assert allowed_error(oracle, place) == pytest.approx(expected)


def test_a_clipped_gradient_may_be_off_by_as_much_less() -> None:
    one_step = replace(TRAINING, schedule=Schedule(steps=1, microbatches=3))
    plain = run_oracle(one_step, 3)
    max_norm = 1e-3
    schedule = replace(one_step.schedule, clip=Clip(max_norm=max_norm))
    clipped = run_oracle(replace(one_step, schedule=schedule), 3)
    (norm,) = (s.norm for s in clipped.steps)
    assert norm is not None
    assert norm > 10 * max_norm
    for name in plain.initial:
        place = TensorKey(quantity=Quantity.GRADIENT, step=0, name=name)
        floor = allowed_error(_silent(plain), place) * max_norm / norm.item()
        assert allowed_error(_silent(clipped), place) == pytest.approx(floor, rel=1e-4)
        assert allowed_error(clipped, place) < 0.1 * allowed_error(plain, place)


def test_a_tensor_that_no_loss_reached_or_without_elements_must_be_exact() -> None:
    oracle = _silent(run_oracle(replace(TRAINING, problem=EMPTY_ROWS), 2))
    empty = [name for name, value in oracle.initial.items() if value.numel() == 0]
    assert empty
    for quantity in (Quantity.GRADIENT, Quantity.PARAMETER):
        assert {allowed_error(oracle, TensorKey(quantity=quantity, step=0, name=n)) for n in empty} == {0.0}
    step, *later = oracle.steps
    unreached = replace(oracle, steps=(replace(step, sizes={}), *later))
    for name in oracle.initial:
        assert (
            oracle_noise._scale(unreached, TensorKey(quantity=Quantity.GRADIENT, step=0, name=name), {})
            == 0.0
        )


def test_exactness_is_lost_when_the_world_is_no_power_of_two() -> None:
    training = Training(problem=EXACT_LINEAR, optimizer=SGD, schedule=Schedule(steps=1))
    assert not run_oracle(training, 3).is_exact


# Random numbers


def test_a_model_that_draws_has_the_noise_of_one_without_draws() -> None:
    for problem in (DROPPED, NOISY):
        seen = run_oracle(replace(TRAINING, problem=problem), 2)
        assert seen.draws
        for name, gradient in seen.steps[0].gradients.items():
            assert gradient is not None
            place = TensorKey(quantity=Quantity.GRADIENT, step=0, name=name)
            assert allowed_error(seen, place) < 1e-4 * gradient.abs().max().item()


def test_draws_depend_on_step_microbatch_and_rank_alone() -> None:
    one, other = (run_oracle(replace(TRAINING, problem=DROPPED), size) for size in (2, 3))
    torch.manual_seed(17)
    again = run_oracle(replace(TRAINING, problem=DROPPED), 2)
    assert torch.equal(one.steps[0].losses, again.steps[0].losses)
    items = [
        sum(DROPPED.num_items(step=0, microbatch=m, rank=r) for m in range(3) for r in range(size)) / size
        for size in (2, 3)
    ]
    torch.testing.assert_close(one.steps[0].losses * items[0], other.steps[0].losses[:, :2] * items[1])
    assert len(set(one.steps[0].losses.flatten().tolist())) == one.steps[0].losses.numel()


def test_each_step_rank_microbatch_and_use_draws_numbers_of_its_own() -> None:
    def drawn() -> list[float]:
        found = []
        for step, rank in itertools.product(range(2), repeat=2):
            seeds = Seeds(step=step, rank=rank)
            for microbatch in (0, 1, 0, 1):
                seeds.begin(microbatch)
                found.append(torch.rand(1, dtype=torch.float64).item())
        return found

    with torch.random.fork_rng(devices=[]):
        once = drawn()
        assert len(set(once)) == 16
        assert drawn() == once


def test_a_recomputation_draws_as_its_forward_did() -> None:
    kept, recomputed = (
        run_oracle(replace(TRAINING, problem=problem), 2) for problem in (DROPPED, DROPPED_AND_RECOMPUTED)
    )
    for name, value in kept.steps[-1].parameters.items():
        assert torch.equal(value, recomputed.steps[-1].parameters[name])


def test_the_default_generator_is_left_as_it_was() -> None:
    before = torch.get_rng_state()
    assert not run_oracle(TRAINING, 2).draws
    run_oracle(replace(TRAINING, problem=NOISY), 2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("shape", [(3,), (40,), (5, 7)])
def test_numbers_of_float64_are_drawn_in_the_dtype_of_the_ranks(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        few, wide = torch.full(shape, 0.5, dtype=dtype), torch.full(shape, 0.5, dtype=torch.float64)
        draws = (
            torch.randn_like,
            torch.rand_like,
            torch.bernoulli,
            torch.nn.functional.dropout,
            lambda x: torch.empty_like(x).normal_(),
            lambda x: torch.empty_like(x).exponential_(),
        )
        for draw in draws:
            torch.manual_seed(3)
            expected = draw(few)
            torch.manual_seed(3)
            with drawing_in(dtype):
                got = draw(wide)
            assert got.dtype is torch.float64
            torch.testing.assert_close(got, expected.double(), rtol=0, atol=0)


# Orders that coincide


@pytest.mark.parametrize(
    ("num_microbatches", "num_ranks", "plan", "num_expected"),
    [
        (1, 1, Plan(), 1),
        (1, 2, Plan(), 1),
        (1, 2, Plan(reduce_dtype=torch.bfloat16), 1),
        (1, 2, Plan(divide_factor=3.0), 2),  # dividing by three rounds, before or after adding
        (1, 3, Plan(), 4),
        (
            3,
            1,
            Plan(accumulation=Accumulation.LAST_MICROBATCH),
            2,
        ),  # two of the four orders add the same pair first
    ],
)
def test_orders_that_add_alike_are_run_once(
    num_microbatches: int, num_ranks: int, plan: Plan, num_expected: int
) -> None:
    orders = [reordering(number, plan) for number in range(num_reorderings(plan))]
    kept = distinct(orders, plan, num_microbatches, num_ranks)
    assert len(kept) == num_expected
    assert kept[0] == orders[0]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_runs_that_are_left_out_would_add_no_noise(
    microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(problem=USER_MODEL, optimizer=SGD, schedule=Schedule(microbatches=microbatches))
    found = run_oracle(training, 2)
    monkeypatch.setattr(oracle_noise, "distinct", lambda orders, *_: orders)
    assert run_oracle(training, 2).noise == found.noise
    assert any(found.noise.values())


@pytest.mark.parametrize("problem", [MLP_UNEVEN, replace(USER_MODEL, is_widened=False)], ids=["rows", "own"])
def test_runs_that_differ_in_more_than_the_order_of_ranks_are_all_kept(problem: Problem) -> None:
    """Shuffled rows also change orders of sums, and each run disturbs a low-precision reference anew."""
    training = Training(problem=problem, optimizer=SGD)
    seen = run_oracle(training, 2)
    orders = oracle_noise._reorderings(training, seen, Batches(problem))
    assert len(orders) == num_reorderings(training.plan)


def test_what_an_engine_ignores_is_rounded_in_no_run_with_noise() -> None:
    training = arithmetic_of(training_of(SPACE.parse("frozen=ignored,compute=bfloat16")))
    problem, run = training.problem, reordering(0, training.plan)
    with OracleModels(problem, problem.build(), 1, run).playing(0) as played:
        dtypes = {name: parameter.dtype for name, parameter in played.model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype is torch.float32} == set(IGNORED)
