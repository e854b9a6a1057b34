"""Models whose parameters other axes cut before fully_shard: scaled, unused, without memory, on one mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy

from shardproof import APART, FOURS, Capability
from shardproof.suites.composable.bench import STEP, Bench, cut, expects, layers, shared_rows
from shardproof.suites.composable.bench import steps_on_shared_rows, whole, whole_gradients
from shardproof.suites.expect import expects_of
from shardproof.suites.params import parametrize
from shardproof.suites.tower import shown_gradients

pytestmark = pytest.mark.worlds(FOURS)
REFUSAL = "the refusal"
_with = partial(expects_of, Capability.COMPOSABLE, Bench)


@pytest.mark.kills("SumsWhatACallerPrepares")
@expects("the scale", "what is not stepped", STEP)
def test_all_ranks_skip_the_step_of_one_infinity(bench: Bench) -> None:
    model, mesh = cut(bench)
    bench.api.fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = GradScaler(bench.device.type, init_scale=8.0)
    scaler.scale(model(shared_rows(bench, 2)[-1]).sum()).backward()
    gradient = next(model.parameters()).grad
    assert isinstance(gradient, DTensor)
    if bench.rank == bench.size - 1:
        gradient.to_local()[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    bench.same("what is not stepped", whole(model), whole(layers()))
    steps_on_shared_rows(bench, model, layers(), 2, scaler)
    bench.same("the scale", scaler.get_scale(), 4.0)


class _Sparing(nn.Sequential):
    """Layers, one of them unused."""

    def __init__(self) -> None:
        super().__init__(*[*layers(), *layers()][:3])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run the first two."""
        result: torch.Tensor = self[1](self[0](rows))
        return result


@pytest.mark.kills("LeavesOutWhatNoRankUsed")
@parametrize("is_expert", False, True, ids=["all_ranks", "experts"])
@_with("gradients of what is unused", STEP, beside=frozenset({Capability.RANK_DEPENDENT, Capability.EXPERTS}))
def test_what_no_rank_used_gets_zeros_where_asked_for(bench: Bench, is_expert: bool) -> None:
    mesh = init_device_mesh(bench.device.type, (bench.size // 2, 2), mesh_dim_names=("data", "expert"))
    model: Any = _Sparing()
    if is_expert:
        model[2].weight = nn.Parameter(
            distribute_tensor(model[2].weight.detach(), mesh["expert"], [Shard(0)])
        )
    places = {id(model[2].weight): bench.api.placed_on(mesh["data"])} if is_expert else {}
    bench.api.fully_shard(model, mesh=bench.mesh(), shard_placement_fn=lambda p: places.get(id(p)))
    model.set_reduce_scatter_unused_params(True)
    steps_on_shared_rows(bench, model, _Sparing(), 1)
    gradient = shown_gradients(model).get("2.weight")
    shown = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    bench.same("gradients of what is unused", shown, torch.zeros(8, 8, device=bench.device))


@pytest.mark.worlds(APART)
@pytest.mark.kills("SumsWhatACallerPrepares", world="processes:4")
@expects(STEP)
def test_losses_are_computed_where_scores_lie(bench: Bench) -> None:
    """A model without memory; each rank of the tensor axis computes the scores of some classes."""
    mesh = init_device_mesh(bench.device.type, (bench.size // 2, 2), mesh_dim_names=("data", "tensor"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    parallelize_module(model[1], mesh["tensor"], ColwiseParallel(use_local_output=False))
    bench.shard(model, units=("0",), mesh=mesh["data"]).to_empty(device=bench.device)
    alone = layers()
    for parameter in alone.parameters():
        parameter.data.div_(1024)
    set_model_state_dict(model, alone.state_dict(), options=StateDictOptions(full_state_dict=True))
    *all_rows, own = shared_rows(bench, 2)
    labels = torch.tensor([3, 6])
    with loss_parallel():
        torch.autograd.backward(cross_entropy(model(own), labels.to(bench.device)))
    for rows in all_rows:
        torch.autograd.backward(cross_entropy(alone(rows), labels) / len(all_rows))
    for trained in (model, alone):
        torch.optim.SGD(trained.parameters(), lr=0.5).step()
    bench.near(STEP, whole(model), whole(alone), tolerance=1e-4)


# Any: only torch 2.13 and later have its type.
def _dims(**names: Any) -> Any:
    from torch.distributed.fsdp import DataParallelMeshDims

    return DataParallelMeshDims(**names)


def _mesh(bench: Bench, axes: dict[str, int]) -> DeviceMesh:
    """Make a mesh of these axes; the remaining axis has the remaining ranks."""
    rest = bench.size // abs(prod(axes.values()))
    sizes = tuple(rest if size < 0 else size for size in axes.values())
    return init_device_mesh(bench.device.type, sizes, mesh_dim_names=tuple(axes))


def _spread(mesh: DeviceMesh, axis: str = "tensor") -> nn.Module:
    """Distribute layers over all axes of a mesh, cut along one; each rank's rows are those of all ranks."""
    everywhere = [Replicate()] * mesh.ndim

    def lay(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, nn.Linear):
            lie = [Shard(int(name)) if axis == other else Replicate() for other in mesh.mesh_dim_names or ()]
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, lie))

    # Any: as torch has it.
    def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, everywhere, run_check=False)

    def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=everywhere).to_local()

    return distribute_module(layers(), mesh, lay, enter, leave)


_LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "shards": ({"a": -1}, {"shard": "a"}),
    "replicas": ({"a": -1}, {"replicate": "a"}),
    "hybrid": ({"a": 2, "b": -1}, {"replicate": "a", "shard": "b"}),
    "two_axes_of_shards": ({"a": 2, "b": -1}, {"shard": ("a", "b")}),
    "two_axes_of_replicas": ({"a": 2, "b": -1}, {"replicate": ("a", "b")}),
    "shards_of_cut_tensors": ({"a": -1, "tensor": 2}, {"shard": "a"}),
    "replicas_of_cut_tensors": ({"a": -1, "tensor": 2}, {"replicate": "a"}),
    "three_axes": ({"a": 1, "b": -1, "tensor": 2}, {"replicate": "a", "shard": "b"}),
    "two_axes_of_shards_of_cut_tensors": ({"a": 1, "b": -1, "tensor": 2}, {"shard": ("a", "b")}),
}


@pytest.mark.kills("SumsWhatACallerPrepares")
@parametrize("frees", True, False, ids=["freed", "kept"])
@parametrize("name", *_LAYOUTS)
@_with(STEP, beside=frozenset({Capability.MESH_DIMS}))
def test_tensors_on_one_mesh_train_like_replicas(bench: Bench, name: str, frees: bool) -> None:
    axes, named = _LAYOUTS[name]
    mesh = _mesh(bench, axes)
    model = _spread(mesh)
    bench.api.fully_shard(model, mesh=mesh, dp_mesh_dims=_dims(**named), reshard_after_forward=frees)
    steps_on_shared_rows(bench, model, layers(), axes.get("tensor", 1))


@pytest.mark.kills("SumsWhatACallerPrepares")
@_with(STEP, beside=frozenset({Capability.MESH_DIMS}))
def test_tensors_on_one_mesh_are_replicated_by_name(bench: Bench) -> None:
    mesh = _mesh(bench, {"a": -1, "tensor": 1})
    model = _spread(mesh)
    bench.api.replicate(model, mesh=mesh, dp_mesh_dims=_dims(replicate="a"))
    steps_on_shared_rows(bench, model, layers(), 1)


def _of_no_axes(bench: Bench, mesh: DeviceMesh) -> object:
    dims = _dims(shard="a")
    dims.shard = None
    return bench.api.fully_shard(_spread(mesh), mesh=mesh, dp_mesh_dims=dims)


# Calls with a mesh of all ranks, with an axis named a and one named tensor, and words of the refusal.
_REFUSALS: dict[str, tuple[Callable[[Bench, DeviceMesh], object], str]] = {
    "a_tensor_that_is_cut": (
        lambda b, mesh: b.api.fully_shard(
            _spread(mesh), mesh=mesh, dp_mesh_dims=_dims(shard=("a", "tensor"))
        ),
        "Replicate",
    ),
    "an_unknown_axis": (
        lambda b, mesh: b.api.fully_shard(_spread(mesh), mesh=mesh, dp_mesh_dims=_dims(shard="b")),
        "not found",
    ),
    "another_mesh": (
        lambda b, mesh: b.api.fully_shard(_spread(mesh["a"]), mesh=mesh, dp_mesh_dims=_dims(shard="a")),
        "same mesh",
    ),
    "no_axes": (_of_no_axes, "at least one"),
    "plain_tensors": (
        lambda b, mesh: b.api.fully_shard(layers(), mesh=mesh, dp_mesh_dims=_dims(shard="a")),
        "plain tensor",
    ),
    "sharding_over_fewer_ranks": (
        lambda b, mesh: b.api.fully_shard(
            _spread(mesh), mesh=mesh, dp_mesh_dims=_dims(shard="a"), reshard_after_forward=2
        ),
        "reshard_after_forward",
    ),
}


@pytest.mark.kills("LeavesModulesAsTheyAre")
@parametrize("name", *_REFUSALS)
@_with(REFUSAL, beside=frozenset({Capability.MESH_DIMS}))
def test_refuses(bench: Bench, name: str) -> None:
    scenario, words = _REFUSALS[name]
    mesh = _mesh(bench, {"a": -1, "tensor": 2})
    bench.refuses(REFUSAL, lambda: scenario(bench, mesh), naming=words)


class _Gain(nn.Module):
    """A factor for each column, equal on the ranks of another axis, each of which applies it to its own rows."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.factors = nn.Parameter(
            distribute_tensor(torch.ones(4, device=mesh.device_type), mesh, [Replicate()])
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Scale the columns."""
        result: torch.Tensor = rows * self.factors
        return result


@pytest.mark.kills("AddsCopiesInTheComputeDtype")
@expects("gradients")
def test_copies_of_another_axis_are_added_in_the_dtype_of_reductions(bench: Bench) -> None:
    """Their sum, 257, is not representable in the compute dtype; each of its parts is."""
    mesh = init_device_mesh(bench.device.type, (bench.size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = _Gain(mesh["tensor"])
    policy = bench.api.mixed_precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    bench.api.fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    part = 256.0 if mesh["tensor"].get_local_rank() == 0 else 1.0
    own = torch.full((1, 4), part, dtype=torch.bfloat16, device=bench.device)
    output = model(DTensor.from_local(own, mesh["tensor"], [Shard(0)]))
    output.to_local().sum().backward()
    bench.same("gradients", whole_gradients(model), {"factors": torch.full((4,), 257.0)})
