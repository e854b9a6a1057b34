"""param_init_fn, device_id and sync_module_states: the initial values of parameters."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from shardproof import EVEN, SEVERAL
from shardproof.suites.wrapper.expect import Bench, expects
from shardproof.suites.tower import copies, fill

VALUES = "values"
TIMES = "how often each module was initialised"


class _Layer(nn.Linear):
    """Resets itself to characteristic numbers."""

    offset: torch.Tensor

    def __init__(self, num_inputs: int, num_outputs: int, device: str) -> None:
        super().__init__(num_inputs, num_outputs, device=device)
        self.register_buffer("offset", torch.empty(num_outputs, device=device))

    def reset_parameters(self) -> None:
        """Fill parameters, and the buffer once there is one."""
        if hasattr(self, "offset") and not self.weight.is_meta:
            fill(self, self.in_features)
            self.offset.fill_(self.in_features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Add the buffer too."""
        return super().forward(rows) + self.offset


def _model(device: str) -> nn.Sequential:
    return nn.Sequential(_Layer(4, 5, device), nn.Sequential(_Layer(5, 3, device)))


def _layers(model: nn.Module) -> list[_Layer]:
    return [module for module in model.modules() if isinstance(module, _Layer)]


def _filled() -> nn.Sequential:
    model = _model("cpu")
    for layer in _layers(model):
        layer.reset_parameters()
    return model


@pytest.mark.kills("NeverResets")
@pytest.mark.api("param_init_fn", "device_id")
@expects(VALUES, "buffers")
def test_modules_without_memory_reset_themselves(bench: Bench) -> None:
    model = _model("meta")
    layers = _layers(model)
    root = bench.wrap(model, auto_wrap_policy=bench.names.ModuleWrapPolicy({nn.Sequential}))
    bench.same(VALUES, bench.summoned(root), copies(_filled().named_parameters()))
    bench.same("buffers", [layer.offset[0].item() for layer in layers], [4.0, 5.0])


@pytest.mark.kills("IgnoresTheInitialiser")
@pytest.mark.api("param_init_fn")
@expects(VALUES, TIMES)
def test_a_function_initialises_each_module_once(bench: Bench) -> None:
    """The function's values win over those of the modules' own reset."""
    calls: Counter[int] = Counter()
    model = _model("meta")
    layers = _layers(model)

    def initialise(module: nn.Module) -> None:
        calls[id(module)] += 1
        if isinstance(module, _Layer):
            module.to_empty(device=bench.device, recurse=False)
            with torch.no_grad():
                module.weight.fill_(module.in_features)
                module.bias.fill_(-module.in_features)
                module.offset.zero_()

    policy = bench.names.ModuleWrapPolicy({nn.Sequential})
    root = bench.wrap(model, auto_wrap_policy=policy, param_init_fn=initialise)
    values = [sorted(set(p.flatten().tolist())) for p in bench.summoned(root).values()]
    bench.same(VALUES, values, [[4.0], [-4.0], [5.0], [-5.0]])
    bench.same(TIMES, [calls[id(layer)] for layer in layers], [1, 1])


@pytest.mark.kills("LeavesBuffersWithoutMemory")
@pytest.mark.api("device_id")
@expects("the device of tensors", "the device of the output")
def test_initialises_and_runs_on_the_device(bench: Bench) -> None:
    root = bench.wrap(_model("meta"))
    places = {tensor.device.type for tensor in (*root.parameters(), *root.buffers())}
    bench.same("the device of tensors", places, {bench.device.type})
    # Inputs are on the host, where a loader leaves them.
    bench.same("the device of the output", root(torch.ones(2, 4)).device.type, bench.device.type)


@pytest.mark.kills("StartsEachRankOnItsOwn")
@pytest.mark.api("sync_module_states")
@pytest.mark.worlds(SEVERAL)  # a lone rank is rank 0
@expects(VALUES)
def test_no_rank_starts_with_values_of_its_own(bench: Bench) -> None:
    _synchronise(bench, sharding_strategy=ShardingStrategy.FULL_SHARD)


@pytest.mark.kills("StartsEachReplicaOnItsOwn")
@pytest.mark.api("sync_module_states", "ShardingStrategy.HYBRID_SHARD")
@pytest.mark.worlds(EVEN)
@expects(VALUES)
def test_no_replica_starts_with_values_of_its_own(bench: Bench) -> None:
    _synchronise(bench, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=bench.mesh(2))


def _synchronise(bench: Bench, **options: Any) -> None:
    """Start with other values on each rank, and claim that all continue with those of rank 0.

    If tensors are on the host an engine may refuse, since the wrapper promises only to send between devices.
    """
    model, first = _filled(), _filled()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(bench.rank)
    try:
        root = bench.wrap(model, sync_module_states=True, **options)
    except ValueError as error:
        bench.same(VALUES, f"refused on {bench.device.type}: {error}", f"refused on cpu: {error}")
        return
    got = [bench.summoned(root), [buffer.clone() for buffer in root.buffers()]]
    bench.same(VALUES, got, [copies(first.named_parameters()), list(first.buffers())])
