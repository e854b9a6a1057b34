"""What a host process and its supervisor say to each other. Plain picklable values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.worlds.outcome import Outcome
from harness.worlds.output import SUFFIX
from harness.worlds.spec import WorldSpec

__all__ = [
    "Dying",
    "Finished",
    "HostSpec",
    "Job",
    "LastThread",
    "Leaving",
    "Left",
    "Message",
    "Ready",
    "Started",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """One process of a world: the world, the ranks that live in it, and a folder for its store and stacks."""

    world: WorldSpec
    ranks: tuple[int, ...]
    folder: Path

    @property
    def stack_file(self) -> Path:
        """Where the process writes the stacks of all its threads, when it crashes or is asked to."""
        return self.folder / f"host{self.ranks[0]}.stacks"

    @property
    def output_file(self) -> Path:
        """Where everything goes that the process prints."""
        return self.folder / f"host{self.ranks[0]}{SUFFIX}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a world is to run: ``body(context, *args)``; journals and files go to ``folder``.

    ``seed`` is the schedule's; see `Turns`.
    """

    body: Callable[..., Any]  # Any: the signature is (RankContext, *args)
    args: tuple[Any, ...]
    folder: Path
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Host: imports are done; the clock may start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Host: this rank runs on this thread (``threading.get_ident``), which names it in a stack file."""

    rank: int
    thread_ident: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Host: this rank ended."""

    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Dying:
    """Host: this rank is about to end the whole process, by a call that leaves no time to say so later."""

    rank: int
    call: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LastThread:
    """A thread that is no daemon and ran when its rank had returned; ``rank`` is None if unknown."""

    name: str
    ident: int
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Host: no job is left; my main thread, of this ident, waits for these threads, and then runs the exit hooks."""

    ident: int
    threads: tuple[LastThread, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Host: all is done; I end with status 0 as soon as I am let go."""


Message = Ready | Started | Finished | Dying | Leaving | Left
