"""Engines whose reads go wrong, or that replace what writes files. Named by path in test_reads.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.contract import Cut, Plan, PreparedModel, Shard

CULPRIT = 1


def _fail() -> NoReturn:
    raise LookupError("my index is gone")


class RaisingParameters(PreparedDdp):
    """Raises when parameters are read."""

    def local_parameters(self) -> Mapping[str, Shard]:
        _fail()


class RaisingGradients(PreparedDdp):
    """Raises when gradients are read."""

    def local_gradients(self) -> Mapping[str, Shard | None]:
        _fail()


class RaisingState(PreparedDdp):
    """Raises when optimizer state is read."""

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        _fail()


class RaisingBuffers(PreparedDdp):
    """Raises when buffers are read."""

    def local_buffers(self) -> Mapping[str, Shard]:
        _fail()


class RaisingFullState(PreparedDdp):
    """Raises when its state is gathered."""

    def full_state(self) -> dict[str, Any]:
        _fail()


class RaisingLoad(PreparedDdp):
    """Raises when it takes a state over."""

    def load_full_state(self, state: dict[str, Any]) -> None:
        _fail()


class RaisingItems(PreparedDdp):
    """Returns a mapping that raises when it is walked."""

    def local_parameters(self) -> Mapping[str, Shard]:
        return _Lazy()


class _Lazy(Mapping[str, Shard]):
    def __getitem__(self, name: str) -> Shard:
        _fail()

    def __iter__(self) -> Iterator[str]:
        return iter(["body.weight"])

    def __len__(self) -> int:
        return 1


class NoParameters(PreparedDdp):
    """Returns no mapping."""

    def local_parameters(self) -> Mapping[str, Shard]:
        return None  # type: ignore[return-value]  # the fault


class PlainTensors(PreparedDdp):
    """Returns tensors where shards are expected."""

    def local_gradients(self) -> Mapping[str, Shard | None]:
        return {name: p.grad for name, p in self.named.named_parameters()}  # type: ignore[misc]  # the fault


class _Changed(PreparedDdp):
    """Changes each shard of a parameter."""

    def change(self, shard: Shard) -> Any:  # Any: no longer a shard
        """Change it."""

    def local_parameters(self) -> Mapping[str, Shard]:
        return {name: self.change(shard) for name, shard in super().local_parameters().items()}


class FloatOffsets(_Changed):
    """Computes offsets by a division."""

    def change(self, shard: Shard) -> Any:
        return replace(shard, offsets=tuple(o / 1 for o in shard.offsets))  # type: ignore[misc]  # the fault


class TensorOffsets(_Changed):
    """Has offsets in a tensor of floats."""

    def change(self, shard: Shard) -> Any:
        return replace(shard, offsets=torch.zeros(shard.tensor.dim()))  # type: ignore[arg-type]  # the fault


class NoOffsets(_Changed):
    """Has no offsets."""

    def change(self, shard: Shard) -> Any:
        return replace(shard, offsets=None)  # type: ignore[arg-type]  # the fault


class FloatShape(_Changed):
    """Computes the global shape by a division."""

    def change(self, shard: Shard) -> Any:
        return replace(shard, global_shape=tuple(n / 1 for n in shard.global_shape))  # type: ignore[misc]  # the fault


class TextTensor(_Changed):
    """Has a text in a tensor's place."""

    def change(self, shard: Shard) -> Any:
        return replace(shard, tensor="weights")  # type: ignore[arg-type]  # the fault


class NumberedNames(PreparedDdp):
    """Names parameters by numbers."""

    def local_parameters(self) -> Mapping[str, Shard]:
        return dict(enumerate(super().local_parameters().values()))  # type: ignore[arg-type]  # the fault


class TextNorm(PreparedDdp):
    """Returns a text from clipping."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        return str(super().clip_grad_norm_(max_norm, norm_type))  # type: ignore[return-value]  # the fault


class TextCut(PreparedDdp):
    """Declares a cut that is none."""

    cut: ClassVar[Cut] = "evenly"  # type: ignore[assignment]  # the fault


class _Patches(DistributedDataParallelEngine):
    """Replaces a function of the whole process before it trains."""

    def patch(self) -> None:
        """Replace it."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replace it on one rank, then train as it should."""
        if dist.get_rank() == CULPRIT:
            self.patch()
        return super().prepare(model, plan, mesh)


# Any: whatever they are called with.
def _nothing(*_: Any, **__: Any) -> str:
    return "{}"


def _raising(*_: Any, **__: Any) -> NoReturn:
    _fail()


class EmptiesJson(_Patches):
    """Has all JSON be empty."""

    def patch(self) -> None:
        json.dumps = _nothing


class BreaksJson(_Patches):
    """Has no JSON be written."""

    def patch(self) -> None:
        json.dumps = _raising


class BreaksEncoders(_Patches):
    """Has no encoder of JSON work."""

    def patch(self) -> None:
        json.JSONEncoder.encode = json.JSONEncoder.iterencode = _raising  # type: ignore[method-assign]


class EmptiesFiles(_Patches):
    """Has torch save nothing."""

    def patch(self) -> None:
        torch.save = _nothing  # type: ignore[assignment]  # the fault


class BreaksFiles(_Patches):
    """Has torch raise when it saves."""

    def patch(self) -> None:
        torch.save = _raising


READERS = (
    RaisingParameters,
    RaisingGradients,
    RaisingState,
    RaisingBuffers,
    RaisingFullState,
    RaisingLoad,
    RaisingItems,
    NoParameters,
    PlainTensors,
    FloatOffsets,
    TensorOffsets,
    NoOffsets,
    FloatShape,
    TextTensor,
    NumberedNames,
    TextNorm,
    TextCut,
)


def __getattr__(name: str) -> DistributedDataParallelEngine:
    """Make the engine of a prepared model: ``RaisingBuffersEngine``."""
    for reader in READERS:
        if name == f"{reader.__name__}Engine":
            made: DistributedDataParallelEngine = type(
                name, (DistributedDataParallelEngine,), {"prepared_type": reader}
            )()
            return made
    raise AttributeError(name)
