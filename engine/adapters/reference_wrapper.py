"""Our own engine behind its wrapper front door, one flat parameter for each unit, on a 1-D or 2-D mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine import reference
from engine.adapters.wrapper import CAPABILITIES, Piece, PreparedWrapper, open_wrapper
from engine.contract import Engine, Plan, PreparedModel, WrapperNames
from engine.reference import comm_hooks, wrapping
from engine.reference.original_names import clean_name
from engine.reference.scaler import ShardedGradScaler
from engine.reference.whole import arrangement_of
from engine.reference.wrapper_base import wrappers_in
from engine.reference.wrapper_state import own_names

__all__ = ["NAMES", "PreparedReferenceWrapper", "ReferenceWrapperEngine", "pieces"]

NAMES = WrapperNames(
    FullyShardedDataParallel=reference.FullyShardedDataParallel,
    FlatParameter=reference.FlatParameter,
    ShardedGradScaler=ShardedGradScaler,
    ModuleWrapPolicy=wrapping.ModuleWrapPolicy,
    CustomPolicy=wrapping.CustomPolicy,
    always_wrap_policy=wrapping.always_wrap_policy,
    lambda_auto_wrap_policy=wrapping.lambda_auto_wrap_policy,
    size_based_auto_wrap_policy=wrapping.size_based_auto_wrap_policy,
    transformer_auto_wrap_policy=wrapping.transformer_auto_wrap_policy,
    enable_wrap=wrapping.enable_wrap,
    wrap=wrapping.wrap,
    DefaultState=comm_hooks.DefaultState,
    LowPrecisionState=comm_hooks.LowPrecisionState,
    allreduce_hook=comm_hooks.allreduce_hook,
    reduce_scatter_hook=comm_hooks.reduce_scatter_hook,
    fp16_compress_hook=comm_hooks.fp16_compress_hook,
    bf16_compress_hook=comm_hooks.bf16_compress_hook,
)


class PreparedReferenceWrapper(PreparedWrapper):
    """Reads each unit's arrangement."""

    def __init__(self, module: nn.Module, model: nn.Module, names: WrapperNames = NAMES) -> None:
        super().__init__(module, model, names, pieces)


class ReferenceWrapperEngine(Engine):
    """Each unit is one flat parameter: gathered before use, its gradient reduce-scattered after backward."""

    name = "reference.wrapper"
    capabilities = CAPABILITIES
    names: ClassVar[WrapperNames] = NAMES

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap every unit of the plan, then the root."""
        plan.refuse_beyond(self.capabilities)
        return PreparedReferenceWrapper(open_wrapper(self.names, model, plan, mesh), model, self.names)


def pieces(root: nn.Module) -> Iterator[Piece]:
    """Find where the pieces of sharded or flat units lie; others are whole parameters under their own names."""
    paths = {module: name for name, module in root.named_modules()}
    for wrapper in wrappers_in(root):
        prefix = clean_name(f"{paths[wrapper]}." if paths[wrapper] else "")
        names = {piece: name for name, piece in reversed(list(own_names(wrapper)))}
        for group in wrapper.groups:
            flat = arrangement_of(group)
            for piece in flat.parameters if flat.num_ranks > 1 or wrapper.is_flat else ():
                yield Piece(
                    name=prefix + names[piece],
                    shape=tuple(piece.shape),
                    start=piece.first,
                    numel=piece.local_numel,
                    owner=piece.owned,
                    is_flat=not piece.is_visible,
                    offset=piece.offset,
                )
