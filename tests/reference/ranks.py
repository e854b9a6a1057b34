"""Runs a test's body on ranks: threads that live as long as the tests of a file, or new processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from shardproof.harness.tracing.ledger import Op, Phase
from shardproof.harness.worlds.launch import WorldPool, launch
from shardproof.harness.worlds.outcome import Returned
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import WorldKind, WorldSpec
from tests.values import keep_value, kept_values

Row = TypeVar("Row")
Value = TypeVar("Value")


class Ranks:
    """Worlds of one test; starting threads and warming DTensor up costs more than most tests do."""

    def __init__(self, pool: WorldPool, folder: Path) -> None:
        self._pool = pool
        self._folder = folder
        self._num_runs = 0

    # Any: the body's own arguments and value.
    def run(
        self, size: int, body: Callable[..., Any], *args: Any, kind: WorldKind = WorldKind.THREADS
    ) -> list[Any]:
        """Run ``body`` on every rank; fails unless all return. Returns their values in rank order."""
        __tracebackhide__ = True
        self._num_runs += 1
        folder = self._folder / str(self._num_runs)
        spec = WorldSpec(kind=kind, size=size, deadline_s=60)
        if kind is WorldKind.THREADS:
            result = self._pool.run(spec, keep_value, body, *args, folder=folder)
        else:
            result = launch(spec, keep_value, body, *args, folder=folder)
        failures = [getattr(o, "traceback", str(o)) for o in result.outcomes if not isinstance(o, Returned)]
        assert not failures, "\n".join(failures)
        assert result.is_clean, result.leaks
        return kept_values(folder, size)


def collectives(context: RankContext, phase: Phase | None = None, step: int | None = None) -> dict[Op, int]:
    """Count this rank's collectives by kind: those of a phase or of a step, or all that have a label."""
    entries = [
        e
        for e in context.recorder.ledger()
        if (e.phase is phase if phase else e.phase is not Phase.PREPARE) and step in {None, e.step}
    ]
    return {op: sum(e.op is op for e in entries) for op in {e.op for e in entries}}


def each(rows: Iterable[Row], observe: Callable[[Row], Value]) -> dict[Row, Value | str]:
    """Observe row after row of a table in one world; a row that raises on every rank is reported by its error."""
    observed: dict[Row, Value | str] = {}
    for row in rows:
        try:
            observed[row] = observe(row)
        except Exception as error:
            observed[row] = f"{type(error).__name__}: {error}"
    return observed
