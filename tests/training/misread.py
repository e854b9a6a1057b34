"""Engines whose reads fail, or that replace functions that write files. Named by path in test_reads.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.contract import Plan, PreparedModel, Shard

CULPRIT = 1


# Any: any arguments.
def _nothing(*_: Any, **__: Any) -> str:
    return "{}"


def _raising(*_: Any, **__: Any) -> NoReturn:
    raise LookupError("my index is gone")


class _Lazy(Mapping[str, Shard]):
    def __getitem__(self, name: str) -> Shard:
        _raising()

    def __iter__(self) -> Iterator[str]:
        return iter(["body.weight"])

    def __len__(self) -> int:
        return 1


# Any: any arguments and results of a method.
def _reading(method: str, read: Callable[..., Any]) -> type[PreparedDdp]:
    """Make a prepared model of which one method is another."""
    return type("Misread", (PreparedDdp,), {method: read})


def _changing(change: Callable[[Shard], Any]) -> type[PreparedDdp]:
    """Make a prepared model that changes each shard of a parameter."""
    honest = PreparedDdp.local_parameters
    return _reading("local_parameters", lambda self: {n: change(s) for n, s in honest(self).items()})


# The fault of each prepared model, by name.
READERS: Mapping[str, type[PreparedDdp]] = {
    "RaisingParameters": _reading("local_parameters", _raising),
    "RaisingGradients": _reading("local_gradients", _raising),
    "RaisingState": _reading("local_optimizer_state", _raising),
    "RaisingBuffers": _reading("local_buffers", _raising),
    "RaisingFullState": _reading("full_state", _raising),
    "RaisingLoad": _reading("load_full_state", _raising),
    "RaisingItems": _reading("local_parameters", lambda self: _Lazy()),
    "NoParameters": _reading("local_parameters", lambda self: None),
    "PlainTensors": _reading(
        "local_gradients", lambda self: {name: p.grad for name, p in self.named.named_parameters()}
    ),
    "FloatOffsets": _changing(lambda shard: replace(shard, offsets=tuple(o / 1 for o in shard.offsets))),  # type: ignore[misc]  # the fault
    "TensorOffsets": _changing(lambda shard: replace(shard, offsets=torch.zeros(shard.tensor.dim()))),  # type: ignore[arg-type]  # the fault
    "NoOffsets": _changing(lambda shard: replace(shard, offsets=None)),  # type: ignore[arg-type]  # the fault
    "FloatShape": _changing(
        lambda shard: replace(shard, global_shape=tuple(n / 1 for n in shard.global_shape))  # type: ignore[misc]  # the fault
    ),
    "TextTensor": _changing(lambda shard: replace(shard, tensor="weights")),  # type: ignore[arg-type]  # the fault
    "NumberedNames": _reading(
        "local_parameters", lambda self: dict(enumerate(PreparedDdp.local_parameters(self).values()))
    ),
    "TextNorm": _reading(
        "clip_grad_norm_", lambda self, *limits: str(PreparedDdp.clip_grad_norm_(self, *limits))
    ),
    "TextCut": type("Misread", (PreparedDdp,), {"cut": "evenly"}),
}


class _Patches(DistributedDataParallelEngine):
    """Replaces a function of the whole process on one rank, then trains as it should."""

    def __init__(self, patch: Callable[[], None]) -> None:
        self.patch = patch

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        if dist.get_rank() == CULPRIT:
            self.patch()
        return super().prepare(model, plan, mesh)


def _replace_all(owner: object, *names: str, by: Callable[..., Any]) -> None:
    for name in names:
        setattr(owner, name, by)


# The function that each engine replaces, by name.
PATCHERS: Mapping[str, Callable[[], None]] = {
    "EmptiesJson": lambda: _replace_all(json, "dumps", by=_nothing),
    "BreaksJson": lambda: _replace_all(json, "dumps", by=_raising),
    "BreaksEncoders": lambda: _replace_all(json.JSONEncoder, "encode", "iterencode", by=_raising),
    "EmptiesFiles": lambda: _replace_all(torch, "save", by=_nothing),
    "BreaksFiles": lambda: _replace_all(torch, "save", by=_raising),
}


def __getattr__(name: str) -> DistributedDataParallelEngine:
    """Make the engine of a prepared model, as ``RaisingBuffersEngine``, or one that replaces a function."""
    if name in PATCHERS:
        return _Patches(PATCHERS[name])
    if name.removesuffix("Engine") in READERS:
        readers = {"prepared_type": READERS[name.removesuffix("Engine")]}
        made: DistributedDataParallelEngine = type(name, (DistributedDataParallelEngine,), readers)()
        return made
    raise AttributeError(name)
