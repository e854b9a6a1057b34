"""Methods of a sharded module: gather, free, divide, share streams, recover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.harness.tracing.ledger import Op, Phase
from shardproof.harness.worlds.rank import RankContext
from tests.reference.models import (
    BY_NAME,
    Chain,
    apply_to,
    assert_gradients,
    chain_gradients,
    each_api,
    hybrid_mesh,
    inputs_of,
    is_whole,
    train,
    whole,
    whole_units,
)
from tests.reference.ranks import Ranks, collectives

SIZE = 4


# --- gathering ----------------------------------------------------------------------------------------------------


def _assert_original(model: nn.Module) -> None:
    expected = dict(Chain().named_parameters())
    found = {name: whole(param.detach()) for name, param in model.named_parameters()}
    assert list(found) == list(expected), "names and their order"
    for name, value in found.items():
        assert value.is_contiguous(), name
        assert torch.equal(value, expected[name]), name


def _unshard(context: RankContext, api_name: str, is_async: bool) -> dict[Op, int]:
    api, chain = BY_NAME[api_name], Chain()
    model = apply_to(chain, api.fully_shard)
    unit = model.units[1]
    with context.recorder.during(Phase.FORWARD, step=7):
        handle = unit.unshard(async_op=is_async)  # before any forward
        if is_async:
            assert handle is not None
            assert not is_whole(unit), "nothing is registered before the wait"
            handle.wait()
            handle.wait()  # a second wait is a no-op
        else:
            assert handle is None
        assert whole_units(chain) == {1}, "only this module"
        assert type(unit.weight) is nn.Parameter
        unit.unshard()  # already there
    _assert_original(model)
    unit.reshard()
    unit.reshard()
    assert not whole_units(chain)
    _assert_original(model)
    train(context, model)
    assert_gradients(chain, chain_gradients(SIZE))
    return collectives(context, step=7)


@each_api
@pytest.mark.parametrize("is_async", [False, True])
def test_unshard_gathers_one_module_once_even_before_any_forward(
    api: str, is_async: bool, ranks: Ranks
) -> None:
    assert ranks.run(SIZE, _unshard, api, is_async) == [{Op.ALL_GATHER: 1}] * SIZE


# --- gradients ----------------------------------------------------------------------------------------------------


def _divide_one(context: RankContext, api: str) -> None:
    model = apply_to(Chain(), BY_NAME[api].fully_shard)
    model.set_gradient_divide_factor(2.0 * context.size)  # not of the units
    model.set_force_sum_reduction_for_comms(True)  # else torch asks for PREMUL_SUM, which only NCCL has
    train(context, model)
    means = chain_gradients(context.size)
    assert_gradients(model, {**means, "scale": means["scale"] / 2})


@each_api
def test_a_divide_factor_is_of_one_group_only(api: str, ranks: Ranks) -> None:
    ranks.run(SIZE, _divide_one, api)


# --- several roots ------------------------------------------------------------------------------------------------


def _share_streams(context: RankContext, api_name: str, in_turn: bool) -> None:
    api, size = BY_NAME[api_name], context.size
    api.share_comm_ctx([])
    models = [apply_to(Chain(), api.fully_shard) for _ in range(2)]
    api.share_comm_ctx(models)
    for step in range(3):
        losses = []
        for model in models:
            model.zero_grad()
            losses.append(model(inputs_of(context.rank)).sum())
            if in_turn:
                losses.pop().backward()
        for loss in losses[:: -1 if step % 2 else 1]:
            loss.backward()
        for model in models:
            assert_gradients(model, chain_gradients(size))
            assert not whole_units(model)


@pytest.mark.parametrize(
    ("in_turn", "api"),
    [
        pytest.param(True, "reference", id="in turn"),
        pytest.param(True, "torch", id="in turn-torch"),
        # In torch the end of one root's backward clears the order of all: the next one's raises IndexError.
        pytest.param(False, "reference", id="all forwards first"),
    ],
)
def test_roots_may_share_streams(in_turn: bool, api: str, ranks: Ranks) -> None:
    """Upstream row T37."""
    ranks.run(2, _share_streams, api, in_turn)


# --- accidents ----------------------------------------------------------------------------------------------------


class Accident(Exception):  # noqa: N818 - an event of training, not of the tests
    """An error of a user's module."""


def _raise(*_: object) -> None:
    raise Accident


def _fail_in_forward(context: RankContext, model: Any) -> None:
    handle = model.units[1].register_forward_hook(_raise)
    try:
        train(context, model, step=1)
    finally:
        handle.remove()


def _raise_in_backward(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
    output.register_hook(_raise)


def fail_in_backward(context: RankContext, model: Any) -> None:
    handle = model.units[0].register_forward_hook(_raise_in_backward)
    try:
        train(context, model, step=1)
    finally:
        handle.remove()


def _fail_while_accumulating(context: RankContext, model: Any) -> None:
    model.set_requires_gradient_sync(False)
    train(context, model, step=1)
    model.set_requires_gradient_sync(True)
    raise Accident


Fail = Callable[[RankContext, Any], None]


def recover(context: RankContext, api: str, fail: Fail, hybrid: bool) -> list[str]:
    """Raise in a forward, reset, train; returns the parameters whose gradients are then wrong."""
    chain = Chain()
    mesh = hybrid_mesh(2, 2) if hybrid else None
    model = apply_to(chain, BY_NAME[api].fully_shard, mesh=mesh)
    train(context, model, step=0)
    model.zero_grad()
    with pytest.raises(Accident):
        fail(context, model)
    model.reset_iter_state()
    assert not whole_units(chain)
    model.zero_grad()
    train(context, model, step=2)
    expected = chain_gradients(context.size)
    wrong = [n for n, p in model.named_parameters() if not torch.allclose(whole(p.grad), expected[n])]
    model.zero_grad()
    train(context, model, step=3)
    assert_gradients(model, expected)
    assert collectives(context, step=0) == collectives(context, step=3)
    return wrong


@pytest.mark.parametrize("hybrid", [False, True], ids=["flat", "hybrid"])
@pytest.mark.parametrize(
    ("fail", "api"),
    [
        pytest.param(_fail_in_forward, "reference", id="forward"),
        pytest.param(_fail_in_forward, "torch", id="forward-torch"),
        pytest.param(fail_in_backward, "reference", id="backward"),
        pytest.param(_fail_while_accumulating, "reference", id="accumulating"),
    ],
)
def test_training_goes_on_after_an_accident(fail: Fail, api: str, hybrid: bool, ranks: Ranks) -> None:
    assert ranks.run(SIZE, recover, api, fail, hybrid) == [[]] * SIZE
