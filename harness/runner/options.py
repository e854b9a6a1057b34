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


def _option(flag: str, text: str, *, shown: str = "", in_pytest: str = "", **settings: Any) -> Option:
    return Option(flag=flag, help=text, default_text=shown, settings=settings, in_pytest=in_pytest)


ENGINE = _option(
    "--engine", "engine to judge, repeat for several", shown="all built in", action="append", metavar="NAME"
)
WORLD = _option(
    "--world",
    "world to judge in, repeat for several; gpu is the best for this machine's accelerator",
    shown=DEFAULT_WORLD,
    action="append",
    metavar="KIND:SIZE",
)
WRAPPING = (
    _option(
        "--with",
        "option of the call that wraps the model, such as find_unused_parameters=True; repeat for several",
        action="append",
        metavar="NAME=VALUE",
    ),
    _option(
        "--wrap",
        "function of your own that wraps the model with the engine, called with the model or with model and mesh",
        metavar="FILE.py:FUNCTION",
    ),
)
OUT = _option("--out", "folder for records, observations and reports", shown="none is kept", metavar="DIR")
DEADLINE = _option(
    "--deadline",
    "seconds a world may take",
    shown=f"{DEADLINE_S:.0f}",
    type=float,
    default=DEADLINE_S,
    metavar="S",
)
KEEP = _option(
    "--keep", "observations to keep", shown=Keep.FAILURES.value, choices=[*Keep], default=Keep.FAILURES.value
)
ORACLES = _option(
    "--oracles",
    "folder that keeps references between runs; an engine that fails is judged by a fresh one",
    shown="none is kept",
    metavar="DIR",
)
EFFORT = (
    _option("--schedule-seed", "seed of schedules and hashes", shown="0", type=int, default=0, metavar="S"),
    _option(
        "--schedules",
        "run each case under N schedules, where ranks are threads",
        shown="1",
        type=int,
        default=1,
        metavar="N",
    ),
    _option(
        "--no-locate",
        "do not train a case with wrong values once more to find where they came from",
        action="store_true",
    ),
    _option(
        "--thorough", "watch for all that can be watched on a CPU, in about 3 x the time", action="store_true"
    ),
)
KNOWN_FAILURES = (
    _option("--expectations", "known failures", shown="suites/known_failures.toml", metavar="FILE"),
    _option("--no-expectations", "excuse no known failure", action="store_true"),
)
PRINTED = (
    _option("--verbose", "print the verdict of each case too", action="store_true"),
    _option("--quiet", "print what does not conform, and the score", action="store_true"),
    _option(
        "--json", "print the conclusion and its causes as JSON; all else goes to stderr", action="store_true"
    ),
)
SHARDS = (
    _option("--shard", "run one of several parts of the cases, such as 2/8", metavar="N/OF"),
    _option(
        "--durations",
        "balance shards by the durations of this run",
        shown="by number",
        in_pytest="--durations-of",
        metavar="DIR",
    ),
)
REMAINDERS = (
    _option("--resume", "the rest of an interrupted run; needs that run's options", metavar="DIR"),
    _option(
        "--last-failed", "only what did not conform in this run", in_pytest="--last-failed-of", metavar="DIR"
    ),
)
WITHIN = _option(
    "--within",
    "begin no case after this time, such as 60s or 2m; the most telling cases go first",
    metavar="TIME",
)
OF_PYTEST = (
    _option("--model", "model that the suite user_model trains", shown="a small one", metavar="NAME"),
    _option("--replay", "judge what this run observed, and start no world", metavar="DIR"),
)
OF_RUNS = (
    ENGINE,
    WORLD,
    OUT,
    DEADLINE,
    KEEP,
    ORACLES,
    *EFFORT,
    *KNOWN_FAILURES,
    *SHARDS,
    *REMAINDERS,
    WITHIN,
)


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
