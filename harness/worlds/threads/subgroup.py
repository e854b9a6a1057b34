"""Splitting process groups where torch cannot: it splits on accelerators only, and our backend has no splitter."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from harness.torch_compat.process_groups import GroupOptions, create_subgroup

__all__ = ["split_group", "split_method"]


def split_group(
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """Split ``parent_pg`` by ranks within it, as `torch.distributed.split_group` documents.

    Returns this rank's part, or None on a rank that is in no part.
    """
    if not split_ranks:
        raise ValueError(f"split_group: expected a list of lists of ranks, got {split_ranks!r}")
    parent = parent_pg or dist.group.WORLD
    if parent is None:
        raise ValueError(
            "split_group: expected an initialized default process group; call init_process_group"
        )
    parent_ranks = dist.get_process_group_ranks(parent)
    parts = [sorted(part) for part in split_ranks]
    for part in parts:
        _check_part(part, len(parent_ranks))
    nth = _next_split(parent)
    mine = next((part for part in parts if parent.rank() in part), None)
    if mine is None:
        return None
    ranks = [parent_ranks[rank] for rank in mine]
    # Every member of the parent splits the same number of times, so all of them arrive at one name.
    name = f"{parent.group_name}:split:{nth}:{'_'.join(map(str, ranks))}"
    description = group_desc or f"{parent.group_desc}:split:{nth}"
    return create_subgroup(
        ranks, GroupOptions(backend or dist.get_backend(parent), name, timeout, description)
    )


def split_method(
    self: dist.ProcessGroup,
    ranks: Sequence[int],
    timeout: timedelta | None = None,
    opts: object = None,
    group_name: str | None = None,
    group_desc: str | None = None,
    device_types: object = None,
) -> dist.ProcessGroup | None:
    """Split this group as `ProcessGroup.split_group` does: one part, under ``group_name`` if given."""
    if group_name is None:
        return split_group(self, [ranks], timeout, group_desc=group_desc)
    part = sorted(ranks)
    parent_ranks = dist.get_process_group_ranks(self)
    _check_part(part, len(parent_ranks))
    if self.rank() not in part:
        return None
    options = GroupOptions(dist.get_backend(self), group_name, timeout, group_desc)
    return create_subgroup([parent_ranks[rank] for rank in part], options)


def _check_part(part: Sequence[int], parent_size: int) -> None:
    if not part or len(part) != len(set(part)) or not set(part) <= set(range(parent_size)):
        raise ValueError(
            f"split_group: expected distinct ranks within a group of {parent_size}, got {list(part)}"
        )


# One count for each group object; a group belongs to one rank, so threads never share an entry.
_splits: dict[dist.ProcessGroup, int] = {}


def _next_split(parent: dist.ProcessGroup) -> int:
    nth = _splits.get(parent, 0)
    _splits[parent] = nth + 1
    return nth
