"""The kill matrix for a terminal, as Markdown and as JSON: which cases killed which mutants, and which survived."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

from shardproof.harness.audit.kill_matrix import KillMatrix, MutantRow, MutantStatus, PairResult
from shardproof.harness.records.run import write_file
from shardproof.reports.matrix import by_test
from shardproof.reports.text import duration, one_line

_NUM_TESTS = 2  # names in a row of the terminal's table, which should fit on one line
_NUM_LISTED = 50  # beyond these a terminal scrolls them away anyway
_SCHEMA = 2


def render(matrix: KillMatrix, *, duration_s: float) -> str:
    """Render for a terminal; the last line sums up."""
    parts = [
        tabulate(
            [[row.target.name, *_counts(row), _killers(row, limit=_NUM_TESTS)] for row in matrix.mutants],
            headers=["mutant", "pairs", "kills", "by"],
            tablefmt="simple",
            disable_numparse=True,
        ),
        *_findings(matrix, limit=_NUM_LISTED),
        summary(matrix, duration_s=duration_s),
    ]
    return "\n\n".join(part for part in parts if part)


def places(matrix: KillMatrix) -> str:
    """Render, for a terminal, which mutants' faults were located in the phase that they declare."""
    by_name = {target.name: target for target in matrix.targets}
    rows = []
    right, total = Counter[str](), Counter[str]()
    for result in matrix.results:
        declared, found = by_name[result.pair.mutant].phase, result.located
        if result.status is not MutantStatus.KILLED or found is None or not declared:
            continue
        total[declared] += 1
        if found.phase == declared:
            right[declared] += 1
        else:
            case = result.pair.case.rpartition("::")[2]
            rows.append([result.pair.mutant, declared, one_line(found.sentence, limit=200), case])
    if not total:
        return "nothing to locate"
    table = tabulate(rows, headers=["mutant", "declares", "found", "case"], tablefmt="simple")
    by_phase = [[phase, f"{right[phase]} of {number}"] for phase, number in sorted(total.items())]
    shares = tabulate(by_phase, headers=["phase", "right"], tablefmt="simple")
    share = f"{right.total()} of {total.total()} ({right.total() / total.total():.0%})"
    return f"{table}\n\n{shares}\n\nlocated in the declared phase: {share}"


def render_markdown(matrix: KillMatrix) -> str:
    """Render as Markdown: without times, so that an unchanged matrix is an unchanged file."""
    table = tabulate(
        [
            [f"`{row.target.name}`", row.target.fault, *_counts(row), _killers(row, limit=None)]
            for row in matrix.mutants
        ],
        headers=["mutant", "fault", "pairs", "kills", "by"],
        tablefmt="github",
        disable_numparse=True,
    )
    parts = ["# Kill matrix", _score(matrix), table, *_findings(matrix, limit=None)]
    return "\n\n".join(parts) + "\n"


def render_json(matrix: KillMatrix) -> str:
    """Render as JSON: every mutant, every case, every pair with its result."""
    harmless = {idle.case: idle.why for idle in matrix.harmless}
    plain = {
        "schema": _SCHEMA,
        "is_whole": matrix.is_whole,
        "is_proven": matrix.is_proven,
        "mutants": [
            {
                "name": row.target.name,
                "engine": row.target.engine,
                "fault": row.target.fault,
                "trace": row.target.trace,
                "killed_by": list(row.killers),
            }
            for row in matrix.mutants
        ],
        "cases": [
            {"case": case, "kills": _killed_by(matrix, case), "why_none": harmless.get(case)}
            for case in matrix.cases
        ],
        "pairs": [
            {
                "mutant": result.pair.mutant,
                "case": result.pair.case,
                "world": result.pair.world,
                "must_kill": result.pair.must_kill,
                "fate": result.status.value,
                "verdict": None if result.verdict is None else str(result.verdict),
            }
            for result in matrix.results
        ],
    }
    return json.dumps(plain, indent=1) + "\n"


def write_kills(folder: Path, matrix: KillMatrix) -> tuple[Path, ...]:
    """Write kills.json and kills.md, each whole or not at all."""
    texts = {"kills.json": render_json(matrix), "kills.md": render_markdown(matrix)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_file(folder / name, text)
    return tuple(folder / name for name in texts)


def summary(matrix: KillMatrix, *, duration_s: float) -> str:
    """Return the counts of the matrix in one line."""
    return f"{_score(matrix)}; {len(matrix.results)} pairs in {duration(duration_s)}"


def _score(matrix: KillMatrix) -> str:
    num_killed, num_cases = sum(bool(row.killers) for row in matrix.mutants), len(matrix.cases)
    parts = [
        f"{num_killed} of {len(matrix.mutants)} mutants killed",
        f"{num_cases - len(matrix.harmless)} of {num_cases} cases kill at least one",
        *([f"{len(matrix.survivors)} pairs survived"] if matrix.survivors else []),
        *([f"{len(matrix.refused)} pairs refused"] if matrix.refused else []),
        *([f"{len(matrix.unknown)} without a verdict"] if matrix.unknown else []),
    ]
    return ", ".join(parts)


def _counts(row: MutantRow) -> tuple[str, str]:
    return str(row.num_pairs), str(len(row.killers))


def _killers(row: MutantRow, *, limit: int | None) -> str:
    return ", ".join(by_test(row.killers, limit=limit)).replace("|", "\\|") or "-"


def _killed_by(matrix: KillMatrix, case: str) -> list[str]:
    return [r.pair.mutant for r in matrix.results if r.pair.case == case and r.status is MutantStatus.KILLED]


def _findings(matrix: KillMatrix, *, limit: int | None) -> list[str]:
    """List survivors, gaps and excluded pairs, each kind under its heading; empty if there are none."""
    unknown = [_described(result) for result in matrix.unknown]
    survivors = [_described(result) for result in matrix.survivors]
    unkilled = [f"{target.name}: {target.fault}" for target in matrix.unkilled]
    harmless = [f"{one_line(idle.case)}: {one_line(idle.why)}" for idle in matrix.harmless]
    refused = [_described(result) for result in matrix.refused]
    elsewhere = [f"{p.mutant} in {p.world} on {one_line(p.case)}" for p in matrix.elsewhere]
    return [
        *_section("No verdict, which is our own fault:", unknown, limit),
        *_section("Mutants that survived a case that names them:", survivors, limit),
        *_section("Mutants that no case kills:", unkilled, limit),
        *_section("Cases that kill no mutant:", harmless, limit),
        *_section("Left out, because the engine does not declare what the case needs:", refused, limit),
        *_section("Left out, because the device is not here:", elsewhere, limit),
    ]


def _described(result: PairResult) -> str:
    verdict = "no verdict" if result.verdict is None else str(result.verdict)
    where = f"{result.pair.mutant} in {result.pair.world} on {one_line(result.pair.case)}"
    return f"{where}: {verdict}: {one_line(result.headline, limit=200)}"


def _section(title: str, texts: Sequence[str], limit: int | None) -> Iterable[str]:
    if not texts:
        return []
    shown = texts if limit is None else texts[:limit]
    lines = [f"- {text}" for text in shown]
    if len(shown) < len(texts):
        lines.append(f"- and {len(texts) - len(shown)} more; kills.md has them all")
    return ["\n".join([title, "", *lines])]
