"""Hang analysis over ledgers written by hand finds wait-for relations, suspects, and the divergence of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.harness.records.hang import HangReport, RankActivity, RankState
from shardproof.harness.tracing.ledger import Entry, Ledger, Op, Phase, Wait
from shardproof.harness.verdicts.hang_analysis import analyse_hang
from shardproof.harness.worlds.outcome import Abandoned, Died, Outcome, Raised, Returned, TimedOut
from tests.ledgers import entry, numbered, renew, sharding_ledger, without

STACK = """  File "/usr/lib/python3.12/threading.py", line 355 in wait
  File "/home/me/mine/engine.py", line 40 in linger
  File "/x/site-packages/torch/nn/modules/module.py", line 1775 in _call_impl
  File "/x/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", line 9 in _pre_forward
  File "/usr/lib/python3.12/threading.py", line 1032 in _bootstrap_inner
"""
OVER = Wait(phase=Phase.BACKWARD, step=0, microbatch=0, num_issued=1, is_over=True)
BEGUN = replace(OVER, is_over=False)


def late(rank: int, stack: str = "") -> TimedOut:
    return TimedOut(rank=rank, stack=stack, last_call="")


def ended(entry_: Entry, **fields: object) -> Entry:
    """Make a call that ended."""
    return renew(entry_, **{"wait": OVER, **fields})


def blocked(entry_: Entry, **fields: object) -> Entry:
    """Make a call that has not returned."""
    return renew(entry_, **{"wait": None, "is_async": False, **fields})


def analysed(*ledgers: Ledger, outcomes: tuple[Outcome, ...] = ()) -> HangReport:
    return analyse_hang(outcomes or tuple(map(late, range(len(ledgers)))), dict(enumerate(ledgers)))


def doings(hang: HangReport) -> list[RankActivity]:
    return [rank.doing for rank in hang.ranks]


def test_a_rank_that_left_is_suspect() -> None:
    calls = [ended(entry(site=f"x.py:{line}")) for line in (9, 10, 11)]
    found = analysed(
        numbered(calls),
        numbered([*calls, blocked(entry(site="x.py:12"))]),
        outcomes=(Returned(rank=0, value=None), late(1)),
    )
    assert found.summary == (
        "rank 1 waits in all_reduce(avg, float32[4, 4]) as #3 of group [0, 1] at x.py:12, backward of microbatch 0"
        " of step 0 for rank 0 (returned; last call: all_reduce #2 of group [0, 1] in"
        " backward of microbatch 0 of step 0)"
    )
    assert found.suspects == (0,)
    assert found.cycle == ()
    assert doings(found) == [RankActivity.RETURNED, RankActivity.WAITING]
    assert found.ranks[1].awaits == (0,)
    assert found.difference is not None
    assert found.difference.position == 3
    assert found.difference.common is not None
    assert found.difference.common.site == "x.py:11"
    assert [(side.ranks, side.call is None) for side in found.difference.sides] == [
        ((1,), False),
        ((0,), True),
    ]


def test_a_rank_in_no_call_is_reported_with_its_own_frame() -> None:
    found = analysed(
        numbered([blocked(entry())]), numbered([ended(entry(group=(1,)))]), outcomes=(late(0), late(1, STACK))
    )
    assert "for rank 1 (in no call, at engine.py:40 in linger; last call: all_reduce" in found.summary
    assert doings(found) == [RankActivity.WAITING, RankActivity.OUTSIDE]
    own = ("engine.py:40 in linger", "torch/distributed/fsdp/_fully_shard/_fsdp_state.py:9 in _pre_forward")
    assert found.ranks[1].frames == own
    assert len(found.ranks[1].stack) == 5


def test_a_rank_without_any_call_is_reported_as_such() -> None:
    found = analysed(numbered([blocked(entry())]), ())
    assert found.summary.endswith("for rank 1 (in no call, at an unknown place; no call before)")


def test_the_root_of_a_chain_of_waits_is_suspect() -> None:
    # 0 waits for 1, which waits for 2, which computes for ever.
    pairs = [blocked(entry(group=(0, 1))), blocked(entry(group=(1, 2)))]
    found = analysed(numbered([pairs[0]]), numbered([pairs[1]]), ())
    assert found.suspects == (2,)
    assert found.summary.startswith("rank 1 waits in all_reduce")
    assert "for rank 2 (in no call" in found.summary


def test_a_cycle_is_reported_as_such() -> None:
    first, second = entry(group=(0, 1), site="a.py:1"), entry(group=(1, 2), site="b.py:2")
    third = entry(group=(0, 2), site="c.py:3")
    found = analysed(numbered([blocked(first)]), numbered([blocked(second)]), numbered([blocked(third)]))
    assert found.cycle == (0, 1, 2)
    assert found.suspects == (0, 1, 2)
    assert found.summary.startswith("ranks 0-2 wait for each other: rank 0 for rank 1 in all_reduce")
    assert "rank 2 for rank 0 in all_reduce" in found.summary


def test_groups_of_equal_ranks_make_a_cycle_too() -> None:
    left, right = blocked(entry(group_name="left")), blocked(entry(group_name="right"))
    found = analysed(numbered([left]), numbered([right]))
    assert found.cycle == (0, 1)


def test_the_rank_of_a_cycle_that_most_ranks_wait_for_is_suspect() -> None:
    everybody, pair = blocked(entry(world_size=4)), blocked(entry(group=(2, 3)))
    found = analysed(*[numbered([everybody])] * 3, numbered([pair]))
    assert found.cycle == (2, 3)
    assert found.suspects == (3,)


def test_a_wait_that_began_and_did_not_end_holds_a_rank() -> None:
    # As in gloo: the call itself returned.
    calls = [ended(entry(site="x.py:1")), renew(entry(site="x.py:2"), is_async=True, wait=BEGUN)]
    found = analysed(numbered(calls), numbered([calls[0]]), outcomes=(late(0, STACK), late(1, STACK)))
    assert doings(found) == [RankActivity.WAITING, RankActivity.OUTSIDE]


@pytest.mark.parametrize(
    ("stack", "doing"),
    [
        (
            '  File "/x/site-packages/torch/autograd/graph.py", line 1 in _engine_run_backward\n',
            RankActivity.WAITING,
        ),
        ('  File "/home/me/engine.py", line 3 in spin\n', RankActivity.OUTSIDE),
        ("", RankActivity.WAITING),
    ],
)
def test_a_rank_that_took_a_future_waits_unless_its_stack_ends_in_its_own_code(
    stack: str, doing: RankActivity
) -> None:
    future = renew(entry(), is_async=True, wait=replace(OVER, is_over=None))
    found = analysed(numbered([future]), (), outcomes=(late(0, stack), late(1)))
    assert found.ranks[0].doing is doing


def test_a_wait_that_ended_before_others_came_is_one_on_a_device() -> None:
    assert analysed(numbered([ended(entry())]), ()).ranks[0].doing is RankActivity.WAITING
    assert analysed(numbered([ended(entry(Op.BROADCAST, peer=0))]), ()).ranks[0].doing is RankActivity.OUTSIDE


def test_a_call_of_the_rank_itself_comes_before_those_of_its_threads() -> None:
    own, other = blocked(entry(site="own.py:1")), blocked(entry(site="thread.py:1"), thread="comm")
    call = analysed(numbered([own, other]), ()).ranks[0].call
    assert call is not None
    assert call.site == "own.py:1"


@pytest.mark.parametrize("op", [Op.SEND, Op.RECV])
def test_a_message_without_its_other_end_is_reported(op: Op) -> None:
    found = analysed(numbered([blocked(entry(op, peer=1))]), ())
    assert found.summary.startswith(f"rank 0 waits in {op}(")
    assert found.suspects == (1,)
    assert found.difference is None


def test_an_answered_message_holds_no_rank() -> None:
    sent, received = ended(entry(Op.SEND, peer=1)), ended(entry(Op.RECV, peer=0))
    assert doings(analysed(numbered([sent]), numbered([received]))) == [
        RankActivity.OUTSIDE,
        RankActivity.OUTSIDE,
    ]
    from_any = ended(entry(Op.RECV, peer=None))
    found = analysed(numbered([sent, blocked(entry(Op.SEND, peer=1))]), numbered([from_any]))
    assert found.ranks[0].awaits == (1,)


def test_equal_calls_from_other_lines_are_reported_from_the_first_of_them() -> None:
    sites = [f"x.py:{line}" for line in range(6)]
    whole = [ended(entry(site=site)) for site in sites]
    short = [c for c in whole if c.site != "x.py:2"]
    found = analysed(
        numbered([*whole[:-1], blocked(whole[-1])]),
        numbered(short),
        outcomes=(late(0), Returned(rank=1, value=None)),
    )
    assert found.difference is not None
    assert found.difference.position == 5
    assert [(s.ranks, s.call and s.call.site) for s in found.difference.desynchronised] == [
        ((0,), "x.py:2"),
        ((1,), "x.py:3"),
    ]
    assert "from #2 on their calls were alike but not their places: rank 0 in" in found.summary


def test_one_call_from_two_lines_is_no_straying() -> None:
    left = [ended(entry(site="root.py:1")), ended(entry(site="x.py:2")), blocked(entry(site="x.py:3"))]
    right = [ended(entry(site="leaf.py:1")), ended(entry(site="x.py:2"))]
    found = analysed(numbered(left), numbered(right))
    assert found.difference is not None
    assert found.difference.desynchronised == ()


@pytest.mark.parametrize(("step", "is_straying"), [(0, False), (1, True)])
def test_other_lines_from_the_first_call_on_are_a_habit_of_the_engine(step: int, is_straying: bool) -> None:
    left = [ended(entry(site="root.py:1")), ended(entry(site="root.py:2")), blocked(entry(site="x.py:3"))]
    right = [ended(entry(site="leaf.py:1")), ended(entry(site="leaf.py:2"), step=step)]
    found = analysed(numbered(left), numbered(right))
    assert found.difference is not None
    assert bool(found.difference.desynchronised) is is_straying


def test_ranks_that_all_compute_wait_for_no_rank() -> None:
    found = analysed((), (), outcomes=(late(0, STACK), late(1, STACK)))
    assert found.summary == "ranks 0, 1 (in no call, at engine.py:40 in linger; no call before)"
    assert found.suspects == (0, 1)


def test_ranks_that_called_different_things_wait_for_each_other() -> None:
    found = analysed(numbered([blocked(entry())]), numbered([blocked(entry(Op.BARRIER))]))
    assert found.cycle == (0, 1)
    assert found.difference is not None
    assert [(side.ranks, side.call and side.call.op) for side in found.difference.sides] == [
        ((0,), "all_reduce"),
        ((1,), "barrier"),
    ]


def test_every_end_is_reported() -> None:
    deadlock = Raised(
        rank=0, kind="DeadlockError", message="", traceback=_traceback("e.py"), is_symptom=False, at_s=0.0
    )
    own = replace(deadlock, rank=1, kind="ValueError")
    died = Died(rank=2, exit_code=3, is_attributed=True, text="")
    stopped = Abandoned(rank=3, stack=_traceback("f.py"))
    found = analysed(*[numbered([blocked(entry(world_size=4))])] * 4, outcomes=(deadlock, own, died, stopped))
    assert doings(found) == [
        RankActivity.WAITING,
        RankActivity.FAILED,
        RankActivity.FAILED,
        RankActivity.WAITING,
    ]
    assert [r.ended for r in found.ranks] == [
        "raised DeadlockError",
        "raised ValueError",
        "exited with status 3",
        "stopped because of another rank",
    ]
    assert found.ranks[0].frames == ("e.py:7 in inner", "e.py:3 in outer")
    assert found.ranks[3].frames[0] == "f.py:7 in inner"


def test_calls_of_a_rank_that_was_lost_with_its_journal_are_not_missed() -> None:
    lost = Died(rank=1, exit_code=None, is_attributed=True, text="its machine cannot be reached")
    found = analysed(numbered([blocked(entry(world_size=2))]), (), outcomes=(late(0), lost))
    assert found.ranks[1].ended == "was lost"
    assert found.suspects == (1,)
    assert found.difference is None


@settings(
    max_examples=60, deadline=None
)  # deadline: the machine is shared, and the test does not measure time
@given(data=st.data())
def test_any_single_omission_is_laid_to_the_rank_that_made_it(data: st.DataObject) -> None:
    honest = tuple(ended(e) for e in sharding_ledger(steps=2, microbatches=1, world_size=3))
    position = data.draw(st.integers(min_value=0, max_value=len(honest) - 1))
    rank = data.draw(st.integers(min_value=0, max_value=2))
    stopped = numbered([*honest[:-1], blocked(honest[-1])])
    short = without(honest, lambda e: e.seq == position)
    ledgers = [short if r == rank else stopped for r in range(3)]
    ends: list[RankState] = list(
        analysed(
            *ledgers, outcomes=tuple(Returned(rank=r, value=None) if r == rank else late(r) for r in range(3))
        ).ranks
    )
    assert [r.rank for r in ends if r.doing is RankActivity.WAITING] == [r for r in range(3) if r != rank]
    assert all(rank in r.awaits for r in ends if r.doing is RankActivity.WAITING)


def _traceback(file: str) -> str:
    return (
        "Traceback (most recent call last):\n"
        f'  File "/home/me/{file}", line 3, in outer\n    inner()\n'
        f'  File "/home/me/{file}", line 7, in inner\n    call()\n'
        "DeadlockError: no rank comes\n"
    )
