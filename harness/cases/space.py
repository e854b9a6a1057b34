"""A space of training programs: named dimensions, contradictions, draws, shrinking.

A program chooses one value of each dimension. The first value of a dimension is the plainest, and a program's spelling
lists only the others. The meaning of the values is defined elsewhere, for the bundled space in
`shardproof.fixtures.programs.training`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product

from shardproof.engine.contract import Capability
from shardproof.harness.errors import UsageError

Choice = tuple[str, str]  # the name of a dimension, and one of its values
Combination = frozenset[Choice]  # of several dimensions, one value each
_MOST_TRIES = 100
_MOST_MORE = 2  # choices, beside which a combination may make sense


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One property of a model, plan or loop; ``interacts`` names dimensions whose triples with it must be covered.

    ``demands`` are the capabilities that a value needs of an engine.
    """

    name: str
    values: tuple[str, ...]
    interacts: bool = False
    demands: tuple[tuple[str, frozenset[Capability]], ...] = ()

    @property
    def plain(self) -> str:
        """The value that adds nothing."""
        return self.values[0]


@dataclass(frozen=True, kw_only=True)
class Program:
    """The values that are not the plainest, in the order of the space's dimensions."""

    choices: tuple[Choice, ...] = ()

    def __getitem__(self, dimension: Dimension) -> str:
        return self._values.get(dimension.name, dimension.values[0])

    @cached_property
    def _values(self) -> dict[str, str]:
        return dict(self.choices)  # asked for by every rule, of millions of programs

    @cached_property
    def _chosen(self) -> frozenset[Choice]:
        return frozenset(self.choices)

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.choices) or "plain"

    def contains(self, other: Program) -> bool:
        """Return whether this program makes all choices of another one."""
        return other._chosen <= self._chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRule:
    """The reason why programs for which ``holds`` is true are contradictory."""

    why: str
    holds: Callable[[Program], bool]


@dataclass(frozen=True, kw_only=True)
class Space:
    """All programs that choose a value of each dimension and that no rule excludes."""

    dimensions: tuple[Dimension, ...]
    rules: tuple[ProgramRule, ...] = ()

    def program(self, choices: Mapping[str, str]) -> Program:
        """Make a program; raises UsageError for a value that no dimension has."""
        known = self._by_name
        for name, value in choices.items():
            if name not in known or value not in known[name].values:
                expected = f"one of {', '.join(known[name].values)}" if name in known else "a dimension"
                raise UsageError(
                    f"program {name}={value}", expected=expected, got=repr(value), hint=", ".join(known)
                )
        chosen = [choice for choice in choices.items() if choice[1] != known[choice[0]].plain]
        return Program(choices=tuple(sorted(chosen, key=lambda choice: self._position[choice[0]])))

    @cached_property
    def _by_name(self) -> dict[str, Dimension]:
        return {d.name: d for d in self.dimensions}

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self._by_name)}

    def parse(self, text: str) -> Program:
        """Parse the ``str`` of a program."""
        pairs = (part.partition("=") for part in text.split(",") if part not in {"", "plain"})
        return self.program({name: value for name, _, value in pairs})

    def has(self, program: Program) -> bool:
        """Return whether all choices of a program are values of this space."""
        known = {d.name: d.values for d in self.dimensions}
        return all(value in known.get(name, ()) for name, value in program.choices)

    def contradiction(self, program: Program) -> str | None:
        """Return why a program is contradictory; None if it is not."""
        return next((rule.why for rule in self.rules if rule.holds(program)), None)

    def makes_sense(self, program: Program) -> bool:
        """Return whether a program is not contradictory; fast for programs that one rule excludes in turn."""
        for position, rule in enumerate(self._recent):
            if rule.holds(program):
                self._recent.insert(0, self._recent.pop(position))
                return False
        return True

    @cached_property
    def _recent(self) -> list[ProgramRule]:
        """The rules, those first that excluded programs last."""
        return list(self.rules)

    def needs(self, program: Program) -> frozenset[Capability]:
        """Return the capabilities that the program's values need of an engine."""
        return frozenset[Capability]().union(
            *(demands for d in self.dimensions for value, demands in d.demands if program[d] == value)
        )

    def within(self, capabilities: Collection[Capability]) -> Space:
        """Return the space of the programs that need only these capabilities."""
        kept = tuple(
            replace(
                d, values=tuple(v for v in d.values if dict(d.demands).get(v, set()) <= set(capabilities))
            )
            for d in self.dimensions
        )
        return replace(self, dimensions=tuple(d for d in kept if len(d.values) > 1))

    def without(self, failing: Iterable[Program]) -> Space:
        """Return the space of the programs that contain none of these."""
        known = tuple(failing)
        rule = ProgramRule(
            why="contains one that is known", holds=lambda p: any(p.contains(k) for k in known)
        )
        return replace(self, rules=(*self.rules, rule))

    @cached_property
    def combinations(self) -> frozenset[Combination]:
        """All pairs, and triples of dimensions that interact, including contradictory ones."""
        groups = [
            *combinations(self.dimensions, 2),
            *combinations([d for d in self.dimensions if d.interacts], 3),
        ]
        return frozenset(
            frozenset(zip((d.name for d in group), values, strict=True))
            for group in groups
            for values in product(*(d.values for d in group))
        )

    def combinations_in(self, program: Program) -> set[Combination]:
        """Return the combinations that a program contains."""
        chosen = [(d.name, program[d]) for d in self.dimensions]
        strong = [(d.name, program[d]) for d in self.dimensions if d.interacts]
        return {*map(frozenset, combinations(chosen, 2)), *map(frozenset, combinations(strong, 3))}

    def draw(self, rng: random.Random) -> Program:
        """Draw a valid program: a value of each of some dimensions, as far as these agree."""
        drawn = [
            (d.name, rng.choice(d.values))
            for d in rng.sample(self.dimensions, rng.randint(1, len(self.dimensions)))
        ]
        program = Program()
        for name, value in (*drawn, *drawn):  # twice: some make sense only beside later ones
            other = self.program({**dict(program.choices), name: value})
            if self.makes_sense(other):
                program = other
        return program

    def varied(self, program: Program, rng: random.Random) -> Program:
        """Return a program that differs in one to three dimensions; any valid one, if none such is found."""
        for _ in range(_MOST_TRIES):
            redrawn = rng.sample(self.dimensions, rng.randint(1, min(3, len(self.dimensions))))
            other = self.program(dict(program.choices) | {d.name: rng.choice(d.values) for d in redrawn})
            if other != program and self.makes_sense(other):
                return other
        return self.draw(rng)

    def simpler(self, program: Program, size: int) -> Iterator[Program]:
        """Yield the valid programs that leave out ``size`` consecutive choices."""
        for start in range(0, len(program.choices), size):
            left = Program(choices=(*program.choices[:start], *program.choices[start + size :]))
            if self.makes_sense(left):
                yield left

    def alike(self, program: Program, other: Program) -> Program:
        """Return the choices of ``program`` in the dimensions in which ``other`` chooses."""
        names = {name for name, _ in other.choices}
        return Program(choices=tuple(c for c in program.choices if c[0] in names))

    def completion(self, target: Combination) -> Program | None:
        """Return a valid program of these choices and as few more as possible, up to two; None if there is none."""
        program, fixed = self.program(dict(target)), {name for name, _ in target}
        completed = (self._completed(program, fixed, more) for more in range(_MOST_MORE + 1))
        return next((program for program in completed if program), None)

    def _completed(self, program: Program, fixed: Collection[str], more: int) -> Program | None:
        """Return the program, or a valid one that chooses in up to ``more`` dimensions that are not fixed.

        What a rule excludes, it excludes until one of the values changes that it read.
        """
        if self.makes_sense(program):
            return program
        watched = _Watched(program, self._by_name)
        if not more or not next(rule for rule in self._recent if rule.holds(program)).holds(watched):
            return None
        for dimension in (d for d in self.dimensions if d.name in watched.asked - set(fixed)):
            fixed = {*fixed, dimension.name}  # in what follows too, where this dimension has been tried
            for value in dimension.values[1:]:
                other = self.program({**dict(program.choices), dimension.name: value})
                completed = self._completed(other, fixed, more - 1)
                if completed:
                    return completed
        return None


class _Watched(Program):
    """A program that remembers of which dimensions a rule has asked it."""

    def __init__(self, program: Program, names: Collection[str]) -> None:
        self._program, self._names = program, names
        self.asked: set[str] = set()

    def __getitem__(self, dimension: Dimension) -> str:
        self.asked.add(dimension.name)
        return self._program[dimension]

    def contains(self, other: Program) -> bool:
        self.asked.update(name for name, _ in other.choices)
        return self._program.contains(other)

    @property
    def choices(self) -> tuple[Choice, ...]:
        self.asked.update(self._names)
        return self._program.choices
