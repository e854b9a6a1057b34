"""Saves the observations of a world in files, so that it can be judged again without the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from shardproof.harness.errors import UnreadableError
from shardproof.harness.records.manifest import MANIFEST, changes, digest_of, kept_digests, write_manifest
from shardproof.harness.records.observation import Observation, load_observation
from shardproof.harness.regular_file import clear, open_regular, read_regular
from shardproof.harness.tracing.codec import UNREADABLE, decode, encode
from shardproof.harness.tracing.journal import Journal, read_journal
from shardproof.harness.tracing.ledger import Ledger
from shardproof.harness.worlds.outcome import Outcome, Returned, WorldResult
from shardproof.harness.worlds.rank import journal_path

_OUTCOMES = "outcomes.json"
_SCHEDULE = "schedule"
_READ = {_OUTCOMES, "engine.json", _SCHEDULE}  # in addition to the ranks' files
# A rank can make a sparse file of any size; hashing this many bytes takes seconds.
_MOST_BYTES = 2**34
_LONGEST_CALLS = 4000
_KINDS: Mapping[str, type[Outcome]] = {kind.__name__: kind for kind in get_args(Outcome)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedResult:
    """The results of one world: how its ranks ended, each rank's ledger, and the observations if all trained.

    ``refusals`` are the messages of the ranks that refused the plan, by rank. ``damage`` names the ranks whose files
    differ from what they had written: their ledgers are incomplete, and there are no observations. ``wrapper`` is the
    first rank's text of the calls that wrapped the model; empty if none was seen.
    """

    result: WorldResult
    refusals: Mapping[int, str]
    ledgers: tuple[Ledger, ...]
    ranks: tuple[Observation, ...]
    damage: tuple[str, ...] = ()
    wrapper: str = ""

    @property
    def ledgers_by_rank(self) -> dict[int, Ledger]:
        """Each rank's ledger; a simulated world has ledgers of only some ranks."""
        return dict(zip((o.rank for o in self.result.outcomes), self.ledgers, strict=True))


def observation_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's observation."""
    return folder / f"rank{rank}.observation"


def arcs_path(folder: Path) -> Path:
    """Return the path of the file with the engine code that the first rank ran, if that was traced."""
    return folder / "rank0.arcs"


def probes_path(folder: Path, rank: int) -> Path:
    """Return the path of the values that a rank's probes saw."""
    return folder / f"rank{rank}.probes"


def wrapper_path(folder: Path) -> Path:
    """Return the path of the file with the calls by which the first rank's engine wrapped the model."""
    return folder / "rank0.wrapper"


def _wrapper(folder: Path) -> str:
    """Read that file up to a length that no call has."""
    try:
        with open_regular(wrapper_path(folder)) as file:
            return file.read(_LONGEST_CALLS).decode("utf-8", "replace")
    except OSError:
        return ""


def keep_result(result: WorldResult, folder: Path, *, seed: int | None = None) -> None:
    """Write how the ranks ended, and the manifest of all files; ranks wrote ledgers and observations themselves.

    ``seed`` is that of the schedule. No process of the world may be alive, because it could change the hashed files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (_OUTCOMES, _SCHEDULE, MANIFEST):
        clear(folder / name)
    plain = {
        "outcomes": [{"outcome": type(o).__name__, **encode(o)} for o in result.outcomes],
        "leaks": list(result.leaks),
    }
    (folder / _OUTCOMES).write_text(json.dumps(plain))
    if seed is not None:
        (folder / _SCHEDULE).write_text(str(seed))
    write_manifest(folder, {path.name: digest_of(path) for path in folder.iterdir() if _is_read(path)})


def kept_seed(folder: Path) -> int:
    """Read the seed of the schedule; 0 if there is none, as in worlds of processes."""
    file = folder / _SCHEDULE
    return int(read_regular(file)) if file.exists() else 0


def check_kept(folder: Path) -> None:
    """Raise UnreadableError if a file in a world's folder has changed since it was saved."""
    for name, why in changes(folder).items():
        raise UnreadableError(
            f"{folder.name}/{name}",
            expected="the file as it was kept",
            got=why,
            hint="running the case again",
        )


def _is_read(path: Path) -> bool:
    """Whether anything reads the file later; a world also writes its store and its stacks."""
    is_known = path.name.startswith("rank") or path.name in _READ
    return is_known and path.is_file() and path.stat().st_size <= _MOST_BYTES


def load_kept(folder: Path) -> SavedResult:
    """Read one world's folder; raises UnreadableError if it is missing or incomplete."""
    try:
        plain = json.loads(read_regular(folder / _OUTCOMES))
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
    journals = tuple(read_journal(journal_path(folder, o.rank)) for o in outcomes)
    refusals = {o.rank: str(o.value) for o in outcomes if isinstance(o, Returned) and o.value is not None}
    has_all = not refusals and all(isinstance(o, Returned) for o in outcomes)
    damage = tuple(_damage(folder, outcomes, journals, has_all=has_all))
    ranks = (
        tuple(
            load_observation(observation_path(folder, o.rank), journal.ledger, journal.events)
            for o, journal in zip(outcomes, journals, strict=True)
        )
        if has_all and not damage
        else ()
    )
    ledgers = tuple(journal.ledger for journal in journals)
    return SavedResult(
        result=result,
        refusals=refusals,
        ledgers=ledgers,
        ranks=ranks,
        damage=damage,
        wrapper=_wrapper(folder),
    )


def _damage(
    folder: Path, outcomes: Sequence[Outcome], journals: Sequence[Journal], *, has_all: bool
) -> Iterator[str]:
    """Compare the files after the end of the world with the digests that each rank reported.

    Later changes differ from the manifest, see `check_kept`. A rank that did not return reported no digest; its journal
    may end in half a line, and the lines before are intact.
    """
    kept = kept_digests(folder)
    for outcome, journal in zip(outcomes, journals, strict=True):
        written = dict(outcome.digests) if isinstance(outcome, Returned) else {}
        if has_all:
            written.setdefault(observation_path(folder, outcome.rank).name, "")
        found = {
            name: "changed" if name in kept else "missing"
            for name, digest in written.items()
            if name not in kept or (digest and kept[name] != digest)
        }
        name = journal_path(folder, outcome.rank).name
        if journal.damaged and found.get(name) != "missing":
            lines = f"{len(journal.damaged)} damaged line(s), the first in line {journal.damaged[0]}"
            found[name] = lines
        if found:
            files = ", ".join(f"{name} ({how})" for name, how in sorted(found.items()))
            yield f"files of rank {outcome.rank} were changed or removed while the case ran: {files}"
