"""One session's judging: case by engine by world to a record, each world run once, each oracle computed once."""

from __future__ import annotations

import hashlib
import re
import shutil
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

from engine.contract import Plan
from harness.aside import aside, describe
from harness.case import Case, Training
from harness.drive import drive_rank
from harness.errors import UsageError
from harness.judge import Judgement, judge
from harness.keep import Kept, keep_result, load_kept
from harness.ledger.summary import summarize
from harness.oracle import OracleObservation, run_oracle
from harness.record import Record
from harness.script import EachMicrobatch
from harness.scripts.exercise import Exercise
from harness.verdict import Verdict
from harness.worlds.launch import WorldPool, launch
from harness.worlds.spec import WorldSpec

__all__ = ["Cell", "Source", "TrialSession"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One engine, by the name it was given, in one world."""

    engine: str
    world: WorldSpec

    def __str__(self) -> str:
        return f"{self.engine}@{self.world}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where observations are kept, and whether they are made or only read again.

    Each worker of a session that runs in several processes writes below a folder of its own, and reads all.
    """

    folder: Path
    worker: str = "main"
    is_replay: bool = False


class TrialSession:
    """Runs and judges cases; remembers oracles and what each world observed."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._oracles: dict[tuple[str, int], OracleObservation] = {}
        self._kept: dict[Path, Kept] = {}
        self._pool = WorldPool(source.folder / source.worker / "pool")

    def run(self, case: Case, cell: Cell, *, suite: str, command: str) -> Record:
        """Judge one case in one cell; our own errors become the verdict ERRORED, the caller's are raised."""
        started = time.monotonic()
        engine = describe(cell.engine)
        training = case.training
        if not training.needs <= engine.capabilities:
            training = _unexercised(training)  # what it would call plays no part in whether a plan is refused
        folder = self._folder(cell, training)
        try:
            kept = self._observe(training, cell, folder)
            oracle = self._oracle(case.training, case.training.plan.data_size(cell.world.size))
            judgement = judge(case, engine.capabilities, kept, oracle)
            ledger = summarize(kept.ledgers)
        except UsageError:
            raise
        except Exception as error:  # whatever breaks here is ours, and must not stop the other cases
            text = traceback.format_exc()
            judgement = Judgement(
                verdict=Verdict.ERRORED, headline=f"{type(error).__name__}: {error}\n{text}"
            )
            ledger = ()
        return Record(
            engine=cell.engine,
            case=case.id,
            world=str(cell.world),
            verdict=judgement.verdict,
            headline=judgement.headline,
            suite=suite,
            engine_version=engine.version_on(cell.world.device),
            laws=judgement.laws,
            worst=judgement.worst,
            ledger=ledger,
            outcomes=judgement.outcomes,
            observation=str(Path(self._source.folder.name) / folder.relative_to(self._source.folder)),
            command=command,
            duration_s=round(time.monotonic() - started, 4),
        )

    def close(self) -> None:
        """End pooled worlds."""
        self._pool.close()

    def _folder(self, cell: Cell, training: Training) -> Path:
        name = _folder_name(cell, training)
        kept = sorted(self._source.folder.glob(f"*/{name}")) if self._source.is_replay else []
        return kept[0] if kept else self._source.folder / self._source.worker / name

    def _oracle(self, training: Training, world_size: int) -> OracleObservation:
        # The engine and most of the plan change neither what is right nor the noise around it.
        arithmetic = replace(
            _unexercised(training), plan=_arithmetic(training.plan), resume=None, watch=frozenset()
        )
        key = (_digest(arithmetic), world_size)
        if key not in self._oracles:
            self._oracles[key] = aside(run_oracle, arithmetic, world_size)
        return self._oracles[key]

    def _observe(self, training: Training, cell: Cell, folder: Path) -> Kept:
        if folder not in self._kept:
            if not self._source.is_replay:
                self._launch(training, cell, folder)
            self._kept[folder] = load_kept(folder)
        return self._kept[folder]

    def _launch(self, training: Training, cell: Cell, folder: Path) -> None:
        if folder.exists():  # a world of an earlier, interrupted run of the same case
            shutil.rmtree(folder)
        # Starting ranks is cheap on the CPU, where a fresh world per case shares nothing; on CUDA it is dear.
        run = launch if cell.world.device == "cpu" else self._pool.run
        result = run(cell.world, drive_rank, training, cell.engine, folder=folder)
        keep_result(result, folder)


def _unexercised(training: Training) -> Training:
    """Leave out the calls of an engine's own interface: the same for all exercises of one model."""
    return replace(training, script=EachMicrobatch()) if isinstance(training.script, Exercise) else training


def _arithmetic(plan: Plan) -> Plan:
    """Keep of a plan what changes the oracle: how gradients are divided, in what dtype and portions summed."""
    return Plan(
        divide_factor=plan.divide_factor,
        reduce_dtype=plan.reduce_dtype,
        compute_dtype=plan.compute_dtype,
        output_dtype=plan.output_dtype,
        accumulation=plan.accumulation,
        demands=plan.demands,  # without them the script is refused
    )


def _folder_name(cell: Cell, training: Training) -> Path:
    engine = re.sub(r"[^A-Za-z0-9_.-]+", "-", cell.engine).strip("-.")
    world = str(cell.world).replace(":", "-")
    return Path(engine) / world / _digest(training)


def _digest(training: Training) -> str:
    parts = [training.problem.name, training.optimizer.name]
    plans = [training.plan] if training.resume is None else [training.plan, training.resume.plan]
    for plan in plans:  # a set has no order that two processes agree on
        parts += [repr(replace(plan, demands=frozenset())), *sorted(c.name for c in plan.demands)]
    after = None if training.resume is None else training.resume.after_steps
    parts += [repr(x) for x in (training.schedule, training.script, training.convert, after)]
    parts += sorted(watch.name for watch in training.watch)
    text = "|".join(parts)
    return (
        f"{training.problem.name}-{training.optimizer.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    )
