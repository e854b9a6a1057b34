"""Writes docs/benchmarks.md and its plots: runs the benchmarks one after the other, in about ten minutes.

Needs ``pip install -e '.[bench]'``. Run: ``python -m benchmarks.page [--outputs DIR]``. ``--outputs`` keeps what each
benchmark printed, and takes what is there already instead of running it again. The text around the tables is in the
page itself and stays as it is.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tabulate import tabulate

_DOCS = Path(__file__).resolve().parents[1] / "docs"
_PAGE = _DOCS / "benchmarks.md"
_OF_TORCHS_TESTS = "expecttest"
_RUN = "{run}"  # a placeholder in a command: a run with records
_ROW, _LEFT, _BAR, _RIGHT = 22, 330, 300, 90  # pixels
_NUMBER = re.compile(r"[\d,]*\.?\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Bars of some columns of a table, by their headings; ``labels`` are columns too. A line marks the ``aim``."""

    columns: tuple[str, ...]
    labels: tuple[str, ...]
    unit: str
    aim: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One benchmark: its arguments, and the columns of its table that are drawn."""

    name: str
    arguments: tuple[str, ...]
    plot: Plot


SECTIONS = (
    Section(
        name="stages",
        arguments=("benchmarks.case_cost", "--world", "threads:4", "--suite", "smoke", "--suite", "parity"),
        plot=Plot(columns=("smoke, threads:4", "parity, threads:4"), labels=("stage",), unit="%"),
    ),
    Section(
        name="worlds",
        arguments=("benchmarks.world_cost", "--sizes", "2", "4", "--repeats", "3"),
        plot=Plot(
            columns=("threads s", "processes s", "MultiProcessTestCase s"), labels=("ranks",), unit=" s"
        ),
    ),
    Section(
        name="ledger",
        arguments=("benchmarks.ledger_overhead",),
        plot=Plot(columns=("ledger", "events", "CommDebugMode"), labels=("step",), unit="x", aim=1.10),
    ),
    Section(
        name="watches",
        arguments=("benchmarks.watch_overhead",),
        plot=Plot(columns=("both / plain [quartiles]",), labels=("step",), unit="x", aim=1.5),
    ),
    Section(
        name="engines",
        arguments=("benchmarks.engine_step",),
        plot=Plot(
            columns=("of processor",),
            labels=("world", "reshard", "accumulation", "engine"),
            unit="x",
            aim=1.0,
        ),
    ),
    Section(
        name="telling",
        arguments=("benchmarks.time_limit",),
        plot=Plot(columns=("dead in 30 s", "dead in 120 s"), labels=("engine",), unit="%", aim=95.0),
    ),
    Section(
        name="growth",
        arguments=("benchmarks.growth", _RUN),
        plot=Plot(columns=("ms each",), labels=("what", "number"), unit=" ms"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The output of a benchmark: its headings and its rows."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def column(self, head: str) -> list[str]:
        """Return the cells of a column."""
        return [row[self.heads.index(head)] for row in self.rows]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--outputs", type=Path)
    arguments = parser.parse_args()
    if find_spec(_OF_TORCHS_TESTS) is None:  # now, and not after minutes
        parser.error(
            f"expected the package {_OF_TORCHS_TESTS}, which torch's own test class imports; got none; "
            "try pip install -e '.[bench]'"
        )
    with tempfile.TemporaryDirectory() as scratch:
        outputs: Path = arguments.outputs or Path(scratch)
        outputs.mkdir(parents=True, exist_ok=True)
        text = _PAGE.read_text()
        for section in SECTIONS:
            table = read_table(_printed(section, outputs))
            text = filled(text, section.name, table)
            (_DOCS / f"benchmark-{section.name}.svg").write_text(picture(table, section.plot))
    _PAGE.write_text(text)


def _printed(section: Section, outputs: Path) -> str:
    file = outputs / f"{section.name}.txt"
    if not file.exists():
        arguments = [str(_judged(outputs)) if part == _RUN else part for part in section.arguments]
        done = subprocess.run(
            [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True, check=True
        )
        file.write_text(done.stdout)
    return file.read_text()


def _judged(outputs: Path) -> Path:
    """Return a run of many suites in one world, whose records are repeated."""
    run = outputs / "run"
    if not run.exists():
        where = (
            "--engine",
            "torch.fsdp2",
            "--world",
            "threads:2",
            "--suite",
            "parity",
            "--suite",
            "communication",
        )
        subprocess.run(
            [sys.executable, "-m", "shardproof", "run", *where, "--out", str(run), "--quiet"], check=False
        )
    return run


def read_table(printed: str) -> Table:
    """Read a table in tabulate's plain format: a line of dashes shows its columns."""
    lines = printed.splitlines()
    rule = next(i for i, line in enumerate(lines) if line and set(line) == {"-", " "})
    spans = [match.span() for match in re.finditer("-+", lines[rule])]
    rows = [
        tuple(line[start:end].strip() for start, end in spans)
        for line in (lines[rule - 1], *lines[rule + 1 :])
    ]
    return Table(heads=rows[0], rows=tuple(row for row in rows[1:] if any(row)))


def filled(page: str, name: str, table: Table) -> str:
    """Put a table between the marks of its section."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = page.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"docs/benchmarks.md: expected {start.strip()} and {end}, got a page without them")
    drawn = tabulate(table.rows, headers=table.heads, tablefmt="github", disable_numparse=True)
    return f"{before}{start}{drawn}\n\n![{name}](benchmark-{name}.svg)\n{end}{after}"


def picture(table: Table, plot: Plot) -> str:
    """Draw bars, one for each row and column, as SVG."""
    bars = list(_bars(table, plot))
    most = max([value for _, value in bars] + [plot.aim or 0.0])
    scale = _BAR / most if most else 0.0
    parts = []
    for row, (label, value) in enumerate(bars):
        top = row * _ROW
        parts += [
            f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{label}</text>',
            f'<rect x="{_LEFT}" y="{top + 4}" width="{value * scale:.1f}" height="{_ROW - 8}" fill="#4a76a8"/>',
            f'<text x="{_LEFT + value * scale + 6:.1f}" y="{top + 15}">{value:g}{plot.unit}</text>',
        ]
    height = len(bars) * _ROW
    if plot.aim is not None:
        at = _LEFT + plot.aim * scale
        parts.append(f'<path d="M{at:.1f} 0V{height}" stroke="#b3261e" stroke-dasharray="4 3"/>')
    size = f'width="{_LEFT + _BAR + _RIGHT}" height="{height}"'
    style = 'font-family="sans-serif" font-size="12" fill="#5c626d"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', *parts, "</svg>\n"])


def _bars(table: Table, plot: Plot) -> Iterator[tuple[str, float]]:
    labels = list(zip(*map(table.column, plot.labels), strict=True))
    columns = [table.column(head) for head in plot.columns]
    for at, of_row in enumerate(labels):
        for head, cells in zip(plot.columns, columns, strict=True):
            if found := _NUMBER.match(cells[at]):
                name = [*of_row, head.split(" [")[0]] if len(columns) > 1 else of_row
                yield _escaped(name), float(found[0].replace(",", ""))


def _escaped(words: Sequence[str]) -> str:
    return ": ".join(words).replace("&", "&amp;").replace("<", "&lt;")


if __name__ == "__main__":
    main()
