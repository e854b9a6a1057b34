"""Where a plan decides an option of an engine's function, a user who sets it takes the plan's capability away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardproof.engine.contract import Capability, Engine
from shardproof.engine.registry import BUILT_IN, resolve
from shardproof.fixtures.programs.space import SPACE
from shardproof.fixtures.programs.training import training_of
from shardproof.harness.cases.space import Program
from shardproof.harness.torch_compat.process_groups import HashStore
from shardproof.harness.tracing.wrapping import WrapperCalls

WRAPPING = sorted(name for name in BUILT_IN if type(resolve(name)).call is not None)
NOT_DECIDED = {
    *("ignored_params", "ignored_states"),  # parameters, which no user spells
    "find_unused_parameters",  # a user who turns it off is shown what becomes of a model that needs it
}


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=HashStore())
    yield
    dist.destroy_process_group()


def _options(engine: Engine, program: Program) -> frozenset[str]:
    """Return the options of an engine's calls for a program, on the first of four ranks."""
    call, training = type(engine).call, training_of(program)
    assert call is not None
    axes = training.plan.axes(4)
    mesh = init_device_mesh("cpu", tuple(a.size for a in axes), mesh_dim_names=tuple(a.name for a in axes))
    model = training.problem.build()
    calls = WrapperCalls(model)
    with calls.watching():
        engine.prepare(model, training.plan, mesh[training.plan.data_axes])
    return calls.options_of(call.__name__)


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
        asked = _options(engine, program)
        for option in {spelled.partition("=")[0] for spelled in asked ^ plain} if asked else set():
            is_decided = SPACE.needs(program) & engine.decided_by.get(option, frozenset())
            if not is_decided and option not in NOT_DECIDED:
                undecided.add((option, str(program)))
    assert undecided == set()
