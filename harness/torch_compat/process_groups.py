"""Process groups and meshes below torch's documented interface, so that threads can be ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store, TCPStore  # type: ignore[attr-defined]  # public by their docs
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from shardproof.harness.torch_compat.patching import Replacement
from shardproof.harness.torch_compat.private_names import optional, private

__all__ = [
    "FileStore",
    "GroupOptions",
    "HashStore",
    "Store",
    "TCPStore",
    "c10d_state",
    "create_subgroup",
    "fake_backend",
    "owned_meshes",
    "owned_timers",
    "register_in_thread",
    "replace_split_group",
    "replace_world",
    "thread_isolation",
]

# Any: the stubs lack most of it.
_c10d: Any = c10d
_BINDINGS = "torch._C._distributed_c10d"
_C10D = "torch.distributed.distributed_c10d"

# Module-level state of torch, behind properties of the same names.
_C10D_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")


def _own_table(name: str) -> property:
    # Any, for all: the state below, and torch's own state.
    def read(state: Any) -> Any:
        return state.own_tables[name]

    def write(state: Any, value: Any) -> None:
        state.own_tables[name] = value

    return property(read, write)


@cache
def _state_class() -> type:
    """Derive a class from torch's table of process groups that keeps all state in the instance, not in the module."""
    own = {name: _own_table(name) for name in (*_C10D_TABLES, "group_count")}
    return type("C10dState", (private(f"{_C10D}:_World"),), own)


def c10d_state() -> Any:  # Any: torch's own class, which has no type
    """Return an empty table of process groups, for a rank that has not joined a group yet."""
    state: Any = _state_class()()
    state.own_tables = {name: {} for name in _C10D_TABLES} | {"group_count": 0}
    return state


def replace_world(world: object) -> Replacement:
    """Set ``world`` as the state in which torch.distributed looks up process groups."""
    return Replacement(lambda: [(_c10d, "_world", world)])


@contextmanager
def thread_isolation() -> Iterator[None]:
    """Let C++ look up a group's name among those that the calling thread registered."""
    switch = private(f"{_BINDINGS}:_set_thread_isolation_mode")
    switch(True)
    try:
        yield
    finally:
        switch(False)


def register_in_thread(groups: Mapping[dist.ProcessGroup, str]) -> None:
    """Register groups by name in C++ on the calling thread."""
    for group, name in groups.items():
        private(f"{_BINDINGS}:_register_process_group")(name, group)


def owned_meshes(owner: Callable[[], int | None]) -> Replacement:
    """Make meshes of different ranks unequal as keys of caches whose values only one rank may use.

    torch does so by a field that it sets only for a threaded backend of its own.
    """
    field = "_thread_id"

    def read(mesh: DeviceMesh) -> int | None:
        return mesh.__dict__.get(field)

    def write(mesh: DeviceMesh, value: int | None) -> None:
        mesh.__dict__[field] = owner() if value is None else value

    return Replacement(lambda: [(DeviceMesh, field, property(read, write))])


class _OwnNames(threading.local):
    """A set of names that is separate for every thread."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str) -> None:
        self._names.add(name)

    def remove(self, name: str) -> None:
        self._names.remove(name)

    def clear(self) -> None:
        self._names.clear()


def owned_timers() -> Replacement:
    """Let threads save and load FSDP1 state at the same time, which torch times per process.

    torch refuses to start a timer that is running, and stores the running timers once per process.
    """

    def replacements() -> list[tuple[Any, str, Any]]:
        profiler = optional("torch.distributed.fsdp._debug_utils:SimpleProfiler")
        return [] if profiler is None else [(profiler, "profiling", _OwnNames())]

    return Replacement(replacements)


def fake_backend(rank: int, size: int) -> Any:  # Any: missing in the stubs
    """Return a backend that moves no data: a process group needs one even though the interceptor takes its place."""
    return private(f"{_BINDINGS}:FakeProcessGroup")._create_internal(rank, size)


class GroupOptions(NamedTuple):
    """The options of a subgroup, besides its ranks."""

    backend: str
    name: str
    timeout: timedelta | None
    description: str | None


def create_subgroup(ranks: list[int], options: GroupOptions) -> dist.ProcessGroup:
    """Create a subgroup under a chosen name on one of its members; the others need not call."""
    state = _c10d._world
    _, store = state.pg_map[state.default_pg]
    backend = dist.Backend(options.backend)
    group: dist.ProcessGroup
    group, _ = private(f"{_C10D}:_new_process_group_helper")(
        len(ranks),
        ranks.index(state.default_pg.rank()),
        ranks,
        backend,
        store,
        options.name,
        timeout=options.timeout or private(f"{_C10D}:_get_default_timeout")(backend),
        group_desc=options.description,
    )
    state.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


def replace_split_group(function: Callable[..., object], method: Callable[..., object]) -> Replacement:
    """Set ``function`` as dist.split_group and ``method`` as ProcessGroup.split_group."""
    holders: list[tuple[Any, Any]] = [(dist, function), (_c10d, function), (dist.ProcessGroup, method)]
    return Replacement(lambda: [(holder, "split_group", made) for holder, made in holders])
