"""The world sizes that a case makes sense for; suites say so with ``@pytest.mark.worlds(SIZES)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "ALONE",
    "EVEN",
    "FOURS",
    "FOUR_OR_MORE_EVEN",
    "ODD",
    "POWERS_OF_TWO",
    "SEVERAL",
    "SIX_OR_MORE_EVEN",
    "Sizes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A named set of world sizes."""

    name: str
    allows: Callable[[int], bool]


ALONE = Sizes(name="one rank", allows=lambda size: size == 1)
SEVERAL = Sizes(name="two ranks or more", allows=lambda size: size > 1)
EVEN = Sizes(name="two replicas of equal size", allows=lambda size: size % 2 == 0)
FOUR_OR_MORE_EVEN = Sizes(
    name="two replicas of several ranks", allows=lambda size: size >= 4 and size % 2 == 0
)
# Four ranks are two pairs, which is the mesh of two replicas.
SIX_OR_MORE_EVEN = Sizes(name="three pairs or more", allows=lambda size: size >= 6 and size % 2 == 0)
FOURS = Sizes(name="two replicas of pairs that share their data", allows=lambda size: size % 4 == 0)
POWERS_OF_TWO = Sizes(name="worlds by which division is exact", allows=lambda size: size & (size - 1) == 0)
ODD = Sizes(name="ranks that make no pairs", allows=lambda size: size > 1 and size % 2 == 1)
