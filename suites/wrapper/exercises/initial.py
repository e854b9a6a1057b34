"""How parameters come to be: moved, initialised from nothing, taken from rank 0."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from fixtures.tower import fill, whole_numbers
from shardproof import InterfaceBench
from suites.wrapper.exercises.wrapped import same, whole, wrap

__all__ = ["DIFFERS", "TIMES", "VALUES", "initialises", "moves", "resets", "synchronises"]

VALUES = "values"
TIMES = "how often each module was initialised"
DIFFERS = "a rank is refused without need, or goes on with values that rank 0 has not"
_SEED = 7


class _Layer(nn.Linear):
    """Resets itself to numbers that are its own."""

    offset: torch.Tensor

    def __init__(self, num_inputs: int, num_outputs: int, device: str) -> None:
        super().__init__(num_inputs, num_outputs, device=device)
        self.register_buffer("offset", torch.empty(num_outputs, device=device))

    def reset_parameters(self) -> None:
        """Fill parameters, and the buffer once there is one."""
        if hasattr(self, "offset") and not self.weight.is_meta:
            fill(self, _SEED + self.in_features)
            self.offset.fill_(self.in_features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Add the buffer too."""
        return super().forward(rows) + self.offset


def _model(device: str) -> nn.Sequential:
    return nn.Sequential(_Layer(4, 5, device), nn.Sequential(_Layer(5, 3, device)))


def _expected() -> dict[str, torch.Tensor]:
    model = _model("cpu")
    for layer in model.modules():
        if isinstance(layer, _Layer):
            layer.reset_parameters()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def resets(bench: InterfaceBench) -> None:
    """Wrap a model without memory: each module resets itself."""
    model = _model("meta")
    buffers = [module for module in model.modules() if isinstance(module, _Layer)]
    root = wrap(bench, model, auto_wrap_policy=bench.names.ModuleWrapPolicy({nn.Sequential}))
    bench.note(VALUES, "reset" if same(whole(bench, root), _expected()) else "something else")
    bench.note("buffers", [layer.offset[0].item() for layer in buffers])


def initialises(bench: InterfaceBench) -> None:
    """Wrap it with a function that initialises: the function has the last word, and is called once a module."""
    calls: Counter[int] = Counter()
    model = _model("meta")
    layers = [module for module in model.modules() if isinstance(module, _Layer)]

    def initialise(module: nn.Module) -> None:
        calls[id(module)] += 1
        if isinstance(module, _Layer):
            module.to_empty(device=bench.device, recurse=False)
            with torch.no_grad():
                module.weight.fill_(module.in_features)
                module.bias.fill_(-module.in_features)
                module.offset.zero_()

    policy = bench.names.ModuleWrapPolicy({nn.Sequential})
    root = wrap(bench, model, auto_wrap_policy=policy, param_init_fn=initialise)
    got = whole(bench, root)
    bench.note(VALUES, [sorted(set(p.flatten().tolist())) for p in got.values()])
    bench.note(TIMES, [calls[id(layer)] for layer in layers])


def moves(bench: InterfaceBench) -> None:
    """Note where parameters and buffers are that were made without memory, and where forward runs."""
    model = _model("meta")
    root = wrap(bench, model)
    tensors = [*root.parameters(), *root.buffers()]
    bench.note("tensors are on the device", all(t.device.type == bench.device.type for t in tensors))
    # Inputs are on the host, where a loader leaves them.
    output = root(torch.ones(2, 4))
    bench.note("the output is on the device", output.device.type == bench.device.type)


def synchronises(bench: InterfaceBench, strategy: ShardingStrategy) -> None:
    """Start with other values on each rank: note whether any goes on with its own; hybrid ones have two replicas.

    Where tensors are on the host an engine may refuse, since the wrapper promises to send between devices alone.
    """
    model = _model("cpu")
    fill(model, 10 * bench.rank)
    for position, buffer in enumerate(model.buffers()):
        buffer.copy_(whole_numbers(buffer.shape, 50 + 10 * bench.rank + position))
    first = _model("cpu")
    fill(first, 0)
    options: dict[str, Any] = {"sharding_strategy": strategy}
    if strategy is ShardingStrategy.HYBRID_SHARD:
        shape = (2, bench.size // 2)
        options["device_mesh"] = init_device_mesh(
            bench.device.type, shape, mesh_dim_names=("replicate", "shard")
        )
    try:
        root = wrap(bench, model, sync_module_states=True, **options)
    except ValueError:
        bench.note(DIFFERS, bench.device.type != "cpu")
        return
    got = [buffer.clone() for buffer in root.buffers()]
    expected = [
        whole_numbers(buffer.shape, 50 + position).to(bench.device) for position, buffer in enumerate(got)
    ]
    is_same = same(whole(bench, root), dict(first.named_parameters()))
    is_same &= all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    bench.note(DIFFERS, not is_same)
