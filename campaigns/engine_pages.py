"""Pages on engines, written from records: one for each engine below ``docs/engines/``, and ``docs/engines.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardproof.engine.registry import known_engines
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports.causes import Cause, causes
from shardproof.reports.expected import address, known
from shardproof.reports.markup import code, escape, table
from shardproof.reports.summary import Tally, tally

_WRITTEN = "<!-- Written by `make engines`. -->"
_SUMMARY = f"""# Engines

{_WRITTEN}

Each row is one engine that Shardproof judged, in a world that it can live in. `make engines` makes an environment for
each family, runs it, and writes this page and one page for each engine from the records. Engines that it does not run
keep what this page says of them. The page of an engine says which suites it was asked.
*Passed*: every law held. *Known*: a divergence, decided and named on the engine's page. *Not declared*: the adapter
does not promise it, and refuses. *Not conforming*: everything else.

{{rows}}

## Engine by promise

Each row is a suite: a promise, asked by its cases. A cell shows how many cases passed of those that the engine
declares; `-` where it declares none, `(n known)` where divergences are named, **bold** where a case does not conform.

{{promises}}
"""
_PAGE = f"""# {{engine}}

{_WRITTEN}

{{release}}, judged on {{date}} with Shardproof at `{{commit}}`, torch {{torch}}, {{worlds}}, by {{selection}}.
The adapter is [`{{adapter}}`](../../{{adapter}}), {{lines}} lines.

```sh
{{install}}
shardproof run --engine {{engine}} --world {{world}}{{suites}}
```

It declares {{declared}}.

{{counts}}

## Divergences

{{divergences}}

## Not decided

{{undecided}}

## By promise

{{promises}}
"""
_MOST_CASES = 6  # of one cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One engine: its run, its capabilities, and how it is installed."""

    engine: str
    run: Run
    capabilities: tuple[str, ...]
    install: str

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(r for r in self.run.records if r.engine == self.engine)

    @property
    def is_whole(self) -> bool:
        """Whether it ran the whole catalogue."""
        return self.run.footer is not None and self.run.footer.is_whole

    @property
    def suites(self) -> list[str]:
        return self.run.header.options.get("cases", "").split()

    @property
    def release(self) -> str:
        """The engine's release, as its records name it."""
        return next((r.engine_version for r in self.records), "no record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One engine on the page of all engines: its row, and a cell for each promise."""

    row: tuple[str, ...]
    cells: Mapping[str, str]


def columns(judged: Sequence[Judged]) -> dict[str, Column]:
    """Count the records of each engine, by name."""
    return {one.engine: Column(row=tuple(_row(one)), cells=_cells(one)) for one in judged}


def columns_of(text: str) -> dict[str, Column]:
    """Read ``docs/engines.md`` as `summary` wrote it."""
    lines = [tuple(line[2:-2].split(" | ")) for line in text.splitlines() if line.startswith("| ")]
    rows = {cells[0][1:].partition("]")[0]: cells for cells in lines if cells[0].startswith("[")}
    (*names,) = next((cells[1:] for cells in lines if cells[0] == "promise"), ())
    promises = [
        cells for cells in lines if len(cells) == len(names) + 1 and cells[0] not in ("promise", "---")
    ]
    return {
        name: Column(row=rows[name], cells={cells[0]: cells[index] for cells in promises})
        for index, name in enumerate(names, start=1)
        if name in rows
    }


def summary(engines: Mapping[str, Column]) -> str:
    """Render ``docs/engines.md``."""
    heads = ["engine", "release", "judged", "world", "passed", "known", "not declared", "not conforming"]
    found = dict(sorted(engines.items()))
    rows = table(heads, (list(column.row) for column in found.values()))
    return _SUMMARY.format(rows=rows, promises=_promises({n: column.cells for n, column in found.items()}))


def page(judged: Judged, root: Path) -> str:
    """Render the page of one engine."""
    header = judged.run.header
    adapter = _adapter(judged.engine)
    declared = ", ".join(code(name) for name in judged.capabilities)
    return _PAGE.format(
        engine=judged.engine,
        release=escape(judged.release),
        date=header.started_at[:10],
        commit=f"{header.git_head[:10]}{' with changes' if header.git_dirty else ''}",
        torch=header.versions.get("torch", "unknown"),
        worlds=" and ".join(header.worlds),
        selection="the whole catalogue" if judged.is_whole else f"the suites {', '.join(judged.suites)}",
        suites="" if judged.is_whole else "".join(f" --suite {suite}" for suite in judged.suites),
        world=" --world ".join(header.worlds),
        adapter=adapter,
        lines=len((root / adapter).read_text(encoding="utf-8").splitlines()),
        install=judged.install,
        declared=declared,
        counts=table(
            ["verdict", "cases"], ([code(v), str(n)] for v, n in tally(judged.records).counts.items())
        ),
        divergences="\n".join([*_divergences(judged.run), *_scripts(judged.engine, root)]) or "None.",
        undecided="\n".join(map(_undecided, causes(judged.records))) or "Nothing.",
        promises=_promises({judged.engine: _cells(judged)}),
    )


def _adapter(engine: str) -> str:
    """Return the file of an engine's adapter, from the root."""
    module = known_engines()[engine].partition(":")[0].removeprefix("shardproof.")
    return f"{module.replace('.', '/')}.py"


def _row(judged: Judged) -> list[str]:
    counted = tally(judged.records)
    red = counted.num_not_conforming
    return [
        f"[{judged.engine}](engines/{judged.engine}.md)",
        escape(judged.release),
        judged.run.header.started_at[:10],
        " ".join(judged.run.header.worlds),
        str(counted.passed),
        str(counted.counts.get(Verdict.KNOWN_FAILURE, 0)),
        str(counted.counts.get(Verdict.UNSUPPORTED, 0)),
        f"**{red}**" if red else "0",
    ]


def _cells(judged: Judged) -> dict[str, str]:
    by_suite: dict[str, list[Record]] = {}
    for record in judged.records:
        by_suite.setdefault(record.suite, []).append(record)
    return {suite: _cell(tally(records)) for suite, records in by_suite.items()}


def _promises(engines: Mapping[str, Mapping[str, str]]) -> str:
    promises = sorted({promise for cells in engines.values() for promise in cells})
    rows = ([promise, *(cells.get(promise, "-") for cells in engines.values())] for promise in promises)
    return table(["promise", *engines], rows)


def _cell(counted: Tally) -> str:
    if not counted.declared:
        return "-"
    known_failures = counted.counts.get(Verdict.KNOWN_FAILURE, 0)
    text = f"{counted.passed} of {counted.declared}" + (
        f" ({known_failures} known)" if known_failures else ""
    )
    return f"**{text}**" if counted.num_not_conforming else text


def _divergences(run: Run) -> Iterator[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for found in known(run):  # entries with one reason may be about other cases, or older than the file
        counts[found.expectation.reason, address(found.expectation.link)] += found.count
    for (reason, link), count in counts.items():
        where = f" ([where]({link}))" if link else ""
        yield f"- {escape(reason)}{where} {count} of the cases show it."


def _scripts(engine: str, root: Path) -> Iterator[str]:
    """Link the scripts that show a divergence without Shardproof, named after the family or torch's engine."""
    family = engine.removeprefix("torch.").partition(".")[0]
    for script in sorted((root / "docs" / "divergences").glob(f"{family}_*.py")):
        yield f"- [`{script.name}`](../divergences/{script.name}) shows one without Shardproof."


def _undecided(cause: Cause) -> str:
    cases = [code(record.case) for record in cause.records]
    more = f" and {len(cases) - _MOST_CASES} more" if len(cases) > _MOST_CASES else ""
    return f"- {cause.verdict}: {escape(cause.example.headline)}: {', '.join(cases[:_MOST_CASES])}{more}"
