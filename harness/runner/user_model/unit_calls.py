"""Counts how often the forwards of a user's model call its units, and which parts of a unit they call from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from shardproof.harness.cases.batch import arguments_of
from shardproof.harness.cases.draws import Seeds
from shardproof.harness.cases.user_model import UserModel
from shardproof.harness.worlds.threads.together import own_rank

_FORWARDS = (3, 3)  # steps and microbatches in which ranks are compared
NUM_RANKS = 4  # those whose passes are compared


class UnitCalls:
    """Counts the calls of each unit while it watches; ``outside`` names the parts that were called without their unit.

    Only parts with parameters of their own count: an engine that gathers a unit in its forward does not have their
    parameters elsewhere.
    """

    def __init__(self, model: nn.Module, units: tuple[str, ...]) -> None:
        self._model = model
        self._units = units
        self._running = Counter[str]()
        self.calls = Counter[str]()
        self.outside: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the forwards of the block; watching backward would count those that recomputation repeats."""
        handles = []
        for name, module in self._model.named_modules():
            if name in self._units:
                handles.append(module.register_forward_pre_hook(partial(self._enter, name), prepend=True))
                handles.append(module.register_forward_hook(partial(self._leave, name), always_call=True))
            elif (unit := self._innermost(name)) and list(module.parameters(recurse=False)):
                handles.append(module.register_forward_pre_hook(partial(self._part, name, unit)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _innermost(self, name: str) -> str:
        return max((unit for unit in self._units if name.startswith(f"{unit}.")), key=len, default="")

    # Any: a module's inputs and outputs.
    def _enter(self, unit: str, module: nn.Module, inputs: Any) -> None:
        self.calls[unit] += 1
        self._running[unit] += 1

    def _leave(self, unit: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._running[unit] -= 1

    def _part(self, name: str, unit: str, module: nn.Module, inputs: Any) -> None:
        if not self._running[unit] and name not in self.outside:
            self.outside.append(name)


def calls_differ(problem: UserModel, units: tuple[str, ...]) -> bool:
    """Return whether the forwards of some ranks call units that others do not call, or call more often."""
    model, differ = problem.build(), False
    for step, microbatch in product(*map(range, _FORWARDS)):
        of_ranks = [
            _calls_of(problem, model, units, step=step, microbatch=microbatch, rank=rank)
            for rank in range(NUM_RANKS)
        ]
        differ |= any(others != of_ranks[0] for others in of_ranks)
    return differ


def _calls_of(
    problem: UserModel, model: nn.Module, units: tuple[str, ...], *, step: int, microbatch: int, rank: int
) -> Counter[str]:
    args, kwargs = arguments_of(
        problem.batch(step=step, microbatch=microbatch, rank=own_rank() + rank).inputs
    )
    Seeds(step=step, rank=rank).begin(microbatch)
    watch = UnitCalls(model, units)
    with watch.watching(), torch.no_grad():
        model(*args, **kwargs)
    return watch.calls
