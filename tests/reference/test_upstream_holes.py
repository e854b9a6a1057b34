"""Checks of torch's own tests, and wrong engines that pass them; our own cases fail these engines.

Each check is what the test of a row of suites/upstream/tests.toml does with an engine; our cases are those of the row.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.engine.registry import resolve
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import WorldKind
from tests.reference.models import Chain, inputs_of
from tests.reference.ranks import Ranks
from tests.shell import python

SPECS = {mutant.name: mutant.engine_spec for mutant in MUTANTS}
_UNITS = ("units.0", "units.1", "units.2")


def _prepared(engine: str, **options: Any) -> PreparedModel:  # Any: fields of a plan
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    return resolve(engine).prepare(Chain(), Plan(units=_UNITS, **options), mesh)


def _same_inputs(context: RankContext, engine: str) -> None:
    """CP01 and its like: every rank has the inputs of every other, and losses are compared."""
    _losses_agree(_prepared(engine), torch.optim.SGD, rank=0)


def _adam_on_sums(context: RankContext, engine: str) -> None:
    """RF04: losses under Adam, beside a model whose gradients are summed over ranks, not averaged."""
    _losses_agree(_prepared(engine), torch.optim.Adam, rank=context.rank, sums=True)


def _losses_agree(
    prepared: PreparedModel,
    adam_or_sgd: Any,
    *,
    rank: int,
    sums: bool = False,
    frozen: tuple[str, ...] = (),
) -> None:
    alone = Chain()
    prepared.optimizer(lambda parameters: adam_or_sgd(parameters, lr=1e-3))
    optimizer = adam_or_sgd(alone.parameters(), lr=1e-3)
    for step in range(4):
        for unit in frozen:
            for model in (prepared.named, alone):
                model.get_submodule(unit).requires_grad_(step == 3)
        losses = [model(inputs_of(rank)).sum() / 64 for model in (prepared, alone)]
        torch.testing.assert_close(losses[0].detach(), losses[1].detach())
        prepared.backward(losses[0])
        losses[1].backward()
        for parameter in alone.parameters() if sums else ():
            dist.all_reduce(parameter.grad)
        prepared.step()
        optimizer.step()
        prepared.zero_grad(set_to_none=True)
        optimizer.zero_grad()


def _dtype_of_scatters(context: RankContext, engine: str) -> None:
    """RX01 and its like: the check reads the dtype in reduce-scatters, which replicas never make."""
    scatter = dist.reduce_scatter_tensor

    def looking(output: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        assert output.dtype is torch.bfloat16
        return scatter(output, *arguments, **named)

    dist.reduce_scatter_tensor = looking  # of this process, which is the rank's own
    prepared = _prepared(engine, compute_dtype=torch.bfloat16)
    prepared.backward(prepared(inputs_of(context.rank)).sum())


def _a_million_times_the_memory(context: RankContext, engine: str) -> None:
    """M01: the bound on memory multiplies the number of bytes by a million instead of dividing it."""
    prepared = _prepared(engine)
    whole = sum(p.numel() * p.element_size() for p in Chain().parameters())
    for _ in range(3):
        prepared.backward(prepared(inputs_of(context.rank)).sum())
        gc.collect()
        found = [
            t for t in gc.get_objects() if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter)
        ]
        assert sum(t.untyped_storage().nbytes() for t in found) <= 4 * whole * 1e6


def _losses_of_frozen_units(context: RankContext, engine: str) -> None:
    """F02 and F03: a unit is frozen until the last iteration; losses are compared, and no collectives."""
    _losses_agree(_prepared(engine), torch.optim.SGD, rank=0, frozen=("units.1",))


def _it_runs(context: RankContext, engine: str) -> None:
    """UP02: training runs under every schedule; the check reads no number."""
    prepared = _prepared(engine)
    prepared.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    for _ in range(2):
        prepared.backward(prepared(inputs_of(context.rank)).sum())
        prepared.step()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """A check of torch's, an engine that passes it, and the case of ours that this engine fails."""

    check: Callable[[RankContext, str], None]
    honest: str
    mutant: str
    case: str
    world: str = "threads:2"


HOLES = (
    Hole(
        check=_same_inputs,
        honest="torch.ddp",
        mutant="NeverSynchronises",
        case="suites/checkpointing/test_checkpointing.py",
    ),
    Hole(
        check=_adam_on_sums,
        honest="torch.fsdp2",
        mutant="SumsInsteadOfAveraging",
        case="suites/parity/test_layouts.py",
    ),
    Hole(
        check=_dtype_of_scatters,
        honest="torch.replicate",
        mutant="IgnoresTheComputeDtype",
        case="suites/precision/test_compute.py",
    ),
    Hole(
        check=_a_million_times_the_memory,
        honest="reference",
        mutant="KeepsUnitsUntilBackwardEnds",
        case="suites/lifetimes/test_memory.py",
    ),
    Hole(
        check=_losses_of_frozen_units,
        honest="torch.fsdp2",
        mutant="ReducesWhatIsFrozen",
        case="suites/interventions/test_freezing.py",
    ),
    Hole(
        check=_it_runs,
        honest="torch.fsdp2",
        mutant="SumsInsteadOfAveraging",
        case="suites/pipeline/test_schedules.py",
        world="threads:4",
    ),
)
each_hole = pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.check.__name__.strip("_"))


@each_hole
def test_a_wrong_engine_passes_the_check_of_torch(hole: Hole, ranks: Ranks) -> None:
    for engine in (hole.honest, SPECS[hole.mutant]):
        ranks.run(2, hole.check, engine, kind=WorldKind.PROCESSES)


@each_hole
def test_and_fails_ours(hole: Hole) -> None:
    command = ["-m", "pytest", "-q", "-x", hole.case, "--engine", SPECS[hole.mutant], "--world", hole.world]
    ended = python(*command, limit_s=120)
    assert ended.returncode == 1
    assert "FAILED:" in ended.stdout
