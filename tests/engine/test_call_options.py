"""Where a plan decides an option of an engine's function, a user who sets it takes the plan's capability away."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardproof.engine.contract import Capability, Engine
from shardproof.engine.registry import BUILT_IN, resolve
from shardproof.fixtures.programs.space import SPACE
from shardproof.fixtures.programs.training import training_of
from shardproof.harness.cases.space import Program
from shardproof.harness.torch_compat.process_groups import HashStore

WRAPPING = sorted(name for name in BUILT_IN if type(resolve(name)).call is not None)
NOT_DECIDED = {
    *(
        "mesh",
        "device_mesh",
        "process_group",
        "ignored_params",
        "ignored_states",
        "module",
        "self",
    ),  # not spelled
    "find_unused_parameters",  # a user who turns it off is shown what becomes of a model that needs it
}


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=HashStore())
    yield
    dist.destroy_process_group()


@contextmanager
def _calls_of(call: Callable[..., Any]) -> Iterator[dict[str, set[str]]]:
    """Collect the values of each option in all calls of a function."""
    seen: dict[str, set[str]] = defaultdict(set)
    body = inspect.unwrap(vars(call)["__init__"] if isinstance(call, type) else call).__code__

    def see(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is body:
            for name, value in frame.f_locals.items():
                seen[name].add(_spelled(value))

    sys.setprofile(see)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def _spelled(value: object) -> str:
    if isinstance(value, nn.Module):
        return "a module"  # not yet initialised
    is_plain = is_dataclass(value) or type(value).__repr__ is not object.__repr__
    return repr(value) if is_plain else type(value).__name__


def _options(engine: Engine, program: Program) -> dict[str, set[str]]:
    """Return the options of an engine's calls for a program, on the first of four ranks."""
    call, training = type(engine).call, training_of(program)
    assert call is not None
    axes = training.plan.axes(4)
    mesh = init_device_mesh("cpu", tuple(a.size for a in axes), mesh_dim_names=tuple(a.name for a in axes))
    with _calls_of(call) as seen:
        engine.prepare(training.problem.build(), training.plan, mesh[training.plan.data_axes])
    return seen


def _programs(engine: Engine) -> Iterator[Program]:
    """Yield a program for each value that needs a capability of the engine."""
    space = SPACE.within(engine.capabilities - {Capability.TENSOR_PARALLEL})
    for dimension in space.dimensions:
        asking = dict(dimension.demands).keys() & set(dimension.values)
        completed = (space.completion(frozenset({(dimension.name, value)})) for value in sorted(asking))
        yield from filter(None, completed)


@pytest.mark.parametrize("name", WRAPPING)
def test_what_a_plan_asks_of_an_option_is_no_capability_where_the_user_sets_it(name: str) -> None:
    engine = resolve(name)
    plain, undecided = _options(engine, Program()), set()
    for program in _programs(engine):
        for option, values in _options(engine, program).items():
            is_decided = SPACE.needs(program) & engine.decided_by.get(option, frozenset())
            if values != plain[option] and not is_decided and option not in NOT_DECIDED:
                undecided.add((option, str(program)))
    assert undecided == set()
