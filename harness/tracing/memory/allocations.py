"""Tracks the lives of one rank's memory, and infers at the end the kind of each. Pure; no torch here.

[Note: kinds] The harness does not ask an engine what its memory is for. The contract defines what the optimizer owns.
The rest follows from the data flow, unit by unit:

- A gather that takes shares makes its output *whole*, of the units to which the shares belong. A copy of whole memory
  is whole. The output of a gather that was copied from and never computed with is staging. Other whole memory is
  gathered, including a part that is kept for the next gather.
  Where nothing is sharded there is no gather: there a copy of shares that is computed with is gathered.
- The input of a reduction is gradients. So is each source of that input, over any number of copies. A source that was
  itself packed is staging. The output of a reduce-scatter is reduced, and so are the gradients of the optimizer's
  parameters.
- Memory that an optimizer step makes, and that is none of the above, is the optimizer's.

When other parameters than before are written to a buffer, one life of it ends and another begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.memory.memory_report import Allocation, LoopSpan, MemoryKind
from shardproof.harness.tracing.recorder import LoopPosition


class Role(Enum):
    """The observed role or use of memory."""

    SHARE = auto()  # contains what the optimizer owns
    REDUCED = auto()  # contains a gradient of what the optimizer owns
    USER = auto()
    GATHERED_FROM = auto()
    GATHERED_INTO = auto()
    COPIED_OUT = auto()  # the output of a gather, also copied to other whole memory
    COMPUTED_WITH = auto()  # filled from shares, and read by an operator other than a copy
    WHOLE = auto()
    REDUCED_FROM = auto()
    SCATTERED_INTO = auto()


@dataclass(slots=True, eq=False)
class _Life:
    """A life; ``units`` are all units whose parameters it has carried, ``carries`` the current ones."""

    num_bytes: int
    born: int
    phase: Phase
    operator: str
    site: str
    died: int | None = None
    roles: set[Role] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    carries: frozenset[str] = frozenset()
    # The possible sources of gradients: indices of lives.
    sources: set[int] = field(default_factory=set)
    is_packed: bool = False


class Allocations:
    """All memory of one rank, by a key that is unique among live memory; events are counted from 0."""

    def __init__(self) -> None:
        self._all: list[_Life] = []
        self._alive: dict[int, int] = {}  # by key: the index of its life
        self._stretches: list[LoopSpan] = []
        self._place: LoopPosition | None = None
        self._now = 0

    @property
    def num_events(self) -> int:
        """Return the number of events."""
        return self._now

    def is_alive(self, key: int) -> bool:
        """Return whether the memory has a life that has not ended."""
        return key in self._alive

    def advance(self, place: LoopPosition) -> None:
        """Begin the next event, at the loop's position ``place``."""
        self._now += 1
        if place != self._place:
            self._place = place
            self._stretches.append(
                LoopSpan(
                    start=self._now,
                    phase=place.phase,
                    step=place.step,
                    microbatch=place.microbatch,
                    unit=place.unit,
                )
            )

    def born(self, key: int, num_bytes: int, operator: str, site: str) -> None:
        phase = Phase.PREPARE if self._place is None else self._place.phase
        self._alive[key] = len(self._all)
        self._all.append(
            _Life(num_bytes=num_bytes, born=self._now, phase=phase, operator=operator, site=site)
        )

    def size_of(self, key: int) -> int:
        """Return the size of the memory in bytes."""
        return self._life(key).num_bytes

    def resized(self, key: int, num_bytes: int, operator: str, site: str) -> None:
        """End a life, and begin one of another size in the same storage, with the roles from its owner."""
        old = self._life(key)
        self.died(key)
        self.born(key, num_bytes, operator, site)
        self._life(key).roles = old.roles & {Role.SHARE, Role.USER}
        if Role.SHARE in old.roles:
            self._life(key).carries = old.carries
            self._life(key).units = set(old.units)

    def died(self, key: int) -> None:
        index = self._alive.pop(key, None)
        if index is not None:
            self._all[index].died = self._now

    def is_role(self, key: int, role: Role, unit: str | None = None) -> None:
        """Set the role of memory, and for a share its unit."""
        life = self._life(key)
        life.roles.add(role)
        if unit is not None:
            life.units.add(unit)
        if unit is not None and role is Role.SHARE:
            life.carries |= {unit}

    def has_role(self, key: int, role: Role) -> bool:
        """Return whether memory was seen in a role."""
        return role in self._life(key).roles

    def copied(self, sources: Sequence[int], targets: Sequence[int], *, is_packing: bool) -> None:
        """Record that targets were filled from sources unchanged, side by side if this is packing."""
        carried = frozenset[str]().union(*(self._life(key).carries for key in sources))
        is_whole = any(Role.WHOLE in self._life(key).roles for key in sources)
        for key in targets:
            if key in sources or Role.SHARE in self._life(key).roles:
                continue
            if carried:
                life = self._carrying(key, carried)
                if is_whole:
                    life.roles.add(Role.WHOLE)
        if is_whole:
            self._note(sources, of=Role.GATHERED_INTO, role=Role.COPIED_OUT)
        self.summed(sources, targets, is_packing=is_packing)

    def computed(self, sources: Sequence[int]) -> None:
        """Record an operator other than a copy."""
        for key in sources:
            if self._life(key).carries:
                self._life(key).roles.add(Role.COMPUTED_WITH)

    def summed(self, sources: Sequence[int], targets: Sequence[int], *, is_packing: bool = False) -> None:
        """Record that targets contain, element by element, terms from sources."""
        for key in targets:
            others = {self._alive[source] for source in sources if source != key}
            self._life(key).sources |= others
            self._life(key).is_packed |= is_packing and bool(others)

    def gathered(self, inputs: Iterable[int], outputs: Iterable[int]) -> None:
        """Record a gather: of parameters, if its inputs are shares."""
        given = [self._life(key) for key in inputs]
        carried = frozenset[str]().union(*(life.carries for life in given))
        if not carried:
            return
        for life in given:
            life.roles.add(Role.GATHERED_FROM)
        for key in outputs:
            self._carrying(key, carried).roles |= {Role.GATHERED_INTO, Role.WHOLE}

    def reduced(self, inputs: Iterable[int], outputs: Iterable[int], *, is_scattered: bool) -> None:
        """Record a reduction; in place, unless it scatters."""
        for key in inputs:
            self._life(key).roles.add(Role.REDUCED_FROM)
        for key in outputs if is_scattered else ():
            self._life(key).roles.add(Role.SCATTERED_INTO)

    def report(self) -> tuple[Allocation, ...]:
        """Return all lives with their kinds; see [Note: kinds]."""
        gradients = self._gradients()
        return tuple(
            Allocation(
                kind=_kind(life, is_gradient=index in gradients),
                unit=next(iter(life.units)) if len(life.units) == 1 else None,
                num_bytes=life.num_bytes,
                born=life.born,
                died=life.died,
                operator=life.operator,
                site=life.site,
            )
            for index, life in enumerate(self._all)
            if life.num_bytes and life.died != life.born
        )

    def stretches(self) -> tuple[LoopSpan, ...]:
        """Return the positions of the loop, in order."""
        return tuple(self._stretches)

    def _life(self, key: int) -> _Life:
        return self._all[self._alive[key]]

    def _carrying(self, key: int, units: frozenset[str]) -> _Life:
        """Mark memory as carrying the parameters of units; start a new life if it carried others."""
        if self._life(key).units - units:
            old = self._life(key)
            self.died(key)
            self.born(key, old.num_bytes, old.operator, old.site)
        life = self._life(key)
        life.carries = units
        life.units |= units
        return life

    def _note(self, keys: Sequence[int], *, of: Role, role: Role) -> None:
        for key in keys:
            if of in (roles := self._life(key).roles):
                roles.add(role)

    def _gradients(self) -> set[int]:
        """Find the sources, over any number of copies, of the inputs of reductions."""
        found: set[int] = set()
        ahead = [source for life in self._all if Role.REDUCED_FROM in life.roles for source in life.sources]
        while ahead:
            index = ahead.pop()
            if index not in found:
                found.add(index)
                ahead += self._all[index].sources
        return found


_SETTLED = (
    (Role.SHARE, MemoryKind.SHARDED),
    (Role.USER, MemoryKind.USER),
    (Role.REDUCED, MemoryKind.REDUCED),
    (Role.SCATTERED_INTO, MemoryKind.REDUCED),
    (Role.COMPUTED_WITH, MemoryKind.GATHERED),
    (Role.COPIED_OUT, MemoryKind.STAGING),
    (Role.WHOLE, MemoryKind.GATHERED),
    (Role.GATHERED_FROM, MemoryKind.STAGING),
)


def _kind(life: _Life, *, is_gradient: bool) -> MemoryKind:
    for role, kind in _SETTLED:
        if role in life.roles:
            return kind
    if is_gradient or Role.REDUCED_FROM in life.roles:
        return MemoryKind.STAGING if life.is_packed else MemoryKind.GRADIENT
    return MemoryKind.OPTIMIZER if life.phase is Phase.STEP else MemoryKind.OTHER
