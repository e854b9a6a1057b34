"""The law over races: on every rank, whatever touches memory is ordered after what touched it before."""

from __future__ import annotations

from dataclasses import dataclass

from harness.laws.law import Evidence, Ruling, rule

__all__ = ["NoRaces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRaces:
    """No two operators touch the same memory, one of them writing, unless something has the later one wait."""

    @property
    def name(self) -> str:
        """Say the law."""
        return "streams wait for each other"

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at what each rank's watch found; a rank that nobody watched breaks the law."""
        broken: list[str] = []
        num_touches, num_streams, num_collectives = 0, 0, 0
        for observation in evidence.ranks:
            report = observation.race_report
            if report is None or not report.num_touches:
                broken.append(
                    f"rank {observation.rank}: expected a watch over its streams, got none that saw any"
                )
                continue
            num_touches += report.num_touches
            num_collectives += report.num_collectives
            num_streams = max(num_streams, report.num_streams)
            broken += [f"rank {observation.rank}: {race}" for race in report.races]
        held = (
            f"{num_touches} touches of memory and {num_collectives} collectives on {evidence.world_size} ranks, "
            f"up to {num_streams} streams each"
        )
        return rule(self.name, broken, held=held)
