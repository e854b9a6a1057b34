"""A requested world: its kind, size, device and deadline, its command-line spelling, and the sizes a case allows."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from shardproof.harness.errors import UsageError
from shardproof.harness.worlds.launched.launcher import launched_process

MAX_RANKS = 64
_MAX_SIMULATED = 65_536


class WorldKind(StrEnum):
    """The form in which ranks run."""

    THREADS = "threads"  # threads of one killable process, over in-memory collectives
    PROCESSES = "processes"  # one process each, over gloo on a CPU, over the own backend of other devices
    LAUNCHED = (
        "launched"  # as processes, each beside one that torchrun or srun started, on any number of hosts
    )
    SIMULATED = "simulated"  # a few of very many, one after the other in one process; no data is exchanged

    @property
    def shares_a_process(self) -> bool:
        """Return whether all ranks of a world live in one process."""
        return self in {WorldKind.THREADS, WorldKind.SIMULATED}


# For engines that require CUDA: the CPU has a stand-in for it.
DEVICES_OF_CUDA = ("cpu", "cuda")
OWN_KINDS = (WorldKind.THREADS, WorldKind.PROCESSES)  # those that exchange data and need no launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSpec:
    """One world. ``deadline_s`` bounds the whole case; ``collective_timeout_s`` is the process group's own.

    ``seed`` decides the free choices of the threads world: which rank runs next, and how late results are. ``preload``
    names modules that are imported before its ranks start.
    """

    kind: WorldKind
    size: int
    device: str = "cpu"
    deadline_s: float = 60.0
    collective_timeout_s: float | None = None
    seed: int = 0
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse sizes and devices that no world has."""
        others = {WorldKind.LAUNCHED: self.size, WorldKind.SIMULATED: _MAX_SIMULATED}
        most = others.get(self.kind, MAX_RANKS)
        if not 1 <= self.size <= most:
            raise UsageError(
                f"world {self}",
                expected=f"1 to {most} ranks",
                got=str(self.size),
                hint="--world threads:4",
            )
        if self.kind is WorldKind.SIMULATED and self.device != "cpu":
            raise UsageError(
                f"world {self}",
                expected=f"{self.kind} on cpu",
                got=f"{self.kind} on {self.device}",
                hint=f"--world processes:{self.size}:{self.device}",
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run: all, but in a simulated world the first, the second, a middle one and the last."""
        if self.kind is not WorldKind.SIMULATED:
            return tuple(range(self.size))
        return tuple(sorted({0, min(1, self.size - 1), self.size // 2, self.size - 1}))

    @property
    def num_local_processes(self) -> int:
        """The processes of this machine that share its devices; a launcher's ranks may be on any machine."""
        return self.size if self.kind is WorldKind.PROCESSES else 1

    @classmethod
    def parse(cls, text: str, *, deadline_s: float = 60.0) -> WorldSpec:
        """Parse ``threads:4``, ``processes:2`` or ``processes:2:DEVICE``; raises UsageError for other texts.

        The size of ``launched`` comes from the launcher of this process.
        """
        if text.partition(":")[0] == WorldKind.LAUNCHED and not re.match(r"launched:\d", text):
            text = text.replace("launched", f"launched:{launched_process(os.environ).size}", 1)
        match = re.fullmatch(r"([a-z]+):(\d+)(?::([a-z]\w*))?", text)
        if match is None or match[1] not in set(WorldKind):
            near = difflib.get_close_matches(text.split(":")[0], list(WorldKind), n=1, cutoff=0.4)
            hint = f"{near[0]}:4" if near else "threads:4"
            raise UsageError(
                "--world",
                expected="KIND:SIZE or KIND:SIZE:DEVICE, with KIND threads, processes, launched or simulated",
                got=repr(text),
                hint=f"--world {hint}",
            )
        return cls(
            kind=WorldKind(match[1]), size=int(match[2]), device=match[3] or "cpu", deadline_s=deadline_s
        )

    def __str__(self) -> str:
        return f"{self.kind}:{self.size}" + ("" if self.device == "cpu" else f":{self.device}")


_EXCHANGING = frozenset(WorldKind) - {WorldKind.SIMULATED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A named set of world sizes, for worlds of these kinds; by default the kinds in which ranks exchange data."""

    name: str
    allows: Callable[[int], bool]
    kinds: frozenset[WorldKind] = _EXCHANGING
    is_on_cpu: bool = False

    def suits(self, world: WorldSpec) -> bool:
        is_on_device = world.device != "cpu"
        return self.allows(world.size) and world.kind in self.kinds and not (self.is_on_cpu and is_on_device)


ANY = Sizes(name="ranks that exchange data", allows=lambda size: True)
ALONE = Sizes(name="one rank", allows=lambda size: size == 1)
SEVERAL = Sizes(name="two ranks or more", allows=lambda size: size > 1)
THREE_OR_MORE = Sizes(name="three ranks or more", allows=lambda size: size > 2)
# For calls of an engine that keeps process-wide state, so that ranks in one process would disturb each other.
APART = Sizes(
    name="ranks that share no process",
    allows=lambda size: size > 1,
    kinds=frozenset({WorldKind.PROCESSES, WorldKind.LAUNCHED}),
)
# For what CUDA has once per process: graphs are captured and kernels profiled of all its threads.
OWN_PROCESSES = Sizes(
    name="ranks with a process each",
    allows=lambda size: True,
    kinds=frozenset({WorldKind.PROCESSES, WorldKind.LAUNCHED}),
)
# For laws that count live memory: gloo's own threads (torch 2.13) may hold a work, and its tensors, after the engine
# released it.
TOGETHER = Sizes(
    name="several ranks that share a process",
    allows=lambda size: size > 1,
    kinds=frozenset({WorldKind.THREADS}),
)
# For laws that compare no numbers.
SIMULATED = Sizes(
    name="ranks that are simulated", allows=lambda size: size > 1, kinds=frozenset({WorldKind.SIMULATED})
)
# After a world of half as many ranks, or of one more: a launcher starts one number of ranks, and a machine may have no
# device for another rank.
AFTER_FEWER = Sizes(
    name="two ranks or more, after a world of half as many",
    allows=lambda size: size > 1,
    kinds=frozenset(OWN_KINDS),
)
AFTER_MORE = Sizes(
    name="ranks on a CPU, after a world of one more",
    allows=lambda size: size < MAX_RANKS,
    kinds=frozenset(OWN_KINDS),
    is_on_cpu=True,
)
EVEN = Sizes(name="two replicas of equal size", allows=lambda size: size % 2 == 0)
FOUR_OR_MORE_EVEN = Sizes(
    name="two replicas of several ranks", allows=lambda size: size >= 4 and size % 2 == 0
)
# Four ranks are two pairs, which is the mesh of two replicas.
SIX_OR_MORE_EVEN = Sizes(name="three pairs or more", allows=lambda size: size >= 6 and size % 2 == 0)
FOURS = Sizes(name="two replicas of pairs that share their data", allows=lambda size: size % 4 == 0)
POWERS_OF_TWO = Sizes(name="worlds by which division is exact", allows=lambda size: size & (size - 1) == 0)
ODD = Sizes(name="ranks that make no pairs", allows=lambda size: size > 1 and size % 2 == 1)
