"""The calls that ``fully_shard`` and ``replicate`` must refuse, through the names of an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

_WIDTH = 8
# Any: engines share no base class.
Scenario = Callable[[Any], object]


def _mesh(*more: int, named: bool = True) -> DeviceMesh:
    """Arrange all ranks along the first of several axes."""
    shape = (dist.get_world_size(), 1, *more)
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]) if named else None)


def _linear() -> nn.Linear:
    return nn.Linear(_WIDTH, _WIDTH, bias=False)


def _inputs() -> torch.Tensor:
    return torch.ones(2, _WIDTH)


def _with_scalar() -> nn.Module:
    model = _linear()
    model.gain = nn.Parameter(torch.tensor(1.0))
    return model


def _transposed() -> nn.Module:
    model = _linear()
    model.weight = nn.Parameter(torch.ones(_WIDTH, 4).t())
    return model


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return _linear()


def _hook_on_a_stream_of_ours(api: Any) -> object:
    model = api.fully_shard(_linear(), mesh=_mesh())
    return model.set_all_reduce_hook(lambda reduced: None, stream=torch.cpu.Stream())


class _Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _linear(), _linear()
        self.second.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run both."""
        result: torch.Tensor = self.second(self.first(inputs))
        return result


def _tied_across_groups(api: Any) -> object:
    model = _Tied()
    api.fully_shard(model.first)
    api.fully_shard(model.second)
    return api.fully_shard(model)(_inputs())


def _child_before_root(api: Any) -> object:
    model = nn.Sequential(_linear(), _linear())
    api.fully_shard(model[0])
    api.fully_shard(model)
    model[0](_inputs())
    return model(_inputs())


def _list_as_root(api: Any) -> object:
    layers = [_linear(), _linear()]
    api.fully_shard(layers)
    return layers[0](_inputs())


def _mixed_dtypes(api: Any) -> object:
    model = nn.Sequential(_linear(), _linear().to(torch.float64))
    return api.fully_shard(model)(_inputs())


def _reset_of_a_child(api: Any) -> object:
    inner = api.fully_shard(_linear())
    api.fully_shard(nn.Sequential(inner))(_inputs())
    return inner.reset_iter_state()


def _reduced_in_whole_numbers(api: Any) -> None:
    model = api.fully_shard(_linear(), mp_policy=api.mixed_precision(reduce_dtype=torch.int64))
    model(_inputs()).sum().backward()


# Calls through an interface `d`, and words by which the refusal names the mistake.
SCENARIOS: Mapping[str, tuple[Scenario, str]] = {
    "a list without forward": (lambda d: d.fully_shard(nn.ModuleList([_linear()])), r"forward"),
    "a dict without forward": (lambda d: d.fully_shard(nn.ModuleDict({"a": _linear()})), r"forward"),
    "replicas of a list without forward": (lambda d: d.replicate(nn.ModuleList([_linear()])), r"forward"),
    "a scalar parameter": (lambda d: d.fully_shard(_with_scalar()), r"scalar.*gain|gain.*scalar"),
    "a parameter that is not contiguous": (lambda d: d.fully_shard(_transposed()), r"contiguous"),
    "a mesh of three axes": (
        lambda d: d.fully_shard(_linear(), mesh=_mesh(1)),
        r"1D or 2D|1-D or 2-D|one or two",
    ),
    "a mesh of two axes without names": (
        lambda d: d.fully_shard(_linear(), mesh=_mesh(named=False)),
        r"mesh_dim_names",
    ),
    "replicas on two axes": (lambda d: d.replicate(_linear(), mesh=_mesh()), r"1D|1-D|one"),
    "a number that does not divide": (lambda d: d.fully_shard(_linear(), reshard_after_forward=3), r"factor"),
    "a number above the world": (lambda d: d.fully_shard(_linear(), reshard_after_forward=1000), r"factor"),
    "uneven columns": (
        lambda d: d.fully_shard(nn.Linear(3, _WIDTH), shard_placement_fn=lambda _: Shard(1)),
        r"even",
    ),
    "a dim that is not there": (
        lambda d: d.fully_shard(_linear(), shard_placement_fn=lambda _: Shard(2)),
        r"dim",
    ),
    "sharding twice": (lambda d: d.fully_shard(d.fully_shard(_linear())), r"fully_shard|already"),
    "replicating twice": (lambda d: d.replicate(d.replicate(_linear())), r"replicate|already"),
    "replicas of shards": (
        lambda d: d.replicate(d.fully_shard(_linear())),
        r"already managed by `?fully_shard",
    ),
    "shards of replicas": (lambda d: d.fully_shard(d.replicate(_linear())), r"replicate"),
    "deepcopy": (lambda d: copy.deepcopy(d.fully_shard(_linear())), r"deepcopy"),
    "deepcopy of replicas": (lambda d: copy.deepcopy(d.replicate(_linear())), r"deepcopy"),
    "forward prefetch of a plain module": (
        lambda d: d.fully_shard(_linear()).set_modules_to_forward_prefetch([_linear()]),
        r"FSDPModule.*Linear",
    ),
    "backward prefetch of a plain module": (
        lambda d: d.fully_shard(_linear()).set_modules_to_backward_prefetch([_linear()]),
        r"FSDPModule.*Linear",
    ),
    "reshard set to a number": (
        lambda d: d.fully_shard(_linear()).set_reshard_after_forward(2),
        r"bool.*(int|2)",
    ),
    "reshard set to None": (
        lambda d: d.fully_shard(_linear()).set_reshard_after_forward(None),
        r"bool.*None",
    ),
    "reshard set on replicas": (lambda d: d.replicate(_linear()).set_reshard_after_forward(True), r""),
    "a forward method that is missing": (
        lambda d: d.register_forward_method(d.fully_shard(_linear()), "encode"),
        r"encode",
    ),
    "sharing streams with a plain module": (
        lambda d: d.share_comm_ctx([d.fully_shard(_linear()), _linear()]),
        r"FSDPModule.*Linear",
    ),
    "a hook's stream beside native HSDP": (_hook_on_a_stream_of_ours, r"stream"),
    "a weight tied across groups": (_tied_across_groups, r"already managed by another.*group"),
    "a child before its root": (_child_before_root, r"already been lazily init.*root"),
    "a list as root": (_list_as_root, r"single root"),
    "meta parameters at forward": (
        lambda d: d.fully_shard(_on_meta())(_inputs()),
        r"materializ.*meta.*weight",
    ),
    "meta parameters at unshard": (lambda d: d.fully_shard(_on_meta()).unshard(), r"materializ.*meta"),
    "two dtypes in a group": (_mixed_dtypes, r"uniform.*dtype"),
    "a compute dtype of no floats": (
        lambda d: d.fully_shard(_linear(), mp_policy=d.mixed_precision(param_dtype=torch.int64))(_inputs()),
        "float",
    ),
    "a reduce dtype of no floats": (_reduced_in_whole_numbers, "float|Long"),
}
# Of methods that only some releases of torch have.
NUMBERS_OF_BUFFERS: Mapping[str, tuple[Scenario, str]] = {
    "no buffer": (
        lambda d: d.fully_shard(_linear()).set_reduce_scatter_max_input_buffers(0),
        r"positive|at least|>= 1",
    ),
    "half a buffer": (
        lambda d: d.fully_shard(_linear()).set_reduce_scatter_max_input_buffers(2.5),
        r"int.*float|int.*2.5",
    ),
    "True buffers": (
        lambda d: d.fully_shard(_linear()).set_reduce_scatter_max_input_buffers(True),
        r"int.*bool|int.*True",
    ),
}
RESETS: Mapping[str, tuple[Scenario, str]] = {"reset of a child": (_reset_of_a_child, r"root")}
