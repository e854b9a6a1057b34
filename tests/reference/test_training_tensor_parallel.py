"""Data parallelism over parameters that tensor parallelism has already cut: two and three axes, one mesh."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind
from tests.reference.front_doors import BY_NAME
from tests.reference.models import build, stack
from tests.reference.oracle import (
    DOORS,
    Mesh,
    Plan,
    Training,
    cases,
    laid_out,
    rows,
    run_world,
    train_beside_oracle,
)
from tests.reference.test_training_accumulation import Accumulate
from tests.reference.test_training_checkpointing import MAKES

FLAT = Mesh(shape=(2, 2), names=("dp", "tp"))
REPLICAS = Mesh(shape=(2, 2), names=("replicate", "tp"))
DEEP = Mesh(shape=(2, 2, 2), names=("replicate", "shard", "tp"))
NUM_PAIRS = 3
UNITS = (*(str(i) for i in range(NUM_PAIRS)), "")


def _cut(model: nn.Module, mesh: DeviceMesh | None, *, checkpoint: str = "", pairs: int = NUM_PAIRS) -> None:
    """Cut the first ``pairs`` by columns, then rows; the rest stays whole on every rank of the axis."""
    assert mesh is not None
    for i in range(pairs):
        # What lies between stays a DTensor: its local part would not tell an uneven cut from an even one.
        columns = ColwiseParallel(use_local_output=False)
        parallelize_module(model, mesh["tp"], {f"{i}.inward": columns, f"{i}.outward": RowwiseParallel()})
    if checkpoint:
        for i in range(1, NUM_PAIRS):  # the input of the first needs no gradient, and reentrance wants one
            MAKES[checkpoint](model, str(i))


def _training(
    mesh: Mesh,
    width: int,
    *,
    raf: bool | None = None,
    checkpoint: str = "",
    call: Literal["fully_shard", "replicate"] = "fully_shard",
    units: tuple[str, ...] = UNITS,
) -> Training:
    return Training(
        model=partial(stack, width),
        draw=rows(width),
        mesh=mesh,
        plan=Plan(
            units=units,
            call=call,
            options={} if raf is None else {"reshard_after_forward": raf},
            before=partial(_cut, checkpoint=checkpoint),
        ),
    )


TRAININGS: dict[str, Training] = {
    # T32
    **{f"width_{width}": _training(FLAT, width) for width in (3, 5, 16, 17)},
    **{f"reshard_{raf}": _training(FLAT, 16, raf=raf) for raf in (True, False)},
    "checkpointed": _training(FLAT, 5, checkpoint="composable"),
    "checkpointed_reentrant": _training(FLAT, 5, checkpoint="function_reentrant"),
    "single_unit": _training(FLAT, 5, units=("",)),
    "one_data_rank": _training(Mesh(shape=(1, 4), names=("dp", "tp")), 5),
    "one_tensor_rank": _training(Mesh(shape=(4, 1), names=("dp", "tp")), 5),
    "accumulating": Training(
        model=partial(stack, 5),
        mesh=FLAT,
        plan=Plan(units=UNITS, before=_cut),
        schedule=Accumulate(),
        num_microbatches=3,
    ),
    # R17
    **{f"replicas_{width}": _training(REPLICAS, width, call="replicate") for width in (3, 16, 17)},
    "replicas_checkpointed": _training(REPLICAS, 5, call="replicate", checkpoint="composable"),
}
# T34
DEEPER: dict[str, Training] = {
    **{f"width_{width}": _training(DEEP, width) for width in (3, 16, 17)},
    "reshard": _training(DEEP, 5, raf=True, checkpoint="composable"),
    "all_reduce_last": Training(
        model=partial(stack, 5),
        mesh=DEEP,
        plan=Plan(units=UNITS, before=_cut),
        schedule=Accumulate(all_reduce_only=True),
        num_microbatches=3,
    ),
}


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS))
def test_two_axes_train_as_one_model(name: str, door: str, tmp_path: Path) -> None:
    """Upstream rows T32, R17."""
    run_world(WorldKind.THREADS, 4, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(DEEPER))
def test_three_axes_train_as_one_model(name: str, door: str, tmp_path: Path) -> None:
    """Upstream row T34."""
    run_world(WorldKind.THREADS, 8, train_beside_oracle, door, DEEPER[name], folder=tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS, "width_5", "replicas_16"))
def test_and_in_processes(name: str, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.PROCESSES, 4, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)


def _lies_on(context: RankContext, door_name: str, mesh: Mesh) -> None:
    device_mesh = laid_out(mesh)
    plain = build(partial(stack, 16))
    whole = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    plan = Plan(units=UNITS, before=_cut, call="replicate" if mesh == REPLICAS else "fully_shard")
    model = plan.apply(BY_NAME[door_name], plain, device_mesh)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.device_mesh.mesh_dim_names == mesh.names
        assert len(parameter.placements) == len(mesh.shape)
        assert parameter.full_tensor().equal(whole[name]), name


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("mesh", [FLAT, REPLICAS, DEEP], ids=lambda mesh: "_".join(mesh.names))
def test_parameters_lie_on_the_whole_mesh(mesh: Mesh, door: str, tmp_path: Path) -> None:
    size = 8 if mesh == DEEP else 4
    run_world(WorldKind.THREADS, size, _lies_on, door, mesh, folder=tmp_path)
