"""What is refused: the type of the error, and that its text names what came and what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from harness.worlds.rank import RankContext
from tests.reference.front_doors import BY_NAME, FrontDoor
from tests.reference.watching import (
    WIDTH,
    Chain,
    both_doors,
    each,
    hybrid_mesh,
    run,
    shard_chain,
)

SIZE = 4
Scenario = Callable[[FrontDoor], object]


class Refusal(Exception):  # noqa: N818 - it says that nothing was refused
    """Raised by the test where the engine accepted what it must refuse."""


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def _inputs() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def _container(door: FrontDoor) -> object:
    return door.fully_shard(nn.ModuleList([_linear()]))


def _container_by_name(door: FrontDoor) -> object:
    return door.fully_shard(nn.ModuleDict({"a": _linear()}))


def _container_of_replicas(door: FrontDoor) -> object:
    return door.replicate(nn.ModuleList([_linear()]))


def _scalar(door: FrontDoor) -> object:
    model = _linear()
    model.gain = nn.Parameter(torch.tensor(1.0))
    return door.fully_shard(model)


def _not_contiguous(door: FrontDoor) -> object:
    model = _linear()
    model.weight = nn.Parameter(torch.ones(WIDTH, 4).t())
    return door.fully_shard(model)


def _three_axes(door: FrontDoor) -> object:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    return door.fully_shard(_linear(), mesh=mesh)


def _axes_without_names(door: FrontDoor) -> object:
    return door.fully_shard(_linear(), mesh=init_device_mesh("cpu", (2, 2)))


def _replicas_on_two_axes(door: FrontDoor) -> object:
    return door.replicate(_linear(), mesh=hybrid_mesh(2, 2))


def _not_a_factor(door: FrontDoor) -> object:
    return door.fully_shard(_linear(), reshard_after_forward=3)


def _more_than_all(door: FrontDoor) -> object:
    return door.fully_shard(_linear(), reshard_after_forward=2 * SIZE)


def _uneven_columns(door: FrontDoor) -> object:
    return door.fully_shard(nn.Linear(3, WIDTH), shard_placement_fn=lambda _: Shard(1))


def _no_such_dim(door: FrontDoor) -> object:
    return door.fully_shard(_linear(), shard_placement_fn=lambda _: Shard(2))


def _sharded_twice(door: FrontDoor) -> object:
    return door.fully_shard(door.fully_shard(_linear()))


def _replicated_twice(door: FrontDoor) -> object:
    return door.replicate(door.replicate(_linear()))


def _replicas_of_shards(door: FrontDoor) -> object:
    return door.replicate(door.fully_shard(_linear()))


def _shards_of_replicas(door: FrontDoor) -> object:
    return door.fully_shard(door.replicate(_linear()))


def _copied(door: FrontDoor) -> object:
    return copy.deepcopy(door.fully_shard(_linear()))


def _copied_replicas(door: FrontDoor) -> object:
    return copy.deepcopy(door.replicate(_linear()))


def _forward_prefetch_of_plain(door: FrontDoor) -> object:
    return door.fully_shard(_linear()).set_modules_to_forward_prefetch([_linear()])


def _backward_prefetch_of_plain(door: FrontDoor) -> object:
    model = door.fully_shard(_linear())
    return model.set_modules_to_backward_prefetch([model, _linear()])


def _reshard_by_number(door: FrontDoor) -> object:
    return door.fully_shard(_linear()).set_reshard_after_forward(2)


def _reshard_by_none(door: FrontDoor) -> object:
    return door.fully_shard(_linear()).set_reshard_after_forward(None)


def _reshard_of_replicas(door: FrontDoor) -> object:
    return door.replicate(_linear()).set_reshard_after_forward(True)


def _no_such_method(door: FrontDoor) -> object:
    door.register_forward_method(door.fully_shard(_linear()), "encode")
    return None


def _shared_with_plain(door: FrontDoor) -> object:
    door.share_comm_ctx([door.fully_shard(_linear()), _linear()])
    return None


def _no_buffer(door: FrontDoor) -> object:
    return door.fully_shard(_linear()).set_reduce_scatter_max_input_buffers(0)


def _half_a_buffer(door: FrontDoor) -> object:
    return door.fully_shard(_linear()).set_reduce_scatter_max_input_buffers(2.5)


def _true_buffers(door: FrontDoor) -> object:
    return door.fully_shard(_linear()).set_reduce_scatter_max_input_buffers(True)


def _hook_on_a_stream_of_ours(door: FrontDoor) -> object:
    model = door.fully_shard(_linear(), mesh=hybrid_mesh(2, 2))
    return model.set_all_reduce_hook(lambda reduced: None, stream=torch.cpu.Stream())


class Comm:
    """A custom collective that nobody calls."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give memory."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Fail: it is not meant to be called."""
        raise NotImplementedError


def _allocation_beside_custom_gather(door: FrontDoor) -> object:
    model = door.fully_shard(_linear())
    model.set_custom_all_gather(Comm())
    return model.set_allocate_memory_from_process_group_for_comm(True)


def _allocation_beside_custom_scatter(door: FrontDoor) -> object:
    model = door.fully_shard(_linear())
    model.set_custom_reduce_scatter(Comm())
    return model.set_allocate_memory_from_process_group_for_comm(True)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _linear(), _linear()
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run both."""
        result: torch.Tensor = self.second(self.first(inputs))
        return result


def _tied_across_groups(door: FrontDoor) -> object:
    model = Tied()
    door.fully_shard(model.first)
    door.fully_shard(model.second)
    return door.fully_shard(model)(_inputs())


def _child_before_root(door: FrontDoor) -> object:
    model = nn.Sequential(_linear(), _linear())
    door.fully_shard(model[0])
    door.fully_shard(model)
    model[0](_inputs())
    return model(_inputs())


def _list_as_root(door: FrontDoor) -> object:
    layers = [_linear(), _linear()]
    door.fully_shard(layers)
    return layers[0](_inputs())


def _meta(door: FrontDoor) -> object:
    with torch.device("meta"):
        model = _linear()
    return door.fully_shard(model)(_inputs())


def _meta_unsharded(door: FrontDoor) -> object:
    with torch.device("meta"):
        model = _linear()
    return door.fully_shard(model).unshard()


def _mixed_dtypes(door: FrontDoor) -> object:
    model = nn.Sequential(_linear(), _linear().to(torch.float64))
    return door.fully_shard(model)(_inputs())


def _reset_of_a_child(door: FrontDoor) -> object:
    model = Chain()
    shard_chain(door, model)(_inputs())
    child: Any = model.units[0]
    return child.reset_iter_state()


# What is refused: when, with which errors, and what their text must speak of.
SCENARIOS: dict[str, tuple[Scenario, str, str]] = {
    "a list without forward": (_container, "ValueError", "forward"),
    "a dict without forward": (_container_by_name, "ValueError", "forward"),
    "replicas of a list without forward": (_container_of_replicas, "ValueError", "forward"),
    "a scalar parameter": (_scalar, "ValueError", r"scalar.*gain|gain.*scalar"),
    "a parameter that is not contiguous": (_not_contiguous, "NotImplementedError", "contiguous"),
    "a mesh of three axes": (_three_axes, "ValueError", r"1D or 2D|1-D or 2-D|one or two"),
    "a mesh of two axes without names": (_axes_without_names, "AssertionError|ValueError", "mesh_dim_names"),
    "replicas on two axes": (_replicas_on_two_axes, "ValueError", r"1D|1-D|one"),
    "a number that does not divide": (_not_a_factor, "ValueError", "factor.*4.*3|factor"),
    "a number above the world": (_more_than_all, "ValueError", "factor"),
    "uneven columns": (_uneven_columns, "NotImplementedError", "even"),
    "a dim that is not there": (_no_such_dim, "AssertionError|ValueError|IndexError", "dim"),
    "sharding twice": (_sharded_twice, "AssertionError|RuntimeError|ValueError", "fully_shard|already"),
    "replicating twice": (_replicated_twice, "AssertionError|RuntimeError|ValueError", "replicate|already"),
    "replicas of shards": (_replicas_of_shards, "RuntimeError", "already managed by `?fully_shard"),
    "shards of replicas": (_shards_of_replicas, "AssertionError|RuntimeError|ValueError", "replicate"),
    "deepcopy": (_copied, "AssertionError", "deepcopy"),
    "deepcopy of replicas": (_copied_replicas, "AssertionError", "deepcopy"),
    "forward prefetch of a plain module": (_forward_prefetch_of_plain, "ValueError", "FSDPModule.*Linear"),
    "backward prefetch of a plain module": (_backward_prefetch_of_plain, "ValueError", "FSDPModule.*Linear"),
    "reshard set to a number": (_reshard_by_number, "ValueError", "bool.*(int|2)"),
    "reshard set to None": (_reshard_by_none, "ValueError", "bool.*None"),
    "reshard set on replicas": (_reshard_of_replicas, "AssertionError", ""),  # torch has no text
    "a forward method that is missing": (_no_such_method, "ValueError", "encode"),
    "sharing streams with a plain module": (_shared_with_plain, "ValueError", "FSDPModule.*Linear"),
    "no buffer": (_no_buffer, "ValueError", "positive|at least|>= 1"),
    "half a buffer": (_half_a_buffer, "TypeError", "int.*float|int.*2.5"),
    "True buffers": (_true_buffers, "TypeError", "int.*bool|int.*True"),
    "a hook's stream beside native HSDP": (
        _hook_on_a_stream_of_ours,
        "ValueError",
        "stream",
    ),
    "process group memory for a custom gather": (
        _allocation_beside_custom_gather,
        "AssertionError",
        "custom",
    ),
    "process group memory for a custom scatter": (
        _allocation_beside_custom_scatter,
        "AssertionError",
        "custom",
    ),
    "a weight tied across groups": (_tied_across_groups, "ValueError", "already managed by another.*group"),
    "a child before its root": (_child_before_root, "RuntimeError", "already been lazily init.*root"),
    "a list as root": (_list_as_root, "RuntimeError", "single root"),
    "meta parameters at forward": (_meta, "RuntimeError", "materializ.*meta|meta.*materializ"),
    "meta parameters at unshard": (_meta_unsharded, "RuntimeError", "materializ.*meta|meta.*materializ"),
    "two dtypes in a group": (_mixed_dtypes, "AssertionError", "uniform.*dtype"),
    "reset of a child": (_reset_of_a_child, "RuntimeError", "root"),
}


# Methods that an engine may leave out; then there is nothing to refuse.
NEEDS = {
    "no buffer": "set_reduce_scatter_max_input_buffers",
    "half a buffer": "set_reduce_scatter_max_input_buffers",
    "True buffers": "set_reduce_scatter_max_input_buffers",
    "process group memory for a custom gather": "set_allocate_memory_from_process_group_for_comm",
    "process group memory for a custom scatter": "set_allocate_memory_from_process_group_for_comm",
}


def _names(door: str) -> list[str]:
    has = BY_NAME[door].sharded_module
    return [name for name in SCENARIOS if name not in NEEDS or hasattr(has, NEEDS[name])]


def _provoke(door: FrontDoor, name: str) -> str:
    scenario, _, _ = SCENARIOS[name]
    scenario(door)
    raise Refusal("nothing was refused")


def _provoke_each(context: RankContext, door: str, names: list[str]) -> dict[str, str]:
    return each(names, lambda name: _provoke(BY_NAME[door], name))


def _complaint(name: str, told: str) -> str | None:
    _, kinds, pattern = SCENARIOS[name]
    kind, _, text = told.partition(": ")
    if re.fullmatch(kinds, kind) and re.search(pattern, text, re.DOTALL | re.IGNORECASE):
        return None
    return f"expected {kinds} about {pattern!r}, got {told}"


@both_doors
def test_refusals_name_what_is_wrong(door: str, tmp_path: Path) -> None:
    for observed in run(tmp_path, SIZE, _provoke_each, door, _names(door)):
        complaints = {name: _complaint(name, told) for name, told in observed.items()}
        assert {name: text for name, text in complaints.items() if text} == {}


def test_the_reference_says_what_was_expected_what_came_and_what_to_try(tmp_path: Path) -> None:
    for observed in run(tmp_path, SIZE, _provoke_each, "reference", _names("reference")):
        curt = {name: told for name, told in observed.items() if len(told.partition(": ")[2]) < 30}
        assert curt == {}


def _factor_of_one(context: RankContext, door: str) -> list[bool]:
    """Ask for groups of one rank, and of all: the one means False, the other True."""
    told = []
    for reshard in (1, SIZE):
        model = BY_NAME[door].fully_shard(_linear(), reshard_after_forward=reshard)
        model(_inputs())
        told.append(type(model.weight) is nn.Parameter)
    return told


@both_doors
def test_a_number_at_either_end_means_a_bool(door: str, tmp_path: Path) -> None:
    assert run(tmp_path, SIZE, _factor_of_one, door) == [[True, False]] * SIZE


def _recover(context: RankContext, door: str, name: str) -> None:
    """Provoke an error at first forward on a model of its own; another one trains as ever."""
    observed = each([name], lambda name: _provoke(BY_NAME[door], name))
    assert "Refusal" not in observed[name]
    model = shard_chain(BY_NAME[door], Chain())
    model(_inputs()).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@both_doors
@pytest.mark.parametrize(
    "name", ["a weight tied across groups", "a child before its root", "two dtypes in a group"]
)
def test_a_refusal_leaves_other_models_alone(door: str, name: str, tmp_path: Path) -> None:
    run(tmp_path, 2, _recover, door, name)


def _mesh_of_one_axis(context: RankContext, door: str) -> None:
    mesh: DeviceMesh = init_device_mesh("cpu", (SIZE,))  # no name is needed
    BY_NAME[door].fully_shard(_linear(), mesh=mesh)(_inputs())
    BY_NAME[door].replicate(_linear(), mesh=mesh)(_inputs())


@both_doors
def test_one_axis_needs_no_name(door: str, tmp_path: Path) -> None:
    run(tmp_path, SIZE, _mesh_of_one_axis, door)
