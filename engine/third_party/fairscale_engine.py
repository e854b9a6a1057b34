"""The adapter of fairscale's FullyShardedDataParallel, which insists on CUDA: a stand-in for it is used on a CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from fairscale.nn.data_parallel import FullyShardedDataParallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import Capability, Engine, Plan, PreparedModel, Reshard
from shardproof.engine.pieces import Piece, PreparedPieces


class PreparedFairscale(PreparedPieces):
    """Each unit is one flat parameter, cut evenly over ranks with padding at the end."""

    wrapped_as = ("_fsdp_wrapped_module", "_fpw_module")

    def __init__(self, module: Any, model: nn.Module) -> None:
        super().__init__(module, named=model)
        self._root = module

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        """Use the engine's own."""
        return float(self._root.clip_grad_norm_(max_norm, norm_type))

    def value_of(self, piece: Piece) -> torch.Tensor:
        """Read the shard also where the flat parameter is whole."""
        value: torch.Tensor = getattr(piece.owner, "_fp32_shard", piece.owner)
        return value

    def pieces(self) -> Iterator[Piece]:
        for path, unit in self._root.named_modules():
            if isinstance(unit, FullyShardedDataParallel):
                for flat in unit.params:
                    yield from self._pieces_of(unit, flat, path)

    def _pieces_of(self, unit: Any, flat: Any, path: str) -> Iterator[Piece]:  # Any: of an untyped package
        share = -(-sum(flat.metadata()[2]) // unit.world_size)
        offset = -unit.rank * share  # of a parameter in this rank's shard
        for name, shape, numel in zip(*flat.metadata(), strict=True):
            begin, end = (min(max(bound, offset), offset + numel) for bound in (0, share))
            yield Piece(
                name=self.original_name(f"{path}.{name}").lstrip("."),
                shape=tuple(shape),
                owner=flat,
                start=begin - offset,
                offset=max(begin, 0),
                numel=end - begin,
            )
            offset += numel


class FairscaleEngine(Engine):
    """The adapter."""

    name = "fairscale.fsdp"
    package = "fairscale"
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
