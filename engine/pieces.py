"""Reads of an engine that keeps this rank's piece of each parameter: the adapter lists the pieces, the rest follows."""

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
    """An interval of one parameter, flattened: the elements from ``start`` on that this rank has.

    ``owner`` is what the optimizer updates: the piece itself, or a flat tensor in which the piece begins at
    ``offset``. ``numel`` counts its elements; None stands for the rest of the owner. Padding, which lies behind the
    end of the parameter, is left out. A piece of no elements may start anywhere.
    """

    name: str
    shape: tuple[int, ...]
    owner: Any  # Any: engines set attributes of their own on tensors
    start: int = 0
    offset: int = 0
    numel: int | None = None

    def of(self, tensor: torch.Tensor) -> Shard:
        """Copy this piece's part of a tensor that lies as its owner does; a single number beside it is of the whole."""
        if not tensor.dim() and (self.shape or self.numel is None):
            return shard_of(tensor)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        start = min(self.start, math.prod(self.shape))
        rest = math.prod(self.shape) - start
        num = rest if self.numel is None else min(self.numel, rest)
        mine = local.detach().reshape(-1)[self.offset : self.offset + num]
        return Shard.flat(mine.to("cpu", copy=True), start, self.shape)


class PreparedPieces(PreparedModel, ABC):
    """A model of whose parameters this rank keeps pieces; one that is flat alone is a piece that is the whole."""

    parameters_are_whole: ClassVar[bool] = False
    """Whether each rank has every parameter whole beside its pieces, as under ZeRO-1 and ZeRO-2."""

    @abstractmethod
    def pieces(self) -> Iterable[Piece]:
        """Return this rank's piece of each parameter that the optimizer updates, an empty one included."""

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Build it over the owners of the pieces."""
        owners = dict.fromkeys(piece.owner for piece in self.pieces())
        super().optimizer(lambda _: factory(owners))

    def value_of(self, piece: Piece) -> torch.Tensor:
        """Return what the optimizer updates: a tensor that lies as the piece's owner does."""
        value: torch.Tensor = piece.owner
        return value

    def gradient_of(self, piece: Piece) -> torch.Tensor | None:
        """Return the gradient, which lies as the piece's owner does; None if there is none."""
        gradient: torch.Tensor | None = piece.owner.grad
        is_empty = piece.owner.requires_grad and not piece.of(piece.owner).tensor.numel()
        # Of nothing, nothing can be missing.
        return piece.owner if gradient is None and is_empty else gradient

    def state_of(self, piece: Piece) -> Mapping[str, Any]:  # Any: what is no tensor is left out
        """Return the optimizer's state of the piece's owner, by key."""
        state: Mapping[str, Any] = self.built_optimizer().state.get(piece.owner, {})
        return state

    def shown_parameters(self) -> Mapping[str, Shard]:
        """Read what modules show of whole parameters, else the pieces: the whole is there in forward and backward."""
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
        """Read this rank's pieces; a parameter without one has no gradient."""
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
