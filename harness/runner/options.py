"""The options of a run, each declared once, for the command line and for pytest. No torch and no pytest here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from shardproof.harness.errors import UsageError
from shardproof.harness.worlds.spec import WorldKind, WorldSpec

if TYPE_CHECKING:
    from shardproof.harness.cases.training import Training


class Keep(StrEnum):
    """Which observations stay in the folder of a run."""

    FAILURES = "failures"  # those of records with any verdict but PASSED and UNSUPPORTED
    ALL = "all"  # those of every record, so that all can be judged again


DEFAULT_WORLD = "threads:2"
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option; ``settings`` are argparse's, which pytest accepts too, and ``default_text`` is part of its help."""

    flag: str
    help: str
    default_text: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    in_pytest: str = ""  # its flag there, if pytest has an option of that name

    @property
    def key(self) -> str:
        """The name of its value in an argparse.Namespace."""
        return self.flag.strip("-").replace("-", "_")

    def add_to(self, add: Callable[..., object], *, default_text: str = "", **settings: object) -> None:
        """Add it by ``add_argument`` of a parser or ``addoption`` of pytest; ``settings`` override the table's."""
        shown = default_text or self.default_text
        text = f"{self.help}; default: {shown}" if shown else self.help
        add(self.flag, help=text, **{**self.settings, **settings})

    def spelled(self, value: object) -> list[str]:
        """Format a value for pytest: one argument for each item of a list, none for an option that was not set."""
        flag = self.in_pytest or self.flag
        if value is None or value is False:
            return []
        if value is True:
            return [flag]
        return [f"{flag}={each}" for each in (value if isinstance(value, list) else [value])]


_MANY: Mapping[str, Any] = {"action": "append"}
ENGINE = Option(
    flag="--engine",
    help="engine to judge, repeat for several",
    default_text="all built in",
    settings={**_MANY, "metavar": "NAME"},
)
WORLD = Option(
    flag="--world",
    help="world to judge in, repeat for several; gpu is the best for this machine's accelerator",
    default_text=DEFAULT_WORLD,
    settings={**_MANY, "metavar": "KIND:SIZE"},
)
WRAPPING = (
    Option(
        flag="--with",
        help="option of the call that wraps the model, such as find_unused_parameters=True; repeat for several",
        settings={**_MANY, "metavar": "NAME=VALUE"},
    ),
    Option(
        flag="--wrap",
        help="function of your own that wraps the model with the engine, called with the model or with model and mesh",
        settings={"metavar": "FILE.py:FUNCTION"},
    ),
)
OUT = Option(
    flag="--out",
    help="folder for records, observations and reports",
    default_text="none is kept",
    settings={"metavar": "DIR"},
)
DEADLINE = Option(
    flag="--deadline",
    help="seconds a world may take",
    default_text=f"{DEADLINE_S:.0f}",
    settings={"type": float, "default": DEADLINE_S, "metavar": "S"},
)
KEEP = Option(
    flag="--keep",
    help="observations to keep",
    default_text=Keep.FAILURES.value,
    settings={"choices": [*Keep], "default": Keep.FAILURES.value},
)
ORACLES = Option(
    flag="--oracles",
    help="folder that keeps references between runs; an engine that fails is judged by a fresh one",
    default_text="none is kept",
    settings={"metavar": "DIR"},
)
EFFORT = (
    Option(
        flag="--schedule-seed",
        help="seed of schedules and hashes",
        default_text="0",
        settings={"type": int, "default": 0, "metavar": "S"},
    ),
    Option(
        flag="--schedules",
        help="run each case under N schedules, where ranks are threads",
        default_text="1",
        settings={"type": int, "default": 1, "metavar": "N"},
    ),
    Option(
        flag="--no-locate",
        help="do not train a case with wrong values once more to find where they came from",
        settings={"action": "store_true"},
    ),
    Option(
        flag="--thorough",
        help="watch for all that can be watched on a CPU, in about 3 x the time",
        settings={"action": "store_true"},
    ),
)
KNOWN_FAILURES = (
    Option(
        flag="--expectations",
        help="known failures",
        default_text="suites/expectations.toml",
        settings={"metavar": "FILE"},
    ),
    Option(flag="--no-expectations", help="excuse no known failure", settings={"action": "store_true"}),
)
PRINTED = (
    Option(flag="--verbose", help="print the verdict of each case too", settings={"action": "store_true"}),
    Option(
        flag="--quiet", help="print what does not conform, and the score", settings={"action": "store_true"}
    ),
    Option(
        flag="--json",
        help="print the conclusion and its causes as JSON; all else goes to stderr",
        settings={"action": "store_true"},
    ),
)
SHARDS = (
    Option(
        flag="--shard",
        help="run one of several parts of the cases, such as 2/8",
        settings={"metavar": "N/OF"},
    ),
    Option(
        flag="--durations",
        help="balance shards by the durations of this run",
        default_text="by number",
        settings={"metavar": "DIR"},
        in_pytest="--durations-of",
    ),
)
REMAINDERS = (
    Option(
        flag="--resume",
        help="the rest of an interrupted run; needs that run's options",
        settings={"metavar": "DIR"},
    ),
    Option(
        flag="--last-failed",
        help="only what did not conform in this run",
        settings={"metavar": "DIR"},
        in_pytest="--last-failed-of",
    ),
)
OF_PYTEST = (
    Option(
        flag="--model",
        help="model that the suite user_model trains",
        default_text="a small one",
        settings={"metavar": "NAME"},
    ),
    Option(
        flag="--replay",
        help="judge what this run observed, and start no world",
        settings={"metavar": "DIR"},
    ),
)
OF_RUNS = (ENGINE, WORLD, OUT, DEADLINE, KEEP, ORACLES, *EFFORT, *KNOWN_FAILURES, *SHARDS, *REMAINDERS)


def add_to_pytest(add: Callable[..., object]) -> None:
    """Add all options by the ``addoption`` of a group."""
    for option in (*OF_RUNS, *OF_PYTEST):
        replace(option, flag=option.in_pytest or option.flag).add_to(add)


def pytest_arguments(values: Mapping[str, object]) -> list[str]:
    """Format the values of a run's options, by key, for pytest."""
    return [text for option in OF_RUNS for text in option.spelled(values.get(option.key))]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The effort that a run spends on each case.

    If ranks are threads, a case runs once for each of ``num_schedules`` seeds, the first being ``seed``; in other
    worlds the machine makes the schedule, and there is one. With ``is_thorough``
    every training runs under all watches. If it ``locates``, a case with wrong values is trained once more.
    """

    seed: int = 0
    num_schedules: int = 1
    is_thorough: bool = False
    locates: bool = True

    def __post_init__(self) -> None:
        """Raise UsageError for values that no run supports."""
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
        """Return the seeds of the schedules under which a world runs a training."""
        num = max(self.num_schedules, training.schedules) if world.kind is WorldKind.THREADS else 1
        return range(self.seed, self.seed + num)

    def applied(self, training: Training) -> Training:
        if not self.is_thorough:
            return training
        # Here, because it imports torch, which commands that only read options do not need.
        from shardproof.harness.cases.training import Watch

        return replace(training, watch=training.watch | {Watch.RACES, Watch.LIFETIMES})

    def options(self, seed: int) -> tuple[str, ...]:
        """Format the options that differ from the default, for the command that repeats a case under this seed."""
        seed_option = (f"--schedule-seed={seed}",) if seed else ()
        return (*seed_option, *(("--thorough",) if self.is_thorough else ()))
