"""A request for the observations or the oracle of a training, and when two requests are for the same.

[Note: the same question] Two cases share an observation if they run the same content: equal values, and equal code of
the problem, the optimizer and the script. Names do not matter. Content without a digest is shared by no two cases.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace

from shardproof.harness.cases.content import content_digest
from shardproof.harness.cases.script import EachMicrobatch
from shardproof.harness.cases.scripts.interface import Exercise
from shardproof.harness.cases.training import Training
from shardproof.harness.runner.cell import Cell
from shardproof.harness.worlds.spec import WorldKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A training in a cell, and the id of the case that requests it, which matters if the training has no digest."""

    training: Training
    cell: Cell
    case: str

    @property
    def num_simulated(self) -> int:
        """The number of ranks of a simulated world; 0 for other worlds."""
        return self.cell.world.size if self.cell.world.kind is WorldKind.SIMULATED else 0

    @property
    def data_size(self) -> int:
        """The number of ranks with data of their own."""
        return 1 if self.num_simulated else self.training.plan.data_size(self.cell.world.size)

    def without_exercises(self) -> Request:
        """Leave out the calls of an engine's own interface: all exercises of one model share a training."""
        if not isinstance(self.training.script, Exercise):
            return self
        return replace(self, training=replace(self.training, script=EachMicrobatch()))


class Identities:
    """Digests of trainings; a part without a digest has an identity in the requesting case alone."""

    def __init__(self) -> None:
        self._unreadable: dict[str, list[object]] = {}
        # Digests of parts, of the last case that requested any.
        self._read: tuple[str, list[tuple[object, str]]] = ("", [])

    def digest(self, training: Training, case: str) -> str:
        """Hash the content of a training; a part without a digest belongs to the requesting case."""
        parts = [
            digest or self._place(getattr(training, name), f"{name} of {case}")
            for name, digest in self.digests(training, case).items()
        ]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:10]

    def digests(self, training: Training, case: str) -> dict[str, str]:
        """Digest each part of a training; empty for a part without a digest."""
        return {
            field.name: self._part_digest(getattr(training, field.name), case) for field in fields(training)
        }

    def _part_digest(self, part: object, case: str) -> str:
        """Digest a part once per case, which requests it several times; it may have changed by the next case."""
        if self._read[0] != case:
            self._read = (case, [])
        for known, digest in self._read[1]:
            if known is part:
                return digest
        digest = content_digest(part) or ""
        self._read[1].append((part, digest))
        return digest

    def _place(self, part: object, owner: str) -> str:
        """Name an object without a digest by its owner, and by how many others of the owner came before it."""
        met = self._unreadable.setdefault(owner, [])
        if not any(part is other for other in met):
            met.append(part)
        return f"{owner}, {next(i for i, other in enumerate(met) if other is part)}"
