"""The adapter of fairscale's FullyShardedDataParallel, which insists on CUDA: a stand-in for it is used on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from fairscale.nn.data_parallel import FullyShardedDataParallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import Capability, Engine, Plan, PreparedModel, Reshard, Shard, shard_of
from shardproof.engine.pieces import Piece, PreparedPieces

_PREFIXES = ("_fsdp_wrapped_module.", "_fpw_module.")


class PreparedFairscale(PreparedPieces):
    """Each unit is one flat parameter, cut evenly over ranks with padding at the end."""

    def __init__(self, module: Any, model: nn.Module) -> None:
        super().__init__(module, named=model)
        self._root = module

    def optimizer(self, factory: Any) -> None:
        """Build it over the flat parameters."""
        self._optimizer = factory(self._root.parameters())

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        """Use the engine's own."""
        return float(self._root.clip_grad_norm_(max_norm, norm_type))

    def local_buffers(self) -> Mapping[str, Shard]:
        """Read buffers, which the engine leaves alone."""
        return {_original(name): shard_of(b) for name, b in self._root.named_buffers()}

    def value_of(self, piece: Piece) -> torch.Tensor:
        """Read the shard also where the flat parameter is whole."""
        value: torch.Tensor = getattr(piece.owner, "_fp32_shard", piece.owner)
        return value

    def pieces(self) -> Iterator[Piece]:
        for path, unit in self._root.named_modules():
            if isinstance(unit, FullyShardedDataParallel):
                yield from _pieces_of(unit, _original(f"{path}."))


def _pieces_of(unit: Any, prefix: str) -> Iterator[Piece]:
    for flat in unit.params:
        names, shapes, numels = flat.metadata()
        first = unit.rank * -(-sum(numels) // unit.world_size)
        last = first + -(-sum(numels) // unit.world_size)
        offset = 0
        for name, shape, numel in zip(names, shapes, numels, strict=True):
            begin = min(max(first, offset), offset + numel)
            end = max(begin, min(last, offset + numel))
            yield Piece(
                name=prefix + _original(name),
                shape=tuple(shape),
                owner=flat,
                start=begin - offset,
                offset=max(begin - first, 0),
                numel=end - begin,
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
