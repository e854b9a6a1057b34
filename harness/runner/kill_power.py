"""Which mutants each case kills, as measured, and the order of cases in which mutants die soonest. No pytest here.

`suites/kill_power.json` is written by ``python -m campaigns.kill_power``. A case that is not in it has no known power.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shardproof.harness.cases.case_id import SUITES
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import Power
from shardproof.harness.worlds.spec import WorldSpec

KILL_POWER = SUITES / "kill_power.json"
_OF_USERS = "user_model/"
_USUAL_S = 0.2  # of a case whose duration was not measured
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class CasePower:
    """What was measured of one case: its duration, what it needs, and the mutants that it killed in each world.

    ``needs`` are names of capabilities. Mutants are bits, numbered as in the table.
    """

    seconds: float
    needs: frozenset[str]
    kills: Mapping[WorldSpec, int]

    def applicable(self, world: WorldSpec, declared: frozenset[str], refusals: int) -> int:
        """Return the mutants that the case kills where an engine that declares this much runs it in a world.

        What died in a world of another size, or died of processes, need not die here: of two ranks, any more have all
        that they have. A plan that is not declared can only show that an engine accepts it: the ``refusals``.
        """
        found = 0
        for measured, mutants in self.kills.items():
            is_large_enough = measured.size == world.size or measured.size == 2 < world.size
            if is_large_enough and (measured.kind.shares_a_process or not world.kind.shares_a_process):
                found |= mutants
        return found & ~refusals if self.needs <= declared else found & refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPower:
    """The table: the names of mutants, which of them accept plans that are not declared, and the power of cases."""

    mutants: tuple[str, ...]
    refusals: int
    cases: Mapping[str, CasePower]
    of_functions: Mapping[
        str, CasePower
    ]  # of the suite user_model, whose cases have a parameter for the model

    def seconds(self, case: str) -> float:
        """Return how long a case takes on the machine of the table [s]."""
        found = self._found(case)
        return _USUAL_S if found is None else found.seconds

    def kills(self, case: str, world: WorldSpec, declared: frozenset[str]) -> int:
        """Return the mutants, as bits, that this case kills for such an engine in this world."""
        found = self._found(case)
        return 0 if found is None else found.applicable(world, declared, self.refusals)

    def _found(self, case: str) -> CasePower | None:
        """Return a case's power; that of the shipped model where a case is of a user's model."""
        return self.cases.get(case) or self.of_functions.get(case.partition("[")[0])


@cache
def read_kill_power(file: Path = KILL_POWER) -> KillPower:
    """Read the table."""
    plain = json.loads(file.read_text())
    cases = {
        case: CasePower(
            seconds=found["seconds"],
            needs=frozenset(found["needs"]),
            kills={WorldSpec.parse(world): _bits(numbers) for world, numbers in found["kills"].items()},
        )
        for case, found in plain["cases"].items()
    }
    return KillPower(
        mutants=tuple(plain["mutants"]),
        refusals=_bits(plain["refusals"]),
        cases=cases,
        of_functions={c.partition("[")[0]: found for c, found in cases.items() if c.startswith(_OF_USERS)},
    )


def seconds_of(text: str) -> float:
    """Read ``60s``, ``60`` or ``2m`` [s]; raises UsageError for any other form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None or not float(match[1]):
        raise UsageError("--within", expected="a time from 1s on", got=repr(text), hint="--within 60s")
    return float(match[1]) * _UNITS_S[match[2]]


def most_telling_first(kills: Mapping[str, int], seconds: Mapping[str, float]) -> list[str]:
    """Order cases so that each kills most new mutants per second of those that are left; then the others, cheap first.

    The greedy order of a set cover by cost: Feige, "A threshold of ln n for approximating set cover" (1998), says how
    near it is to the best.
    """
    order: list[str] = []
    dead = 0
    place = {case: number for number, case in enumerate(kills)}
    waiting = [(-bits.bit_count() / seconds[case], place[case], case) for case, bits in kills.items() if bits]
    heapq.heapify(waiting)
    while waiting:
        promised, _, case = heapq.heappop(waiting)
        rate = (kills[case] & ~dead).bit_count() / seconds[case]
        if rate and rate < -promised:  # others died since; it may still be the best
            heapq.heappush(waiting, (-rate, place[case], case))
        elif rate:
            order.append(case)
            dead |= kills[case]
    chosen = set(order)
    return order + sorted((case for case in kills if case not in chosen), key=lambda case: seconds[case])


def interleaved(orders: Iterable[Sequence[str]]) -> list[str]:
    """Merge the orders of several engines and worlds: the first of each, then the second of each, and so on."""
    return [
        name
        for _, _, name in sorted((n, o, name) for o, each in enumerate(orders) for n, name in enumerate(each))
    ]


def power(engine: str, kills: Mapping[str, int], ran: Collection[str]) -> Power:
    """Return how much of the power of an engine's cases the cases had that ran; both by node id."""
    dead = killable = 0
    for case, bits in kills.items():
        killable |= bits
        dead |= bits if case in ran else 0
    return Power(
        engine=engine,
        num_cases=len(kills),
        num_ran=sum(case in ran for case in kills),
        num_killable=killable.bit_count(),
        num_killed=dead.bit_count(),
    )


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)
