"""Few programs that contain all pairs of choices, and dense ones with as many triples as a greedy walk finds.

A covering array of all triples would have several times the rows of one of pairs. A few dense programs contain most of
what the pairs leave: see Cohen et al., "The AETG system" (1997), for the walk.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from itertools import combinations
from math import prod

import torch

from shardproof.harness.cases.space import Choice, Combination, Program, Space

_TRIES = 8  # walks, of which the best program is taken


def cover(space: Space, seed: int = 0, unseen: Collection[Combination] | None = None) -> Iterator[Program]:
    """Yield programs until every valid combination is in one; greedy, and deterministic for each seed."""
    rng = random.Random(seed)
    left = set(space.combinations if unseen is None else unseen)
    while left:
        target = min(left, key=sorted) if unseen is None else rng.choice(sorted(left, key=sorted))
        program = _completed(space, target, left, rng)
        if program is None:
            left.discard(target)
            continue
        left -= space.combinations_in(program)
        yield program


def _completed(
    space: Space, target: Combination, left: set[Combination], rng: random.Random
) -> Program | None:
    """Return a program with the target and as much of ``left`` as a greedy walk finds."""
    program = space.completion(target)
    if program is None:
        return None
    best = len(left & space.combinations_in(program))
    for dimension in rng.sample(space.dimensions, len(space.dimensions)):
        if dimension.name in dict(target):
            continue
        for value in dimension.values:
            other = space.program({**dict(program.choices), dimension.name: value})
            gain = len(left & space.combinations_in(other))
            if gain > best and space.makes_sense(other):
                program, best = other, gain
    return program


class Triples:
    """Which triples of choices some programs contain."""

    def __init__(self, space: Space, programs: Iterable[Program]) -> None:
        self._space = space
        choices = [(d.name, value) for d in space.dimensions for value in d.values]
        self._number = {choice: number for number, choice in enumerate(choices)}
        every = torch.arange(len(choices))
        one, two, three = torch.meshgrid(every, every, every, indexing="ij")
        self._is_seen = (one == two) | (two == three) | (one == three)  # one choice twice makes no triple
        for program in programs:
            self._add(program)

    def has(self, triple: Iterable[Choice]) -> bool:
        """Return whether some program contains the triple."""
        one, two, three = (self._number[choice] for choice in triple)
        return bool(self._is_seen[one, two, three])

    @property
    def number(self) -> int:
        """The number of triples in the space, contradictory ones included."""
        sizes = [len(d.values) for d in self._space.dimensions]
        return sum(map(prod, combinations(sizes, 3)))

    def denser(self, least: int) -> Iterator[Program]:
        """Yield valid programs, each with ``least`` unseen triples or more; the yielded ones are seen then."""
        rng = random.Random(0)
        while True:
            walks = [self._walk(rng) for _ in range(_TRIES)]
            best = max(walks, key=self._num_unseen)
            if self._num_unseen(best) < least:
                return
            self._add(best)
            yield best

    def _walk(self, rng: random.Random) -> Program:
        """Choose in each dimension the value with most unseen triples; twice, for some need later choices."""
        program, dimensions = self._space.draw(rng), self._space.dimensions
        for dimension in (*rng.sample(dimensions, len(dimensions)), *rng.sample(dimensions, len(dimensions))):
            others = [
                self._space.program({**dict(program.choices), dimension.name: value})
                for value in rng.sample(dimension.values, len(dimension.values))
            ]
            others.sort(key=lambda other: -self._num_unseen_of((dimension.name, other[dimension]), other))
            program = next((o for o in others if self._space.makes_sense(o)), program)
        return program

    def _num_unseen(self, program: Program) -> int:
        chosen = self._numbers(program)
        return int((~self._is_seen[chosen][:, chosen][:, :, chosen]).sum()) // 6  # each in six orders

    def _num_unseen_of(self, choice: Choice, program: Program) -> int:
        """Count the unseen triples of a program that contain a choice."""
        chosen = self._numbers(program)
        return int((~self._is_seen[self._number[choice]][chosen][:, chosen]).sum()) // 2

    def _numbers(self, program: Program) -> torch.Tensor:
        return torch.tensor([self._number[d.name, program[d]] for d in self._space.dimensions])

    def _add(self, program: Program) -> None:
        self._is_seen[torch.meshgrid([self._numbers(program)] * 3, indexing="ij")] = True
