"""One training under several schedules: keeps the first, and those of the others that differ from it."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from shardproof.harness.records.saved_result import (
    SavedResult,
    keep_result,
    kept_seed,
    load_kept,
    observation_path,
)
from shardproof.harness.worlds.launch import World
from shardproof.harness.worlds.outcome import Returned, WorldResult
from shardproof.harness.worlds.spec import WorldSpec


class Scheduled(NamedTuple):
    """The results of a world under the schedule of one seed."""

    seed: int
    saved: SavedResult


# Any: the body's own arguments.
def run_schedules(
    spec: WorldSpec, seeds: Iterable[int], body: Callable[..., Any], *args: Any, folder: Path
) -> None:
    """Run one job under one schedule after another, in one world, until one fails; keep the observations.

    The first schedule's results go to ``folder``. Those of others go to folders below it, and are dropped if every rank
    has the same observation and ledger, because the verdict would be the same.
    """
    world = World(spec, folder)
    results: list[tuple[int, Path, WorldResult]] = []
    try:
        for seed in seeds:
            place = folder / f"schedule-{seed}" if results else folder
            result = world.run(body, *args, folder=place, seed=seed)
            results.append((seed, place, result))
            if not is_trained(result):
                break
    finally:
        ending = world.close()
        if results:
            seed, place, last = results[-1]
            results[-1] = (seed, place, last.ended_by(ending))
        for seed, place, result in results:
            keep_result(result, place, seed=seed)
    _drop_repetitions([place for _, place, _ in results])


def schedule_folders(folder: Path) -> tuple[Path, ...]:
    """List the folders in which `run_schedules` saved observations, in the order of seeds."""
    found = (path for path in folder.glob("schedule-*") if path.name.partition("-")[2].isdecimal())
    others = sorted(found, key=lambda path: int(path.name.partition("-")[2]))
    return (folder, *others)


def load_schedules(folder: Path) -> tuple[Scheduled, ...]:
    """Read the results of `run_schedules`, in the order of seeds; raises UnreadableError if one is incomplete."""
    return tuple(Scheduled(kept_seed(place), load_kept(place)) for place in schedule_folders(folder))


def is_trained(result: WorldResult) -> bool:
    """Return whether every rank trained to its end: if one refused, another schedule shows nothing new."""
    return result.is_clean and all(isinstance(o, Returned) and o.value is None for o in result.outcomes)


def _drop_repetitions(places: list[Path]) -> None:
    if len(places) < 2:
        return
    first = load_kept(places[0])
    for place in places[1:]:
        if _is_repetition(place, places[0], first):
            shutil.rmtree(place)


def _is_repetition(place: Path, first_place: Path, first: SavedResult) -> bool:
    saved = load_kept(place)
    ranks = [o.rank for o in first.ranks]
    return (
        saved.result.is_clean
        and len(saved.ranks) == len(first.ranks)
        and saved.ledgers == first.ledgers
        and all(_is_same_file(observation_path(place, r), observation_path(first_place, r)) for r in ranks)
    )


def _is_same_file(one: Path, other: Path) -> bool:
    return filecmp.cmp(one, other, shallow=False)
