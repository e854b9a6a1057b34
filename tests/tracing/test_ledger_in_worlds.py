"""The interceptor records real engines as CommDebugMode does where that works, and records right where it fails."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from shardproof import Returned, launch
from shardproof.harness.torch_compat.process_groups import HashStore
from shardproof.harness.tracing.journal import read_journal
from shardproof.harness.tracing.ledger import CallSummary, Entry, Ledger, Op, Phase
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.worlds.rank import RankContext, journal_path
from shardproof.harness.worlds.spec import OWN_KINDS, WorldKind, WorldSpec

KINDS = list(OWN_KINDS)

# CommDebugMode's names of collectives, by our name.
COUNTED = {
    "allreduce_": Op.ALL_REDUCE,
    "_allgather_base_": Op.ALL_GATHER,
    "allgather_": Op.ALL_GATHER,
    "_reduce_scatter_base_": Op.REDUCE_SCATTER,
    "broadcast_": Op.BROADCAST,
}


def _launch(kind: WorldKind, size: int, body: object, *args: object, folder: Path) -> list[Ledger]:
    assert callable(body)
    result = launch(WorldSpec(kind=kind, size=size, deadline_s=30), body, *args, folder=folder)
    assert all(isinstance(o, Returned) for o in result.outcomes), result.outcomes
    return [read_journal(journal_path(folder, rank)).ledger for rank in range(size)]


def _model(name: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if name == "ddp":
        return DistributedDataParallel(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def _train_under_comm_debug_mode(context: RankContext, name: str) -> None:
    model = _model(name)
    mode = CommDebugMode()
    with context.recorder.during(Phase.STEP, step=0), mode:
        model(torch.ones(2, 8)).sum().backward()
    counts = Counter[str]()
    for op, count in mode.get_comm_counts().items():
        counts[str(COUNTED[op.__name__])] += count
    ours = Counter(str(e.op) for e in context.recorder.ledger() if e.step == 0)
    assert counts
    assert ours == counts, f"CommDebugMode counted {counts}, the ledger {ours}"


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_agrees_with_comm_debug_mode_where_that_works(name: str, tmp_path: Path) -> None:
    _launch(WorldKind.PROCESSES, 2, _train_under_comm_debug_mode, name, folder=tmp_path)


def _train_twice(context: RankContext, name: str) -> None:
    model = _model(name)
    for microbatch in range(2):
        with context.recorder.during(Phase.STEP, step=0, microbatch=microbatch):
            model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_records_trainings_on_which_comm_debug_mode_crashes(kind: WorldKind, tmp_path: Path) -> None:
    for ledger in _launch(kind, 2, _train_twice, "fsdp2", folder=tmp_path):
        for microbatch in range(2):
            ops = Counter(e.op for e in ledger if e.microbatch == microbatch)
            assert ops == {Op.ALL_GATHER: 4, Op.REDUCE_SCATTER: 2}


def _talk(context: RankContext) -> None:
    halves, world = dist.new_group([0, 1]), dist.group.WORLD
    assert world is not None
    mine = torch.full((3,), float(context.rank))
    with context.recorder.during(Phase.STEP, step=0):
        work = dist.all_reduce(mine, op=dist.ReduceOp.MAX, async_op=True)
        forgotten = dist.all_reduce(torch.ones(2, dtype=torch.int64), group=halves, async_op=True)
        work.wait()
        functional.wait_tensor(functional.all_reduce(torch.ones(5), "sum", world))
        if context.rank == 0:
            dist.send(mine, 1)
        else:
            dist.recv(mine, 0)
        with torch.inference_mode():
            dist.broadcast(torch.ones(1), 1)
        dist.barrier()
    forgotten.wait()  # late: after the step that issued it


@pytest.mark.parametrize("kind", KINDS)
def test_writes_down_everything_that_crosses(kind: WorldKind, tmp_path: Path) -> None:
    for rank, ledger in enumerate(_launch(kind, 2, _talk, folder=tmp_path)):
        entries = [e for e in ledger if e.step == 0]
        message = Op.SEND if rank == 0 else Op.RECV
        assert [e.op for e in entries] == [
            *[Op.ALL_REDUCE] * 3,
            message,
            Op.BROADCAST,
            Op.BARRIER,
        ]
        maximum, forgotten, total, _, root, _ = entries
        assert _essence(maximum) == ("max", "float32", 12, ((3,),), True)
        assert _essence(forgotten) == ("sum", "int64", 16, ((2,),), True)
        assert _essence(total)[:3] == ("sum", "float32", 20)
        assert root.peer == 1
        assert maximum.wait is not None
        assert maximum.wait.phase is Phase.STEP
        assert forgotten.wait is not None
        assert forgotten.wait.phase is Phase.PREPARE, "waited for only after the step was over"
        assert all(e.thread == "main" and "test_ledger_in_worlds.py" in e.site for e in entries)
        assert all(e.wait is not None and e.wait.is_over for e in entries)
        assert forgotten.group_name != maximum.group_name == total.group_name, "two groups of the same ranks"


def _essence(entry: Entry) -> tuple[object, ...]:
    return (entry.reduce_op, entry.dtype, entry.num_bytes, entry.shapes, entry.is_async)


def _on_the_fake_backend(context: RankContext) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=HashStore(), rank=5, world_size=1024)
    model = _model("fsdp2")
    with context.recorder.during(Phase.STEP, step=0):
        model(torch.ones(2, 8)).sum().backward()


def test_sees_a_rank_of_a_world_that_is_not_there(tmp_path: Path) -> None:
    (ledger,) = _launch(WorldKind.PROCESSES, 1, _on_the_fake_backend, folder=tmp_path)
    reductions = [e for e in ledger if e.op is Op.REDUCE_SCATTER]
    assert len(reductions) == 2
    assert all(len(e.group) == 1024 for e in reductions)


def _never_waits(context: RankContext) -> None:
    with context.recorder.during(Phase.STEP, step=0):
        dist.all_reduce(torch.ones(3), async_op=True)
    dist.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_records_a_result_that_no_rank_waited_for(kind: WorldKind, tmp_path: Path) -> None:
    for ledger in _launch(kind, 2, _never_waits, folder=tmp_path):
        assert [e.wait for e in ledger if e.op is Op.ALL_REDUCE] == [None]


def _wait_in_vain(context: RankContext) -> None:
    if context.rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)  # no rank waits for this call
        dist.all_reduce(torch.ones(3), async_op=True).wait()


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_that_never_ends_is_recorded_as_begun(kind: WorldKind, tmp_path: Path) -> None:
    spec = WorldSpec(kind=kind, size=2, deadline_s=3.0)
    assert not launch(spec, _wait_in_vain, folder=tmp_path).is_clean
    first, second = read_journal(journal_path(tmp_path, 0)).ledger
    assert first.wait is None
    assert second.wait is not None
    assert second.wait.is_over is False


def test_a_wait_that_returned_is_read_as_over(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    recorder = Recorder(journal)
    call = CallSummary(
        op=Op.BARRIER,
        group_name="0",
        group=(0, 1),
        dtype="",
        shapes=(),
        num_bytes=0,
        reduce_op=None,
        peer=None,
        is_async=False,
        site="x.py:1 in f",
    )
    for _ in range(2):
        seq = recorder.issued(call)
        recorder.waited(seq, is_over=False)
        recorder.over(seq)
        recorder.over(seq)
    recorder.close()
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["entry", "wait", "over"] * 2
    assert read_journal(journal).ledger == recorder.ledger()
