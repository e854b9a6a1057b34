"""Watching an engine from outside: a chain whose units tell themselves apart on the wire, and what a rank saw of it.

Each unit owns a different number of parameters, so a gather or a reduce-scatter names its unit by its bytes. No
expectation about any engine lives here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from harness.tracing.ledger import Entry, Ledger, Op, Phase
from harness.worlds.launch import launch
from harness.worlds.outcome import Raised, Returned
from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind, WorldSpec
from tests.reference.front_doors import BY_NAME, FrontDoor
from tests.values import keep_value, kept_values

Row = TypeVar("Row")
Value = TypeVar("Value")

WIDTH = 8
ROOT = -1  # the index under which the root's own parameter travels
DOORS = sorted(BY_NAME)

both_doors = pytest.mark.parametrize("door", DOORS)


def doors_with(method: str) -> pytest.MarkDecorator:
    """Parametrise over both doors; one whose sharded modules leave ``method`` out is shown as skipped."""
    return pytest.mark.parametrize(
        "door",
        [
            pytest.param(
                door,
                marks=pytest.mark.skipif(
                    not hasattr(BY_NAME[door].sharded_module, method), reason=f"{door} leaves {method} out"
                ),
            )
            for door in DOORS
        ],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment of compute: F or B of unit ``index``, after ``seq`` collectives, with those then ``whole``."""

    kind: str
    index: int
    seq: int
    phase: Phase
    step: int
    whole: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank saw: its collectives, its moments of compute, and who was left whole at the end."""

    entries: Ledger
    marks: tuple[Mark, ...]
    left_whole: frozenset[int]


class Unit(nn.Module):
    """A square weight and a vector whose length depends on ``index``; tells ``watch`` when it computes."""

    def __init__(self, index: int, watch: Watch | None = None) -> None:
        super().__init__()
        self.index = index
        self.watch = watch
        self.weight = nn.Parameter(torch.eye(WIDTH) / 2)
        self.extra = nn.Parameter(torch.ones(4 * (index + 1)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute something whose backward needs the weight."""
        watch, index = self.watch, self.index
        if watch is not None:
            watch.mark("F", index)
        hidden = inputs @ self.weight + self.extra.sum()
        if watch is not None and hidden.requires_grad:
            hidden.register_hook(lambda _: watch.mark("B", index))
        return hidden * 1.0  # a tensor of its own: engines hook the output, we the sum before it


class Chain(nn.Module):
    """Units one after the other, and a vector that the root owns."""

    def __init__(self, num_units: int = 3, watch: Watch | None = None) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(i, watch) for i in range(num_units))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run all units."""
        for unit in self.units:
            inputs = unit(inputs)
        return inputs * self.scale


class Watch:
    """Runs and watches one rank's training of a chain."""

    def __init__(self, context: RankContext, num_units: int = 3) -> None:
        self.context = context
        self.chain = Chain(num_units, self)
        self._marks: list[Mark] = []
        self._phase, self._step = Phase.PREPARE, -1
        self._first = len(context.recorder.ledger())

    def forward(
        self, inputs: torch.Tensor | None = None, *, step: int = 0, microbatch: int = 0
    ) -> torch.Tensor:
        """Run a labelled forward, on this rank's own inputs unless others are given."""
        self._phase, self._step = Phase.FORWARD, step
        with self.context.recorder.during(self._phase, step=step, microbatch=microbatch):
            given = inputs_of(self.context.rank) if inputs is None else inputs
            output: torch.Tensor = self.chain(given)
        return output

    def backward(self, loss: torch.Tensor, *, step: int = 0, microbatch: int = 0, **options: Any) -> None:
        """Run a labelled backward from the sum of a tensor."""
        self._phase, self._step = Phase.BACKWARD, step
        with self.context.recorder.during(self._phase, step=step, microbatch=microbatch):
            loss.sum().backward(**options)

    def train(self, *, step: int = 0, microbatch: int = 0) -> None:
        """Run a labelled forward and backward."""
        self.backward(self.forward(step=step, microbatch=microbatch), step=step, microbatch=microbatch)

    def mark(self, kind: str, index: int) -> None:
        """Note a moment of compute."""
        seq = len(self.context.recorder.ledger())
        whole, phase, step = self.whole(), self._phase, self._step
        self._marks.append(Mark(kind=kind, index=index, seq=seq, phase=phase, step=step, whole=whole))

    def whole(self) -> frozenset[int]:
        """Name the units whose parameters are registered as plain tensors now."""
        owners: list[tuple[int, nn.Module]] = [(ROOT, self.chain), *enumerate(self.chain.units)]
        return frozenset(index for index, owner in owners if is_whole(owner))

    def seen(self) -> Seen:
        """Give all that was seen."""
        entries = self.context.recorder.ledger()[self._first :]
        return Seen(entries=entries, marks=tuple(self._marks), left_whole=self.whole())


def is_whole(module: nn.Module) -> bool:
    """Tell whether a module's own parameters are registered as plain tensors."""
    kinds = {isinstance(param, DTensor) for param in module.parameters(recurse=False)}
    assert len(kinds) == 1, f"{type(module).__name__} has parameters of both kinds, or none"
    return kinds == {False}


def shard_chain(door: FrontDoor, model: Chain, **options: Any) -> Any:
    """Shard each unit, then the root; Any because the engines share no base class."""
    for unit in model.units:
        door.fully_shard(unit, **options)
    return door.fully_shard(model, **options)


def replicate_chain(door: FrontDoor, model: Chain, **options: Any) -> Any:
    """Replicate each unit, then the root."""
    for unit in model.units:
        door.replicate(unit, **options)
    return door.replicate(model, **options)


def hybrid_mesh(replicate: int, shard: int) -> DeviceMesh:
    """Make a mesh of replicas of shards."""
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def inputs_of(rank: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Give small whole numbers that differ over ranks, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-2, 3, (2, WIDTH), generator=generator).to(dtype)


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Gather the gradients by name; a collective call where they are sharded."""
    return {name: _full(param.grad) for name, param in model.named_parameters()}


def plain_gradients(size: int, num_units: int = 3, microbatches: int = 1) -> dict[str, torch.Tensor]:
    """Give the averages over ranks of a chain's gradients, computed by one process with no engine."""
    model = Chain(num_units)
    for rank in range(size):
        for _ in range(microbatches):
            (model(inputs_of(rank)).sum() / size).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def assert_gradients(model: nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    """Check every gradient of a model in full, absences included."""
    gradients = {name: grad for name, grad in full_gradients(model).items() if grad is not None}
    assert sorted(gradients) == sorted(expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close({name: gradient}, {name: expected[name]})  # the error names the key


def _full(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def run(
    folder: Path,
    size: int,
    body: Callable[..., Any],
    *args: Any,
    kind: WorldKind = WorldKind.THREADS,
) -> list[Any]:
    """Run a body in a fresh world; every rank must return. Gives what the ranks returned, in rank order."""
    __tracebackhide__ = True
    result = launch(WorldSpec(kind=kind, size=size, deadline_s=40), keep_value, body, *args, folder=folder)
    for outcome in result.outcomes:
        if isinstance(outcome, Raised):
            pytest.fail(f"rank {outcome.rank}: {outcome.kind}: {outcome.message}\n{outcome.traceback}")
    assert all(isinstance(o, Returned) for o in result.outcomes), result.outcomes
    assert result.leaks == ()
    return kept_values(folder, size)


def each(rows: Iterable[Row], observe: Callable[[Row], Value]) -> dict[Row, Value | str]:
    """Observe row after row of a table in one world; a row that raises on every rank is told by its error."""
    observed: dict[Row, Value | str] = {}
    for row in rows:
        try:
            observed[row] = observe(row)
        except Exception as error:
            observed[row] = f"{type(error).__name__}: {error}"
    return observed


def same_on_all(values: Sequence[Any]) -> Any:
    """Give what all ranks returned, which must be the same."""
    __tracebackhide__ = True
    for rank, value in enumerate(values):
        assert value == values[0], f"rank {rank} saw {value}, rank 0 {values[0]}"
    return values[0]


def count(entries: Iterable[Entry], phase: Phase | None = None) -> dict[Op, int]:
    """Count collectives by kind, in one phase or in all but PREPARE."""
    return dict(
        Counter(e.op for e in entries if (e.phase is phase if phase else e.phase is not Phase.PREPARE))
    )


def padded_numel(shapes: Iterable[Sequence[int]], size: int) -> int:
    """Give the elements that a gather of tensors sharded on dim 0 moves: rows padded to a multiple of ``size``."""
    return sum(-(-shape[0] // size) * size * torch.Size(shape[1:]).numel() for shape in shapes)


def unit_of(entry: Entry, size: int, itemsize: int = 4) -> int:
    """Name the unit that a collective over ``size`` shards serves, by its bytes."""
    bytes_of = {index: itemsize * padded_numel(shapes_of(index), size) for index in range(ROOT, 8)}
    (index,) = (i for i, num_bytes in bytes_of.items() if num_bytes == entry.num_bytes)
    return index


def story(seen: Seen, size: int, phase: Phase, step: int = 0) -> list[str]:
    """Tell a phase of a step as words in order: G2 a gather of unit 2, R2 its reduction, F2 and B2 its compute."""
    letters = {Op.ALL_GATHER: "G", Op.REDUCE_SCATTER: "R", Op.ALL_REDUCE: "A"}
    # A mark made after n collectives comes before the collective numbered n.
    words = [(m.seq, 0, f"{m.kind}{m.index}") for m in seen.marks if (m.phase, m.step) == (phase, step)]
    words += [
        (e.seq, 1, f"{letters[e.op]}{unit_of(e, size)}")
        for e in seen.entries
        if (e.phase, e.step) == (phase, step)
    ]
    return [word for _, _, word in sorted(words, key=lambda w: w[:2])]


def shapes_of(index: int) -> tuple[tuple[int, ...], ...]:
    """Give the shapes of a unit's parameters, or of the root's own."""
    return ((WIDTH,),) if index == ROOT else ((WIDTH, WIDTH), (4 * (index + 1),))
