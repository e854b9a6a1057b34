"""What is refused: the type of the error, and that its text names what came and what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardproof.harness.worlds.rank import RankContext
from tests.reference.front_doors import BY_NAME, FrontDoor, each_door
from tests.reference.models import WIDTH, Chain, apply_to, hybrid_mesh
from tests.reference.ranks import Ranks, each

SIZE = 4
Scenario = Callable[[FrontDoor], object]


class Refusal(Exception):  # noqa: N818 - it says that nothing was refused
    """Raised by the test where the engine accepted what it must refuse."""


def _linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def _inputs() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def _with_scalar() -> nn.Module:
    model = _linear()
    model.gain = nn.Parameter(torch.tensor(1.0))
    return model


def _transposed() -> nn.Module:
    model = _linear()
    model.weight = nn.Parameter(torch.ones(WIDTH, 4).t())
    return model


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return _linear()


def _hook_on_a_stream_of_ours(door: FrontDoor) -> object:
    model = door.fully_shard(_linear(), mesh=hybrid_mesh(2, 2))
    return model.set_all_reduce_hook(lambda reduced: None, stream=torch.cpu.Stream())


class Comm:
    """A custom collective that is never called."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Fail: it is not meant to be called."""
        raise NotImplementedError


def _pool_memory(door: FrontDoor, setter: str) -> object:
    model = door.fully_shard(_linear())
    getattr(model, setter)(Comm())
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


def _mixed_dtypes(door: FrontDoor) -> object:
    model = nn.Sequential(_linear(), _linear().to(torch.float64))
    return door.fully_shard(model)(_inputs())


def _reset_of_a_child(door: FrontDoor) -> object:
    model = apply_to(Chain(), door.fully_shard)
    model(_inputs())
    return model.units[0].reset_iter_state()


# What is refused, by the door `d`.
SCENARIOS: dict[str, Scenario] = {
    "a list without forward": lambda d: d.fully_shard(nn.ModuleList([_linear()])),
    "a dict without forward": lambda d: d.fully_shard(nn.ModuleDict({"a": _linear()})),
    "replicas of a list without forward": lambda d: d.replicate(nn.ModuleList([_linear()])),
    "a scalar parameter": lambda d: d.fully_shard(_with_scalar()),
    "a parameter that is not contiguous": lambda d: d.fully_shard(_transposed()),
    "a mesh of three axes": lambda d: d.fully_shard(
        _linear(), mesh=init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    ),
    "a mesh of two axes without names": lambda d: d.fully_shard(
        _linear(), mesh=init_device_mesh("cpu", (2, 2))
    ),
    "replicas on two axes": lambda d: d.replicate(_linear(), mesh=hybrid_mesh(2, 2)),
    "a number that does not divide": lambda d: d.fully_shard(_linear(), reshard_after_forward=3),
    "a number above the world": lambda d: d.fully_shard(_linear(), reshard_after_forward=2 * SIZE),
    "uneven columns": lambda d: d.fully_shard(nn.Linear(3, WIDTH), shard_placement_fn=lambda _: Shard(1)),
    "a dim that is not there": lambda d: d.fully_shard(_linear(), shard_placement_fn=lambda _: Shard(2)),
    "sharding twice": lambda d: d.fully_shard(d.fully_shard(_linear())),
    "replicating twice": lambda d: d.replicate(d.replicate(_linear())),
    "replicas of shards": lambda d: d.replicate(d.fully_shard(_linear())),
    "shards of replicas": lambda d: d.fully_shard(d.replicate(_linear())),
    "deepcopy": lambda d: copy.deepcopy(d.fully_shard(_linear())),
    "deepcopy of replicas": lambda d: copy.deepcopy(d.replicate(_linear())),
    "forward prefetch of a plain module": lambda d: d.fully_shard(_linear()).set_modules_to_forward_prefetch(
        [_linear()]
    ),
    "backward prefetch of a plain module": lambda d: d.fully_shard(
        _linear()
    ).set_modules_to_backward_prefetch([_linear()]),
    "reshard set to a number": lambda d: d.fully_shard(_linear()).set_reshard_after_forward(2),
    "reshard set to None": lambda d: d.fully_shard(_linear()).set_reshard_after_forward(None),
    "reshard set on replicas": lambda d: d.replicate(_linear()).set_reshard_after_forward(True),
    "a forward method that is missing": lambda d: d.register_forward_method(
        d.fully_shard(_linear()), "encode"
    ),
    "sharing streams with a plain module": lambda d: d.share_comm_ctx([d.fully_shard(_linear()), _linear()]),
    "no buffer": lambda d: d.fully_shard(_linear()).set_reduce_scatter_max_input_buffers(0),
    "half a buffer": lambda d: d.fully_shard(_linear()).set_reduce_scatter_max_input_buffers(2.5),
    "True buffers": lambda d: d.fully_shard(_linear()).set_reduce_scatter_max_input_buffers(True),
    "a hook's stream beside native HSDP": _hook_on_a_stream_of_ours,
    "process group memory for a custom gather": lambda d: _pool_memory(d, "set_custom_all_gather"),
    "process group memory for a custom scatter": lambda d: _pool_memory(d, "set_custom_reduce_scatter"),
    "a weight tied across groups": _tied_across_groups,
    "a child before its root": _child_before_root,
    "a list as root": _list_as_root,
    "meta parameters at forward": lambda d: d.fully_shard(_on_meta())(_inputs()),
    "meta parameters at unshard": lambda d: d.fully_shard(_on_meta()).unshard(),
    "two dtypes in a group": _mixed_dtypes,
    "reset of a child": _reset_of_a_child,
}
# With which errors they are refused, and what the text must speak of.
REFUSED: dict[str, tuple[str, str]] = {
    "a list without forward": ("ValueError", "forward"),
    "a dict without forward": ("ValueError", "forward"),
    "replicas of a list without forward": ("ValueError", "forward"),
    "a scalar parameter": ("ValueError", r"scalar.*gain|gain.*scalar"),
    "a parameter that is not contiguous": ("NotImplementedError", "contiguous"),
    "a mesh of three axes": ("ValueError", r"1D or 2D|1-D or 2-D|one or two"),
    "a mesh of two axes without names": ("AssertionError|ValueError", "mesh_dim_names"),
    "replicas on two axes": ("ValueError", r"1D|1-D|one"),
    "a number that does not divide": ("ValueError", "factor"),
    "a number above the world": ("ValueError", "factor"),
    "uneven columns": ("NotImplementedError", "even"),
    "a dim that is not there": ("AssertionError|ValueError|IndexError", "dim"),
    "sharding twice": ("AssertionError|RuntimeError|ValueError", "fully_shard|already"),
    "replicating twice": ("AssertionError|RuntimeError|ValueError", "replicate|already"),
    "replicas of shards": ("RuntimeError", "already managed by `?fully_shard"),
    "shards of replicas": ("AssertionError|RuntimeError|ValueError", "replicate"),
    "deepcopy": ("AssertionError", "deepcopy"),
    "deepcopy of replicas": ("AssertionError", "deepcopy"),
    "forward prefetch of a plain module": ("ValueError", "FSDPModule.*Linear"),
    "backward prefetch of a plain module": ("ValueError", "FSDPModule.*Linear"),
    "reshard set to a number": ("ValueError", "bool.*(int|2)"),
    "reshard set to None": ("ValueError", "bool.*None"),
    "reshard set on replicas": ("AssertionError", ""),  # torch has no text
    "a forward method that is missing": ("ValueError", "encode"),
    "sharing streams with a plain module": ("ValueError", "FSDPModule.*Linear"),
    "no buffer": ("ValueError", "positive|at least|>= 1"),
    "half a buffer": ("TypeError", "int.*float|int.*2.5"),
    "True buffers": ("TypeError", "int.*bool|int.*True"),
    "a hook's stream beside native HSDP": ("ValueError", "stream"),
    "process group memory for a custom gather": ("AssertionError", "custom"),
    "process group memory for a custom scatter": ("AssertionError", "custom"),
    "a weight tied across groups": ("ValueError", "already managed by another.*group"),
    "a child before its root": ("RuntimeError", "already been lazily init.*root"),
    "a list as root": ("RuntimeError", "single root"),
    "meta parameters at forward": ("RuntimeError", "materializ.*meta|meta.*materializ"),
    "meta parameters at unshard": ("RuntimeError", "materializ.*meta|meta.*materializ"),
    "two dtypes in a group": ("AssertionError", "uniform.*dtype"),
    "reset of a child": ("RuntimeError", "root"),
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
    SCENARIOS[name](door)
    raise Refusal("nothing was refused")


def _provoke_each(context: RankContext, door: str, names: list[str]) -> dict[str, str]:
    return each(names, lambda name: _provoke(BY_NAME[door], name))


def _complaint(name: str, told: str) -> str | None:
    kinds, pattern = REFUSED[name]
    kind, _, text = told.partition(": ")
    if re.fullmatch(kinds, kind) and re.search(pattern, text, re.DOTALL | re.IGNORECASE):
        return None
    return f"expected {kinds} about {pattern!r}, got {told}"


@each_door
def test_refusals_name_what_is_wrong(door: str, ranks: Ranks) -> None:
    for observed in ranks.run(SIZE, _provoke_each, door, _names(door)):
        complaints = {name: _complaint(name, told) for name, told in observed.items()}
        assert {name: text for name, text in complaints.items() if text} == {}
        if door == "reference":  # what was expected, what came and what to try
            curt = {name: told for name, told in observed.items() if len(told.partition(": ")[2]) < 30}
            assert curt == {}


def _recover(context: RankContext, door: str) -> None:
    """Provoke an error at first forward on a model of its own; another one trains as ever."""
    for name in ("a weight tied across groups", "a child before its root", "two dtypes in a group"):
        observed = each([name], lambda name: _provoke(BY_NAME[door], name))
        assert "Refusal" not in observed[name]
        model = apply_to(Chain(), BY_NAME[door].fully_shard)
        model(_inputs()).sum().backward()
        assert all(param.grad is not None for param in model.parameters())


@each_door
def test_a_refusal_leaves_other_models_alone(door: str, ranks: Ranks) -> None:
    ranks.run(2, _recover, door)


def _accept(context: RankContext, door: str) -> list[bool]:
    """Shard over a mesh of one axis without a name; groups of one rank mean False, of all ranks True."""
    mesh = init_device_mesh("cpu", (SIZE,))
    BY_NAME[door].fully_shard(_linear(), mesh=mesh)(_inputs())
    BY_NAME[door].replicate(_linear(), mesh=mesh)(_inputs())
    is_kept = []
    for reshard in (1, SIZE):
        model = BY_NAME[door].fully_shard(_linear(), reshard_after_forward=reshard)
        model(_inputs())
        is_kept.append(type(model.weight) is nn.Parameter)
    return is_kept


@each_door
def test_one_axis_needs_no_name_and_a_number_at_either_end_is_a_bool(door: str, ranks: Ranks) -> None:
    assert ranks.run(SIZE, _accept, door) == [[True, False]] * SIZE
