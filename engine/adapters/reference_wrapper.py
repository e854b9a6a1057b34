"""The wrapper of the reference engine, one flat parameter for each unit, on a 1-D or 2-D mesh."""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.engine import reference
from shardproof.engine.adapters.torch_internals import optimizer_in_backward
from shardproof.engine.adapters.wrapper_base import CAPABILITIES, PreparedWrapper, WrapperEngine, WrapperPiece
from shardproof.engine.contract import Capability, WrapperNames
from shardproof.engine.reference.fsdp1 import comm_hooks, wrap_policy
from shardproof.engine.reference.fsdp1.state_dict import named_pieces

NAMES = WrapperNames.of(reference, wrap_policy, comm_hooks, optimizer_in_backward=optimizer_in_backward)


class PreparedReferenceWrapper(PreparedWrapper):
    """Reads each unit's layout."""

    def pieces(self) -> Iterator[WrapperPiece]:
        """Yield the pieces, without whole parameters under their own names."""
        for name, group, piece in named_pieces(self.module):
            if group.mesh.shard_size > 1 or not piece.is_visible:
                yield WrapperPiece(
                    name=name,
                    shape=tuple(piece.shape),
                    start=piece.first,
                    numel=piece.local_numel,
                    owner=piece.sharded_param,
                    is_flat=not piece.is_visible,
                    offset=piece.offset,
                )


class ReferenceWrapperEngine(WrapperEngine):
    """The wrapper of the reference engine."""

    name = "reference.wrapper"
    capabilities = CAPABILITIES | {Capability.COMPLEX, Capability.MEMORY_FORMATS}
    names = NAMES
    call = reference.FullyShardedDataParallel
    prepared_type = PreparedReferenceWrapper
