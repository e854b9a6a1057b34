"""What a check of a user's own model showed, on one screen: proven, not declared, broken, and how close it was."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports.matrix import label
from shardproof.reports.summary import conclude, tally
from shardproof.reports.text import duration, one_line, rough

_WIDTH = 110
_INDENT = " " * 16


def render(run: Run) -> str:
    """Render the run: a block for each engine in each world, then the conclusion."""
    cells: dict[tuple[str, str], list[Record]] = {}
    for record in run.records:
        cells.setdefault((record.engine, record.world), []).append(record)
    blocks = [_block(engine, world, records) for (engine, world), records in cells.items()]
    counted = tally(run.records)
    took = f" in {duration(run.footer.duration_s)}" if run.footer else ""
    score = f"{conclude(run).value}: {counted.score}{took}, {counted.num_not_conforming} not conforming"
    return "\n\n".join([*blocks, score]) + "\n"


def _block(engine: str, world: str, records: Sequence[Record]) -> str:
    passed = [record for record in records if record.verdict is Verdict.PASSED]
    refused = [record for record in records if record.verdict is Verdict.UNSUPPORTED]
    broken = [record for record in records if not record.verdict.is_conforming]
    lines = [f"{one_line(engine)} in {one_line(world)}"]
    lines += [_line("proven", _promise(record)) for record in passed]
    lines += [_line("not declared", f"{_promise(r)}: {one_line(r.headline)}") for r in refused]
    lines += [_line(str(r.verdict), f"{_promise(r)}: {one_line(r.headline, limit=400)}") for r in broken]
    lines += [_line("repeat", record.command) for record in broken[:1]]
    return "\n".join([*lines, *_closest(passed)])


def _promise(record: Record) -> str:
    """Format the id of a case as a sentence; the model's name, which all have, is left out."""
    name, _, parameters = label(record.case, record.suite).rpartition("::")[2].partition("[")
    _, _, own = parameters.removesuffix("]").partition("-")
    return name.replace("_", " ") + (f" ({own})" if own else "")


def _closest(passed: Sequence[Record]) -> list[str]:
    """Name the tensor that came closest to what is allowed, over all that passed."""
    tensors = [record.worst for record in passed if record.worst is not None]
    if not tensors:
        return []
    worst = max(tensors, key=lambda tensor: tensor.ratio)
    text = (
        f"{worst.quantity} {one_line(worst.name)!r} in step {worst.step} on rank {worst.rank} was off by "
        f"{rough(worst.error)}; more than {rough(worst.allowed)} would have failed"
    )
    return [_line("closest", text)]


def _line(word: str, text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=f"  {word:<14}", subsequent_indent=_INDENT)
