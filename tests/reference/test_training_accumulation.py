"""Gradients over microbatches: whoever reduces when, their sum over microbatches and mean over ranks is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from harness.worlds.spec import WorldKind
from tests.reference.front_doors import FrontDoor
from tests.reference.models import TRANSFORMER, Rooted
from tests.reference.oracle import (
    HYBRID,
    Args,
    Mesh,
    Plan,
    Training,
    cases,
    loss_of,
    rows,
    run_world,
    tokens,
    train_beside_oracle,
)

ALL = ("",)
CALLS: tuple[Literal["fully_shard", "replicate"], ...] = ("fully_shard", "replicate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """A schedule in which the ``quiet`` modules reduce on the last microbatch alone."""

    quiet: tuple[str, ...] = ALL
    recurse: bool = True
    keeps: tuple[str, ...] = ()  # modules that stay whole between microbatches
    all_reduce_only: bool = False  # shards are reduced on every microbatch, replicas on the last
    flags_last: bool = False

    def __call__(
        self, model: nn.Module, batches: Sequence[Args], door: FrontDoor | None
    ) -> list[torch.Tensor]:
        losses = []
        for i, args in enumerate(batches):
            if door is not None:
                self._set(model, door, is_last=i == len(batches) - 1)
            loss = loss_of(model(*args)) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def _set(self, model: nn.Module, door: FrontDoor, *, is_last: bool) -> None:
        for name in self.quiet:
            module = _of(model, name, door)
            if self.all_reduce_only:
                module.set_requires_all_reduce(is_last, recurse=self.recurse)
            else:
                module.set_requires_gradient_sync(is_last, recurse=self.recurse)
        for name in self.keeps:
            _of(model, name, door).set_reshard_after_backward(is_last, recurse=self.recurse)
        if self.flags_last:
            _of(model, "", door).set_is_last_backward(is_last)


def _of(model: nn.Module, name: str, door: FrontDoor) -> Any:  # Any: the engines share no base class
    module = model.get_submodule(name)
    assert isinstance(module, door.sharded_module)
    return module


def one_forward_one_backward(
    model: nn.Module, batches: Sequence[Args], door: FrontDoor | None, *, unshards: bool, keeps: bool
) -> list[torch.Tensor]:
    """Keep two microbatches under way, as a pipeline stage does (upstream row T31)."""
    if door is not None:
        root = _of(model, "", door)
        root.set_requires_gradient_sync(False)
        root.set_is_last_backward(False)
        root.set_reshard_after_backward(not keeps)
        modules = [m for m in model.modules() if isinstance(m, door.sharded_module)] if unshards else []
        handles = [module.unshard(async_op=True) for module in modules]
        assert all(handle is not None for handle in handles)
    losses = [loss_of(model(*batches[0])) / len(batches)]
    for i in range(len(batches)):
        if i + 1 < len(batches):
            losses.append(loss_of(model(*batches[i + 1])) / len(batches))
        elif door is not None:
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)
            root.set_reshard_after_backward(True)
        losses[i].backward()
    return [loss.detach() for loss in losses]


PAIRS = ("pairs.0", "pairs.1", "pairs.2")
UNITS = (*PAIRS, "")
RESHARDS: dict[str, object] = {"true": True, "false": False, "two": 2}
# T30: everything waits, the root's own parameters wait, or two of three units wait.
MODES: dict[str, Accumulate] = {
    "all": Accumulate(),
    "root_only": Accumulate(recurse=False),
    "some_units": Accumulate(quiet=PAIRS[:2]),
}
KEEPING: dict[str, Accumulate] = {
    "all_kept": Accumulate(keeps=ALL),
    "root_only_kept": Accumulate(recurse=False, keeps=ALL),
    "some_units_kept": Accumulate(quiet=PAIRS[:2], keeps=PAIRS[:2]),
}
MESHES: dict[str, Mesh | None] = {"flat": None, "hybrid": HYBRID}


def _rooted(
    schedule: Accumulate, mesh: Mesh | None, *, raf: object = True, count: int = 3, offload: bool = False
) -> Training:
    return Training(
        model=partial(Rooted, 5),
        plan=Plan(units=UNITS, options={"reshard_after_forward": raf}, offload=offload),
        schedule=schedule,
        mesh=mesh,
        num_microbatches=count,
    )


TRAININGS: dict[str, Training] = {
    **{
        f"{mode}_{raf}_{mesh}": _rooted(schedule, MESHES[mesh], raf=value)
        for mode, schedule in MODES.items()
        for raf, value in RESHARDS.items()
        for mesh in MESHES
        if (mesh, raf) != ("hybrid", "two")
    },
    **{
        f"{mode}_{mesh}": _rooted(schedule, MESHES[mesh], raf=False)
        for mode, schedule in KEEPING.items()
        for mesh in MESHES
    },
    "offloaded": _rooted(Accumulate(), None, offload=True),
    "offloaded_hybrid": _rooted(Accumulate(), HYBRID, offload=True),
    "offloaded_root_only": _rooted(MODES["root_only"], None, offload=True),
    **{
        f"all_reduce_last_{mode}": _rooted(
            Accumulate(quiet=schedule.quiet, recurse=schedule.recurse, all_reduce_only=True), HYBRID
        )
        for mode, schedule in MODES.items()
    },
    "all_reduce_last_offloaded": _rooted(Accumulate(all_reduce_only=True), HYBRID, offload=True),
    "all_reduce_last_among_replicas": _rooted(
        Accumulate(all_reduce_only=True), Mesh(shape=(4, 1), names=("replicate", "shard"))
    ),
    "one_microbatch": _rooted(Accumulate(), None, count=1),
    "four_microbatches": _rooted(Accumulate(), None, count=4),
    "last_flagged": _rooted(Accumulate(flags_last=True), None),
    "last_flagged_reduced": _rooted(Accumulate(quiet=(), flags_last=True), None),
    "rows_differ": Training(
        model=partial(Rooted, 5),
        plan=Plan(units=UNITS),
        draw=rows(5, grows=True),
        schedule=Accumulate(),
        num_microbatches=3,
    ),
}
PIPELINES = {
    f"unshards_{unshards}_keeps_{keeps}_{call}": Training(
        model=TRANSFORMER,
        draw=tokens,
        plan=Plan(
            units=("blocks.0", "blocks.1", ""),
            options={"reshard_after_forward": False} if call == "fully_shard" else {},
            call=call,
        ),
        schedule=partial(one_forward_one_backward, unshards=unshards, keeps=keeps),
        num_microbatches=3,
    )
    for call in CALLS
    for unshards in (False, True)
    for keeps in (False, True)
}


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS))
def test_a_delayed_reduction_changes_no_number(name: str, door: str, tmp_path: Path) -> None:
    """Upstream row T30."""
    needs_four = TRAININGS[name].mesh is not None or "two" in name
    run_world(
        WorldKind.THREADS, 4 if needs_four else 2, train_beside_oracle, door, TRAININGS[name], folder=tmp_path
    )


@pytest.mark.parametrize(("name", "door"), cases(PIPELINES))
def test_nor_does_a_pipeline(name: str, door: str, tmp_path: Path) -> None:
    """Upstream rows T31, R15."""
    run_world(WorldKind.THREADS, 2, train_beside_oracle, door, PIPELINES[name], folder=tmp_path)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(("name", "door"), cases(TRAININGS, "all_true_flat", "some_units_false_flat"))
def test_nor_does_the_world(name: str, size: int, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, size, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS, "all_true_hybrid", "all_reduce_last_all"))
def test_nor_do_processes(name: str, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.PROCESSES, 4, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)
