"""The observations of trainings: runs each world once, computes each oracle once, and finds their files.

[Note: the same question] Two cases share an observation if they run the same content: equal values, and equal code of
the problem, the optimizer and the script. Names do not matter. Content without a digest is shared by no two cases.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from shardproof.engine.contract import Capability, Plan
from shardproof.harness.cases.content import content_digest
from shardproof.harness.cases.script import EachMicrobatch
from shardproof.harness.cases.scripts.interface import Exercise
from shardproof.harness.cases.training import StateForm, Training, Watch
from shardproof.harness.cases.user_model import UserOptimizer
from shardproof.harness.errors import UnreadableError
from shardproof.harness.oracle.kept_oracle import KeptOracle, kept_oracle
from shardproof.harness.oracle.oracle_answer import ask_oracle
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.records.world_result import check_kept, keep_result
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
from shardproof.harness.torch_compat.private_names import Feature, require
from shardproof.harness.tracing.arcs import COUNTS_ARCS
from shardproof.harness.training.rank_body import BEFORE, drive_rank, leave_state
from shardproof.harness.worlds.launch import WorldPool, launch
from shardproof.harness.worlds.spec import WorldKind, WorldSpec

__all__ = ["ObservationCache", "Source", "unexercised"]


_MOST_KEPT = 8  # trainings that are in memory
# Of the parameters as they were built: those of trainings in memory, and of references, which take some twenty times as
# much disk.
_MOST_BYTES = 2**28
_MOST_BYTES_OF_ORACLES = 2**30
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


class ObservationCache:
    """Returns the observations of a training, which it runs at the first request; caches the last few."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._oracles: dict[tuple[str, int], OracleObservation] = {}
        self._kept_oracles: dict[tuple[str, int], KeptOracle] = {}  # oracles that were not computed here
        self._explaining: set[tuple[str, int]] = set()  # oracles that must explain a failure
        self._unread: dict[str, list[object]] = {}
        # Digests of parts, of the last case that requested any.
        self._read: tuple[str, list[tuple[object, str]]] = ("", [])
        # The last few, with all tensors of a training.
        self._kept: dict[Path, tuple[Scheduled, ...]] = {}
        self._wanted: set[Path] = set()
        self._dropped: dict[Path, str] = {}  # too large to keep until the end, by the case that followed
        self._launched: set[Path] = set()
        self._pool = WorldPool(source.folder / source.worker / "pool")

    def close(self) -> None:
        """End pooled worlds, and delete observations that are not to be kept.

        Not earlier: a later case may request the same observation, and fail.
        """
        self._pool.close()
        if self._source.is_replay or self._source.keep is Keep.ALL:
            return
        for folder in self._launched - self._wanted:
            shutil.rmtree(folder, ignore_errors=True)
        _remove_empty(self._source.folder / self._source.worker)

    def want(self, training: Training, cell: Cell, case: str) -> None:
        """Keep the observations of a training, whatever else is deleted."""
        self._wanted.add(self.folder(training, cell, case))

    def name(self, training: Training, cell: Cell, case: str) -> str:
        """Name the folder of a training's observations, below that of the run."""
        folder = self.folder(training, cell, case)
        return str(Path(self._source.folder.name) / folder.relative_to(self._source.folder))

    def folder(self, training: Training, cell: Cell, case: str) -> Path:
        """Return the folder of a training's observations, which need not exist."""
        engine = re.sub(r"[^A-Za-z0-9_.-]+", "-", cell.engine).strip("-.")
        if engine != cell.engine:  # another path may be spelled alike
            engine += f"-{hashlib.sha256(cell.engine.encode()).hexdigest()[:10]}"
        label = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{training.problem.name}-{training.optimizer.name}")
        name = Path(engine) / str(cell.world).replace(":", "-") / f"{label}-{self._digest(training, case)}"
        kept = sorted(self._source.folder.glob(f"*/{name}")) if self._source.is_replay else []
        return kept[0] if kept else self._source.folder / self._source.worker / name

    @property
    def is_replay(self) -> bool:
        """Whether observations are only read again."""
        return self._source.is_replay

    def engine(self, training: Training, cell: Cell, case: str) -> EngineDescription:
        """Return the engine's declarations, or those that were recorded when it was observed.

        Raises UnreadableError if there is no readable observation.
        """
        if not self._source.is_replay:
            return describe(cell.engine)
        for asked in (training, unexercised(training)):
            if (folder := self.folder(asked, cell, case)).is_dir():
                check_kept(folder)
                return load_description(folder)
        raise UnreadableError(
            "observations",
            expected=f"those of {cell.engine} in {cell.world}",
            got="none are kept",
            hint="running the case again",
        )

    def holds(self, training: Training, cell: Cell, case: str) -> bool:
        """Whether there are observations of a training: always, unless they are only read again."""
        return not self._source.is_replay or self.folder(training, cell, case).exists()

    def observations(
        self, training: Training, cell: Cell, seeds: Iterable[int], case: str
    ) -> tuple[Scheduled, ...]:
        """Return the observations under the schedules of these seeds that differ; see `run_schedules`.

        ``case`` is the id of the requesting case; it matters if the training has no digest.
        """
        folder = self.folder(training, cell, case)
        self._delete_dropped(case)
        if folder not in self._kept:
            if folder in self._launched or self._source.is_replay:
                for place in schedule_folders(folder):
                    check_kept(place)
            else:
                if folder.exists():  # a world of an earlier, interrupted run of the same case
                    shutil.rmtree(folder)
                self._launch(training, cell, seeds, folder)
            self._launched.add(folder)
            self._kept[folder] = load_schedules(folder)
            for dropped, num_bytes in _drop_oldest(self._kept, _bytes_observed, _MOST_BYTES, _MOST_KEPT):
                if num_bytes > _MOST_BYTES:
                    self._dropped[dropped] = case
        return self._kept[folder]

    def _delete_dropped(self, case: str) -> None:
        """Delete large observations of earlier cases that nothing keeps; a case that needs one again trains again."""
        if self._source.is_replay or self._source.keep is Keep.ALL:
            return
        for folder in [folder for folder, since in self._dropped.items() if since != case]:
            del self._dropped[folder]
            if folder not in self._wanted | self._kept.keys():
                shutil.rmtree(folder, ignore_errors=True)
                self._launched.discard(folder)

    def oracle(self, training: Training, world_size: int, case: str, *, limit_s: float) -> OracleObservation:
        """Return the oracle of a training with this many ranks of data."""
        arithmetic = _arithmetic(training)
        key = (self._digest(arithmetic, case), world_size)
        if key not in self._oracles:
            kept, explains = self._kept_oracle(arithmetic, world_size, case), key in self._explaining
            if kept is not None and not explains and kept.path.exists():
                self._kept_oracles[key] = kept
            folder = self._own_folder()
            self._oracles[key] = ask_oracle(
                arithmetic, world_size, limit_s=limit_s, kept=kept, folder=folder, explains=explains
            )
            _drop_oldest(self._oracles, _bytes_of_oracle, _MOST_BYTES_OF_ORACLES)
        return self._oracles[key]

    def _own_folder(self) -> Path | None:
        """Return the folder below which this worker writes; None if it only reads."""
        if self._source.is_replay:
            return None
        folder = self._source.folder / self._source.worker
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def forget_oracle(self, training: Training, world_size: int, case: str, *, must_explain: bool) -> bool:
        """Forget the oracle of a training if an earlier run computed it, or if it lacks a required explanation.

        Returns whether it did: the next one is computed now, and explains.
        """
        key = (self._digest(_arithmetic(training), case), world_size)
        oracle, kept = self._oracles.get(key), self._kept_oracles.pop(key, None)
        if kept is None and (oracle is None or oracle.explains or not must_explain):
            return False
        if kept is not None:
            kept.forget()
        self._oracles.pop(key, None)
        self._explaining.add(key)
        return True

    def _kept_oracle(self, arithmetic: Training, world_size: int, case: str) -> KeptOracle | None:
        if self._source.oracles is None:
            return None
        digests = self._digests(arithmetic, case).values()
        return kept_oracle(self._source.oracles, str(world_size), *digests) if all(digests) else None

    def _digest(self, training: Training, case: str) -> str:
        """Hash the content of a training; a part without a digest belongs to the requesting case."""
        parts = [
            digest or self._place(getattr(training, name), f"{name} of {case}")
            for name, digest in self._digests(training, case).items()
        ]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:10]

    def _digests(self, training: Training, case: str) -> dict[str, str]:
        """Digest each part of a training; empty for a part without a digest."""
        return {
            field.name: self._part_digest(getattr(training, field.name), case) for field in fields(training)
        }

    def _part_digest(self, part: object, case: str) -> str:
        """Digest a part once per case, which requests it several times; it may have changed by the next case."""
        if self._read[0] != case:
            self._read = (case, [])
        for known, digest in self._read[1]:
            if known is part:
                return digest
        digest = content_digest(part) or ""
        self._read[1].append((part, digest))
        return digest

    def _place(self, part: object, owner: str) -> str:
        """Name an object without a digest by its owner, and by how many others of the owner came before it."""
        met = self._unread.setdefault(owner, [])
        if not any(part is other for other in met):
            met.append(part)
        return f"{owner}, {next(i for i, other in enumerate(met) if other is part)}"

    def _launch(self, training: Training, cell: Cell, seeds: Iterable[int], folder: Path) -> None:
        require(*_features(training, cell))
        engine = describe(cell.engine)
        keep_description(engine, folder)
        counters = (COUNTS_ARCS,) if Watch.ARCS in training.watch else ()
        world = replace(cell.world, preload=(*engine.preload, *counters))
        before = None if training.origin is None else folder / BEFORE
        if before is not None and not _has_left_state(training, cell, world, before):
            return
        job = (drive_rank, training, cell.engine, before)
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
    result = launch(spec, leave_state, training, cell.engine, folder=place)
    if is_trained(result):
        return True
    for path in place.iterdir():
        shutil.move(path, place.parent)
    keep_result(result, place.parent)
    return False


def _drop_oldest(
    held: dict[_Key, _Held], num_bytes: Callable[[_Held], int], most_bytes: int, most: int | None = None
) -> list[tuple[_Key, int]]:
    """Drop the oldest entries until the rest is small enough; returns them, with the bytes of each.

    The newest is kept whatever its size.
    """
    dropped = []
    total = sum(map(num_bytes, held.values()))
    while len(held) > 1 and (total > most_bytes or (most is not None and len(held) > most)):
        oldest = next(iter(held))
        dropped.append((oldest, num_bytes(held.pop(oldest))))
        total -= dropped[-1][1]
    return dropped


def _bytes_observed(trained: tuple[Scheduled, ...]) -> int:
    shards = (s for seen in trained for rank in seen.kept.ranks for s in rank.initial.values())
    return sum(shard.tensor.nbytes for shard in shards)


def _bytes_of_oracle(oracle: OracleObservation) -> int:
    return sum(tensor.nbytes for tensor in oracle.initial.values())


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


def unexercised(training: Training) -> Training:
    """Remove the calls of an engine's own interface: all exercises of one model share a training."""
    return replace(training, script=EachMicrobatch()) if isinstance(training.script, Exercise) else training


def _arithmetic(training: Training) -> Training:
    """Keep what changes the oracle: the engine and most of the plan change neither the right result nor its noise."""
    asked = unexercised(training)
    scaling = asked.schedule.scaling
    if scaling is not None and scaling.overflows_at is None:  # a factor that is later divided out
        asked = replace(asked, schedule=replace(asked.schedule, scaling=None))
    resume, origin = asked.resume, asked.origin
    if resume is not None:
        # A fresh model has no gradients. If the previous step left none either, the oracle does not depend on it. A
        # user's optimizer may clear only some.
        has_none = asked.schedule.clears_to_none(resume.after_steps - 1)
        is_alike = has_none and not isinstance(asked.optimizer, UserOptimizer)
        resume = None if is_alike else replace(resume, plan=None, form=StateForm.WHOLE)
    if origin is not None:
        before = None if origin.plan is None else _arithmetic_plan(origin.plan)
        origin = replace(origin, plan=before, form=StateForm.WHOLE)
    return replace(
        asked,
        plan=_arithmetic_plan(asked.plan),
        origin=origin,
        schedule=replace(asked.schedule, steps_in_backward=False),
        resume=resume,
        watch=frozenset(),
        schedules=1,
        is_by_default=False,
    )


def _arithmetic_plan(plan: Plan) -> Plan:
    """Keep those parts of a plan that set how gradients are divided, clipped and summed, and in which dtype."""
    return Plan(
        divide_factor=plan.divide_factor,
        clip_in_step=plan.clip_in_step,
        reduce_dtype=plan.reduce_dtype,
        compute_dtype=plan.compute_dtype,
        output_dtype=plan.output_dtype,
        accumulation=plan.accumulation,
        demands=plan.demands & {Capability.REDUCE_AS_STORED},
    )
