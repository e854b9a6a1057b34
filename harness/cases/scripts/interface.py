"""A script that calls an engine's own interface on models of its own, and then trains the case's model as usual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardproof.engine.contract import Capability
from shardproof.harness.cases.script import Actor, EachMicrobatch, InterfaceBench


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Exercise:
    """Each rank calls ``body(bench, *arguments)`` before each step; a law may judge its notes.

    ``body`` is a module-level function; ``arguments`` are values whose repr distinguishes them.
    """

    body: Callable[..., None]
    arguments: tuple[Any, ...] = ()  # Any: the arguments of the body
    interface: Capability = Capability.WRAPPER
    beside: frozenset[Capability] = frozenset()

    @property
    def demands(self) -> frozenset[Capability]:
        return self.beside | {self.interface}

    def __repr__(self) -> str:
        """Format it without the function's address, which differs between processes."""
        return f"Exercise({self.body.__module__}.{self.body.__qualname__}{self.arguments!r})"

    def play(self, actor: Actor) -> None:
        bench: InterfaceBench | None = actor.bench()
        if bench is not None:
            self.body(bench, *self.arguments)
        EachMicrobatch().play(actor)
