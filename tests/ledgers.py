"""Ledgers written by hand: entries of an honest sharding engine, which laws pass and tests break."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

from shardproof import Evidence, Plan, Schedule, Training
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.records.observation import Observation
from shardproof.harness.tracing.collectives.call import Call, Pieces
from shardproof.harness.tracing.ledger import Entry, Ledger, Op, Phase, Wait

UNITS = ("first", "second")
GATHERED_BYTES = 64
ROW_SHAPES = ((4, 4),)


def entry(op: Op = Op.ALL_REDUCE, /, world_size: int = 2, **fields: object) -> Entry:
    """Make one entry of a backward, waited for at once, with some fields changed."""
    reduces = op in {Op.ALL_REDUCE, Op.REDUCE_SCATTER}
    made = Entry(
        seq=0,
        op=op,
        group=tuple(range(world_size)),
        group_seq=0,
        axis="data",
        dtype="float32",
        shapes=ROW_SHAPES,
        num_bytes=GATHERED_BYTES,
        reduce_op="avg" if reduces else None,
        peer=None,
        is_async=False,
        wait=Wait(phase=Phase.BACKWARD, step=0, microbatch=0),
        phase=Phase.BACKWARD,
        step=0,
        microbatch=0,
        unit=None,
        thread="main",
        site="engine.py:12",
    )
    return renew(made, **fields)


def renew(made: Entry, **fields: object) -> Entry:
    """Change fields of an entry; without ``wait`` its wait stays beside the call."""
    changed = replace(made, **fields)  # type: ignore[arg-type]  # the test names Entry's own fields
    if "wait" in fields:
        return changed
    return replace(changed, wait=Wait(phase=changed.phase, step=changed.step, microbatch=changed.microbatch))


def numbered(entries: Sequence[Entry]) -> Ledger:
    """Number entries as a recorder does: over all, and within each group."""
    counts: dict[object, int] = {}
    result = []
    for seq, made in enumerate(entries):
        stream = (made.group, made.op, made.peer) if made.op in {Op.SEND, Op.RECV} else made.group
        result.append(replace(made, seq=seq, group_seq=counts.get(stream, 0)))
        counts[stream] = counts.get(stream, 0) + 1
    return tuple(result)


def sharding_ledger(*, steps: int = 3, microbatches: int = 2, world_size: int = 2) -> Ledger:
    """Write the ledger of an accumulating sharding engine, which gathers each unit twice and reduces once a step."""
    entries = [
        entry(Op.BROADCAST, world_size=world_size, phase=Phase.PREPARE, step=-1, microbatch=-1, peer=0)
    ]
    for step in range(steps):
        for microbatch in range(microbatches):
            for op, phase, units in (
                (Op.ALL_GATHER, Phase.FORWARD, UNITS),
                (Op.ALL_GATHER, Phase.BACKWARD, UNITS[::-1]),
                (Op.REDUCE_SCATTER, Phase.BACKWARD, UNITS[::-1] if microbatch == microbatches - 1 else ()),
            ):
                entries += [
                    entry(op, world_size=world_size, phase=phase, step=step, microbatch=microbatch, unit=unit)
                    for unit in units
                ]
    return numbered(entries)


def evidence(*ledgers: Ledger, steps: int = 3, microbatches: int = 2) -> Evidence:
    """Return the evidence of a training with these ledgers, one for each rank, and nothing else observed."""
    schedule = Schedule(steps=steps, microbatches=microbatches)
    return Evidence(
        training=Training(problem=MLP_EVEN, optimizer=SGD, plan=Plan(units=UNITS), schedule=schedule),
        world_size=len(ledgers),
        ranks=tuple(_observation(rank, ledger) for rank, ledger in enumerate(ledgers)),
        # No law over ledgers reads the oracle; a law that did would fail on this.
        oracle=cast(OracleObservation, None),
    )


def changed(ledger: Ledger, where: Callable[[Entry], bool], **fields: object) -> Ledger:
    position = next(i for i, e in enumerate(ledger) if where(e))
    return (*ledger[:position], renew(ledger[position], **fields), *ledger[position + 1 :])


def without(ledger: Ledger, where: Callable[[Entry], bool]) -> Ledger:
    """Leave out the first entry that matches."""
    position = next(i for i, e in enumerate(ledger) if where(e))
    return numbered((*ledger[:position], *ledger[position + 1 :]))


def _observation(rank: int, ledger: Ledger) -> Observation:
    return Observation(
        rank=rank,
        input_digest=str(rank),
        initial={},
        steps=(),
        optimizer_state={},
        buffers={},
        ledger=ledger,
    )


# Calls.


# Any: the fields of a call.
def made_call(op: Op, inputs: Pieces = (), outputs: Pieces = (), **fields: Any) -> Call:
    """Make the call of the first of two ranks, which waits for it, with some fields changed."""
    plain: dict[str, Any] = {
        "group": cast(dist.ProcessGroup, None),
        "group_name": "everybody",
        "ranks": (0, 1),
        "rank": 0,
        "reduce_op": None,
        "peer": None,
        "tag": 0,
        "is_async": False,
        "device": torch.device("cpu"),
        "timeout_s": None,
        "site": "engine.py:1 in step",
    }
    return Call(op=op, inputs=inputs, outputs=outputs, **(plain | fields))
