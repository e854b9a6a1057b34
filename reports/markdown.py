"""A run as Markdown that any forge shows, within the size that forges accept.

[Note: what is left out first] The report is cut by dropping detail, never the score: first the detail of records that
passed, then of those that are declared (unsupported, known failures), then of the rest. The matrix loses rows once it
fills half of the report. Everything left out is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports import evidence, user_model_result
from shardproof.reports.evidence import headroom, ledger_rows, outcome_groups, place
from shardproof.reports.expected import address, idle, stale
from shardproof.reports.markup import Budget, block, code, escape, listed, num_bytes, table
from shardproof.reports.matrix import CaseRow, Column, Matrix, arrange, by_severity, label
from shardproof.reports.overview import overview
from shardproof.reports.summary import conclude, declared_zeros, laws_judged, limited, tally, warnings
from shardproof.reports.text import duration, printable, size, versions
from shardproof.reports.verdict_style import MARKS

LIMIT_BYTES = 2**20
_RESERVE_BYTES = 2_000  # for the sentences that count what was left out
_MATRIX_BYTES = LIMIT_BYTES // 2  # so that failures keep room for their evidence
_NUM_WARNINGS = 20
_NUM_COLUMNS = 100
_NUM_CARDS = 8
_NUM_ENGINES = 40  # of the first table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Detail:
    """One record's section."""

    record: Record
    text: str


def render(run: Run) -> str:
    """Render the run in at most LIMIT_BYTES; see [Note: what is left out first]."""
    head = _head(run)
    matrix = _matrix(arrange(run), Budget(_MATRIX_BYTES))
    tail = "\n\n".join((*_laws_judged(run), *listed("Expectations not exercised:", idle(run))))
    budget = Budget(LIMIT_BYTES - _RESERVE_BYTES - sum(map(num_bytes, (head, matrix, tail))))
    details = [_Detail(record=record, text=_detail(record)) for record in by_severity(run.records)]
    kept = [detail for detail in details if budget.takes(detail.text)]
    parts = [head, matrix, *_sections(kept), _left_out(details, kept), tail]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(run: Run) -> str:
    counted = tally(run.records)
    rows = [
        (code(MARKS[verdict].letter), str(verdict), str(count), MARKS[verdict].phrase)
        for verdict, count in counted.counts.items()
    ]
    parts = [
        f"# Shardproof: {conclude(run).value.lower()}",
        f"**{counted.score}**: {counted.words}.",
        engines_table(run),
        *_warnings(run),
        *listed("**Stale expectations, which fail this run:**", stale(run)),
        *listed("The time was limited:", limited(run)),
        *listed("Gradients that were not judged as None:", declared_zeros(run)),
        *_of_model(run),
        table(["", "verdict", "records", "meaning"], rows) if rows else "",
        _origin(run),
    ]
    return "\n\n".join(part for part in parts if part)


def engines_table(run: Run) -> str:
    """Write the overview of a run as a table."""
    found = overview(run)
    judged = found.engines[:_NUM_ENGINES]
    rows = [[code(engine), *(cell.text if cell else "" for cell in cells)] for engine, cells in judged]
    if len(judged) < len(found.engines):
        rows.append([f"and {len(found.engines) - len(judged)} more"])
    return table(["engine", *map(escape, found.worlds)], rows) if rows else ""


def _of_model(run: Run) -> list[str]:
    """Return what a check found of the user's model, and what it proved."""
    found = run.header.model
    if not found:
        return []
    facts = [f"- {escape(word)}: {escape(text, limit=500)}" for word, text in found.items() if word != "file"]
    title = f"## What is proven of {code(found['file'], limit=500)}"
    return [title, "\n".join(facts), block(user_model_result.render(run))]


def _warnings(run: Run) -> list[str]:
    problems = warnings(run)
    lines = [f"> - {escape(text)}" for text in problems[:_NUM_WARNINGS]]
    if len(problems) > _NUM_WARNINGS:
        lines.append(f"> - and {len(problems) - _NUM_WARNINGS} more problems")
    return ["\n".join(["> **This run is not whole.**", ">", *lines])] if problems else []


def _origin(run: Run) -> str:
    found = run.header
    changed = " with changed files" if found.git_dirty else ""
    memory = found.hardware.get("memory_bytes", "")
    hardware = found.hardware | ({"memory_bytes": size(int(memory))} if memory.isdecimal() else {})
    took = f", took {duration(run.footer.duration_s)}" if run.footer else ""
    return "\n".join(
        (
            f"- command: {code(found.command, limit=2000)}",
            f"- started: {escape(found.started_at)}{took}; seed {found.seed}",
            f"- versions: {escape(versions(found.versions), limit=2000)}",
            f"- hardware: {escape(versions(hardware), limit=2000)}",
            f"- git: {escape(found.git_head)}{changed}",
        )
    )


def _laws_judged(run: Run) -> list[str]:
    """Return a table of how many records each law judged: it cannot be derived for the others, or they do not ask."""
    rows = [(escape(law), f"{n} of {of}", f"{n / of:.0%}") for law, n, of in laws_judged(run)]
    return ["## Laws, and the records that they judged", table(["law", "records", ""], rows)] if rows else []


def _matrix(matrix: Matrix, budget: Budget) -> str:
    columns = matrix.columns[:_NUM_COLUMNS]
    if not columns:
        return ""
    header = table(["case", *map(_heading, columns)], ())
    parts, dropped = ["## Matrix"], len(matrix.columns) - len(columns)
    if dropped:
        parts.append(f"{dropped} more columns are left out.")
    num_left_out = 0
    for suite in matrix.suites:
        title = f"### {escape(suite.suite) or 'no suite'}"
        if not budget.takes(title + header):
            num_left_out += len(suite.rows)
            continue
        lines = [_row(row, len(columns)) for row in suite.rows]
        kept = [line for line in lines if budget.takes(line)]
        num_left_out += len(lines) - len(kept)
        parts += [title, "\n".join([header, *kept])]
    if num_left_out:
        parts.append(f"{num_left_out} more rows are left out for length; `report.html` has them.")
    return "\n\n".join(parts)


def _heading(column: Column) -> str:
    return f"{escape(column.engine)}<br>{escape(column.world)}"


def _row(row: CaseRow, num_columns: int) -> str:
    cells = ("".join(MARKS[record.verdict].letter for record in cell) for cell in row.cells[:num_columns])
    return f"| {' | '.join([code(row.label).replace('|', chr(92) + '|'), *map(code, cells)])} |"


def _sections(kept: Sequence[_Detail]) -> list[str]:
    parts: list[str] = []
    for verdict in dict.fromkeys(detail.record.verdict for detail in kept):
        parts.append(f"## {verdict}: {MARKS[verdict].phrase}")
        parts += [detail.text for detail in kept if detail.record.verdict is verdict]
    return parts


def _left_out(details: Sequence[_Detail], kept: Sequence[_Detail]) -> str:
    missing = tally(d.record for d in details).counts
    present = tally(d.record for d in kept).counts
    left = {v: count - present.get(v, 0) for v, count in missing.items() if count > present.get(v, 0)}
    if not left:
        return ""
    words = ", ".join(f"{count} {verdict}" for verdict, count in left.items())
    return (
        f"---\n\nLeft out for length: the detail of {words}. `records.jsonl` and `report.html` have it all."
    )


def _detail(record: Record) -> str:
    title = f"{code(label(record.case, record.suite))} on {code(record.engine)} in {code(record.world)}"
    if record.verdict is Verdict.PASSED:
        return f"- {title}: {escape(record.headline)} ({duration(record.duration_s)})"
    parts = [f"### {title}", _expectation(record), escape(record.headline, limit=2000)]
    parts += [f"First wrong: {escape(record.located.sentence, limit=2000)}"] if record.located else []
    parts += [*_hang(record), *_laws(record), *_worst(record)]
    if not record.verdict.is_conforming:
        parts += [*_ledger(record), *([] if record.hang else _outcomes(record)), *_output(record)]
    if record.command:
        parts.append(f"Again: {code(record.command, limit=2000)}")
    return "\n\n".join(part for part in parts if part)


def _expectation(record: Record) -> str:
    entry = record.expectation
    if entry is None:
        return ""
    link = address(entry.link)
    spelt = f"<{link}>" if link and len(link) <= 300 else escape(entry.link)
    return f"Expectation {entry.number}: {escape(entry.reason)} {spelt}, until {escape(entry.expiry)}"


def _laws(record: Record) -> list[str]:
    lines: list[str] = []
    for law in record.laws[:50]:
        lines.append(f"- {'held' if law.held else '**broken**'}: {escape(law.law)}: {escape(law.summary)}")
        lines += [f"  - {escape(detail)}" for detail in law.details[:10]]
        if len(law.details) > 10:
            lines.append(f"  - and {len(law.details) - 10} more")
    if len(record.laws) > 50:
        lines.append(f"- and {len(record.laws) - 50} more laws")
    return ["\n".join(lines)] if lines else []


def _hang(record: Record) -> list[str]:
    """Return ranks side by side, the difference, and each rank's own frames."""
    if record.hang is None:
        return []
    found = evidence.state_cards(record.hang)[:_NUM_CARDS]
    labels = list(dict.fromkeys(label for card in found for label, _ in card.facts))
    names = [f"**{p.ranks}** (blocks the others)" if p.is_suspect else p.ranks for p in found]
    rows = [("", *(p.words for p in found))]
    rows += [(label, *(escape(dict(p.facts).get(label, "")) for p in found)) for label in labels]
    rows.append(("stack", *("<br>".join(code(frame) for frame in p.frames[:4]) for p in found)))
    parts = [table(["ranks", *names], rows)]
    if circle := evidence.hang_cycle(record.hang):
        parts.append(f"In a circle: {escape(circle)}")
    for step in evidence.hang_steps(record.hang):
        sides = "".join(f"\n  - {escape(who)}: {escape(what)}" for who, what in step.sides)
        parts.append(f"- call {escape(step.number)}: {escape(step.words)}{sides}")
    return parts


def _worst(record: Record) -> list[str]:
    if record.worst is None:
        return []
    looks = f" It looks like: {escape(record.worst.looks_like)}." if record.worst.looks_like else ""
    return [f"Worst: {escape(place(record.worst))}: {escape(headroom(record.worst))}.{looks}"]


def _ledger(record: Record) -> list[str]:
    rows = ledger_rows(record)
    spelt = [
        (*map(escape, (row.phase, row.op, row.axis, row.dtype, row.ranks)), str(row.count), row.size)
        for row in rows[:60]
    ]
    more = [f"and {len(rows) - 60} more lines of the ledger"] if len(rows) > 60 else []
    lines = table(["phase", "op", "axis", "dtype", "ranks", "count", "bytes"], spelt)
    return [lines, *more] if rows else []


def _output(record: Record) -> list[str]:
    return ["Printed by the ranks:", block(record.output)] if printable(record.output).strip() else []


def _outcomes(record: Record) -> list[str]:
    parts: list[str] = []
    groups = outcome_groups(record)
    for group in groups[:16]:
        parts.append(f"{escape(group.ranks)}: {escape(group.kind)}")
        if printable(group.text).strip():
            parts.append(block(group.text))
    if len(groups) > 16:
        parts.append(f"and {len(groups) - 16} more kinds of outcome")
    return parts
