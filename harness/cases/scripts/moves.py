"""Moves of a loop in the middle of a step that have options of their own; see `harness.cases.script.Move`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from shardproof.engine.contract import Capability
from shardproof.harness.cases.script import Actor
from shardproof.harness.cases.state_form import StateForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """The state is taken in this form, as a loop does that saves and goes on."""

    form: StateForm = StateForm.WHOLE

    @property
    def demands(self) -> frozenset[Capability]:
        return self.form.demands

    def play(self, actor: Actor) -> None:
        actor.save(self.form)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearPending:
    """The module's own ``zero_grad`` clears all gradients that it exposes, while others wait for their reduction."""

    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.PENDING_APART})

    def play(self, actor: Actor) -> None:
        actor.part("").zero_grad()


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert:
    """The model is converted to these dtypes and back to float32, its original dtype."""

    dtypes: tuple[torch.dtype, ...] = ()
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.RECONVERT})

    def play(self, actor: Actor) -> None:
        actor.convert(*self.dtypes, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherByHand:
    """All units are gathered by hand, without blocking, and freed if they ``are_freed`` before anything computes."""

    are_freed: bool = False
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.UNIT_STATE, Capability.ASYNC_GATHER})

    def play(self, actor: Actor) -> None:
        units = actor.units().values()
        for wait in [unit.unshard_async() for unit in units]:
            wait()
        if self.are_freed:
            for unit in units:
                unit.reshard()


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze:
    """These parts of the model are frozen in some steps, and train in the others; each change is made once.

    What is frozen ``for_good`` is frozen in the first of the steps, and left so.
    """

    parts: tuple[str, ...]
    steps: tuple[int, ...]
    for_good: bool = False
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.FREEZE, Capability.UNUSED})

    def play(self, actor: Actor) -> None:
        if self.for_good and actor.step != self.steps[0]:
            return
        if actor.step == 0 or (actor.step in self.steps) is not (actor.step - 1 in self.steps):
            self.apply(actor.part, actor.step)

    def apply(self, part: Callable[[str], nn.Module], step: int) -> None:
        """Freeze or unfreeze the parts of a model, which ``part`` finds by name, for a step."""
        for name in self.parts:
            part(name).requires_grad_(step not in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """In this step the user loads other weights into the module, before its forwards or after its backwards."""

    step: int
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.LOADED_WEIGHTS})

    def play(self, actor: Actor) -> None:
        if actor.step == self.step:
            actor.load_weights()
