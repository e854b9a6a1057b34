"""What a training must come to: a plain model that sees every rank's data, no communication, beside an engine.

Every rank runs the whole oracle: it draws the data of all ranks, adds their gradients up and divides. Then raw
gradients, losses, parameters and buffers are compared on every rank, shard by shard.
"""

from __future__ import annotations

import atexit
import copy
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from harness.worlds.launch import WorldPool, launch
from harness.worlds.outcome import Returned, WorldResult
from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind, WorldSpec
from tests.reference.front_doors import BY_NAME, REFERENCE, FrontDoor
from tests.reference.models import LENGTH, VOCABULARY, Builder, build, tensors_of
from tests.values import keep_value, kept_values

DOORS = sorted(BY_NAME)
# Float64: what is left is the order of summation, over fewer than a thousand terms of about one.
RTOL, ATOL = 1e-9, 1e-12
LEARNING_RATE = 0.125
WRAPPER_PREFIX = "_checkpoint_wrapped_module."

Args = tuple[Any, ...]  # of one forward: tensors and plain values
Draw = Callable[[torch.Generator, int], Args]  # from a generator and the rank
# One iteration: forwards and backwards of all microbatches, on the engine's model (with its door) or a plain one.
Schedule = Callable[[nn.Module, Sequence[Args], FrontDoor | None], list[torch.Tensor]]
Touch = Callable[[FrontDoor, nn.Module], None]
Group = str | tuple[str, ...]  # one module, or several that make one unit; "" is the root


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How an engine is laid over a model. ``options`` go to every call, ``own`` adds some for one group."""

    units: tuple[Group, ...] = ("",)
    call: Literal["fully_shard", "replicate"] = "fully_shard"
    options: Mapping[str, Any] = field(default_factory=dict)  # Any: an engine's keyword arguments
    own: Mapping[Group, Mapping[str, Any]] = field(default_factory=dict)  # Any: the same
    precision: Mapping[str, Any] | None = None  # Any: the fields of the engine's MixedPrecisionPolicy
    offload: bool = False
    before: Callable[[nn.Module, DeviceMesh | None], None] | None = None
    after: Touch | None = None

    def apply(self, door: FrontDoor, model: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
        """Lay the engine over ``model``, in place."""
        if self.before is not None:
            self.before(model, mesh)
        options = dict(self.options)
        if mesh is not None:
            options["mesh"] = _data_mesh(mesh)
        if self.precision is not None:
            options["mp_policy"] = door.mixed_precision(**self.precision)
        if self.offload:
            options["offload_policy"] = door.cpu_offload(pin_memory=False)
        engage = getattr(door, self.call)
        for unit in self.units:
            names = (unit,) if isinstance(unit, str) else unit
            modules = [model.get_submodule(name) for name in names]
            engage(modules[0] if isinstance(unit, str) else modules, **options, **self.own.get(unit, {}))
        if self.after is not None:
            self.after(door, model)
        return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A mesh to lay a world out as; ``tp`` is the name of an axis that holds no data of its own."""

    shape: tuple[int, ...]
    names: tuple[str, ...]


HYBRID = Mesh(shape=(2, 2), names=("replicate", "shard"))


def loss_of(output: object) -> torch.Tensor:
    """Weigh all tensors of an output differently, so that no two may be mistaken for each other."""
    parts = [
        t.double().square().mean() * (i + 1) + t.double().mean() for i, t in enumerate(tensors_of(output))
    ]
    return torch.stack(parts).sum()


def in_turn(model: nn.Module, batches: Sequence[Args], door: FrontDoor | None) -> list[torch.Tensor]:
    """Forward and backward of one microbatch after the other, each reduced."""
    losses = []
    for args in batches:
        loss = loss_of(model(*args)) / len(batches)
        loss.backward()
        losses.append(loss.detach())
    return losses


class Stepping(Protocol):
    """An optimizer."""

    def step(self) -> Any: ...  # Any: torch's returns what a closure returned

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class Momentum:
    """SGD with momentum: unlike Adam it hides no wrong scale, and it remembers every gradient.

    It works on the shards themselves. What torch's optimizers do with DTensors is for a few scenarios of its own to
    show: on every thread of every world DTensor would plan each operator anew, which takes most of a training's time.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._velocities: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        for i, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                velocity = self._velocities.get(i, torch.zeros_like(gradient))
                self._velocities[i] = velocity * 0.9 + gradient
                local(parameter).sub_(self._velocities[i], alpha=LEARNING_RATE)

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                local(parameter.grad).zero_()


@dataclass(frozen=True, slots=True)
class rows:  # noqa: N801 - read aloud: draw=rows(5)
    """Draw normal rows; where it ``grows``, each rank has one more than the rank before."""

    width: int
    count: int = 3
    grows: bool = False

    def __call__(self, generator: torch.Generator, rank: int) -> Args:
        num_rows = self.count + rank if self.grows else self.count
        return (torch.randn(num_rows, self.width, generator=generator, dtype=torch.float64),)


def tokens(generator: torch.Generator, rank: int) -> Args:
    """Draw two sequences that never use the last row of the vocabulary."""
    return (torch.randint(0, VOCABULARY - 1, (2, LENGTH), generator=generator),)


def images(generator: torch.Generator, rank: int) -> Args:
    """Draw two small images of two channels."""
    return (torch.randn(2, 2, 6, 6, generator=generator, dtype=torch.float64),)


def nothing(generator: torch.Generator, rank: int) -> Args:
    """Give a forward no argument."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One scenario: model, plan, schedule and data, and what of it is known to stay without a gradient."""

    model: Builder
    plan: Plan = field(default_factory=Plan)
    draw: Draw = rows(5)
    schedule: Schedule = in_turn
    then: tuple[Schedule, ...] = ()  # what follows in the next iterations, before it begins anew
    mesh: Mesh | None = None
    num_microbatches: int = 1
    num_steps: int = 3
    idle: tuple[str, ...] = ()  # prefixes of parameters that never get a gradient
    zeroed: bool = False  # an idle parameter may have a gradient of zeros instead of none
    optimizer: Callable[[Iterable[torch.Tensor]], Stepping] = Momentum
    torch_fails: str = ""  # what torch 2.13 does wrong here, which leaves the scenario to the reference alone

    def schedule_of(self, step: int) -> Schedule:
        """Pick the schedule of one iteration."""
        schedules = (self.schedule, *self.then)
        return schedules[step % len(schedules)]


def cases(table: Mapping[str, Training], *names: str) -> list[ParameterSet]:
    """Give the parameters ``name, door`` of all scenarios, or of some, on every door that is to pass them."""
    return [case for name in names or table for case in on_doors(name, name, table[name].torch_fails)]


def on_doors(value: object, case_id: str, torch_fails: str) -> list[ParameterSet]:
    """Give the parameters ``value, door`` on every door, but for torch's where it is known to fail."""
    return [
        pytest.param(value, door, id=f"{case_id}-{door}")
        for door in DOORS
        if door == REFERENCE.name or not torch_fails
    ]


def run_world(
    kind: WorldKind, size: int, body: Callable[..., Any], *args: object, folder: Path
) -> list[Any]:  # Any: the body decides
    """Run ``body`` on every rank; fails with every rank's outcome unless all returned. Returns their values.

    A world of threads is kept for the next case until one fails in it: starting one and warming DTensor up costs
    more than most cases do.
    """
    __tracebackhide__ = True
    spec = WorldSpec(kind=kind, size=size, deadline_s=60)
    if kind is WorldKind.THREADS:
        result = _KEPT.run(spec, keep_value, body, *args, folder=folder)
    else:
        result = launch(spec, keep_value, body, *args, folder=folder)
    failures = [
        getattr(o, "traceback", None) or str(o) for o in result.outcomes if not isinstance(o, Returned)
    ]
    assert not failures, "\n".join(failures)
    assert result.is_clean, result.leaks
    return kept_values(folder, size)


class _KeptWorlds:
    """The pool of this process's tests: of a few specs only, so that it stays small."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kept-worlds-")
        self._pools: dict[WorldSpec, WorldPool] = {}
        atexit.register(self.close)

    def run(self, spec: WorldSpec, body: Callable[..., Any], *args: object, folder: Path) -> WorldResult:
        if spec not in self._pools:
            self._close_all_but(1)
            self._pools[spec] = WorldPool(Path(self._folder.name) / str(spec))
        return self._pools[spec].run(spec, body, *args, folder=folder)

    def close(self) -> None:
        self._close_all_but(0)
        self._folder.cleanup()

    def _close_all_but(self, num_kept: int) -> None:
        while len(self._pools) > num_kept:
            self._pools.pop(next(iter(self._pools))).close()


_KEPT = _KeptWorlds()


def train_beside_oracle(context: RankContext, door_name: str, training: Training) -> list[float]:
    """Train an engine and the oracle, compare after every backward and every step; returns the losses of this rank."""
    door = BY_NAME[door_name]
    plain = build(training.model)
    mesh = laid_out(training.mesh)
    model = training.plan.apply(door, copy.deepcopy(plain), mesh)
    place, num_places = _data_place(mesh, context)
    oracle = Oracle(plain, num_places, training)
    initial = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    optimizer = training.optimizer(model.parameters())
    losses: list[float] = []
    for step in range(training.num_steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        data = microbatches(training, step, place)
        mine = training.schedule_of(step)(model, data, door)
        expected = oracle.learn(step)[place]
        torch.testing.assert_close(mine, expected, rtol=RTOL, atol=ATOL)
        compare_gradients(model, plain, zeroed=training.zeroed)
        oracle.refuse_vacuity(step)
        optimizer.step()
        oracle.optimizer.step()
        compare_parameters(model, plain)
        losses.extend(float(loss.sum()) for loss in mine)
    oracle.compare_buffers(model, place)
    for name, parameter in plain.named_parameters():
        is_idle = name.startswith(training.idle or ("?",)) and not training.then
        moves = parameter.requires_grad and parameter.numel() and not is_idle
        assert torch.equal(parameter, initial[name]) != bool(moves), f"{name} moved: {not moves}"
    return losses


class Oracle:
    """A plain model that learns from every rank's data; each rank's buffers are kept apart."""

    def __init__(self, model: nn.Module, num_places: int, training: Training) -> None:
        self.model = model
        self.num_places = num_places
        self.training = training
        self.optimizer = training.optimizer(model.parameters())
        self._buffers = [[b.clone() for b in model.buffers()] for _ in range(num_places)]

    def learn(self, step: int) -> list[list[torch.Tensor]]:
        """Run one iteration on every place's data, leaving the mean gradient; returns the losses by place."""
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses = []
        for place in range(self.num_places):
            self._swap_in(place)
            losses.append(
                self.training.schedule_of(step)(self.model, microbatches(self.training, step, place), None)
            )
            self._buffers[place] = [b.clone() for b in self.model.buffers()]
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.num_places)
        return losses

    def refuse_vacuity(self, step: int) -> None:
        """Raise where a gradient that the scenario is about is absent or zero."""
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad or not parameter.numel():
                continue
            if step and self.training.then:
                continue  # the idle ones are those of the first schedule
            has_one = parameter.grad is not None and bool(parameter.grad.abs().max() > 0)
            assert has_one != name.startswith(self.training.idle or ("?",)), f"{name}: gradient {has_one}"

    def compare_buffers(self, model: nn.Module, place: int) -> None:
        """Demand this place's buffers, to the bit up to summation."""
        names = [plain_name(name) for name, _ in model.named_buffers()]
        assert names == [name for name, _ in self.model.named_buffers()]
        torch.testing.assert_close(
            [b for _, b in model.named_buffers()], self._buffers[place], rtol=RTOL, atol=ATOL
        )

    def _swap_in(self, place: int) -> None:
        for buffer, kept in zip(self.model.buffers(), self._buffers[place], strict=True):
            buffer.copy_(kept)


def microbatches(training: Training, step: int, place: int) -> list[Args]:
    """Draw what one place sees in one step."""
    return [
        training.draw(
            torch.Generator().manual_seed(1_000_003 * step + 10_007 * microbatch + 101 * place + 7), place
        )
        for microbatch in range(training.num_microbatches)
    ]


def compare_gradients(
    model: nn.Module, plain: nn.Module, *, zeroed: bool = False, atol: float = ATOL
) -> None:
    """Demand of every parameter's gradient that its shard is that of the plain one, or that both are absent."""
    for name, actual, expected in _paired(model, plain):
        if not actual.requires_grad:
            assert actual.grad is None, name
        elif expected.grad is None:
            assert actual.grad is None or (zeroed and not local(actual.grad).any()), f"{name} has a gradient"
        else:
            assert actual.grad is not None, f"{name} has no gradient"
            _close(actual.grad, expected.grad, f"gradient of {name}", actual, atol)


def compare_parameters(model: nn.Module, plain: nn.Module) -> None:
    """Demand of every parameter that its shard is that of the plain one."""
    for name, actual, expected in _paired(model, plain):
        _close(actual, expected, name, actual, ATOL)


def shard_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Cut the part that this rank holds of ``whole``, by hand; inner mesh axes (tensor parallel) cut first."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[axis]
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined] # Shard and _StridedShard have one
        chunks = whole.chunk(like.device_mesh.size(axis), dim)
        has_rows = coordinate[axis] < len(chunks)
        whole = chunks[coordinate[axis]] if has_rows else whole.narrow(dim, 0, 0)
    return whole


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Give what this rank holds, in place; without a graph."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_name(name: str) -> str:
    """Spell a parameter's name as it was before checkpoint wrappers."""
    return name.replace(WRAPPER_PREFIX, "")


def laid_out(mesh: Mesh | None) -> DeviceMesh | None:
    """Make the device mesh, if any."""
    return None if mesh is None else init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    return mesh[names]


def _data_place(mesh: DeviceMesh | None, context: RankContext) -> tuple[int, int]:
    """Say which part of the data this rank sees, of how many: ranks that differ in ``tp`` alone see the same."""
    if mesh is None:
        return context.rank, context.size
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    place, num_places = 0, 1
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name != "tp":
            place = place * mesh.size(axis) + coordinate[axis]
            num_places *= mesh.size(axis)
    return place, num_places


def _paired(model: nn.Module, plain: nn.Module) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
    mine = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
    theirs = dict(plain.named_parameters())
    assert [name for name, _ in mine] == list(theirs), "names or their order changed"
    return [(name, parameter, theirs[name]) for name, parameter in mine]


def _close(actual: torch.Tensor, whole: torch.Tensor, what: str, owner: torch.Tensor, atol: float) -> None:
    assert isinstance(actual, DTensor), f"{what} is a {type(actual).__name__}"
    assert isinstance(owner, DTensor)
    assert actual.placements == owner.placements, f"{what}: {actual.placements}, not {owner.placements}"
    assert actual.shape == whole.shape, f"{what}: {actual.shape}, not {whole.shape}"
    mine, wanted = local(actual), shard_of(whole.detach(), actual)
    torch.testing.assert_close(
        mine, wanted, rtol=RTOL, atol=atol, check_dtype=True, msg=lambda text: f"{what}: {text}"
    )
