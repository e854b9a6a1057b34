"""The worlds that a case makes sense for; suites say so with ``@pytest.mark.worlds(SIZES)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.worlds.spec import WorldKind, WorldSpec

__all__ = [
    "ALONE",
    "APART",
    "EVEN",
    "FOURS",
    "FOUR_OR_MORE_EVEN",
    "ODD",
    "POWERS_OF_TWO",
    "SEVERAL",
    "SIX_OR_MORE_EVEN",
    "THREE_OR_MORE",
    "TOGETHER",
    "Sizes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A named set of world sizes; with ``kind`` those of worlds in which ranks live so."""

    name: str
    allows: Callable[[int], bool]
    kind: WorldKind | None = None

    def suits(self, world: WorldSpec) -> bool:
        """Whether this world is one of them."""
        return self.allows(world.size) and self.kind in {None, world.kind}


ALONE = Sizes(name="one rank", allows=lambda size: size == 1)
SEVERAL = Sizes(name="two ranks or more", allows=lambda size: size > 1)
THREE_OR_MORE = Sizes(name="three ranks or more", allows=lambda size: size > 2)
# For calls of an engine that keeps something for the whole process, so that ranks which share one disturb each other.
APART = Sizes(name="ranks that share no process", allows=lambda size: size > 1, kind=WorldKind.PROCESSES)
# For laws that count what is alive: gloo's own threads may hold a work, and its tensors, after the engine let go of it.
TOGETHER = Sizes(
    name="several ranks that share a process", allows=lambda size: size > 1, kind=WorldKind.THREADS
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
