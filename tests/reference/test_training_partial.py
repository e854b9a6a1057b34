"""A head that runs alone, chunk by chunk, after a forward that stopped before it; and a forward that raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind
from tests.reference.front_doors import BY_NAME, FrontDoor
from tests.reference.models import ChunkedHead, build
from tests.reference.oracle import (
    DOORS,
    Args,
    Group,
    Plan,
    Training,
    cases,
    loss_of,
    run_world,
    tokens,
    train_beside_oracle,
)
from tests.reference.test_training_checkpointing import MAKES

HEAD, TIED_HEAD = ("norm", "head"), ("embed", "norm", "head")
UNITS: dict[str, tuple[Group, ...]] = {
    "grouped": ("embed", "body", HEAD, ""),
    "tied": ("body", TIED_HEAD, ""),
    "ungrouped": ("embed", "body", "norm", "head", ""),
    "head_of_the_root": ("body", ""),
}
Before = Callable[[nn.Module, DeviceMesh | None], None]
HEAD_IS_A_UNIT = ("grouped", "tied", "ungrouped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """A schedule: trunk, then the head on chunks of its detached output, then the trunk's backward."""

    num_chunks: int = 3
    toggles: bool = False  # keep the head whole while it runs, then let it go (upstream row T20)
    syncs_last: bool = False  # reduce on the last microbatch alone (upstream row T19)

    def __call__(
        self, model: nn.Module, batches: Sequence[Args], door: FrontDoor | None
    ) -> list[torch.Tensor]:
        losses = []
        for i, args in enumerate(batches):
            if door is not None and self.syncs_last:
                root: Any = model  # Any: the engines share no base class
                root.set_requires_gradient_sync(i == len(batches) - 1)
                root.set_is_last_backward(i == len(batches) - 1)
            losses.append(self._one(model, args[0], door if self.toggles else None))
        return losses

    def _one(self, model: nn.Module, ids: torch.Tensor, door: FrontDoor | None) -> torch.Tensor:
        head: Any = model.get_submodule("head")  # Any: the engines share no base class
        trunk = model(ids)
        cut = trunk.detach().requires_grad_()
        if door is not None:
            _let_go(model, door, gone=False)
        total = torch.zeros((), dtype=torch.float64)
        for chunk in cut.chunk(self.num_chunks, dim=1):
            loss = loss_of(head(chunk))
            loss.backward()
            total += loss.detach()
            assert door is None or not _is_sharded(head)
        if door is not None:
            _let_go(model, door, gone=True)
            assert _is_sharded(head)
        assert cut.grad is not None
        trunk.backward(cut.grad)
        return total


def _let_go(model: nn.Module, door: FrontDoor, *, gone: bool) -> None:
    for name in ("embed", "norm", "head"):
        module: Any = model.get_submodule(name)  # Any: the engines share no base class
        if isinstance(module, door.sharded_module):
            module.set_reshard_after_forward(gone)
            module.set_reshard_after_backward(gone)
            if gone:
                module.reshard()


def _is_sharded(module: nn.Module) -> bool:
    return all(hasattr(parameter, "placements") for parameter in module.parameters())


def _checkpoint_body(model: nn.Module, _mesh: DeviceMesh | None) -> None:
    MAKES["composable"](model, "body")


def _training(units: str, raf: bool | int, schedule: Chunked, before: Before | None = None) -> Training:
    return Training(
        model=partial(ChunkedHead, tied=units == "tied"),
        draw=tokens,
        plan=Plan(units=UNITS[units], options={"reshard_after_forward": raf}, before=before),
        schedule=schedule,
        num_microbatches=3 if schedule.syncs_last else 1,
        num_steps=4,
    )


TRAININGS: dict[str, Training] = {
    # T17
    **{
        f"{units}_{raf}": _training(units, raf, Chunked())
        for units in HEAD_IS_A_UNIT
        for raf in (True, False)
    },
    "head_of_the_root": _training("head_of_the_root", False, Chunked()),  # whole from the root's forward on
    "checkpointed_body": _training("grouped", True, Chunked(), before=_checkpoint_body),
    "one_chunk": _training("grouped", True, Chunked(num_chunks=1)),
    # T19
    **{
        f"{units}_{raf}_accumulating": _training(units, raf, Chunked(num_chunks=2, syncs_last=True))
        for units in HEAD_IS_A_UNIT
        for raf in (True, False)
    },
    # T20
    **{
        f"{units}_{raf}_toggled": _training(units, raf, Chunked(toggles=True))
        for units in HEAD_IS_A_UNIT
        for raf in (True, False)
    },
}


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS))
def test_a_head_that_runs_alone_trains_alike(name: str, door: str, tmp_path: Path) -> None:
    """Upstream rows T17, T19, T20."""
    run_world(WorldKind.THREADS, 2, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS, "grouped_True", "tied_False_toggled"))
def test_and_in_processes(name: str, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.PROCESSES, 2, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)


class Refusing(nn.Module):
    """Raises when told to, in the middle of a forward or of a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.refuses = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.refuses == "forward":
            raise RuntimeError("as told")
        output: torch.Tensor = _Refuse.apply(self.linear(x), self.refuses)
        return output


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, when: str) -> torch.Tensor:  # Any: torch's own type is private
        ctx.when = when
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # Any: as above
        if ctx.when == "backward":
            raise RuntimeError("as told")
        return gradient, None


class RefusingHead(ChunkedHead):
    """The chunked head over a body that may refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Refusing()  # type: ignore[assignment] # in place of a linear


def _refuses_first(
    model: nn.Module, batches: Sequence[Args], door: FrontDoor | None, *, when: str
) -> list[torch.Tensor]:
    """Fail one iteration on all ranks and go on: what it did is forgotten."""
    body = model.get_submodule("body")
    if door is not None:
        assert isinstance(body, Refusing)
        body.refuses = when
        with pytest.raises(RuntimeError, match="as told"):
            loss_of(model(*batches[0], to_the_head=True)).backward()
        body.refuses = ""
        root: Any = model  # Any: the engines share no base class
        root.reset_iter_state()
        assert _is_sharded(model)
        root.zero_grad(set_to_none=True)
    return [_to_the_head(model, args) for args in batches]


def _to_the_head(model: nn.Module, args: Args) -> torch.Tensor:
    loss = loss_of(model(*args, to_the_head=True))
    loss.backward()
    return loss.detach()


RESETS = {
    f"{when}_{raf}": Training(
        model=RefusingHead,
        draw=tokens,
        plan=Plan(units=("body", HEAD, ""), options={"reshard_after_forward": raf}),
        schedule=partial(_refuses_first, when=when),
        num_steps=4,
    )
    for when in ("forward", "backward")
    for raf in (True, False)
}


@pytest.mark.parametrize(("name", "door"), cases(RESETS))
def test_a_reset_forgets_an_iteration_that_raised(name: str, door: str, tmp_path: Path) -> None:
    """Upstream row T21."""
    run_world(WorldKind.THREADS, 2, train_beside_oracle, door, RESETS[name], folder=tmp_path)


def _reset_inside(context: RankContext, door_name: str) -> None:
    model = Plan(units=("body", HEAD, "")).apply(BY_NAME[door_name], build(RefusingHead), None)
    inner: Any = model.get_submodule("body")  # Any: the engines share no base class
    model(torch.zeros(1, 2, dtype=torch.int64), to_the_head=True)
    with pytest.raises(RuntimeError):
        inner.reset_iter_state()


@pytest.mark.parametrize("door", DOORS)
def test_a_reset_is_the_roots(door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, 2, _reset_inside, door, folder=tmp_path)
