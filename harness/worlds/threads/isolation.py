"""Makes state that torch has once per process separate per rank thread: default groups, devices and random generators.

[Note: substitution] A random operator without a generator argument uses the process's default generator. The harness
replaces its kernel by one that, on a rank's thread, passes the rank's own generator instead. So nothing is swapped or
locked, and ranks draw concurrently. Operators that take no generator draw through others that do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from shardproof.harness.torch_compat import dispatch, dtensor, process_groups
from shardproof.harness.torch_compat.dispatch import (
    generator_address,
    random_operators,
    replace_default_generator,
    replaced_kernels,
)
from shardproof.harness.torch_compat.patching import Replacement
from shardproof.harness.tracing.current_rank import adopt_rank, current_rank, own_thread
from shardproof.harness.worlds.threads.premultiplied_sum import factors_remembered
from shardproof.harness.worlds.threads.process_group import split_group, split_method


class _Own(threading.local):
    """The calling thread's process groups."""

    def __init__(self) -> None:
        self.state = process_groups.c10d_state()
        dispatch.keep_backward_in_thread()


_own = _Own()


class _WorldOfThread:
    """Replaces torch's table of process groups and delegates to the calling thread's."""

    def __getattr__(self, name: str) -> Any:  # Any: the attributes of torch's own table
        return getattr(_own.state, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_own.state, name, value)


@contextmanager
def isolate_threads() -> Iterator[None]:
    """Isolate the process groups, meshes and random numbers of every thread, until exit.

    A thread that a rank starts belongs to that rank: it sees the groups that the rank had at the time. Call once,
    before any rank starts, in a process that hosts only ranks.
    """
    dtensor.keep_device_guard()
    with ExitStack() as stack:
        stack.enter_context(process_groups.replace_world(_WorldOfThread()))
        stack.enter_context(process_groups.thread_isolation())
        stack.enter_context(process_groups.owned_meshes(current_rank))
        stack.enter_context(process_groups.owned_timers())
        stack.enter_context(dtensor.shared_propagation())
        stack.enter_context(process_groups.replace_split_group(split_group, split_method))
        stack.enter_context(rank_generators())
        stack.enter_context(_heirs())
        stack.enter_context(_no_workers())
        stack.enter_context(factors_remembered())
        yield


def _heirs() -> Replacement:
    """Make a thread that a rank starts act for this rank."""
    start = threading.Thread.start  # every way to start a thread calls this method

    def start_as_heir(thread: threading.Thread) -> None:
        rank = current_rank()
        if rank is not None:
            own_thread(thread, rank)
            state, generator, run = _own.state, rank_generator(), thread.run

            def run_as_heir() -> None:
                adopt_rank(rank)
                _own.state = state
                inherit_generator(generator)
                process_groups.register_in_thread(state.pg_names)
                run()

            thread.run = run_as_heir  # type: ignore[method-assign]  # on the instance: subclasses override it
        start(thread)

    return Replacement(lambda: [(threading.Thread, "start", start_as_heir)])


def _no_workers() -> Replacement:
    """Make data loaders refuse to start worker processes.

    They fork a process in which other ranks are in the middle of something, and whose locks stay held.
    """
    iterate = DataLoader.__iter__

    def iterate_here(loader: DataLoader[Any]) -> Any:
        if loader.num_workers and current_rank() is not None:
            raise RuntimeError(
                f"DataLoader: expected num_workers=0 where ranks are threads of one process, got {loader.num_workers}; "
                "try a world of processes"
            )
        return iterate(loader)

    return Replacement(lambda: [(DataLoader, "__iter__", iterate_here)])


_GENERATOR = "generator"


class _OwnGenerator(threading.local):
    generator: torch.Generator | None = None


_own_generator = _OwnGenerator()


class _Default(torch.Generator):
    """Replaces torch's default generator and delegates to the calling rank's."""

    def __new__(cls, process_wide: torch.Generator) -> _Default:
        return super().__new__(cls)

    def __init__(self, process_wide: torch.Generator) -> None:
        self.process_wide = process_wide
        self.first_state = process_wide.get_state()

    def actual(self) -> torch.Generator:
        """Return the calling thread's generator; a rank's starts from the process's state at installation."""
        if current_rank() is None:
            return self.process_wide
        if _own_generator.generator is None:
            _own_generator.generator = torch.Generator()
            _own_generator.generator.set_state(self.first_state)
        return _own_generator.generator

    def manual_seed(self, seed: int) -> torch.Generator:
        self.actual().manual_seed(seed)
        return self

    def seed(self) -> int:
        return self.actual().seed()

    def initial_seed(self) -> int:
        return self.actual().initial_seed()

    def get_state(self) -> torch.Tensor:
        return self.actual().get_state()

    def set_state(self, _new_state: torch.Tensor) -> torch.Generator:
        self.actual().set_state(_new_state)
        return self

    def clone_state(self) -> torch.Generator:
        return self.actual().clone_state()

    def graphsafe_get_state(self) -> torch.Generator:
        return self.actual().graphsafe_get_state()

    def graphsafe_set_state(self, _new_state: torch.Generator) -> torch.Generator:
        self.actual().graphsafe_set_state(_new_state)
        return self


class _RandomKernel:
    """A random operator's kernel with the default generator replaced by the calling rank's."""

    # Any: the dispatcher's own kernel handle, and boxed arguments and results.
    def __init__(self, default: _Default, original: Any) -> None:
        self._original = original
        self._default = default
        self._defaults = {generator_address(default), generator_address(default.process_wide)}

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get(_GENERATOR)
        # `generator=torch.default_generator` passes the default generator itself.
        if given is None or generator_address(given) in self._defaults:
            kwargs[_GENERATOR] = self._default.actual()
        return self._original.call_boxed(keyset, *args, **kwargs)


@contextmanager
def rank_generators() -> Iterator[None]:
    """Replace the default generator by one per rank thread, until exit; other threads keep torch's."""
    default = _Default(torch.default_generator)
    kernels = {name: partial(_RandomKernel, default) for name in random_operators()}
    with replaced_kernels("aten", kernels), replace_default_generator(default):
        yield


def rank_generator() -> torch.Generator | None:
    """Return the generator that the calling rank has used so far, to pass it to a thread that the rank starts."""
    return _own_generator.generator


def inherit_generator(generator: torch.Generator | None) -> None:
    """Use the generator of the rank's other thread on this one too."""
    _own_generator.generator = generator
