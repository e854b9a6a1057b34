"""Counterparts finds the calls of other ranks that belong to a call, missing calls, and calls that cannot complete."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof.harness.laws.communication.matching import Counterparts, ProcessGroup
from shardproof.harness.tracing.ledger import Entry, Op, Phase, Wait
from tests.ledgers import entry, numbered

ALL = (0, 1, 2)


def called(op: Op, *, wait: Wait | None = None, **fields: object) -> Entry:
    """Make a call of three ranks; without ``wait`` no rank waited for it."""
    made: Entry = entry(op, world_size=3, **fields)
    return replace(made, wait=wait)


def world(*ledgers: tuple[Entry, ...]) -> tuple[Counterparts, dict[int, tuple[Entry, ...]]]:
    by_rank = {rank: numbered(ledger) for rank, ledger in enumerate(ledgers)}
    return Counterparts(by_rank), by_rank


def test_a_collective_misses_absent_ranks_or_else_ranks_with_another_call() -> None:
    reduce, gather = called(Op.ALL_REDUCE), called(Op.ALL_GATHER)
    counterparts, by_rank = world((reduce, reduce), (reduce,), (reduce, gather))
    assert counterparts.absent(0, by_rank[0][0]) == ()
    assert counterparts.absent(0, by_rank[0][1]) == (1,)
    counterparts, by_rank = world((reduce, reduce), (reduce, reduce), (reduce, gather))
    assert counterparts.absent(0, by_rank[0][1]) == (2,)
    assert counterparts.absent(2, by_rank[2][1]) == (0, 1)


def test_collectives_are_counted_by_group() -> None:
    pair = called(Op.ALL_REDUCE, group=(0, 1))
    everybody = called(Op.ALL_REDUCE)
    counterparts, by_rank = world((pair, everybody, pair), (everybody, pair), (everybody,))
    first, between, second = by_rank[0]
    assert [counterparts.position(0, call) for call in by_rank[0]] == [0, 0, 1]
    assert counterparts.absent(0, first) == ()
    assert counterparts.absent(0, between) == ()
    assert counterparts.absent(0, second) == (1,)
    assert {rank: len(calls) for rank, calls in counterparts.collectives(ProcessGroup.of(first)).items()} == {
        0: 2,
        1: 1,
    }


def test_groups_of_the_same_ranks_are_distinguished_by_name() -> None:
    first, second = called(Op.ALL_REDUCE, group_name="3"), called(Op.ALL_REDUCE, group_name="5")
    counterparts, by_rank = world((first, second), (second,), (first, second))
    assert counterparts.absent(0, by_rank[0][0]) == (1,)
    assert counterparts.absent(0, by_rank[0][1]) == ()
    assert counterparts.name_of(ProcessGroup.of(first)) == "3"
    alone, _ = world((first,), (first,), (first,))
    assert alone.name_of(ProcessGroup.of(first)) == ""


@pytest.mark.parametrize(("mine", "other"), [(Op.SEND, Op.RECV), (Op.RECV, Op.SEND)])
def test_a_message_misses_its_other_end(mine: Op, other: Op) -> None:
    here = called(mine, peer=1)
    assert world((here,), (), ())[0].absent(0, numbered((here,))[0]) == (1,)
    for answer in (called(other, peer=2), called(mine, peer=0)):  # to another rank, and the same end
        counterparts, by_rank = world((here,), (answer,), ())
        assert counterparts.absent(0, by_rank[0][0]) == (1,)
    counterparts, by_rank = world((here, here), (called(other, peer=0),), ())
    assert counterparts.absent(0, by_rank[0][0]) == ()
    assert counterparts.absent(0, by_rank[0][1]) == (1,)


def test_messages_are_no_collectives() -> None:
    counterparts, by_rank = world(
        (called(Op.SEND, peer=1), called(Op.ALL_REDUCE)), (called(Op.ALL_REDUCE),), (called(Op.ALL_REDUCE),)
    )
    assert counterparts.absent(0, by_rank[0][1]) == ()


def test_a_receive_from_any_source_may_take_any_message() -> None:
    send, anybody = called(Op.SEND, peer=1), called(Op.RECV, peer=None)
    counterparts, by_rank = world((send,), (anybody,), ())
    assert counterparts.absent(0, by_rank[0][0]) == ()
    assert counterparts.absent(1, by_rank[1][0]) == (0, 2)  # a receive from any source names no sender
    receiver, waits = called(Op.RECV, peer=1), called(Op.SEND, peer=None)
    counterparts, by_rank = world((receiver,), (waits,), ())
    assert counterparts.absent(0, by_rank[0][0]) == (1,)  # no rank sends


def waited(*, is_over: bool | None) -> Wait:
    return Wait(phase=Phase.BACKWARD, step=0, microbatch=0, is_over=is_over)


@pytest.mark.parametrize(
    ("op", "is_over", "is_stuck"),
    [
        (Op.ALL_REDUCE, True, True),  # gloo may report so, and cannot be right
        (Op.ALL_REDUCE, False, True),
        (Op.BROADCAST, True, False),  # the root may go on
        (Op.BROADCAST, False, True),
        (Op.BROADCAST, None, True),
    ],
)
def test_a_call_that_a_rank_misses_is_stuck_unless_it_may_have_completed(
    op: Op, is_over: bool | None, is_stuck: bool
) -> None:
    call = called(op, wait=waited(is_over=is_over))
    counterparts, by_rank = world((call,), (), (call,))
    assert counterparts.is_stuck(0, by_rank[0][0]) is is_stuck
    counterparts, by_rank = world((call,), (call,), (call,))
    assert not counterparts.is_stuck(0, by_rank[0][0])


def test_a_call_that_no_rank_waited_for_is_stuck_where_a_rank_misses() -> None:
    call = called(Op.BROADCAST)
    counterparts, by_rank = world((call,), (), ())
    assert counterparts.is_stuck(0, by_rank[0][0])
