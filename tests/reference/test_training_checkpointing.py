"""Activation checkpointing of every make, inside, around and across units: a recomputed forward changes no number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from harness.worlds.spec import WorldKind
from tests.reference.front_doors import FrontDoor
from tests.reference.models import TIED, TRANSFORMER, Transformer
from tests.reference.oracle import (
    HYBRID,
    Args,
    Plan,
    Training,
    cases,
    in_turn,
    loss_of,
    run_world,
    tokens,
    train_beside_oracle,
)

Call = Literal["fully_shard", "replicate"]
Wrap = Callable[[nn.Module, str], None]


def _wrapped(model: nn.Module, name: str, *, impl: CheckpointImpl) -> None:
    parent, _, child = name.rpartition(".")
    inner = model.get_submodule(name)
    setattr(model.get_submodule(parent), child, checkpoint_wrapper(inner, checkpoint_impl=impl))


def _composed(model: nn.Module, name: str) -> None:
    composable_checkpoint(model.get_submodule(name))


def _called(model: nn.Module, name: str, *, reentrant: bool) -> None:
    """Make a module's own forward checkpoint what it did, as model code does."""
    module = model.get_submodule(name)
    module.forward = partial(_checkpointed, module.forward, reentrant)


def _checkpointed(forward: Callable[..., Any], reentrant: bool, *args: Any) -> Any:  # Any: a module's forward
    return checkpoint(forward, *args, use_reentrant=reentrant)


MAKES: dict[str, Wrap] = {
    "wrapper": partial(_wrapped, impl=CheckpointImpl.NO_REENTRANT),
    "wrapper_reentrant": partial(_wrapped, impl=CheckpointImpl.REENTRANT),
    "composable": _composed,
    "function": partial(_called, reentrant=False),
    "function_reentrant": partial(_called, reentrant=True),
}
BLOCKS = ("blocks.0", "blocks.1")
PARTS = tuple(f"{block}.{part}" for block in BLOCKS for part in ("attention", "feed"))


def _checkpoint(model: nn.Module, _mesh: DeviceMesh | None, *, wrap: Wrap, names: tuple[str, ...]) -> None:
    for name in names:
        wrap(model, name)


def two_forwards(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> list[torch.Tensor]:
    """One backward through two forwards (upstream row T22)."""
    first, second = (loss_of(model(*args)) for args in batches)
    (first - second).square().backward()
    return [first.detach(), second.detach()]


def through_the_whole(
    model: nn.Module, batches: Sequence[Args], door: FrontDoor | None, *, reentrant: bool
) -> list[torch.Tensor]:
    """Checkpoint the call of the root itself, from outside."""
    losses = []
    witness = torch.ones(
        (), dtype=torch.float64, requires_grad=True
    )  # reentrant needs an input with a gradient

    def forward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(x)
        return output * scale

    for (x,) in batches:
        output = checkpoint(forward, x, witness, use_reentrant=reentrant)
        assert isinstance(output, torch.Tensor)
        loss = loss_of(output)
        loss.backward()
        losses.append(loss.detach())
    return losses


def _training(
    wrap: Wrap,
    names: tuple[str, ...],
    units: tuple[str | tuple[str, ...], ...],
    raf: bool | None = None,
    call: Call = "fully_shard",
    **own: bool,
) -> Training:
    options = {} if raf is None else {"reshard_after_forward": raf}
    return Training(
        model=TIED if own.get("tied") else TRANSFORMER,
        draw=tokens,
        plan=Plan(
            units=units,
            options=options,
            call=call,
            before=partial(_checkpoint, wrap=wrap, names=names),
        ),
        schedule=two_forwards if own.get("twice") else in_turn,
        num_microbatches=2 if own.get("twice") else 1,
        mesh=HYBRID if own.get("hybrid") else None,
    )


WIDE = (("token", "position"), "blocks.0", "blocks.1", ("norm", "head"), "")
TRAININGS: dict[str, Training] = {
    # T16, with R12: a unit is checkpointed, or holds what is, or is held by it
    **{
        f"{make}_{raf}": _training(wrap, BLOCKS, (*BLOCKS, ""), raf)
        for make, wrap in MAKES.items()
        for raf in (True, False)
    },
    **{f"{make}_inside": _training(wrap, PARTS, (*BLOCKS, "")) for make, wrap in MAKES.items()},
    **{f"{make}_around": _training(wrap, BLOCKS, (*PARTS, ""), True) for make, wrap in MAKES.items()},
    **{
        f"{make}_replicate": _training(wrap, BLOCKS, (*BLOCKS, ""), call="replicate")
        for make, wrap in MAKES.items()
    },
    "some_of_the_units": _training(MAKES["wrapper"], ("blocks.1",), WIDE, True),
    "groups_of_several": _training(MAKES["wrapper"], BLOCKS, WIDE, True),
    "two_blocks_in_a_unit": _training(MAKES["composable"], BLOCKS, (BLOCKS, "")),
    # T22
    "twice_composable": _training(MAKES["composable"], BLOCKS, (*PARTS, *BLOCKS, ""), True, twice=True),
    "twice_function": _training(MAKES["function"], BLOCKS, (*PARTS, *BLOCKS, ""), False, twice=True),
    # T26
    **{
        f"tied_{raf}": _training(MAKES["composable"], BLOCKS, (*BLOCKS, ""), raf, tied=True)
        for raf in (True, False)
    },
    "tied_in_a_group": _training(
        MAKES["composable"], BLOCKS, (("token", "head"), *BLOCKS, ""), True, tied=True
    ),
    "whole": Training(
        model=TRANSFORMER,
        draw=tokens,
        plan=Plan(units=(*BLOCKS, "")),
        schedule=partial(through_the_whole, reentrant=False),
    ),
    "whole_reentrant": Training(
        model=TRANSFORMER,
        draw=tokens,
        plan=Plan(units=(*BLOCKS, "")),
        schedule=partial(through_the_whole, reentrant=True),
    ),
    "accumulating": Training(
        model=partial(Transformer, blocks=2),
        draw=tokens,
        plan=Plan(
            units=(*BLOCKS, ""), before=partial(_checkpoint, wrap=MAKES["wrapper_reentrant"], names=BLOCKS)
        ),
        num_microbatches=3,
    ),
}
HYBRIDS = {
    make: _training(MAKES[make], BLOCKS, (*BLOCKS, ""), True, hybrid=True)
    for make in ("wrapper", "function_reentrant")
}


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS))
def test_recomputing_changes_no_number(name: str, door: str, tmp_path: Path) -> None:
    """Upstream rows T16, T22, T26, R12, R13."""
    run_world(WorldKind.THREADS, 2, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(HYBRIDS))
def test_nor_does_it_over_replicas_of_shards(name: str, door: str, tmp_path: Path) -> None:
    """Upstream row T35."""
    run_world(WorldKind.THREADS, 4, train_beside_oracle, door, HYBRIDS[name], folder=tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS, "wrapper_True", "function_reentrant_True"))
def test_nor_does_it_in_processes(name: str, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.PROCESSES, 2, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)
