"""ZeRO-2 over whole parameters: each rank reduces, keeps and updates an even piece of every parameter, then shares it.

A piece is a view of the flattened parameter, so the optimizer writes into the parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

# torch 2.13 gave the flat collectives new names and deprecated these, which older releases have alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True, eq=False)
class OwnPiece:
    """A parameter, the piece of it that this rank updates, and where that begins in the flattened whole."""

    parameter: nn.Parameter
    own: nn.Parameter
    start: int


class Zero2:
    """A module whose gradients and optimizer state are sharded over the ranks of a group."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.module = module
        self._group = group
        self._is_synchronising = True
        trained = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        self.pieces: Mapping[str, OwnPiece] = {name: self._piece(parameter) for name, parameter in trained}

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward; outside `no_sync` reduce what has accumulated, and keep this rank's pieces of it alone."""
        loss.backward()
        if self._is_synchronising:
            self.reduce()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients locally for the time being."""
        self._is_synchronising = False
        try:
            yield
        finally:
            self._is_synchronising = True

    def reduce(self) -> None:
        """Average whole gradients into those of the pieces, and free them."""
        # Issued together and waited for together, so that they overlap each other; none overlaps backward.
        pending = [(piece, *self._reduction(piece)) for piece in self.pieces.values()]
        for piece, work, mean in pending:
            work.wait()
            mean = mean[: piece.own.numel()] / self._group.size()
            piece.own.grad = mean if piece.own.grad is None else piece.own.grad + mean

    @torch.no_grad()
    def share(self) -> None:
        """Gather on all ranks the pieces that the optimizer has updated on each."""
        pending = [(piece, *self._gather(piece)) for piece in self.pieces.values()]
        for piece, work, whole in pending:
            work.wait()
            piece.parameter.copy_(whole[: piece.parameter.numel()].view_as(piece.parameter))

    def _piece(self, parameter: nn.Parameter) -> OwnPiece:
        length = self._length(parameter)
        start = min(length * self._group.rank(), parameter.numel())
        own = parameter.detach().view(-1)[start : start + length]
        return OwnPiece(parameter, nn.Parameter(own), start)

    def _length(self, parameter: nn.Parameter) -> int:
        return -(-parameter.numel() // self._group.size())

    def _reduction(self, piece: OwnPiece) -> tuple[dist.Work, torch.Tensor]:
        parameter, length = piece.parameter, self._length(piece.parameter)
        # Where the loss did not reach a parameter this rank still takes part, with zeros: the others wait for it.
        padded = parameter.new_zeros(length * self._group.size())
        if parameter.grad is not None:
            padded[: parameter.numel()].copy_(parameter.grad.view(-1))
        parameter.grad = None
        mean = parameter.new_empty(length)
        return _reduce_scatter(mean, padded, group=self._group, async_op=True), mean

    def _gather(self, piece: OwnPiece) -> tuple[dist.Work, torch.Tensor]:
        length = self._length(piece.parameter)
        padded = piece.own.new_zeros(length)
        padded[: piece.own.numel()].copy_(piece.own)
        whole = piece.own.new_empty(length * self._group.size())
        return _all_gather(whole, padded, group=self._group, async_op=True), whole
