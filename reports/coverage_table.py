"""Coverage as tables, for a terminal or as Markdown: rows with cases and a verdict per engine, and totals by file."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from shardproof.harness.audit.upstream_coverage import Coverage, RowCoverage, RowState, RowVerdict
from shardproof.reports.matrix import by_test
from shardproof.reports.text import one_line

_NUM_TESTS = 1  # names in a row of the terminal's table, which should fit on one line
_NEEDS_GPU = "GPU"


def render(covered: Coverage) -> str:
    """Render for a terminal: test names shortened, reasons below the table."""
    rows = [[*_start(found), _cases(found, limit=_NUM_TESTS), *_verdicts(found)] for found in covered.rows]
    return _joined(covered, rows, _headers(covered), "simple")


def render_markdown(covered: Coverage) -> str:
    """Render as Markdown, with every test's name, the upstream ones included."""
    rows = []
    for found in covered.rows:
        id, *start = _start(found)
        cases = _cases(found, limit=None).replace("|", "\\|")
        rows.append([id, f"`{found.row.test}`", *start, cases, *_verdicts(found)])
    return _joined(covered, rows, ["row", covered.table.column, *_headers(covered)[1:]], "github")


def _joined(covered: Coverage, rows: list[list[str]], headers: list[str], form: str) -> str:
    parts = [tabulate(rows, headers=headers, tablefmt=form, disable_numparse=True), *_notes(covered)]
    states = [state for state in RowState if covered.num_rows(state)]
    if len(states) > 1:
        total = tabulate(
            _totals(covered, states),
            headers=_of_totals(covered, states),
            tablefmt=form,
            disable_numparse=True,
        )
        parts.append(total)
    return "\n\n".join([*parts, _summary(covered)])


def _of_totals(covered: Coverage, states: Sequence[RowState]) -> list[str]:
    passed = [f"PASSED by {one_line(engine)}" for engine in covered.engines]
    return ["file", covered.table.column + "s", "rows", *(state.value for state in states), *passed]


def _totals(covered: Coverage, states: Sequence[RowState]) -> list[list[str]]:
    files = [*dict.fromkeys(row.row.file for row in covered.rows), None]
    return [
        [
            file or "all",
            str(sum(row.row.num_tests for row in covered.rows if file in {None, row.row.file})),
            str(sum(covered.num_rows(state, file) for state in RowState)),
            *(str(covered.num_rows(state, file)) for state in states),
            *(str(covered.num_passed(engine, file)) for engine in covered.engines),
        ]
        for file in files
    ]


def _headers(covered: Coverage) -> list[str]:
    return ["row", "promise", "state", "cases", "mutants", "tests", *map(one_line, covered.engines)]


def _start(found: RowCoverage) -> list[str]:
    killed = "" if found.num_killed is None else f"{found.num_killed} of "
    return [
        found.row.id,
        found.row.promise,
        found.state.value,
        str(len(found.cases)),
        f"{killed}{found.num_mutants}",
    ]


def _cases(found: RowCoverage, *, limit: int | None) -> str:
    return ", ".join(by_test(found.cases, limit=limit)) or "-"


def _verdicts(found: RowCoverage) -> list[str]:
    return [_verdict(row, found) for row in found.verdicts]


def _verdict(row: RowVerdict, found: RowCoverage) -> str:
    if row.verdict is None:
        return _NEEDS_GPU if found.state is RowState.DEVICE else "-"
    judged = "" if row.num_judged == len(found.cases) else f" ({row.num_judged} of {len(found.cases)})"
    return f"{row.verdict}{judged}"


def _notes(covered: Coverage) -> list[str]:
    parts = []
    if covered.engines:
        parts.append("-: not run. (N of M): cases that were run, where some were not.")
    titles = {
        RowState.DEVICE: "Only a GPU can show:",
        RowState.NEWER: "Only newer engines can show:",
        RowState.INTERNAL: "Not applicable to other engines:",
        RowState.IN_PART: "Covered except for:",
    }
    for state, title in titles.items():
        rows = [found.row for found in covered.rows if found.state is state]
        if rows:
            parts.append("\n".join([title, "", *(f"- {row.id}: {row.missing or row.why}" for row in rows)]))
    others = [found for found in covered.observable if not found.has_passed]
    if covered.engines and others:
        parts.append("PASSED by no engine here: " + ", ".join(map(_why_not, others)))
    if covered.missing:
        parts.append("No case covers: " + ", ".join(row.id for row in covered.missing))
    return parts


def _why_not(found: RowCoverage) -> str:
    verdicts = {str(row.verdict) for row in found.verdicts if row.verdict}
    return f"{found.row.id} ({', '.join(sorted(verdicts)) or 'not run'})"


def _summary(covered: Coverage) -> str:
    with_cases = f"{sum(bool(found.cases) for found in covered.rows)} of {len(covered.rows)} rows have cases"
    if not covered.engines:
        return with_cases
    rows = covered.observable
    passed = sum(found.has_passed for found in rows)
    own = ", ".join(f"{one_line(engine)}: {covered.num_passed(engine)}" for engine in covered.engines)
    of_device = covered.num_rows(RowState.DEVICE)
    return (
        f"{with_cases}; PASSED by {own}; {passed} of {len(rows)} rows that a CPU can show PASSED by one of these "
        f"({passed / len(rows):.1%}), {of_device} need a GPU"
    )
