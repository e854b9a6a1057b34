"""A guard reports changes to the buffers of a call in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardproof.harness.tracing.collectives.call import Pieces
from shardproof.harness.tracing.ledger import Op, ViolationKind
from shardproof.harness.worlds.threads.buffer_guard import BufferGuard, poison
from shardproof.harness.worlds.threads.rendezvous import snapshot
from tests.ledgers import made_call

Tensor = torch.Tensor


def guard(op: Op, inputs: Pieces, outputs: Pieces, rank: int = 0, peer: int | None = None) -> BufferGuard:
    """Issue a call: take its snapshot, poison its outputs."""
    call = made_call(op, inputs, outputs, rank=rank, peer=peer, is_async=True)
    kept = snapshot(call)
    poison(call, 3)
    return BufferGuard(call, kept, 3)


def test_untouched_buffers_are_not_reported() -> None:
    whole, row = torch.arange(6.0), torch.empty(3)
    assert [*guard(Op.REDUCE_SCATTER, ((whole[:3], whole[3:]),), ((row,),)).violations()] == []
    buffer = torch.arange(6.0)  # a gather in place: the own row is input and part of the output
    assert [*guard(Op.ALL_GATHER, ((buffer[:3],),), ((buffer[:3], buffer[3:]),)).violations()] == []
    summed = torch.arange(6.0)
    assert [*guard(Op.ALL_REDUCE, ((summed,),), ((summed,),)).violations()] == []
    assert [*guard(Op.BARRIER, (), ()).violations()] == []


@pytest.mark.parametrize("fill", [0.0, torch.nan, 2.0], ids=["zero", "nan", "other"])
def test_a_changed_input_is_reported(fill: float) -> None:
    whole, row = torch.arange(6.0), torch.empty(3)
    lent = guard(Op.REDUCE_SCATTER, ((whole[:3], whole[3:]),), ((row,),))
    whole[4] = fill
    assert [*lent.violations()] == [ViolationKind.INPUT_OVERWRITTEN]


def test_a_nan_that_stayed_is_no_change() -> None:
    whole, row = torch.full((6,), torch.nan), torch.empty(3)
    assert [*guard(Op.REDUCE_SCATTER, ((whole[:3], whole[3:]),), ((row,),)).violations()] == []


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.uint8,
        torch.bool,
    ],
)
def test_a_write_to_an_output_is_reported_in_any_dtype(dtype: torch.dtype) -> None:
    mine, pieces = torch.zeros(3).to(dtype), tuple(torch.zeros(3).to(dtype) for _ in range(2))
    for byte in (0, -1):
        lent = guard(Op.ALL_GATHER, ((mine,),), (pieces,))
        assert [*lent.violations()] == []
        pieces[1].view(torch.uint8)[byte] = 1
        assert [*lent.violations()] == [ViolationKind.OUTPUT_OVERWRITTEN]


def test_the_input_of_a_gather_in_place_must_stay_too() -> None:
    buffer = torch.arange(6.0)
    lent = guard(Op.ALL_GATHER, ((buffer[:3],),), ((buffer[:3], buffer[3:]),))
    buffer[0] = 7
    assert [*lent.violations()] == [ViolationKind.INPUT_OVERWRITTEN]


def test_a_buffer_reduced_in_place_is_poison_until_its_result_comes() -> None:
    summed = torch.arange(6.0)
    lent = guard(Op.ALL_REDUCE, ((summed,),), ((summed,),))
    summed.zero_()
    assert [*lent.violations()] == [ViolationKind.OUTPUT_OVERWRITTEN]


def test_a_scatter_into_its_own_input_leaves_the_other_rows() -> None:
    whole = torch.arange(6.0)
    lent = guard(Op.REDUCE_SCATTER, ((whole[:3], whole[3:]),), ((whole[:3],),))
    assert [*lent.violations()] == []
    whole[5] = 0
    assert [*lent.violations()] == [ViolationKind.INPUT_OVERWRITTEN]


@pytest.mark.parametrize(
    ("pick", "kind"),
    [
        (lambda whole, row: whole, ViolationKind.INPUT_FREED),
        (lambda whole, row: row, ViolationKind.OUTPUT_FREED),
    ],
    ids=["input", "output"],
)
def test_freed_memory_is_reported(pick: Callable[[Tensor, Tensor], Tensor], kind: ViolationKind) -> None:
    whole, row = torch.arange(6.0), torch.empty(3)
    lent = guard(Op.REDUCE_SCATTER, ((whole[:3], whole[3:]),), ((row,),))
    pick(whole, row).untyped_storage().resize_(0)
    assert [*lent.violations()] == [kind]


def test_harm_of_both_input_and_output_is_reported() -> None:
    mine, pieces = torch.zeros(2), (torch.zeros(2), torch.zeros(2))
    lent = guard(Op.ALL_GATHER, ((mine,),), (pieces,))
    mine.fill_(1)
    pieces[0].fill_(1)
    assert [*lent.violations()] == [ViolationKind.INPUT_OVERWRITTEN, ViolationKind.OUTPUT_OVERWRITTEN]


def test_a_message_may_be_of_any_shape() -> None:
    message: Any = torch.arange(6.0).view(2, 3).t()
    lent = guard(Op.SEND, ((message,),), ((),), peer=1)
    assert [*lent.violations()] == []
    message[0, 0] = 9
    assert [*lent.violations()] == [ViolationKind.INPUT_OVERWRITTEN]
