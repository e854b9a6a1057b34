"""The observations of trainings: runs each world once, finds its files, and caches the last few."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from shardproof.engine.names import absolute
from shardproof.harness.cases.training import Training, Watch
from shardproof.harness.errors import UnreadableError
from shardproof.harness.records.saved_result import check_kept, keep_result
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.engines import EngineDescription, describe, keep_description, load_description
from shardproof.harness.runner.options import Keep
from shardproof.harness.runner.schedules import (
    Scheduled,
    is_trained,
    load_schedules,
    run_schedules,
    schedule_folders,
)
from shardproof.harness.runner.training_request import Identities, Request
from shardproof.harness.torch_compat.private_names import Feature, require
from shardproof.harness.tracing.arcs import COUNTS_ARCS
from shardproof.harness.training.rank_body import BEFORE, drive_rank, leave_state
from shardproof.harness.worlds.launch import WorldPool, launch
from shardproof.harness.worlds.spec import WorldKind, WorldSpec

_MOST_KEPT = 8  # trainings that are in memory
_MOST_BYTES = 2**28  # of the parameters as they were built
_Key = TypeVar("_Key")
_Held = TypeVar("_Held")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The folder of observations, and whether they are made or only read again.

    Each worker of a session with several processes writes below a folder of its own, and reads all.
    """

    folder: Path
    worker: str = "main"
    is_replay: bool = False
    keep: Keep = Keep.ALL
    oracles: Path | None = None  # a folder that survives the run

    @property
    def own_folder(self) -> Path:
        """The folder below which this worker writes."""
        return self.folder / self.worker


class Observations:
    """Returns the observations of a training, which it runs at the first request; caches the last few."""

    def __init__(self, source: Source, identities: Identities) -> None:
        self._source = source
        self._identities = identities
        self._loaded: dict[Path, tuple[Scheduled, ...]] = {}  # the last few, with all tensors of a training
        self._to_keep: set[Path] = set()
        self._dropped: dict[Path, str] = {}  # too large to keep until the end, by the case that followed
        self._launched: set[Path] = set()
        self._pool = WorldPool(source.own_folder / "pool")

    def close(self) -> None:
        """End pooled worlds, and delete observations that are not to be kept.

        Not earlier: a later case may request the same observation, and fail.
        """
        self._pool.close()
        if self._source.is_replay or self._source.keep is Keep.ALL:
            return
        for folder in self._launched - self._to_keep:
            shutil.rmtree(folder, ignore_errors=True)
        _remove_empty(self._source.own_folder)

    def keep(self, request: Request) -> None:
        """Keep the observations of a training, whatever else is deleted."""
        self._to_keep.add(self.folder(request))

    def name(self, request: Request) -> str:
        """Name the folder of a training's observations, below that of the run."""
        folder = self.folder(request)
        return str(Path(self._source.folder.name) / folder.relative_to(self._source.folder))

    def folder(self, request: Request) -> Path:
        """Return the folder of a training's observations, which need not exist."""
        training, cell = request.training, request.cell
        engine = re.sub(r"[^A-Za-z0-9_.-]+", "-", cell.engine).strip("-.")
        if engine != cell.engine:  # another path may be spelled alike
            engine += f"-{hashlib.sha256(cell.engine.encode()).hexdigest()[:10]}"
        label = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{training.problem.name}-{training.optimizer.name}")
        digest = self._identities.digest(training, request.case)
        name = Path(engine) / str(cell.world).replace(":", "-") / f"{label}-{digest}"
        earlier = sorted(self._source.folder.glob(f"*/{name}")) if self._source.is_replay else []
        return earlier[0] if earlier else self._source.own_folder / name

    @property
    def is_replay(self) -> bool:
        """Whether observations are only read again."""
        return self._source.is_replay

    def engine(self, request: Request) -> EngineDescription:
        """Return the engine's declarations, or those that were recorded when it was observed.

        Raises UnreadableError if there is no readable observation.
        """
        if not self._source.is_replay:
            return describe(request.cell.engine)
        for observed in (request, request.without_exercises()):
            if (folder := self.folder(observed)).is_dir():
                check_kept(folder)
                return load_description(folder)
        raise UnreadableError(
            "observations",
            expected=f"those of {request.cell.engine} in {request.cell.world}",
            got="none are kept",
            hint="running the case again",
        )

    def exist(self, request: Request) -> bool:
        """Whether there are observations of a training: always, unless they are only read again."""
        return not self._source.is_replay or self.folder(request).exists()

    def under(self, seeds: Iterable[int], request: Request) -> tuple[Scheduled, ...]:
        """Return the observations under the schedules of these seeds that differ; see `run_schedules`."""
        folder = self.folder(request)
        self._delete_dropped(request.case)
        if folder not in self._loaded:
            if folder in self._launched or self._source.is_replay:
                for place in schedule_folders(folder):
                    check_kept(place)
            else:
                if folder.exists():  # a world of an earlier, interrupted run of the same case
                    shutil.rmtree(folder)
                self._launch(request.training, request.cell, seeds, folder)
            self._launched.add(folder)
            self._loaded[folder] = load_schedules(folder)
            for dropped, num_bytes in drop_oldest(self._loaded, _bytes_observed, _MOST_BYTES, _MOST_KEPT):
                if num_bytes > _MOST_BYTES:
                    self._dropped[dropped] = request.case
        return self._loaded[folder]

    def _delete_dropped(self, case: str) -> None:
        """Delete large observations of earlier cases that nothing keeps; a case that needs one again trains again."""
        if self._source.is_replay or self._source.keep is Keep.ALL:
            return
        for folder in [folder for folder, since in self._dropped.items() if since != case]:
            del self._dropped[folder]
            if folder not in self._to_keep | self._loaded.keys():
                shutil.rmtree(folder, ignore_errors=True)
                self._launched.discard(folder)

    def _launch(self, training: Training, cell: Cell, seeds: Iterable[int], folder: Path) -> None:
        require(*_features(training, cell))
        engine = describe(cell.engine)
        keep_description(engine, folder)
        counters = (COUNTS_ARCS,) if Watch.ARCS in training.watch else ()
        world = replace(cell.world, preload=(*engine.preload, *counters))
        before = None if training.origin is None else folder / BEFORE
        if before is not None and not _has_left_state(training, cell, world, before):
            return
        job = (drive_rank, training, absolute(cell.engine), before)
        # Starting ranks is cheap on the CPU, where a fresh world per case shares nothing; on a device it is expensive.
        if cell.world.device == "cpu":
            run_schedules(world, seeds, *job, folder=folder)
        else:
            keep_result(self._pool.run(world, *job, folder=folder), folder)
        if before is not None:
            shutil.rmtree(before)  # nothing reads it later


def _has_left_state(training: Training, cell: Cell, world: WorldSpec, place: Path) -> bool:
    """Run the previous world in a folder; if it does not train to its end, its results become those of the training."""
    assert training.origin is not None
    spec = replace(world, size=training.origin.ranks.of(world.size))
    result = launch(spec, leave_state, training, absolute(cell.engine), folder=place)
    if is_trained(result):
        return True
    for path in place.iterdir():
        shutil.move(path, place.parent)
    keep_result(result, place.parent)
    return False


def drop_oldest(
    cache: dict[_Key, _Held], num_bytes: Callable[[_Held], int], most_bytes: int, most: int | None = None
) -> list[tuple[_Key, int]]:
    """Drop the oldest entries until the rest is small enough; returns them, with the bytes of each.

    The newest is kept whatever its size.
    """
    dropped = []
    total = sum(map(num_bytes, cache.values()))
    while len(cache) > 1 and (total > most_bytes or (most is not None and len(cache) > most)):
        oldest = next(iter(cache))
        dropped.append((oldest, num_bytes(cache.pop(oldest))))
        total -= dropped[-1][1]
    return dropped


def _bytes_observed(trained: tuple[Scheduled, ...]) -> int:
    shards = (s for seen in trained for rank in seen.saved.ranks for s in rank.initial.values())
    return sum(shard.tensor.nbytes for shard in shards)


def _remove_empty(folder: Path) -> None:
    """Delete the folders below a folder, and itself, that contain no file."""
    for path in sorted((folder, *folder.rglob("*")), reverse=True):
        with contextlib.suppress(OSError):  # it is not empty, or is a file
            path.rmdir()


def _features(training: Training, cell: Cell) -> Iterator[Feature]:
    """Return the features of the harness that a training uses and that need private names of torch."""
    yield Feature.COLLECTIVES
    if cell.world.kind is WorldKind.THREADS:
        yield Feature.THREADS
    if training.watch & {Watch.RACES, Watch.LIFETIMES}:
        yield Feature.OPERATORS
    if Watch.RACES in training.watch and cell.world.device == "cuda":
        yield Feature.CUDA_STREAMS
