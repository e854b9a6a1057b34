"""Ranks in threads over our transport return the results of ranks in processes over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager

from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import OWN_KINDS, WorldKind
from tests.values import returned

Tensor = torch.Tensor
Plain = Any  # nested lists of numbers
Scenario = Callable[[int, int], Plain]


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return integers of each rank's own, whose sum does not depend on the order."""
    numel = torch.Size(shape).numel()
    return (torch.arange(1, numel + 1) + 10 * rank).reshape(shape).to(dtype)


def every_work(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


# ---- collectives: each takes rank and size and returns plain numbers


def all_reduces(rank: int, size: int) -> Plain:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        for is_async in (False, True):
            tensor = numbers(rank, 2, 3)
            every_work([dist.all_reduce(tensor, op, async_op=is_async)])
            results.append(tensor.tolist())
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = numbers(rank, 3, dtype=torch.int64)
        dist.all_reduce(tensor, op)
        results.append(tensor.tolist())
    return results


def all_reduces_of_every_dtype(rank: int, size: int) -> Plain:
    results = []
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.complex64):
        tensor = numbers(rank, 3, dtype=dtype)
        dist.all_reduce(tensor)
        results.append([str(x) for x in tensor.tolist()])
    return results


def coalesced_all_reduces(rank: int, size: int) -> Plain:
    tensors = [numbers(rank, n) for n in (1, 4)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return [t.tolist() for t in tensors]


def all_gathers(rank: int, size: int) -> Plain:
    pieces = [torch.zeros(2, 2) for _ in range(size)]
    dist.all_gather(pieces, numbers(rank, 2, 2))
    late = [torch.zeros(2) for _ in range(size)]
    every_work([dist.all_gather(late, numbers(rank, 2), async_op=True)])
    whole = torch.zeros(size * 2)
    every_work([dist.all_gather_into_tensor(whole, numbers(rank, 2), async_op=True)])
    in_place = torch.zeros(size * 2)
    mine = in_place[rank * 2 : rank * 2 + 2]
    mine.copy_(numbers(rank, 2))
    dist.all_gather_into_tensor(in_place, mine)
    return [t.tolist() for t in (*pieces, *late, whole, in_place)]


def coalesced_all_gathers(rank: int, size: int) -> Plain:
    outputs = [torch.zeros(size * n) for n in (1, 3)]
    with _coalescing_manager(async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(output, numbers(rank, output.numel() // size))
    manager.wait()
    return [t.tolist() for t in outputs]


def reduce_scatters(rank: int, size: int) -> Plain:
    whole = torch.zeros(2)
    dist.reduce_scatter_tensor(whole, numbers(rank, size * 2))
    late = torch.zeros(2)
    every_work([dist.reduce_scatter_tensor(late, numbers(rank, size * 2), async_op=True)])
    listed = torch.zeros(2)
    dist.reduce_scatter(listed, list(torch.split(numbers(rank, size * 2), 2)))
    return [t.tolist() for t in (whole, late, listed)]


def rooted(rank: int, size: int) -> Plain:
    root = size - 1
    spread = numbers(rank, 3)
    every_work([dist.broadcast(spread, root, async_op=True)])
    reduced = numbers(rank, 3)
    dist.reduce(reduced, root)
    gathered = [torch.zeros(2) for _ in range(size)] if rank == root else None
    dist.gather(numbers(rank, 2), gathered, root)
    scattered = torch.zeros(2)
    dist.scatter(scattered, list(numbers(7, size, 2)) if rank == root else None, root)
    # Nothing specifies the result of a reduce on other ranks.
    kept = [reduced] if rank == root else []
    return [t.tolist() for t in (spread, *kept, *(gathered or []), scattered)]


def all_to_alls(rank: int, size: int) -> Plain:
    even = torch.zeros(size * 2)
    dist.all_to_all_single(even, numbers(rank, size * 2))
    into = [rank + 1] * size
    out_of = [d + 1 for d in range(size)]
    uneven = torch.zeros(sum(into))
    every_work([dist.all_to_all_single(uneven, numbers(rank, sum(out_of)), into, out_of, async_op=True)])
    return [even.tolist(), uneven.tolist()]


def messages(rank: int, size: int) -> Plain:
    after, before = (rank + 1) % size, (rank - 1) % size
    received = torch.zeros(2)
    swap = [dist.P2POp(dist.isend, numbers(rank, 2), after), dist.P2POp(dist.irecv, received, before)]
    every_work(dist.batch_isend_irecv(swap))
    tagged = torch.zeros(2, 1)
    if rank == 0:
        works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (1, 2)]
        every_work(works)
    elif rank == 1:
        dist.recv(tagged[0], 0, tag=2)
        dist.recv(tagged[1], 0, tag=1)
    return [received.tolist(), tagged.tolist()]


def objects(rank: int, size: int) -> Plain:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    spread = [("from", rank)]
    dist.broadcast_object_list(spread, 1)
    rooted: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, rooted, 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [[r] for r in range(size)] if rank == 0 else None, 0)
    return [gathered, spread, rooted, mine]


def barriers(rank: int, size: int) -> Plain:
    dist.barrier()
    every_work([dist.barrier(async_op=True)])
    return []


def subgroups(rank: int, size: int) -> Plain:
    # First: torch names such a group by the number of groups of the rank, in which ranks must not differ yet.
    local = dist.new_group([0, size - 1], use_local_synchronization=True)
    firsts = dist.new_group([0, 1])
    results: list[Any] = []
    if rank < 2:
        tensor = numbers(rank, 2)
        dist.all_reduce(tensor, group=firsts)
        results.append(tensor.tolist())
    enumerate_groups: Any = dist.new_subgroups_by_enumeration  # Any: no annotations
    alone, _ = enumerate_groups([[r] for r in range(size)])
    tensor = numbers(rank, 2)
    dist.all_reduce(tensor, group=alone)
    if rank in (0, size - 1):
        dist.broadcast(tensor, size - 1, group=local)
    return [*results, tensor.tolist(), dist.get_process_group_ranks(alone)]


def functionals(rank: int, size: int) -> Plain:
    group = dist.group.WORLD
    assert group is not None
    summed = functional.all_reduce(numbers(rank, 2), "sum", group)
    gathered = functional.all_gather_tensor(numbers(rank, 1, 2), 0, group)
    scattered = functional.reduce_scatter_tensor(numbers(rank, size, 2), "sum", 0, group)
    many = functional.all_reduce_coalesced([numbers(rank, 1), numbers(rank, 2)], "sum", group)
    return [t.tolist() for t in (summed * 2, gathered + 1, scattered, *many)]


COLLECTIVES: Mapping[str, Scenario] = {
    f.__name__: f
    for f in (
        all_reduces,
        all_reduces_of_every_dtype,
        coalesced_all_reduces,
        all_gathers,
        coalesced_all_gathers,
        reduce_scatters,
        rooted,
        all_to_alls,
        messages,
        objects,
        barriers,
        subgroups,
        functionals,
    )
}


def run_collectives(context: RankContext) -> dict[str, Plain]:
    return {name: scenario(context.rank, context.size) for name, scenario in COLLECTIVES.items()}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[WorldKind, list[dict[str, Plain]]]:
    return {
        kind: returned(f"{kind}:3", run_collectives, folder=tmp_path_factory.mktemp(kind.name))
        for kind in OWN_KINDS
    }


@pytest.mark.parametrize("name", COLLECTIVES)
def test_threads_return_the_results_of_gloo(name: str, both: dict[WorldKind, list[dict[str, Plain]]]) -> None:
    threads, processes = ([rank[name] for rank in both[kind]] for kind in OWN_KINDS)
    assert threads == processes


# ---- what only threads have


_meshes: dict[int, DeviceMesh] = {}  # an object that all ranks of one process share


def compare_meshes(context: RankContext) -> list[Plain]:
    _meshes[context.rank] = init_device_mesh("cpu", (context.size,))
    again = init_device_mesh("cpu", (context.size,))
    dist.barrier()
    return [[rank for rank, mesh in sorted(_meshes.items()) if mesh == again]]


def test_meshes_of_different_ranks_are_different_keys(tmp_path: Path) -> None:
    assert returned("threads:3", compare_meshes, folder=tmp_path) == [[[0]], [[1]], [[2]]]


def split_groups(context: RankContext) -> list[Plain]:
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    assert half is not None
    tensor = numbers(context.rank, 1)
    dist.all_reduce(tensor, group=half)
    results: list[Any] = [tensor.tolist(), dist.get_process_group_ranks(half)]
    # Ranks of a split are ranks within the parent.
    one = dist.split_group(half, [[1]])
    results.append(None if one is None else dist.get_process_group_ranks(one))
    world = dist.group.WORLD
    assert world is not None
    split: Any = world.split_group  # Any: the stub wants a type of its own for names
    odd = split([1, 3], group_name="odd")
    if odd is not None:
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, context.rank, group=odd)
        results.append(gathered)
    return results


def test_split_group_works_on_cpu(tmp_path: Path) -> None:
    pair, other = [[12.0], [0, 1]], [[52.0], [2, 3]]
    assert returned("threads:4", split_groups, folder=tmp_path) == [
        [*pair, None],
        [*pair, [1], [1, 3]],
        [*other, None],
        [*other, [3], [1, 3]],
    ]


def thread_of_a_rank(context: RankContext) -> list[Plain]:
    tensor, summed = numbers(context.rank, 2), []

    def reduce() -> None:
        group = dist.group.WORLD
        assert group is not None
        dist.all_reduce(tensor)
        summed.append(functional.all_reduce(numbers(context.rank, 1), "sum", group).tolist())

    helper = threading.Thread(target=reduce)
    helper.start()
    helper.join()
    return [tensor.tolist(), *summed]


def test_a_thread_that_a_rank_starts_belongs_to_it(tmp_path: Path) -> None:
    assert returned("threads:2", thread_of_a_rank, folder=tmp_path) == [[[12.0, 14.0], [12.0]]] * 2
