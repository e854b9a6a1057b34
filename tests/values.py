"""Rank bodies of tests that return values of any class: they come back by a file, since a world carries plain ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardproof.harness.worlds.rank import RankContext


# Any: the body's own arguments and value, here and below.
def keep_value(context: RankContext, body: Callable[..., Any], *args: Any) -> None:
    """Run a body on a rank and leave what it returns in the world's folder; itself a rank body."""
    value = body(context, *args)
    _file(context.folder, context.rank).write_bytes(pickle.dumps(value))


def kept_values(folder: Path, size: int) -> list[Any]:
    """Read what the ranks of a world left, in rank order."""
    return [pickle.loads(_file(folder, rank).read_bytes()) for rank in range(size)]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.value"
