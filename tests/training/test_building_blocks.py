"""`check` describes blocks of common models as they are, and disturbed runs round as other orders of sums do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from shardproof import Plan, Training
from shardproof.fixtures.building_blocks import BLOCKS
from shardproof.fixtures.few_bits import FEW_BITS
from shardproof.fixtures.optimizers import ADAMW
from shardproof.harness.cases.draws import drawing_in
from shardproof.harness.cases.units import groups_in
from shardproof.harness.cases.user_model import UserModel, UserOptimizer, outline_of
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.oracle.oracle_observation import Quantity
from shardproof.harness.oracle.rounding import noticing_narrow, rounding_anew
from shardproof.harness.runner.user_model.read import facts_of
from shardproof.harness.training.layout_memory import Form

NAMED = {block.name: block for block in (*BLOCKS, *FEW_BITS)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small operators are slower on more
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_drops_nothing_stays_exact_where_others_draw(dtype: torch.dtype) -> None:
    """Attention is tagged as an operator that draws, and in low precision saves a float32 tensor for backward."""
    query = torch.randn(1, 2, 4, 8, dtype=torch.float64, requires_grad=True)
    alone = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    with drawing_in(dtype):
        beside = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        beside.sum().backward()
        drawn = torch.randn_like(query)
    assert torch.equal(alone, beside)
    assert torch.equal(drawn, drawn.to(dtype).double())  # drawn in few bits, and widened


@pytest.mark.parametrize("block", NAMED.values(), ids=NAMED)
def test_a_block_is_described_as_check_finds_it(block: UserModel) -> None:
    found = facts_of(block.spec).model
    assert (found.units, found.idle, found.is_widened) == (block.units, block.idle, block.is_widened)
    assert (found.demands, found.digest) == (block.demands, block.digest)


@pytest.mark.parametrize("block", NAMED.values(), ids=NAMED)
def test_an_outline_stands_for_the_model_where_it_is_judged(block: UserModel) -> None:
    model = block.build()
    outlined = replace(block, spec="no.such:Model", outline=tuple(outline_of(model)))
    plan = Plan(units=block.units)
    assert groups_in(outlined.skeleton(), plan) == groups_in(model, plan)
    assert Form.of(outlined.skeleton(), Training(problem=outlined, optimizer=ADAMW, plan=plan)) == Form.of(
        model, Training(problem=block, optimizer=ADAMW, plan=plan)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_operator_is_rounded_once_more(dtype: torch.dtype) -> None:
    one, other = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    product = one * other

    def disturbed(seed: int) -> torch.Tensor:
        with rounding_anew(seed):
            return torch.mul(one, other)

    assert torch.equal(disturbed(1), disturbed(1))
    assert not torch.equal(disturbed(1), disturbed(2))
    off = (disturbed(1) - product).abs().double() / product.abs().double()
    assert 0 < off.max() <= 1.5 * torch.finfo(dtype).eps
    share = (off > 0).double().mean()
    assert share > 0.3 if dtype is torch.float32 else 0.005 < share < 0.03


def test_whole_numbers_and_views_are_left_alone() -> None:
    with rounding_anew(1):
        counts = (torch.arange(12.0) * 3).sum()
        mask = torch.full((3,), torch.finfo(torch.float32).min) * 1.0
        base = torch.rand(4, 3)
        view = base.t()
        view[0] += 0.1
    assert counts == 198
    assert bool((mask == torch.finfo(torch.float32).min).all())
    assert torch.equal(view, base.t())


def test_draws_in_the_dtype_of_an_input_are_those_of_ranks() -> None:
    """Stochastic depth draws `torch.rand(shape, dtype=x.dtype)`."""
    torch.manual_seed(0)
    of_rank = torch.rand(5, dtype=torch.float32)
    torch.manual_seed(0)
    with drawing_in(torch.float32):
        of_oracle = torch.rand(5, dtype=torch.float64)
    assert torch.equal(of_oracle, of_rank.double())


def test_operators_of_few_bits_are_noticed() -> None:
    noticed = list[bool]()
    with noticing_narrow(lambda: noticed.append(True)):
        torch.ones(3) * 2
        assert not noticed
        torch.ones(3).bfloat16()
    assert noticed


def test_the_reference_of_few_bits_has_the_dtypes_of_the_model() -> None:
    block = NAMED["SeveralDtypes"]
    oracle = run_oracle(Training(problem=block, optimizer=ADAMW), 2)
    assert not oracle.is_widened
    found = {oracle.steps[0].parameters[n].dtype for n in ("0.weight", "1.weight")}
    assert found == {torch.bfloat16, torch.float32}
    assert oracle.dtype(Quantity.GRADIENT, "0.weight") is torch.bfloat16


def test_gradients_outside_the_optimizer_add_up_and_stay() -> None:
    block = NAMED["SomeParameters"]
    oracle = run_oracle(
        Training(problem=block, optimizer=UserOptimizer(spec=block.spec, digest=block.digest)), 2
    )
    assert oracle.untrained == {"1.weight", "1.bias", "3.weight", "3.bias"}
    one, two = (step.gradients["1.weight"] for step in oracle.steps[:2])
    pieces = oracle.steps[1].contributions["1.weight"].sum((0, 1)) / oracle.divisor
    assert one is not None
    assert two is not None
    assert torch.allclose(two, one + pieces)
