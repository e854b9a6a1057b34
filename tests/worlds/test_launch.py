"""Worlds between jobs: kept where starting is slow, and ended by a failure; sizes up to the largest."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardproof.harness.worlds.launch import World, WorldPool, launch
from shardproof.harness.worlds.outcome import Died, Raised, Returned, WorldResult
from shardproof.harness.worlds.processes.host_handle import HostHandle
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import OWN_KINDS, WorldKind, WorldSpec

KINDS = [*OWN_KINDS, WorldKind.LAUNCHED]


def _sum_and_process(context: RankContext) -> tuple[float, int]:
    mine = torch.tensor([float(context.rank)])
    dist.all_reduce(mine)
    return float(mine), os.getpid()


def _raise_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        raise ValueError("no")
    dist.barrier()


def _return_a_lambda(context: RankContext) -> object:
    return lambda: None


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[WorldPool]:
    pool = WorldPool(tmp_path / "pool")
    yield pool
    pool.close()


def _processes(result: WorldResult) -> set[int]:
    values = [o.value for o in result.outcomes if isinstance(o, Returned)]
    assert [total for total, _ in values] == [1.0, 1.0]
    return {process for _, process in values}


@pytest.mark.parametrize("kind", KINDS)
def test_a_pooled_world_lives_until_it_fails(kind: WorldKind, pool: WorldPool, tmp_path: Path) -> None:
    spec = WorldSpec(kind=kind, size=2, deadline_s=20)
    first = _processes(pool.run(spec, _sum_and_process, folder=tmp_path / "1"))
    assert _processes(pool.run(spec, _sum_and_process, folder=tmp_path / "2")) == first

    failed = pool.run(spec, _raise_on_rank_1, folder=tmp_path / "3")
    assert isinstance(failed.outcomes[1], Raised)

    after = _processes(pool.run(spec, _sum_and_process, folder=tmp_path / "4"))
    assert not after & first
    for process in first:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_process_that_ends_before_its_first_job_has_died(tmp_path: Path) -> None:
    """Kill one of two ready ranks; the other waits for it in the job, at most until the deadline."""
    world = World(WorldSpec(kind=WorldKind.PROCESSES, size=2, deadline_s=20), tmp_path)
    try:
        host, _ = world._hosts
        assert isinstance(host, HostHandle)
        os.kill(host.pid, signal.SIGKILL)
        while not host.is_over:
            host.listen()
        begun = time.monotonic()
        result = world.run(_sum_and_process, folder=tmp_path / "1")
    finally:
        world.close()
    assert isinstance(result.outcomes[0], Died), result
    assert time.monotonic() - begun < 10, "the death must be seen at once"


def test_sixty_four_ranks_agree(tmp_path: Path) -> None:
    spec = WorldSpec(kind=WorldKind.THREADS, size=64, deadline_s=60)
    result = launch(spec, _sum_and_process, folder=tmp_path)
    assert [o.value[0] for o in result.outcomes if isinstance(o, Returned)] == [float(sum(range(64)))] * 64


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_that_cannot_be_sent_is_reported(kind: WorldKind, tmp_path: Path) -> None:
    result = launch(WorldSpec(kind=kind, size=2, deadline_s=20), _return_a_lambda, folder=tmp_path)
    errors = [o for o in result.outcomes if isinstance(o, Raised)]
    assert errors
    assert "return plain values" in errors[0].message


class Unloadable:
    """Pickles, and raises when it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_fail_to_load, ())


def _fail_to_load() -> None:
    raise LookupError("no such table")


def _take(context: RankContext, thing: object) -> None:
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_cannot_be_loaded_is_reported(kind: WorldKind, tmp_path: Path) -> None:
    result = launch(WorldSpec(kind=kind, size=2, deadline_s=20), _take, Unloadable(), folder=tmp_path)
    assert all(isinstance(o, Raised) and "no such table" in o.message for o in result.outcomes)
