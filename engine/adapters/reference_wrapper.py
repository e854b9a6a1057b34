"""Our own engine behind its wrapper front door, one flat parameter for each unit, on a 1-D or 2-D mesh."""

from __future__ import annotations

from collections.abc import Iterator

from engine import reference
from engine.adapters.wrapper import CAPABILITIES, Piece, PreparedWrapper, WrapperEngine
from engine.contract import Capability, WrapperNames
from engine.reference import comm_hooks, wrapping
from engine.reference.scaler import ShardedGradScaler
from engine.reference.wrapper_state import named_pieces

__all__ = ["NAMES", "PreparedReferenceWrapper", "ReferenceWrapperEngine"]

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

    def pieces(self) -> Iterator[Piece]:
        """Leave out whole parameters under their own names."""
        for name, group, piece in named_pieces(self.module):
            if group.mesh.shard_size > 1 or not piece.is_visible:
                yield Piece(
                    name=name,
                    shape=tuple(piece.shape),
                    start=piece.first,
                    numel=piece.local_numel,
                    owner=piece.owned,
                    is_flat=not piece.is_visible,
                    offset=piece.offset,
                )


class ReferenceWrapperEngine(WrapperEngine):
    """The wrapper of our own engine."""

    name = "reference.wrapper"
    capabilities = CAPABILITIES | {Capability.COMPLEX}
    names = NAMES
    prepared_type = PreparedReferenceWrapper
