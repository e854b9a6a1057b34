"""In which dtypes a wrapped model computes, reduces, and keeps what it keeps."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from shardproof import InterfaceBench
from suites.wrapper.exercises.wrapped import wrap

__all__ = ["casts", "excepts_batch_norm", "keeps", "reduces"]

_WIDTH = 64  # wide enough that each rank has a piece
_PRECISE = 0.01  # the means are of numbers of 256 and more, whose neighbours in bfloat16 are 2 away


class _Witness(nn.Module):
    """Notes the dtypes of its input, weight and buffer, and computes whatever they are."""

    offset: torch.Tensor

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH))
        self.register_buffer("offset", torch.zeros(_WIDTH))
        self.inner = inner
        self.seen = ""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen = ", ".join(str(t.dtype).removeprefix("torch.") for t in (rows, self.weight, self.offset))
        output = rows.to(self.weight.dtype) * self.weight + self.offset.to(self.weight.dtype)
        # What the unit inside is given is in full precision, unless the wrapper casts it.
        return output if self.inner is None else self.inner(output.float())


class _Inner(_Witness):
    """What is made a unit."""


def casts(bench: InterfaceBench, precision: MixedPrecision) -> None:
    """Note what root and unit saw in forward, and the dtypes of parameters, gradients and output."""
    inner = _Inner()
    model = _Witness(inner)
    root = wrap(
        bench, model, mixed_precision=precision, auto_wrap_policy=bench.names.ModuleWrapPolicy({_Inner})
    )
    output = root(torch.ones(2, _WIDTH, device=bench.device))
    output.float().sum().backward()
    bench.note("the root saw", model.seen)
    bench.note("the unit saw", inner.seen)
    bench.note("the root returned", output.dtype)


def keeps(bench: InterfaceBench, precision: MixedPrecision) -> None:
    """Note the dtypes of shards before and after a step, and of their gradients."""
    root = wrap(bench, _Witness(), mixed_precision=precision)
    optimizer = torch.optim.SGD(root.parameters(), lr=2.0**-10)
    root(torch.ones(2, _WIDTH, device=bench.device)).float().sum().backward()
    (weight,) = root.parameters()
    bench.note("gradients are", None if weight.grad is None else weight.grad.dtype)
    bench.note("shards are", weight.dtype)
    if weight.grad is not None:
        weight.grad = weight.grad.to(
            weight.dtype
        )  # low-precision gradients are for optimizers that take them
    optimizer.step()
    # 1 - 2 / 1024 is no number of bfloat16: a master weight that was ever rounded to it shows.
    bench.note("shards are updated in full", bool((weight == 1 - 2.0**-9).all()))


def reduces(bench: InterfaceBench, precision: MixedPrecision) -> None:
    """Note whether gradients that bfloat16 holds are averaged to a mean that it does not hold."""
    root = wrap(bench, _Witness(), mixed_precision=precision)
    of_ranks = [256.0 + 2 * (rank % 2) for rank in range(bench.size)]
    root(torch.full((1, _WIDTH), of_ranks[bench.rank], device=bench.device)).float().sum().backward()
    mean = sum(of_ranks) / bench.size
    grads = [p.grad.float() for p in root.parameters() if p.grad is not None and p.numel()]
    bench.note("the mean is precise", all(bool(((g - mean).abs() < _PRECISE).all()) for g in grads))
    bench.note("gradients seen", len(grads))


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.layer(rows))
        return output


def excepts_batch_norm(bench: InterfaceBench) -> None:
    """Note in what BatchNorm computes beside a layer in low precision."""
    model = _Normed()
    norm, layer = model.norm, model.layer
    low = MixedPrecision(param_dtype=torch.bfloat16)
    root = wrap(bench, model, mixed_precision=low, auto_wrap_policy=bench.names.ModuleWrapPolicy({nn.Linear}))
    layer.register_forward_pre_hook(lambda *_: bench.note("the layer is", layer.weight.dtype))
    norm.register_forward_pre_hook(lambda *_: bench.note("the norm is", norm.weight.dtype))
    norm.register_forward_hook(
        lambda module, inputs, output: bench.note("the norm is given", inputs[0].dtype)
    )
    output = root(torch.arange(12.0, device=bench.device).reshape(3, 4))
    output.float().sum().backward()
    statistics = {buffer.dtype for buffer in norm.buffers() if buffer.is_floating_point()}
    bench.note("statistics are", sorted(map(str, statistics)))
