"""Return values of rank bodies: a world carries plain values, and a file carries values of any class."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardproof import RankContext, Returned, WorldSpec, launch


# Any: the body's own arguments and value, here and below.
def keep_value(context: RankContext, body: Callable[..., Any], *args: Any) -> None:
    """Run a body on a rank and write its value into the world's folder; itself a rank body."""
    value = body(context, *args)
    _file(context.folder, context.rank).write_bytes(pickle.dumps(value))


def returned(world: str, body: Callable[..., Any], *args: Any, folder: Path) -> list[Any]:
    """Run a rank body in a world of this kind and size, as ``threads:4``; fails unless all ranks return."""
    __tracebackhide__ = True
    result = launch(WorldSpec.parse(world, deadline_s=60), body, *args, folder=folder)
    failures = [getattr(o, "traceback", str(o)) for o in result.outcomes if not isinstance(o, Returned)]
    assert not failures, "\n".join(failures)
    assert result.is_clean, result.leaks
    return [o.value for o in result.outcomes if isinstance(o, Returned)]


def kept_values(folder: Path, size: int) -> list[Any]:
    """Read the values of the ranks of a world, in rank order."""
    return [pickle.loads(_file(folder, rank).read_bytes()) for rank in range(size)]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.value"
