"""The law of agreement holds in honest worlds, and names a rank that differs, lags or leaves with its call."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.harness.laws.communication.matching import (
    Counterparts,
    Extent,
    ProcessGroup,
    RanksAgree,
    first_disagreement,
)
from shardproof.harness.tracing.ledger import Entry, Op, Phase, Wait
from tests.ledgers import changed, entry, evidence, numbered, renew, sharding_ledger, without

AGREE = RanksAgree()
NEVER_DIFFER: tuple[dict[str, object], ...] = ({"site": "other.py:1"}, {"unit": "x"}, {"is_async": True})
ALWAYS_DIFFER: tuple[dict[str, object], ...] = (
    {"op": Op.ALL_REDUCE},
    {"dtype": "bfloat16"},
    {"reduce_op": "sum"},
    {"shapes": ((4, 5),)},
    {"peer": 1},
)


def is_reduction(e: Entry) -> bool:
    return e.op is Op.REDUCE_SCATTER and e.step == 1


def send(source: int, destination: int, **fields: object) -> Entry:
    return renew(entry(Op.SEND, peer=destination, site=f"pipe.py:{source}"), **fields)


def recv(destination: int, source: int | None, **fields: object) -> Entry:
    return renew(entry(Op.RECV, peer=source, site=f"pipe.py:{destination}"), **fields)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_honest_world_agrees(world_size: int) -> None:
    ledger = sharding_ledger(world_size=world_size)
    record = AGREE.judge(evidence(*[ledger] * world_size)).record
    assert record.held, record.summary
    ledgers = dict.fromkeys(range(world_size), ledger)
    assert first_disagreement(ledgers, Extent.COMPLETE) is None


def is_gather(e: Entry) -> bool:
    return e.op is Op.ALL_GATHER and e.step == 1


def test_gathers_may_be_ragged_and_their_sum_is_the_same() -> None:
    """Ranks may contribute pieces of different sizes; each rank receives the same total."""
    honest = sharding_ledger(world_size=2)
    ragged = changed(honest, is_gather, shapes=((1, 5),))
    assert first_disagreement({0: honest, 1: ragged}) is None
    num_bytes = next(e.num_bytes for e in honest if is_gather(e))
    short = changed(ragged, is_gather, num_bytes=num_bytes - 4)
    assert "rank 1 called all_gather(float32[1, 5])" in (first_disagreement({0: honest, 1: short}) or "")


@pytest.mark.parametrize("fields", ALWAYS_DIFFER, ids=str)
@pytest.mark.parametrize("odd_rank", [0, 2])
def test_a_differing_call_is_reported_with_both_sides(fields: dict[str, object], odd_rank: int) -> None:
    honest = sharding_ledger(world_size=3)
    odd = changed(honest, is_reduction, site="odd.py:7", **fields)
    ledgers = [odd if r == odd_rank else honest for r in range(3)]
    record = AGREE.judge(evidence(*ledgers)).record
    assert not record.held
    others = sorted({0, 1, 2} - {odd_rank})
    seq = next(e.group_seq for e in honest if is_reduction(e))
    assert f"group [0, 1, 2] disagrees on call #{seq}: " in record.summary
    assert f"ranks {others} called reduce_scatter(avg, float32[4, 4])" in record.summary
    assert f"rank {odd_rank} called " in record.summary
    assert "at odd.py:7" in record.summary
    assert "at engine.py:12" in record.summary
    assert first_disagreement(dict(enumerate(ledgers))) == record.summary


@pytest.mark.parametrize("fields", NEVER_DIFFER, ids=str)
def test_fields_without_meaning_between_ranks_may_differ(fields: dict[str, object]) -> None:
    honest = sharding_ledger()
    assert AGREE.judge(evidence(honest, changed(honest, is_reduction, **fields))).record.held


def test_two_calls_in_swapped_order_are_caught() -> None:
    big = entry(shapes=((8, 8),), site="big.py:1")
    small = entry(shapes=((2, 2),), site="small.py:1")
    record = AGREE.judge(evidence(numbered([big, small]), numbered([small, big]))).record
    assert "call #0: rank 0 called all_reduce(avg, float32[8, 8])" in record.summary
    assert "rank 1 called all_reduce(avg, float32[2, 2])" in record.summary


def test_a_missing_last_call_is_wrong_only_in_complete_ledgers() -> None:
    honest = sharding_ledger()
    short = honest[:-1]
    record = AGREE.judge(evidence(honest, short)).record
    assert not record.held
    assert "rank 0 called reduce_scatter" in record.summary
    assert record.summary.endswith("rank 1 never made it")
    assert first_disagreement({0: honest, 1: short}) is None


def test_rank_without_any_call_on_a_group_is_caught() -> None:
    stray = entry(group=(0, 1), axis="pair")
    honest = numbered([entry(world_size=3)])
    ledgers = (numbered([*honest, stray]), honest, honest)
    record = AGREE.judge(evidence(*ledgers)).record
    assert "group [0, 1] call #0: rank 0 called all_reduce" in record.summary
    assert record.summary.endswith("rank 1 never made it")


def test_groups_are_compared_each_by_itself() -> None:
    left, right = entry(group=(0, 1)), entry(group=(2, 3), dtype="bfloat16")
    ledgers = (numbered([left]), numbered([left]), numbered([right]), numbered([right]))
    assert AGREE.judge(evidence(*ledgers)).record.held


def test_groups_of_equal_ranks_are_distinguished_by_name() -> None:
    left, right = entry(group_name="a"), entry(group_name="b", dtype="int64")
    assert AGREE.judge(evidence(numbered([left, right]), numbered([right, left]))).record.held
    nameless = [renew(e, group_name="") for e in (left, right)]
    assert not AGREE.judge(evidence(numbered(nameless), numbered(nameless[::-1]))).record.held


def test_the_earliest_disagreement_is_reported_first() -> None:
    honest = numbered([entry(group=(0, 1)), entry(group=(0, 1, 2)), entry(group=(0, 1))])
    odd = numbered([honest[0], renew(honest[1], dtype="int64"), renew(honest[2], dtype="int32")])
    record = AGREE.judge(evidence(honest, odd, numbered([honest[1]]))).record
    assert "group [0, 1, 2] disagrees" in record.summary
    assert len(record.details) == 2
    ledgers = {0: honest, 1: odd, 2: numbered([honest[1]])}
    for extent in Extent:
        assert first_disagreement(ledgers, extent) == record.summary


def test_agreeing_on_nothing_proves_nothing() -> None:
    assert not AGREE.judge(evidence((), ())).record.held
    reads = numbered([entry(Op.ALL_GATHER, phase=Phase.OBSERVE)])
    assert "nothing was observed" in AGREE.judge(evidence(reads, reads)).record.summary
    assert AGREE.judge(evidence(())).record.held


def test_messages_that_meet_agree() -> None:
    first = numbered([send(0, 1), send(0, 1, num_bytes=8), recv(0, 1)])
    second = numbered([recv(1, 0), send(1, 0), recv(1, 0, num_bytes=8)])
    assert AGREE.judge(evidence(first, second)).record.held


@pytest.mark.parametrize(
    ("received", "text"),
    [
        ([recv(1, 0, dtype="bfloat16")], "message #0 from rank 0 to rank 1: sent as send("),
        ([recv(1, 0, num_bytes=8)], "received as recv("),
        ([recv(1, 0), recv(1, 0)], "message #1 from rank 0 to rank 1 was never sent: recv("),
        ([entry(Op.BARRIER)], "was never received: send("),
    ],
)
def test_messages_that_do_not_meet_are_caught(received: list[Entry], text: str) -> None:
    barrier = [e for e in received if e.op is Op.BARRIER]
    ledgers = (numbered([send(0, 1), *barrier]), numbered(received))
    assert text in AGREE.judge(evidence(*ledgers)).record.summary


def test_receives_from_any_source_are_counted_in_all() -> None:
    any_two = numbered([recv(2, None), recv(2, None)])
    ledgers = (numbered([send(0, 2)]), numbered([send(1, 2)]), any_two)
    assert AGREE.judge(evidence(*ledgers)).record.held
    record = AGREE.judge(evidence(ledgers[0], ledgers[1], any_two[:1])).record
    assert "rank 2 receives from any source: 1 receives for 2 messages" in record.summary


@settings(
    max_examples=60, deadline=None
)  # deadline: the machine is shared, and the test does not measure time
@given(data=st.data())
def test_any_single_omission_is_found(data: st.DataObject) -> None:
    honest = sharding_ledger(steps=2, microbatches=1, world_size=3)
    position = data.draw(st.integers(min_value=0, max_value=len(honest) - 1))
    rank = data.draw(st.integers(min_value=0, max_value=2))
    short = without(honest, lambda e: e.seq == position)
    ledgers = {r: short if r == rank else honest for r in range(3)}
    assert first_disagreement(ledgers, Extent.COMPLETE) is not None


# Counterparts.


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
