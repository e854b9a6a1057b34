"""Reads of an engine that keeps a piece of each parameter on each rank; the adapter only lists the pieces."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.engine.contract import OptimizerFactory, PreparedModel
from shardproof.engine.shard import Shard, shard_of

__all__ = ["Piece", "PreparedPieces"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """An interval of one flattened parameter: the elements from ``start`` on that this rank has.

    ``owner`` is the tensor that the optimizer updates: the piece itself, or a flat tensor in which the piece begins
    at ``offset``. ``numel`` counts its elements; None means the rest of the owner. Padding after the end of the
    parameter is left out. An empty piece may start anywhere.
    """

    name: str
    shape: tuple[int, ...]
    owner: Any  # Any: engines set their own attributes on tensors
    start: int = 0
    offset: int = 0
    numel: int | None = None

    def of(self, tensor: torch.Tensor) -> Shard:
        """Copy this piece's part of a tensor laid out like its owner; a single number is for the whole parameter."""
        if not tensor.dim() and (self.shape or self.numel is None):
            return shard_of(tensor)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        start = min(self.start, math.prod(self.shape))
        rest = math.prod(self.shape) - start
        num = rest if self.numel is None else min(self.numel, rest)
        mine = local.detach().reshape(-1)[self.offset : self.offset + num]
        return Shard.flat(mine.to("cpu", copy=True), start, self.shape)


class PreparedPieces(PreparedModel, ABC):
    """A model with a piece of each parameter on this rank; an unsharded flat parameter is one whole piece."""

    parameters_are_whole: ClassVar[bool] = False
    """Whether each rank has every whole parameter beside its pieces, as in ZeRO-1 and ZeRO-2."""

    @abstractmethod
    def pieces(self) -> Iterable[Piece]:
        """Return this rank's piece of each parameter that the optimizer updates, including empty ones."""

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Build the optimizer over the owners of the pieces."""
        owners = dict.fromkeys(piece.owner for piece in self.pieces())
        super().optimizer(lambda _: factory(owners))

    def value_of(self, piece: Piece) -> torch.Tensor:
        """Return the tensor that the optimizer updates, laid out like the piece's owner."""
        value: torch.Tensor = piece.owner
        return value

    def gradient_of(self, piece: Piece) -> torch.Tensor | None:
        """Return the gradient, laid out like the piece's owner, or None if there is none."""
        gradient: torch.Tensor | None = piece.owner.grad
        is_empty = piece.owner.requires_grad and not piece.of(piece.owner).tensor.numel()
        # An empty piece cannot lack its gradient.
        return piece.owner if gradient is None and is_empty else gradient

    def state_of(self, piece: Piece) -> Mapping[str, Any]:  # Any: values that are not tensors are left out
        """Return the optimizer's state for the piece's owner, by key."""
        state: Mapping[str, Any] = self.built_optimizer().state.get(piece.owner, {})
        return state

    def shown_parameters(self) -> Mapping[str, Shard]:
        """Read whole parameters where modules show them, as in forward and backward; else read the pieces."""
        return super().shown_parameters() if self.parameters_are_whole else self.local_parameters()

    def owned_parameters(self) -> Mapping[str, nn.Parameter]:
        if self.parameters_are_whole:
            return super().owned_parameters()
        return {piece.name: piece.owner for piece in self.pieces()}

    def local_parameters(self) -> Mapping[str, Shard]:
        if self.parameters_are_whole:
            return super().local_parameters()
        return {piece.name: piece.of(self.value_of(piece)) for piece in self.pieces()}

    def local_gradients(self) -> Mapping[str, Shard | None]:
        """Read the gradients of this rank's pieces; a parameter without a piece has none."""
        found = {piece.name: (piece, self.gradient_of(piece)) for piece in self.pieces()}
        return dict.fromkeys(self.owned_parameters()) | {
            name: None if gradient is None else piece.of(gradient)
            for name, (piece, gradient) in found.items()
        }

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        return {
            f"{piece.name}/{key}": piece.of(value)
            for piece in self.pieces()
            for key, value in self.state_of(piece).items()
            if isinstance(value, torch.Tensor)
        }
