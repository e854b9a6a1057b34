"""Reports to the recorder which unit's forward or backward is running, by public hooks that change nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shardproof.engine.contract import Plan, Roots, UnitHandle
from shardproof.harness.torch_compat.tensor_trees import tensors_in
from shardproof.harness.tracing.events import EventKind
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.recorder import Recorder


@contextmanager
def watching_units(model: nn.Module, units: tuple[str, ...], recorder: Recorder) -> Iterator[None]:
    """Hook the named submodules, and the root as ``""``, until exit.

    Hooks that are registered first mark the beginning of a unit's turn: an engine that gathers the unit in its own
    hooks does so inside the turn. Hooks that are registered last mark the start of computation, after the engine's
    hooks. Units that the engine renamed are left out; their traffic is attributed to the unit around them.
    """
    handles = []
    known = dict(model.named_modules())
    turns, results = _LatestOutput(), _LatestOutput()
    for unit in ("", *(name for joint in units for name in joint.split(","))):
        if (module := known.get(unit)) is not None:
            hooks = _Hooks(unit, recorder, turns, results)
            handles.append(module.register_forward_pre_hook(hooks.enter, prepend=True))
            handles.append(module.register_forward_pre_hook(hooks.compute))
            handles.append(module.register_forward_hook(hooks.leave, prepend=True))
            handles.append(module.register_forward_hook(hooks.left))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watching_states(units: Mapping[str, UnitHandle], recorder: Recorder) -> Iterator[None]:
    """Record when a unit is first seen unsharded or sharded again: before each call, and at each change of turn."""
    seen = {name: unit.is_unsharded() for name, unit in units.items()}

    def look() -> None:
        for name, unit in units.items():
            if (is_whole := unit.is_unsharded()) is not seen[name]:
                seen[name] = is_whole
                recorder.note(EventKind.UNSHARDED if is_whole else EventKind.RESHARDED, name)

    with recorder.watched_by(look):
        yield


def unit_of(name: str, plan: Plan) -> str:
    """Return the unit of a parameter: the first that contains it, because the plan lists inner units first."""
    units = (unit for unit in plan.units if any(name.startswith(f"{part}.") for part in unit.split(",")))
    return next(units, "")


class ComputeDtypes:
    """The dtypes in which units began to compute: of their own parameters as their modules show them, or autocast's.

    And those of the numbers that they were given, where the plan has them cast: from these a unit without parameters,
    as a root may be, computes too.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, torch.dtype]] = set()

    def take(self) -> list[tuple[str, torch.dtype]]:
        """Return the units with their dtypes since the last call."""
        seen, self._seen = self._seen, set()
        return sorted(seen, key=str)

    @contextmanager
    def watching(self, model: nn.Module, plan: Plan) -> Iterator[None]:
        """Look at each unit's inputs and parameters, but ignored ones, once the engine's hooks are through, until exit.

        Where the engine renamed a unit, none is looked at: its parameters would be taken for those of the root.
        """
        known = dict(model.named_modules())
        parts = {part: unit for unit in ("", *plan.units) for part in unit.split(",")}
        own: dict[str, list[tuple[nn.Module, str]]] = {unit: [] for unit in parts.values()}
        for name, _ in model.named_parameters():
            path, _, attribute = name.rpartition(".")
            if name not in plan.ignored:
                own[unit_of(name, plan)].append((known[path], attribute))

        uncast = {of_unit.unit for of_unit in plan.unit_dtypes if not of_unit.casts_inputs}
        uncast |= {""} if plan.roots is Roots.EACH_UNIT else set()  # the model around them is nobody's

        def look(unit: str, _: nn.Module, *inputs: Any) -> None:
            # Not by `getattr`, which may compute: FSDP1 (2.13) shows plain attributes while a unit is gathered.
            tensors = [module._parameters.get(name, module.__dict__.get(name)) for module, name in own[unit]]
            for tensor in (*tensors, *(() if unit in uncast else tensors_in(inputs))):
                if tensor is not None and tensor.is_floating_point():
                    kind = tensor.device.type
                    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
                    self._seen.add((unit, cast))

        handles = [
            known[part].register_forward_pre_hook(partial(look, unit), with_kwargs=True)
            for part, unit in (parts.items() if known.keys() >= parts.keys() else ())
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _LatestOutput:
    """The tensor that a unit returned last. Where a unit and the unit around it return the same tensor, backward
    reaches the inner unit."""

    def __init__(self) -> None:
        self._tensor: weakref.ref[torch.Tensor] | None = None

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Return whether no unit has just returned this tensor, and store it."""
        known = self._tensor is not None and self._tensor() is tensor
        self._tensor = weakref.ref(tensor)
        return not known


class _Hooks:
    """The hooks of one unit: on its module in forward, and on the gradients of its inputs and outputs."""

    def __init__(self, unit: str, recorder: Recorder, turns: _LatestOutput, results: _LatestOutput) -> None:
        self._unit = unit
        self._recorder = recorder
        self._turns = turns
        self._results = results

    # Any, here and below: a module takes and returns any type.
    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._recorder.enter_unit(self._unit)

    def compute(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Record that forward begins; hook its inputs' gradients to record the end of backward."""
        self._recorder.mark(EventKind.COMPUTES, self._unit)
        if self._recorder.phase is Phase.BACKWARD:
            return  # a recomputed forward: the hooks were registered the first time
        given = (t.grad_fn for t in tensors_in(inputs) if t.requires_grad)
        # An engine that watches inputs inserts one node of its own before them all; this hook comes before that node.
        if (node := next((n for n in given if n is not None), None)) is not None:
            node.register_prehook(self._marks(EventKind.BACKWARD_ENDED))

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """End the turn, and hook the outputs' gradients to record that backward reaches the unit."""
        self._recorder.leave_unit(self._unit)
        for tensor in tensors_in(output):
            if tensor.requires_grad and self._turns.is_new(tensor):
                tensor.register_hook(self._arrive)  # type: ignore[no-untyped-call]  # untyped in torch

    def left(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Hook the gradients of the output, as the engine returns it, to record when backward begins."""
        self._recorder.look()
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None and self._results.is_new(tensor):
                # Hooks of a node run after those of its tensors, where engines gather.
                tensor.grad_fn.register_prehook(self._marks(EventKind.BACKWARD_STARTED))

    def _arrive(self, gradient: torch.Tensor) -> None:
        self._recorder.enter_unit_backward(self._unit)

    def _marks(self, what: EventKind) -> Callable[..., None]:
        def mark(*_: Any) -> None:
            self._recorder.mark(what, self._unit)

        return mark
