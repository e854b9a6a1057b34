"""Coverage as a table, for a terminal or as Markdown: row, cases, and a verdict per engine."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from shardproof.harness.audit.upstream_coverage import Coverage, RowCoverage, RowVerdict
from shardproof.reports.matrix import by_test
from shardproof.reports.text import one_line

_NUM_TESTS = 1  # named in a row of the terminal's table, where a line should stay a line
_NEEDS_GPU = "GPU"


def render(covered: Coverage) -> str:
    """Render for a terminal: test names shortened, why some rows need a GPU below the table."""
    rows = [
        [found.row.id, found.row.promise, _num(found), _cases(found, limit=_NUM_TESTS), *_verdicts(found)]
        for found in covered.rows
    ]
    table = tabulate(rows, headers=_headers(covered), tablefmt="simple", disable_numparse=True)
    return "\n\n".join(part for part in (table, *_notes(covered), _summary(covered)) if part)


def render_markdown(covered: Coverage) -> str:
    """Render as Markdown, with every test's name, the upstream ones included."""
    rows = [
        [
            found.row.id,
            f"`{found.row.test}`",
            found.row.promise,
            _num(found),
            _cases(found, limit=None).replace("|", "\\|"),
            *_verdicts(found),
        ]
        for found in covered.rows
    ]
    headers = ["row", covered.table.column, *_headers(covered)[1:]]
    table = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    return "\n\n".join(part for part in (table, *_notes(covered), _summary(covered)) if part)


def _headers(covered: Coverage) -> list[str]:
    return ["row", "promise", "cases", "tests", *map(one_line, covered.engines)]


def _num(found: RowCoverage) -> str:
    return str(len(found.cases))


def _cases(found: RowCoverage, *, limit: int | None) -> str:
    return ", ".join(by_test(found.cases, limit=limit)) or "-"


def _verdicts(found: RowCoverage) -> list[str]:
    return [_verdict(row, found) for row in found.verdicts]


def _verdict(row: RowVerdict, found: RowCoverage) -> str:
    if row.verdict is None:
        return _NEEDS_GPU if found.row.why_gpu else "-"
    judged = "" if row.num_judged == len(found.cases) else f" ({row.num_judged} of {len(found.cases)})"
    return f"{row.verdict}{judged}"


def _notes(covered: Coverage) -> list[str]:
    parts = []
    if covered.engines:
        parts.append("-: not run. (N of M): cases that were run, where some were not.")
    gpu = [found.row for found in covered.rows if found.row.why_gpu]
    if gpu:
        lines = [f"- {row.id}: {row.why_gpu}" for row in gpu]
        parts.append("\n".join(["Only a GPU can show:", "", *lines]))
    if covered.missing:
        parts.append("No case stands for: " + _listed([row.id for row in covered.missing]))
    return parts


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(ids)


def _summary(covered: Coverage) -> str:
    num_rows = len(covered.rows)
    passed = ", ".join(f"{one_line(engine)}: {covered.num_passed(engine)}" for engine in covered.engines)
    row = f"; PASSED by {passed}" if passed else ""
    return f"{num_rows - len(covered.missing)} of {num_rows} rows have cases{row}"
