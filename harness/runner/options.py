"""Where a case is judged (an engine in a world), under how many schedules, and with which watches. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from shardproof.harness.errors import UsageError
from shardproof.harness.worlds.spec import WorldKind, WorldSpec

if TYPE_CHECKING:
    from shardproof.harness.cases.training import Training


PLACEHOLDER = "nobody"  # no engine: the instance of a case that tells its marks and never runs


class Keep(StrEnum):
    """Which observations stay in the folder of a run."""

    FAILURES = "failures"  # those of records with any verdict but PASSED and UNSUPPORTED
    ALL = "all"  # those of every record, so that all can be judged again


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One engine, by the name it was given, in one world."""

    engine: str
    world: WorldSpec

    @property
    def is_placeholder(self) -> bool:
        """Whether nothing is to be run."""
        return self.engine == PLACEHOLDER

    def __str__(self) -> str:
        return f"{self.engine}@{self.world}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run spends on each case.

    Where ranks are threads a case is run once for each of ``num_schedules`` seeds, the first being ``seed``; in
    other worlds the machine makes the schedule, and there is one. ``is_thorough`` has every training watched for
    all that can be.
    """

    seed: int = 0
    num_schedules: int = 1
    is_thorough: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError for what no run can do."""
        for option, value, least in (
            ("--schedule-seed", self.seed, 0),
            ("--schedules", self.num_schedules, 1),
        ):
            if value < least:
                raise UsageError(
                    option,
                    expected=f"a number from {least} on",
                    got=str(value),
                    hint="--schedules 20 for the seeds 0 to 19",
                )

    def seeds(self, training: Training, world: WorldSpec) -> range:
        """Return the seeds of the schedules under which a world is to run a training."""
        num = max(self.num_schedules, training.schedules) if world.kind is WorldKind.THREADS else 1
        return range(self.seed, self.seed + num)

    def applied(self, training: Training) -> Training:
        """Return the training as it is to be watched."""
        if not self.is_thorough:
            return training
        # Here, because it imports torch, which who only reads options can do without.
        from shardproof.harness.cases.training import Watch

        return replace(training, watch=training.watch | {Watch.RACES, Watch.LIFETIMES})

    def options(self, seed: int) -> tuple[str, ...]:
        """Format,, for the command that repeats a case, what is not so by default; ``seed`` is the schedule's."""
        seed_option = (f"--schedule-seed={seed}",) if seed else ()
        return (*seed_option, *(("--thorough",) if self.is_thorough else ()))
