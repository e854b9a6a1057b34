"""The law that a training repeated from the same start comes out the same, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

from harness.laws.law import Evidence, Ruling
from harness.records.record import LawRecord

__all__ = ["Repeatable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeatable:
    """All repetitions that the schedule asks for agree in every bit of every tensor, loss and norm."""

    name: str = "repeats itself bitwise"

    def judge(self, evidence: Evidence) -> Ruling:
        """Compare the hashes of all repetitions, on every rank."""
        broken = []
        for observation in evidence.ranks:
            digests = observation.repeat_digests
            if len(digests) < 2:
                broken.append(f"rank {observation.rank}: expected several repetitions, got {len(digests)}")
            elif len(set(digests)) > 1:
                first = next(i for i, d in enumerate(digests) if d != digests[0])
                broken.append(
                    f"rank {observation.rank}: repetition {first} of {len(digests)} differs from the first"
                )
        if broken:
            more = f" (and {len(broken) - 1} more ranks)" if len(broken) > 1 else ""
            record = LawRecord(law=self.name, held=False, summary=broken[0] + more, details=tuple(broken))
            return Ruling(record=record)
        count = evidence.training.schedule.repeats
        held = f"{count} repetitions on {evidence.world_size} ranks"
        return Ruling(record=LawRecord(law=self.name, held=True, summary=held))
