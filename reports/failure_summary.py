"""A run's failures as Markdown that fits a comment on a pull request: each cause once, and nothing that conforms."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.harness.records.diff.comparison import steady
from shardproof.harness.records.record import Record
from shardproof.harness.records.run import Run
from shardproof.reports.expected import stale
from shardproof.reports.markup import Budget, code, escape, num_bytes
from shardproof.reports.matrix import by_severity
from shardproof.reports.summary import conclude, tally, warnings
from shardproof.reports.text import versions

__all__ = ["LIMIT_BYTES", "render"]

LIMIT_BYTES = 60_000  # a comment on GitHub holds 65,536 characters
_RESERVE_BYTES = 200  # for the line that counts what is left out
_MOST_CASES = 8  # of one cause
_MOST_LINES = 20  # of one list


def render(run: Run) -> str:
    """Render the run in at most LIMIT_BYTES; causes that do not fit are counted."""
    head = _head(run)
    causes = _causes(run)
    budget = Budget(LIMIT_BYTES - _RESERVE_BYTES - num_bytes(head))
    kept = [text for text in map(_cause, causes) if budget.takes(text)]
    left_out = len(causes) - len(kept)
    more = [f"... and {left_out} more causes, which `report.html` has."] if left_out else []
    return "\n\n".join([head, *kept, *more]) + "\n"


def _head(run: Run) -> str:
    counted = tally(run.records)
    parts = [
        f"# Shardproof: {conclude(run).value.lower()}",
        f"**{counted.score}**: {counted.words}.",
        escape(versions(run.header.versions), limit=500),
        *_listed("**This run is not whole:**", warnings(run)),
        *_listed("**Stale expectations, which fail this run:**", stale(run)),
    ]
    return "\n\n".join(part for part in parts if part)


def _listed(title: str, texts: Sequence[str]) -> list[str]:
    lines = [f"- {escape(text)}" for text in texts[:_MOST_LINES]]
    if len(texts) > _MOST_LINES:
        lines.append(f"- and {len(texts) - _MOST_LINES} more")
    return ["\n".join([title, "", *lines])] if texts else []


def _causes(run: Run) -> list[list[Record]]:
    """Group what does not conform by engine, verdict, and headline but for measured values; the worst first."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record in by_severity(run.records):
        if not record.verdict.is_conforming:
            found.setdefault((record.engine, record.verdict, steady(record.headline)), []).append(record)
    return list(found.values())


def _cause(records: Sequence[Record]) -> str:
    first = records[0]
    count = f", {len(records)} records" if len(records) > 1 else ""
    cases = [f"- {code(f'{r.case} in {r.world}')}" for r in records[:_MOST_CASES]]
    if len(records) > _MOST_CASES:
        cases.append(f"- and {len(records) - _MOST_CASES} more")
    again = [f"Again: {code(first.command, limit=500)}"] if first.command else []
    title = f"## {first.verdict}: {code(first.engine)}{count}"
    return "\n\n".join([title, escape(first.headline, limit=600), "\n".join(cases), *again])
