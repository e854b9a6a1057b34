"""Optimizers on unevenly sharded parameters of complex numbers, which torch 2.13 gets wrong.

[Note: views of complex shards] Adam and others update a complex parameter through ``torch.view_as_real``. DTensor
takes that view for a split of the last dim. Where this is the dim that is cut, as of a bias, and ranks have different
numbers of elements, it gathers them first: the view is of a copy, and what the optimizer writes there is lost. Yet both
parts of a number lie where the number does. Told so once, DTensor views it in place.
"""

from __future__ import annotations

from functools import cache

import torch

from engine.reference.torch_internals import run_where_shards_lie

__all__ = ["keep_complex_views_in_place"]


@cache  # once in a process
def keep_complex_views_in_place() -> None:
    """Have DTensor take ``view_as_real`` of a shard where it lies; see [Note: views of complex shards]."""
    run_where_shards_lie(torch.ops.aten.view_as_real.default)
