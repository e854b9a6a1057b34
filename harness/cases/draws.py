"""Random numbers that forward draws: equal on an engine's ranks, in the oracle and in its noise runs.

[Note: equal draws] Dropout and noise are drawn from the default generator. Before each forward and each loss, both
sides seed it with (step, microbatch, rank, use), where *use* counts the calls of this microbatch. Draws in one call
then depend on nothing outside it. A recomputation repeats the draws of its forward, because checkpointing restores the
generator's state. Two differences remain. In float64 normal numbers are not those of float32 with more digits, and
shuffled rows receive other numbers. So if forward draws, the exact run draws in the ranks' dtype, and noise runs keep
rows in order. One process cannot repeat the draws of ranks on another device, of pipeline stages and of sharded
tensors.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from shardproof.harness.torch_compat.accelerators import seed_device
from shardproof.harness.torch_compat.private_names import optional

# Otherwise the exact run draws in float64, and the noise of normal numbers is as large as the numbers.
_Mode: Any = optional("torch.utils._python_dispatch:TorchDispatchMode") or object


class Seeds:
    """The seeds of one rank's calls in one step."""

    def __init__(self, *, step: int, rank: int) -> None:
        self._place = (step, rank)
        self._uses = Counter[int]()

    def begin(self, microbatch: int, device: str = "cpu") -> None:
        """Seed the default generator for the next call of a microbatch."""
        self._uses[microbatch] += 1
        place = repr((*self._place, microbatch, self._uses[microbatch]))
        seed = int.from_bytes(hashlib.sha256(place.encode()).digest()[:6], "big")
        # Not torch.manual_seed: as of 2.13 it queues a call, with its stack, for each kind of device that is absent.
        torch.default_generator.manual_seed(seed)
        seed_device(device, seed)


@contextmanager
def has_drawn(notify: Callable[[], None]) -> Iterator[None]:
    """Call ``notify`` if the block draws from the default generator."""
    before = torch.default_generator.get_state()
    yield
    if not torch.equal(before, torch.default_generator.get_state()):
        notify()


def drawing_in(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return a context in which operators that draw for a tensor of float64 draw in ``dtype``."""
    return nullcontext() if _Mode is object or dtype is torch.float64 else _DrawsIn(dtype)


class _DrawsIn(_Mode):  # type: ignore[misc]  # a class of Any
    """Casts the arguments of operators that draw to a narrower dtype, and widens their results."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    # Any: as torch calls a mode.
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("dtype")
        is_other = asked not in {None, torch.float64} or "out" in kwargs
        if torch.Tag.nondeterministic_seeded not in func.tags or is_other:
            return func(*args, **kwargs)
        if asked is torch.float64:  # the dtype of an input, as in stochastic depth: in ranks it is narrower
            return self._widened(func(*args, **{**kwargs, "dtype": self._dtype}))
        if not any(_is_wide(value) for value in args):
            return func(*args, **kwargs)
        if not func._schema.is_mutable:
            # Attention draws only for dropout, so an operator may not draw. If it does not draw, it stays exact.
            before = torch.default_generator.get_state()
            exact = func(*args, **kwargs)
            if torch.equal(before, torch.default_generator.get_state()):
                return exact
            torch.default_generator.set_state(before)
        drawn = func(*(value.to(self._dtype) if _is_wide(value) else value for value in args), **kwargs)
        if func._schema.is_mutable:
            return args[0].copy_(drawn)
        return tuple(map(self._widened, drawn)) if isinstance(drawn, tuple) else self._widened(drawn)

    def _widened(self, drawn: Any) -> Any:
        return drawn.double() if isinstance(drawn, torch.Tensor) and drawn.is_floating_point() else drawn


def _is_wide(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64
