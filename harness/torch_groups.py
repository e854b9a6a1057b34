"""What we use of process groups and meshes beneath torch's documented surface, so that threads can be ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from harness.replacement import Replacement

__all__ = [
    "FileStore",
    "GroupOptions",
    "HashStore",
    "Store",
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

# Any, for both: their stubs lack much of what they have, or its types.
_bindings: Any = torch._C._distributed_c10d
_c10d: Any = c10d


class C10dState(c10d._World):
    """One rank's view of all process groups: torch's own, with every table its own instead of the module's."""

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[str, Any] = {name: {} for name in _C10D_TABLES} | {"group_count": 0}


# What torch keeps at module level behind properties of the same names.
_C10D_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")


def _own_table(name: str) -> property:
    def read(self: C10dState) -> Any:
        return self._own[name]

    def write(self: C10dState, value: Any) -> None:
        self._own[name] = value

    return property(read, write)


for _name in (*_C10D_TABLES, "group_count"):
    setattr(C10dState, _name, _own_table(_name))


def c10d_state() -> C10dState:
    """Return an empty view, of a rank that has joined nothing yet."""
    return C10dState()


def replace_world(world: object) -> Replacement:
    """Put ``world`` where torch.distributed keeps its process groups."""
    return Replacement(lambda: [(_c10d, "_world", world)])


@contextmanager
def thread_isolation() -> Iterator[None]:
    """Let C++ look a group's name up among those that the calling thread registered."""
    _bindings._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _bindings._set_thread_isolation_mode(False)


def register_in_thread(groups: Mapping[dist.ProcessGroup, str]) -> None:
    """Make groups known by name to C++ on the calling thread."""
    for group, name in groups.items():
        _bindings._register_process_group(name, group)


def owned_meshes(owner: Callable[[], int | None]) -> Replacement:
    """Tell the meshes of different ranks apart, as keys of caches that hold what only one rank may use.

    torch does so by a field that it fills for a threaded backend of its own only.
    """
    field = "_thread_id"

    def read(mesh: DeviceMesh) -> int | None:
        return mesh.__dict__.get(field)

    def write(mesh: DeviceMesh, value: int | None) -> None:
        mesh.__dict__[field] = owner() if value is None else value

    return Replacement(lambda: [(DeviceMesh, field, property(read, write))])


class _OwnNames(threading.local):
    """A set of names, of which every thread has its own."""

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
    """Let threads save and load state of FSDP1 at the same time, each of which torch times.

    torch refuses to time what is being timed already, and keeps what that is once per process.
    """

    def replacements() -> list[tuple[Any, str, Any]]:
        # Here, because it imports slowly where nobody hosts ranks.
        from torch.distributed.fsdp import _debug_utils

        return [(_debug_utils.SimpleProfiler, "profiling", _OwnNames())]

    return Replacement(replacements)


def fake_backend(rank: int, size: int) -> Any:  # Any: no stub declares it
    """Return a backend that moves nothing: what a process group must have although the door answers for it."""
    return _bindings.FakeProcessGroup._create_internal(rank, size)


class GroupOptions(NamedTuple):
    """How a subgroup is made, besides its ranks."""

    backend: str
    name: str
    timeout: timedelta | None
    description: str | None


def create_subgroup(ranks: list[int], options: GroupOptions) -> dist.ProcessGroup:
    """Create a group under a name of our choosing on one of its members; nobody else needs to call."""
    state = _c10d._world
    _, store = state.pg_map[state.default_pg]
    backend = dist.Backend(options.backend)
    group: dist.ProcessGroup
    group, _ = _c10d._new_process_group_helper(
        len(ranks),
        ranks.index(state.default_pg.rank()),
        ranks,
        backend,
        store,
        options.name,
        timeout=options.timeout or _c10d._get_default_timeout(backend),
        group_desc=options.description,
    )
    state.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


def replace_split_group(function: Callable[..., object], method: Callable[..., object]) -> Replacement:
    """Put ``function`` in place of dist.split_group and ``method`` of ProcessGroup.split_group."""
    holders: list[tuple[Any, Any]] = [(dist, function), (_c10d, function), (dist.ProcessGroup, method)]
    return Replacement(lambda: [(holder, "split_group", made) for holder, made in holders])
