"""The adapter of fairscale's FullyShardedDataParallel, which insists on CUDA: a stand-in for it is used on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from fairscale.nn.data_parallel import FullyShardedDataParallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import Capability, Engine, Plan, PreparedModel, Reshard, Shard, shard_of

_PREFIXES = ("_fsdp_wrapped_module.", "_fpw_module.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """What this rank's shard of a unit's flat parameter has of one original parameter."""

    name: str
    shape: tuple[int, ...]
    flat: nn.Parameter
    begin: int  # in the shard
    end: int
    start: int  # in the flattened original

    def of(self, shard: torch.Tensor) -> Shard:
        return Shard.flat(shard.detach()[self.begin : self.end].clone(), self.start, self.shape)


class PreparedFairscale(PreparedModel):
    """Each unit is one flat parameter, cut evenly over ranks with padding at the end."""

    def __init__(self, module: Any, model: nn.Module) -> None:
        super().__init__(module, named=model)
        self._root = module

    def optimizer(self, factory: Any) -> None:
        """Build it over the flat parameters."""
        self._optimizer = factory(self._root.parameters())

    def accumulating(self) -> AbstractContextManager[None]:
        """Use the engine's own context."""
        context: AbstractContextManager[None] = self._root.no_sync()
        return context

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        """Use the engine's own."""
        return float(self._root.clip_grad_norm_(max_norm, norm_type))

    def owned_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the flat parameter for each of its pieces: the model itself shows none of the root's."""
        return {piece.name: piece.flat for piece in self._pieces()}

    def shown_parameters(self) -> Mapping[str, Shard]:
        """Read the shards: what modules show are views that come and go."""
        return self.local_parameters()

    def local_parameters(self) -> Mapping[str, Shard]:
        """Read this rank's shards."""
        return {p.name: p.of(getattr(p.flat, "_fp32_shard", p.flat).reshape(-1)) for p in self._pieces()}

    def local_gradients(self) -> Mapping[str, Shard | None]:
        """Read this rank's shards of gradients."""
        return {
            p.name: None if p.flat.grad is None else p.of(p.flat.grad.reshape(-1)) for p in self._pieces()
        }

    def local_buffers(self) -> Mapping[str, Shard]:
        """Read buffers, which the engine leaves alone."""
        return {_original(name): shard_of(b) for name, b in self._root.named_buffers()}

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        """Read this rank's state of each piece."""
        state = self._built_optimizer().state
        return {
            f"{p.name}/{key}": p.of(value) if value.dim() else shard_of(value)
            for p in self._pieces()
            for key, value in state.get(p.flat, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def _pieces(self) -> Iterator[_Piece]:
        for path, unit in self._root.named_modules():
            if isinstance(unit, FullyShardedDataParallel):
                yield from _pieces_of(unit, _original(f"{path}."))


def _pieces_of(unit: Any, prefix: str) -> Iterator[_Piece]:
    for flat in unit.params:
        names, shapes, numels = flat.metadata()
        total = sum(numels)
        chunk = -(-total // unit.world_size)
        first, last = min(unit.rank * chunk, total), min((unit.rank + 1) * chunk, total)
        offset = 0
        for name, shape, numel in zip(names, shapes, numels, strict=True):
            begin = min(max(first, offset), offset + numel)
            end = max(begin, min(last, offset + numel))
            yield _Piece(
                name=prefix + _original(name),
                shape=tuple(shape),
                flat=flat,
                begin=max(begin - first, 0),
                end=max(end - first, 0),
                start=begin - offset,
            )
            offset += numel


def _original(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name.lstrip(".")


class FairscaleEngine(Engine):
    """The adapter."""

    name = "fairscale.fsdp"
    capabilities = frozenset(
        {
            Capability.SHARD,
            Capability.UNITS,
            Capability.RESHARD_POLICY,
            Capability.ACCUMULATE,
            Capability.CLIP,
        }
    )
    insists_on_cuda = True

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap every unit of the plan, then the root."""
        plan.refuse_beyond(self.capabilities)
        # It calls what torch has renamed since.
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecated")
        warnings.filterwarnings("ignore", category=UserWarning, message="TypedStorage is deprecated")
        group = mesh.get_group()
        options = {
            # Its own cache of groups belongs to the process, and ranks may be threads.
            "process_group": group,
            "process_group_reduce_scatter": group,
            "compute_device": next(model.parameters()).device,
            "reshard_after_forward": plan.reshard is not Reshard.KEEP,
            # By default the root keeps what it gathered, whatever is asked.
            "disable_reshard_on_root": plan.reshard is not Reshard.AFTER_FORWARD,
            # Its buckets have two dims, which backends of a CPU do not take.
            "bucket_cap_mb": 0,
        }
        for unit in plan.units:
            parent, _, name = unit.rpartition(".")
            setattr(
                model.get_submodule(parent),
                name,
                FullyShardedDataParallel(model.get_submodule(unit), **options),
            )
        return PreparedFairscale(FullyShardedDataParallel(model, **options), model)

    def version(self) -> str:
        """Name fairscale's release."""
        return f"fairscale {version('fairscale')}"
