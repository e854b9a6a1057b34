"""One rank's data for one microbatch: rows of tensors, or any batch that a user's model takes.

[Note: arguments of any form] Scripts pass ``batch.inputs`` to forward, one by one. A `ModelBatch` is its own only
input. It stands for all arguments, and `arguments_of` returns them where the model is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardproof.harness.torch_compat.tensor_trees import tensors_in

# Large primes, far apart, so that no two microbatches of a training share a seed.
_STEP, _MICROBATCH, _RANK = 1_000_003, 10_007, 101


def microbatch_seed(seed: int, *, step: int, microbatch: int, rank: int) -> int:
    """Return the seed of one microbatch on one rank; ``seed`` is that of the training."""
    return seed * _STEP * 31 + step * _STEP + microbatch * _MICROBATCH + rank * _RANK


class Batch(Protocol):
    """One rank's data for one microbatch."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Arguments of forward: tensors, rows first, or a `ModelBatch` that stands for all arguments."""

    @property
    def target(self) -> torch.Tensor:
        """The tensor that the loss compares the output with, rows first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Tensors with the same number of rows; an input may be a tree of them."""

    inputs: tuple[Any, ...]
    target: torch.Tensor


# Any, from here on: a user's batch is any tree of tensors and other values.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelBatch:
    """The return value of a user's ``batch()``: a mapping of keyword arguments, a tuple, or one argument."""

    value: Any

    @property
    def inputs(self) -> tuple[ModelBatch]:
        return (self,)

    @property
    def target(self) -> torch.Tensor:
        return torch.empty(0)

    @property
    def arguments(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Positional and keyword arguments of forward."""
        if isinstance(self.value, Mapping):
            return (), self.value
        return (tuple(self.value), {}) if isinstance(self.value, tuple | list) else ((self.value,), {})


def arguments_of(inputs: Sequence[Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments of a forward that a script called with these inputs."""
    if len(inputs) == 1 and isinstance(inputs[0], ModelBatch):
        return inputs[0].arguments
    return tuple(inputs), {}


def tensors_of(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield every tensor of a batch, always in the same order."""
    if isinstance(batch, ModelBatch):
        yield from tensors_in(batch.value)
    else:
        yield from (*tensors_in(batch.inputs), batch.target)


def converted(batch: Batch, convert: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return a batch of the same form in which every tensor is converted."""
    if isinstance(batch, ModelBatch):
        return ModelBatch(value=converted_tree(batch.value, convert))
    return Rows(inputs=converted_tree(batch.inputs, convert), target=convert(batch.target))


def converted_tree(tree: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tree of the same form in which every tensor is converted."""
    if isinstance(tree, torch.Tensor):
        return convert(tree)
    if isinstance(tree, Mapping):
        return {key: converted_tree(value, convert) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(converted_tree(value, convert) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(converted_tree(value, convert) for value in tree)
    return tree
