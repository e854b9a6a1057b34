"""Keeping what a world observed as files, so that it can be judged again without the machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from shardproof.harness.errors import UnreadableError
from shardproof.harness.records.manifest import changes, write_manifest
from shardproof.harness.records.observation import Observation, load_observation
from shardproof.harness.tracing.codec import UNREADABLE, decode, encode
from shardproof.harness.tracing.journal import Journal, read_journal
from shardproof.harness.tracing.ledger import Ledger
from shardproof.harness.worlds.outcome import Outcome, Returned, WorldResult
from shardproof.harness.worlds.rank import journal_path

_OUTCOMES = "outcomes.json"
_READ = {_OUTCOMES, "engine.json", "schedule"}  # besides what the ranks wrote
_KINDS: Mapping[str, type[Outcome]] = {kind.__name__: kind for kind in get_args(Outcome)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedResult:
    """What one world left: how its ranks ended, each rank's ledger, and the observations if all trained.

    ``refusals`` are the words of the ranks that refused the plan, by rank.
    """

    result: WorldResult
    refusals: Mapping[int, str]
    ledgers: tuple[Ledger, ...]
    ranks: tuple[Observation, ...]

    @property
    def ledgers_by_rank(self) -> dict[int, Ledger]:
        """Each rank's ledger; of a simulated world only some ranks have one."""
        return dict(zip((o.rank for o in self.result.outcomes), self.ledgers, strict=True))


def observation_path(folder: Path, rank: int) -> Path:
    """Name the file that holds a rank's observation."""
    return folder / f"rank{rank}.observation"


def keep_result(result: WorldResult, folder: Path) -> None:
    """Write how the ranks ended, and the manifest of all files; ranks wrote ledgers and observations themselves."""
    plain = {
        "outcomes": [{"outcome": type(o).__name__, **encode(o)} for o in result.outcomes],
        "leaks": list(result.leaks),
    }
    (folder / _OUTCOMES).write_text(json.dumps(plain))
    write_manifest(folder, (path.name for path in folder.iterdir() if _is_read(path)))


def check_kept(folder: Path) -> None:
    """Raise UnreadableError where a file of one world's folder is not as it was kept."""
    for name, why in changes(folder).items():
        raise UnreadableError(
            f"{folder.name}/{name}",
            expected="the file as it was kept",
            got=why,
            hint="running the case again",
        )


def _is_read(path: Path) -> bool:
    """Whether anything reads the file later; a world leaves its store and its stacks too."""
    return path.is_file() and (path.name.startswith("rank") or path.name in _READ)


def load_kept(folder: Path) -> SavedResult:
    """Read one world's folder; raises UnreadableError when it is not there or not whole."""
    try:
        plain = json.loads((folder / _OUTCOMES).read_text())
        outcomes = tuple(decode(_KINDS[o.pop("outcome")], o) for o in plain["outcomes"])
        leaks = decode(tuple[str, ...], plain["leaks"])
    except (OSError, *UNREADABLE) as error:
        raise UnreadableError(
            f"{folder.name}/{_OUTCOMES}",
            expected="how each rank ended",
            got="missing" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}",
            hint="running the case again",
        ) from error
    result = WorldResult(outcomes=outcomes, leaks=leaks)
    journals = tuple(_journal(journal_path(folder, o.rank)) for o in outcomes)
    refusals = {o.rank: str(o.value) for o in outcomes if isinstance(o, Returned) and o.value is not None}
    has_all = not refusals and all(isinstance(o, Returned) for o in outcomes)
    ranks = (
        tuple(
            load_observation(observation_path(folder, o.rank), journal.ledger, journal.course)
            for o, journal in zip(outcomes, journals, strict=True)
        )
        if has_all
        else ()
    )
    ledgers = tuple(journal.ledger for journal in journals)
    return SavedResult(result=result, refusals=refusals, ledgers=ledgers, ranks=ranks)


def _journal(path: Path) -> Journal:
    """Read a journal of which nothing but an unfinished end is lost: a law cannot be judged on a part."""
    journal = read_journal(path)
    if journal.damaged:
        raise UnreadableError(
            f"{path.parent.name}/{path.name}",
            expected="whole lines",
            got=f"{len(journal.damaged)} damaged line(s), the first in line {journal.damaged[0]}",
            hint="running the case again",
        )
    return journal
