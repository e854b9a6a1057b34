"""Loops in which the caller looks at gradients, or clears them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from shardproof.engine.contract import Capability, Shard, shard_of
from shardproof.harness.cases.script import Actor, EachMicrobatch, train_microbatch

__all__ = [
    "HOOKED",
    "REDUCED",
    "HoldsBackByTurns",
    "HooksGradients",
]

# The subject of a note, and the value noted in a correct run.
HOOKED, REDUCED = "what hooks on parameters see", "each reduced gradient, once"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsBackByTurns:
    """One of four microbatches defers only the reduction across replicas, one the whole reduction, the last none.

    The first microbatch is reduced; where ``clears``, it defers the reduction across replicas instead, and the
    gradients that the model exposes are cleared before the last.
    """

    units: tuple[str, ...]
    clears: bool
    demands: ClassVar[frozenset[Capability]] = frozenset(
        {Capability.UNIT_SYNC, Capability.REPLICA_SYNC, Capability.PENDING_APART}
    )

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches):
            for name in self.units:
                unit = actor.units()[name]
                unit.set_gradient_sync(is_on=microbatch != 2)
                unit.set_replica_sync(is_on=microbatch == 3 or (microbatch == 0 and not self.clears))
            if microbatch == 3 and self.clears:
                actor.part("").zero_grad()
            train_microbatch(actor, microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class HooksGradients:
    """A plain loop with a hook on each parameter; ``times`` is the number of reductions of each gradient in a step."""

    times: int
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.GRADIENT_HOOKS})

    def play(self, actor: Actor) -> None:
        seen: dict[str, list[Shard]] = {}
        trained = {n: p for n, p in actor.part("").named_parameters() if p.requires_grad}

        def see(name: str, parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            seen.setdefault(name, []).append(shard_of(parameter.grad.clone()))

        # torch leaves the method untyped.
        handles = [
            p.register_post_accumulate_grad_hook(partial(see, name))  # type: ignore[no-untyped-call]
            for name, p in trained.items()
        ]
        EachMicrobatch().play(actor)
        for handle in handles:
            handle.remove()
        wrong = [
            f"{name}: {len(seen.get(name, []))} calls"
            for name, p in trained.items()
            if len(seen.get(name, [])) != self.times or not _shows(p.grad, seen[name][-1])
        ]
        actor.note(HOOKED, wrong[0] if wrong else REDUCED)


def _shows(gradient: torch.Tensor | None, seen: Shard) -> bool:
    return gradient is not None and torch.equal(shard_of(gradient).tensor, seen.tensor)
