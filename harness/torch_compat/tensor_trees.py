"""The tensors in what a module or an operator takes and returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


# Any: a module takes and returns values of any type.
def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a tree of mappings, tuples and lists."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors_in(value)
