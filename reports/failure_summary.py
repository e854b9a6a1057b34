"""A run's failures as Markdown that fits a comment on a pull request: each cause once, and no conforming record."""

from __future__ import annotations

from shardproof.harness.records.run import Run
from shardproof.reports import user_model_result
from shardproof.reports.causes import Cause, causes
from shardproof.reports.expected import stale
from shardproof.reports.markdown import engines_table
from shardproof.reports.markup import Budget, block, code, escape, listed, num_bytes
from shardproof.reports.summary import conclude, limited, tally, warnings
from shardproof.reports.text import versions

LIMIT_BYTES = 60_000  # a comment on GitHub holds 65,536 characters
_RESERVE_BYTES = 200  # for the line that counts what is left out
_MOST_CASES = 8  # of one cause


def render(run: Run) -> str:
    """Render the run in at most LIMIT_BYTES; causes that do not fit are counted."""
    head = _head(run)
    found = causes(run.records)
    budget = Budget(LIMIT_BYTES - _RESERVE_BYTES - num_bytes(head))
    kept = [text for text in map(_cause, found) if budget.takes(text)]
    left_out = len(found) - len(kept)
    more = [f"... and {left_out} more causes, which `report.html` has."] if left_out else []
    return "\n\n".join([head, *kept, *more]) + "\n"


def _head(run: Run) -> str:
    counted = tally(run.records)
    parts = [
        f"# Shardproof: {conclude(run).value.lower()}",
        f"**{counted.score}**: {counted.words}.",
        engines_table(run),
        escape(versions(run.header.versions), limit=500),
        *([block(user_model_result.render(run))] if run.header.model else []),
        *listed("The time was limited:", limited(run)),
        *listed("**This run is not whole:**", warnings(run)),
        *listed("**Stale expectations, which fail this run:**", stale(run)),
    ]
    return "\n\n".join(part for part in parts if part)


def _cause(cause: Cause) -> str:
    first, records = cause.example, cause.records
    count = f", {len(records)} records" if len(records) > 1 else ""
    cases = [f"- {code(f'{r.case} in {r.world}')}" for r in records[:_MOST_CASES]]
    if len(records) > _MOST_CASES:
        cases.append(f"- and {len(records) - _MOST_CASES} more")
    again = [f"Again: {code(first.command, limit=500)}"] if first.command else []
    title = f"## {first.verdict}: {code(first.engine)}{count}"
    return "\n\n".join([title, escape(first.headline, limit=600), "\n".join(cases), *again])
