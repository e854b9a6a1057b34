"""Positions of a rank's piece: blocks, flat pieces, and DTensors that two mesh axes cut along one dim."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from shardproof import RankContext, Shard, shard_of
from shardproof.engine.pieces import Piece
from shardproof.harness.records.observation import Observation, load_observation, save_observation
from tests.values import returned

WHOLE = torch.arange(24.0).reshape(2, 3, 4)
SHAPE = tuple(WHOLE.shape)


def flat(start: int, stop: int) -> Shard:
    return Shard.flat(WHOLE.flatten()[start:stop].clone(), start, SHAPE)


@pytest.mark.parametrize(("start", "stop"), [(0, 24), (0, 5), (5, 19), (23, 24), (7, 7), (24, 24)])
def test_a_flat_piece_reads_its_interval(start: int, stop: int) -> None:
    piece = flat(start, stop)
    assert torch.equal(piece.of(WHOLE), piece.tensor)
    assert torch.equal(piece.of(WHOLE.expand(5, 2, *SHAPE)), piece.tensor.expand(5, 2, -1))
    assert piece.is_inside
    assert piece.is_whole is (stop - start == 24)


def test_a_flat_piece_knows_the_index_in_the_whole() -> None:
    piece = flat(5, 19)
    for local in range(14):
        assert WHOLE[piece.index_of((local,))] == piece.tensor[local]


def test_a_block_reads_its_region_and_knows_its_index() -> None:
    block = Shard(tensor=WHOLE[1:, 1:3].clone(), offsets=(1, 1, 0), global_shape=SHAPE)
    assert torch.equal(block.of(WHOLE), block.tensor)
    assert torch.equal(block.of(WHOLE.expand(5, *SHAPE)), block.tensor.expand(5, *block.tensor.shape))
    assert block.index_of((0, 1, 3)) == (1, 2, 3)
    assert not block.is_whole


def test_a_scalar_is_a_block_or_flat() -> None:
    scalar = torch.tensor(3.0)
    for piece in (Shard(tensor=scalar, offsets=(), global_shape=()), Shard.flat(scalar.reshape(1), 0, ())):
        assert piece.is_whole
        assert piece.is_inside
        assert torch.equal(piece.of(scalar), piece.tensor)
        assert piece.index_of((0,) * piece.tensor.dim()) == ()


def test_a_write_to_a_piece_writes_to_the_whole() -> None:
    held = torch.zeros(SHAPE)
    flat(5, 19).of(held).fill_(1)
    assert held.flatten().nonzero().flatten().tolist() == list(range(5, 19))


@pytest.mark.parametrize(
    "piece",
    [
        Shard.flat(torch.zeros(5), 20, SHAPE),
        Shard.flat(torch.zeros(5), -1, SHAPE),
        Shard.flat(torch.zeros(5, 1), 0, SHAPE),
        Shard(tensor=torch.zeros(5), offsets=(0,), global_shape=SHAPE),
        Shard(tensor=torch.zeros(2, 3, 4), offsets=(0, 0, 1), global_shape=SHAPE),
        Shard(tensor=torch.zeros(2, 3, 4), offsets=(0, 0), global_shape=SHAPE),
    ],
)
def test_a_piece_that_does_not_fit_is_not_inside(piece: Shard) -> None:
    assert not piece.is_inside


def test_a_flat_piece_is_kept_as_one(tmp_path: Path) -> None:
    pieces = {"flat": flat(5, 19), "block": Shard(tensor=WHOLE, offsets=(0, 0, 0), global_shape=SHAPE)}
    seen = Observation(
        rank=0, input_digest="", initial=pieces, steps=(), optimizer_state={}, buffers={}, ledger=()
    )
    save_observation(seen, tmp_path / "seen.pt")
    kept = load_observation(tmp_path / "seen.pt", ()).initial
    assert {name: shard.is_flat for name, shard in kept.items()} == {"flat": True, "block": False}
    assert torch.equal(kept["flat"].of(WHOLE), flat(5, 19).tensor)


# DTensors, in worlds


def _cut_twice(whole: torch.Tensor, mesh: DeviceMesh, dim: int) -> DTensor:
    """Make a parameter that tensor parallelism cuts along ``dim``, then FSDP2 over the other axes along the first."""
    tensor_parallel = mesh["tp"]
    chunks = whole.chunk(tensor_parallel.size(), dim)
    mine = tensor_parallel.get_local_rank()
    module = nn.Module()
    module.weight = nn.Parameter(
        DTensor.from_local(
            (chunks[mine] if mine < len(chunks) else whole.narrow(dim, 0, 0)).contiguous(),
            tensor_parallel,
            [ShardPlacement(dim)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
    )
    fully_shard(module, mesh=mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "tp")])
    assert isinstance(module.weight, DTensor)
    return module.weight


def _mistaken(context: RankContext, shape: tuple[int, ...], dim: int) -> list[str]:
    """Describe one rank's shards of tensors of many sizes; return the shards whose elements lie elsewhere."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp")[-len(shape) :])
    mistaken = []
    for rows in range(1, 20):
        whole = torch.arange(3.0 * rows).reshape((rows, 3) if dim == 0 else (3, rows))
        parameter = _cut_twice(whole, mesh, dim)
        shard = shard_of(parameter)
        # torch cannot gather columns of which some ranks have none.
        is_sound = dim == 1 or torch.equal(parameter.full_tensor(), whole)
        if not is_sound or not torch.equal(shard.of(whole), shard.tensor):
            mistaken.append(f"{shard} of {rows}: {parameter.placements}")
    return mistaken


@pytest.mark.parametrize("dim", [0, 1], ids="tp on dim {}".format)
@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2), (2, 2, 2)], ids=str)
def test_offsets_are_right_where_two_axes_cut_a_tensor(
    shape: tuple[int, ...], dim: int, tmp_path: Path
) -> None:
    size = prod(shape)
    assert returned(f"threads:{size}", _mistaken, shape, dim, folder=tmp_path) == [[]] * size


def _refusals(context: RankContext) -> list[str]:
    mesh = init_device_mesh("cpu", (context.size,))
    errors = []
    for placement in (Partial(), _StridedShard(0, split_factor=2)):
        local = torch.zeros(2, 3)
        shape = torch.Size((4, 3))
        tensor = DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=(3, 1))
        try:
            shard_of(tensor)
        except TypeError as error:
            errors.append(str(error))
    return errors


def test_pieces_that_are_no_block_are_refused(tmp_path: Path) -> None:
    for partial, strided in returned("threads:2", _refusals, folder=tmp_path):
        assert "got P" in partial
        assert "got _S(0, 2)" in strided


# Pieces of parameters.


def test_a_number_that_another_rank_owns_is_an_empty_piece() -> None:
    number = torch.tensor(2.0)
    assert not Piece(name="gain", shape=(), owner=number, numel=0).of(number).tensor.numel()


def test_a_number_of_this_rank_is_whole() -> None:
    number = torch.tensor(2.0)
    shown = Piece(name="gain", shape=(), owner=number).of(number)
    assert shown.is_whole
    assert shown.tensor.item() == 2


def test_a_number_beside_a_piece_is_of_the_whole_parameter() -> None:
    count = torch.tensor(7.0)
    assert Piece(name="weight", shape=(4,), owner=torch.zeros(0), numel=0).of(count).tensor.item() == 7
