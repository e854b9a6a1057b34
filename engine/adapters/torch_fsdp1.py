"""torch.distributed.fsdp.FullyShardedDataParallel (FSDP1), one flat parameter for each unit, on a 1-D or 2-D mesh."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, sharded_grad_scaler, wrap

from shardproof.engine.adapters.torch_internals import default_comm_hooks, optimizer_in_backward
from shardproof.engine.adapters.wrapper_base import (
    CAPABILITIES,
    PREFIX,
    PreparedWrapper,
    WrapperEngine,
    WrapperPiece,
)
from shardproof.engine.contract import Capability, Plan, PreparedModel, WrapperNames

NAMES = WrapperNames.of(
    wrap, fsdp, sharded_grad_scaler, default_comm_hooks(), optimizer_in_backward=optimizer_in_backward
)


class PreparedFsdp1(PreparedWrapper):
    """Reads FSDP1's private attributes."""

    def pieces(self) -> Iterator[WrapperPiece]:
        """Read the pieces from each unit's handle."""
        return _pieces(self.module)


class FullyShardedDataParallelEngine(WrapperEngine):
    """torch's own wrapper."""

    name = "torch.fsdp1"
    # Without an accelerator it refuses to broadcast parameters, and offloading only once training runs.
    capabilities = CAPABILITIES - {Capability.CPU_OFFLOAD, Capability.START_FROM_FIRST}
    names = NAMES
    call = FullyShardedDataParallel
    prepared_type = PreparedFsdp1

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap every unit of the plan; pieces of column-major parameters are not read."""
        strided = [name for name, p in model.named_parameters() if not p.is_contiguous()]
        if strided:
            raise ValueError(f"torch.fsdp1: expected contiguous parameters, got {strided}; try .contiguous()")
        return super().prepare(model, plan, mesh)


def _pieces(root: nn.Module) -> Iterator[WrapperPiece]:
    prefixes = {id(module): name for name, module in root.named_modules()}
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        handle = unit._handle
        if handle is None or not (handle.uses_sharded_strategy or not handle._use_orig_params):
            continue
        flat = handle.flat_param
        prefix = f"{prefixes[id(unit)]}.{PREFIX}".removeprefix(".").replace(PREFIX, "")
        for index, (fqn, shape, info) in enumerate(
            zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)
        ):
            owner = flat._params[index] if handle._use_orig_params and flat._params else flat
            yield WrapperPiece(
                name=f"{prefix}{fqn}".replace(PREFIX, ""),
                shape=tuple(shape),
                start=info.intra_param_start_idx or 0,
                numel=info.numel_in_shard or 0,
                owner=owner,
                is_flat=owner is flat,
                offset=info.offset_in_shard or 0,
            )
