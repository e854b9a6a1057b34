"""The law over who is gathered when: units in their turn, those whose turn is next, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.laws.law import Evidence, Ruling, rule
from harness.laws.memory.sight import MOST_SITES, made, reports
from harness.tracing.ledger import Phase
from harness.tracing.memory.report import Kind, LifetimeReport
from harness.tracing.memory.timeline import Moment, Turn, turns

__all__ = ["UnshardedInTurn"]

_WHOLE = (Kind.GATHERED, Kind.STAGING)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnshardedInTurn:
    """While a unit computes it is gathered, and so are only the root and the ``ahead`` units whose turn is next.

    With ``keeps`` also those units whose backward is still to come: all before it in the order of the plan, which
    must be that of the forward. Buffers of gathers may besides be those of the unit whose turn it was before.
    Where a unit's turn begins and ends the units' own hooks tell, and an engine's hooks may run before them: once the
    unit is let go, the turn is taken for that of the next. What is gathered between turns `Left` and `Peak` ask.
    """

    phase: Phase
    ahead: int = 1
    keeps: bool = False

    @property
    def name(self) -> str:
        """Say the law."""
        kept = ", those still to go backward" if self.keeps else ""
        return (
            f"in {self.phase} only the unit that computes, {self.ahead} ahead{kept} and the root are gathered"
        )

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at every turn of every unit on every rank."""
        broken: list[str] = []
        num_turns = 0
        for rank, report in reports(evidence, broken):
            units = tuple(u for u in evidence.training.plan.units if "," not in u)
            own = [t for t in self._turns(report) if t.place.unit in units]
            steps = {(t.place.step, t.place.unit) for t in own}
            expected = {(step, unit) for step in range(evidence.training.schedule.steps) for unit in units}
            num_turns += len(own)
            broken += [
                f"rank {rank}, step {step}: expected a turn of unit {unit!r} in {self.phase}, got none"
                for step, unit in sorted(expected - steps)
            ]
            broken += [f"rank {rank}, {text}" for turn in own for text in self._wrong(turn, units)]
        return rule(self.name, broken, held=f"in {num_turns} turns on {evidence.world_size} ranks")

    def _turns(self, report: LifetimeReport) -> Iterator[Turn]:
        return turns(report, lambda s: s.phase is self.phase and s.unit is not None, _WHOLE)

    def _wrong(self, turn: Turn, units: tuple[str, ...]) -> Iterator[str]:
        unit = turn.place.unit
        assert unit is not None
        if not any(unit in moment.units(Kind.GATHERED) for moment in turn.moments):
            yield f"{turn.moments[0]}: expected it gathered while it computes, got it sharded"
        order = units if self.phase is Phase.FORWARD else tuple(reversed(units))
        was_gathered = False
        for moment in turn.moments:
            is_gathered = unit in moment.units(Kind.GATHERED)
            is_over = was_gathered and not is_gathered
            was_gathered |= is_gathered
            for kind in _WHOLE:
                surplus = moment.units(kind) - self._allowed(order.index(unit) + is_over, order, kind)
                if surplus:
                    yield _tell_surplus(moment, kind, surplus)
                    return  # what is wrong at one event is so at the next

    def _allowed(self, index: int, order: tuple[str, ...], kind: Kind) -> set[str]:
        """Give who may be gathered in the turn of ``order[index]``."""
        allowed = {"", *order[index : index + 1 + self.ahead]}
        if self.keeps:
            allowed |= set(order[index:] if self.phase is Phase.BACKWARD else order[:index])
        if kind is Kind.STAGING:
            allowed |= set(order[max(0, index - 1) : index])
        return allowed


def _tell_surplus(moment: Moment, kind: Kind, surplus: frozenset[str]) -> str:
    lives = [life for life in moment.alive if life.kind is kind and life.unit in surplus]
    sites = "; ".join(made(life) for life in lives[:MOST_SITES])
    names = ", ".join(map(repr, sorted(surplus)))
    return f"{moment}: expected no {kind} memory of {names} at this time, got {sites}"
