"""Exploration: draws programs from a space, judges them one by one, and shrinks each failure to a minimal program."""

from __future__ import annotations

import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from shardproof.harness.cases.covering_array import cover
from shardproof.harness.cases.space import Combination, Program, Space
from shardproof.harness.cases.training import Training, Watch
from shardproof.harness.laws.law import Law
from shardproof.harness.laws.parity import MatchesOracle
from shardproof.harness.oracle.oracle_observation import Quantity
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.saved_result import arcs_path
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.options import RunOptions
from shardproof.harness.runner.session import Source, TrialSession
from shardproof.harness.tracing.arcs import Arc, can_count, read_arcs
from shardproof.harness.verdicts.case import Case

_LONGEST = 200  # of a message by which two failures are compared
_LATEST = 5  # pioneers, whose neighbours may run more new code
_NEIGHBOURS = 100  # of each, the latest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """The kind of a failure: the verdict, the broken law, and its subject, without numbers and names."""

    verdict: str
    law: str
    kind: str

    def __str__(self) -> str:
        return f"{self.verdict}: {self.law or 'no law was judged'}: {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrunkFailure:
    """The minimal failing program of those tried, and the record of its failure."""

    program: Program
    symptom: Symptom
    record: Record
    drawn: Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """The subject of an exploration: programs of a space, each a training with laws, on one engine in one world.

    ``effort``: the schedules of each program, and whether races and lifetimes are watched. ``arcs`` is the code of the
    engine that the programs have run so far, on its first rank; empty where it is not counted.
    """

    space: Space
    training: Callable[[Program], Training]
    laws: Callable[[Program], tuple[Law, ...]]
    cell: Cell
    effort: RunOptions = field(default_factory=RunOptions)
    arcs: set[Arc] = field(default_factory=set)

    def judge(self, program: Program) -> Record:
        """Judge one program; keeps only the arcs of its observations."""
        training = self.training(program)
        if can_count():
            training = replace(training, watch=training.watch | {Watch.ARCS})
        case = Case(id=f"explore[{program}]", training=training, laws=self.laws(program))
        with tempfile.TemporaryDirectory(prefix="shardproof-explore-") as folder:
            session = TrialSession(Source(folder=Path(folder)), self.effort)
            try:
                return session.run(case, self.cell, suite="explore", command="")
            finally:
                session.close()
                self.arcs.update(*map(read_arcs, Path(folder).rglob(arcs_path(Path()).name)))

    def shrunk(self, program: Program, record: Record) -> ShrunkFailure:
        """Return the minimal program that fails with the same symptom; tries to leave out half of the choices first."""
        symptom, least = symptom_of(record), program
        assert symptom is not None
        size, tried = max(1, len(program.choices) // 2), {program}
        while True:
            smaller = None
            for candidate in self.space.simpler(least, size):
                if candidate in tried:
                    continue
                tried.add(candidate)
                again = self.judge(candidate)
                if symptom_of(again) == symptom:
                    smaller, record = candidate, again
                    break
            if smaller is not None:
                least, size = smaller, min(size, max(1, len(smaller.choices) // 2))
            elif size > 1:
                size //= 2
            else:
                return ShrunkFailure(program=least, symptom=symptom, record=record, drawn=program)


class Progress(NamedTuple):
    """The state of a hunt at one time of the monotonic clock [s]."""

    time_s: float
    num_programs: int
    num_combinations: int
    num_arcs: int


@dataclass
class Hunt:
    """One hunt through a space: the programs judged, combinations seen and failures found so far.

    ``pioneers`` are the latest passing programs that ran new code of the engine, each with the number of neighbours
    left to draw. ``progress`` has a point for each program judged.
    """

    exploration: Exploration
    seed: int = 0
    num_judged: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    combinations_seen: set[Combination] = field(default_factory=set)
    findings: list[ShrunkFailure] = field(default_factory=list)
    pioneers: dict[Program, int] = field(default_factory=dict)
    progress: list[Progress] = field(default_factory=list)

    def failing(self, program: Program) -> ShrunkFailure | None:
        """Judge one program; return its failure unshrunk.

        A vacuous program is no failure: its numbers might not show a fault of any engine.
        """
        num_arcs = len(self.exploration.arcs)
        record = self.exploration.judge(program)
        self.num_judged += 1
        self.verdicts[record.verdict] = self.verdicts.get(record.verdict, 0) + 1
        if record.verdict is Verdict.VACUOUS:
            return None
        symptom = symptom_of(record)
        if symptom is None:
            self.combinations_seen |= self.exploration.space.combinations_in(program)
            if len(self.exploration.arcs) > num_arcs:
                self.pioneers = {**dict(list(self.pioneers.items())[1 - _LATEST :]), program: _NEIGHBOURS}
            return None
        return ShrunkFailure(program=program, symptom=symptom, record=record, drawn=program)

    def check(self, program: Program) -> ShrunkFailure | None:
        """Judge one program, and shrink it if it fails; also None for a failure like an earlier one."""
        failure = self.failing(program)
        if failure is None:
            return None
        record = failure.record
        finding = self._again(program, record)
        is_new = finding is None
        finding = finding or self.exploration.shrunk(program, record)
        self.findings.append(finding)
        return finding if is_new else None

    def _again(self, program: Program, record: Record) -> ShrunkFailure | None:
        """Return the failure as an earlier finding's if the program's values in the same dimensions fail alike."""
        symptom, space = symptom_of(record), self.exploration.space
        tried = set[Program]()
        for known in self.findings:
            candidate = space.alike(program, known.program)
            if known.symptom != symptom or candidate in tried or not space.makes_sense(candidate):
                continue
            tried.add(candidate)
            again = self.exploration.judge(candidate)
            if symptom_of(again) == symptom:
                return replace(known, program=candidate, record=again, drawn=program)
        return None

    def run(self, *, until: float, num_programs: int | None = None) -> Iterator[ShrunkFailure]:
        """Judge programs with unseen combinations, then random ones or neighbours of a pioneer.

        No program contains an earlier finding.

        Stops at ``until`` of the monotonic clock, or after ``num_programs``.
        """
        rng = random.Random(self.seed)
        left = num_programs
        programs = self._programs(rng)
        while time.monotonic() < until and left != 0:
            program = next(programs)
            left = None if left is None else left - 1
            finding = self.check(program)
            self.progress.append(
                Progress(
                    time.monotonic(), self.num_judged, len(self.combinations_seen), len(self.exploration.arcs)
                )
            )
            if finding is not None:
                yield finding
                programs = self._programs(rng)  # without those that contain it

    def _programs(self, rng: random.Random) -> Iterator[Program]:
        space = self.exploration.space.without(finding.program for finding in self.findings)
        yield from cover(space, rng.randrange(2**32), unseen=space.combinations - self.combinations_seen)
        while True:
            yield space.draw(rng)
            if self.pioneers:
                program = next(reversed(self.pioneers))
                self.pioneers[program] -= 1
                if not self.pioneers[program]:
                    del self.pioneers[program]  # its neighbours have been seen
                yield space.varied(program, rng)


def symptom_of(record: Record) -> Symptom | None:
    """Return the symptom of a failing record, None if it does not fail."""
    if record.verdict in {Verdict.PASSED, Verdict.UNSUPPORTED}:
        return None
    broken = next((law for law in record.laws if not law.held), None)
    if broken is None:
        return Symptom(verdict=record.verdict, law="", kind=_plain(record.headline))
    kind = _plain(broken.summary)
    if broken.law == MatchesOracle().name and record.worst is not None:
        quantity = record.worst.quantity  # the norm is only the first quantity to show an error of a gradient
        kind = Quantity.GRADIENT if quantity == Quantity.NORM else quantity
    return Symptom(verdict=record.verdict, law=broken.law, kind=kind)


def _plain(text: str) -> str:
    """Remove what differs between two programs that fail alike: numbers, names, lists and the text after a line."""
    first = text.strip().splitlines()[0]
    if first.startswith("collective #"):
        return "the collectives of ranks differ"  # which ones depends on the following match
    said = re.split(r"; the largest|: \w+\(| \(and \d+ more ranks\)", first)[0]
    return re.sub(r"\[[^]]*\]|'[^']*'|0x[0-9a-f]+|\d+", "*", said)[:_LONGEST]
