"""The backend name ``threads`` and the ranks of a group. The data goes through the exchange, not through here."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from harness.torch_compat.process_groups import fake_backend

__all__ = ["BACKEND", "global_ranks", "register_threads_backend"]

BACKEND = "threads"


def register_threads_backend() -> None:
    """Make ``init_process_group("threads")`` work in this process; does nothing the second time."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def global_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Give a group's global ranks in group order, of whatever backend it is."""
    return tuple(dist.get_process_group_ranks(group))


def _create(options: Any, _backend_options: object) -> Any:  # Any: torch hands over C++ values without stubs
    return fake_backend(options.group_rank, options.group_size)
