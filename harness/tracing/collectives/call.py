"""A collective call in one normal form, whichever API the engine used. Values only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardproof.harness.tracing.ledger import Op

Pieces = tuple[tuple[torch.Tensor, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One rank's call of one collective.

    ``ranks`` are the group's global ranks in group order and ``rank`` is the caller's index in them.
    ``inputs`` and ``outputs`` have one outer entry per tensor of a coalesced call (else one in all). The
    inner tuples, with W = len(ranks):

    ================  ====================================  ===================================
    op                inputs[i]                             outputs[i]
    ================  ====================================  ===================================
    ALL_REDUCE        (tensor,)                             the same tensor
    BROADCAST         (tensor,) on the root, else ()        (tensor,)
    REDUCE            (tensor,)                             the same tensor on the root, else ()
    ALL_GATHER        (tensor,)                             W pieces, one from each rank
    REDUCE_SCATTER    W pieces, one for each rank           (tensor,)
    GATHER            (tensor,)                             W pieces on the root, else ()
    SCATTER           W pieces on the root, else ()         (tensor,)
    ALL_TO_ALL        W pieces, one for each rank           W pieces, one from each rank
    SEND              (tensor,)                             ()
    RECV              ()                                    (tensor,)
    BARRIER           ()                                    ()
    ================  ====================================  ===================================

    Pieces may be views of one buffer, and outputs may alias inputs (in-place forms). ``peer`` is the group rank of the
    root, destination or source. It is None where there is none, and for a receive from any source. ``device`` is the
    device of the tensors. ``timeout_s`` is the group's own limit. ``site`` is the call site in the engine.
    """

    op: Op
    group: dist.ProcessGroup
    group_name: str
    ranks: tuple[int, ...]
    rank: int
    inputs: Pieces
    outputs: Pieces
    reduce_op: dist.ReduceOp.RedOpType | None
    peer: int | None
    tag: int
    is_async: bool
    device: torch.device
    timeout_s: float | None
    site: str

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    def described_by(self) -> list[torch.Tensor]:
        """Return the tensors that describe the call: its inputs, or its outputs where it has no inputs."""
        parts = self.inputs if any(self.inputs) else self.outputs
        return [t for part in parts for t in part]

    def __str__(self) -> str:
        """Format the call for messages: the operation, its tensors and its call site."""
        tensors = self.described_by()
        pieces = [f"{short_name(t.dtype)}{list(t.shape)}" for t in tensors[:4]]
        pieces += [f"... {len(tensors)} in all"] if len(tensors) > len(pieces) else []
        words = [] if self.reduce_op is None else [self.reduce_op.name.lower()]
        words += pieces
        if self.peer is not None:
            word = {Op.SEND: "to", Op.RECV: "from"}.get(self.op, "root")
            words.append(f"{word} rank {self.ranks[self.peer]}")
        if self.op in {Op.SEND, Op.RECV}:
            words.append(f"tag {self.tag}")
        return f"{self.op}({', '.join(words)}) at {self.site}"


def short_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the module it is in."""
    return str(dtype).removeprefix("torch.")
