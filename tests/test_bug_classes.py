"""The page on classes of bugs: some case names every mutant on it, and every row has one or says why not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.mutants.all_mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "bug-classes.md"
HEADER = ("class of bug", "reports", "mutants")
# What may keep a class from having a mutant; a new reason is a decision, not a phrase.
REASONS = {
    "needs a GPU",
    "a framework's own trainer computes the loss, and here the harness does",
    "to free what is free shows in nothing that is held or crosses",
}
_REPORT = re.compile(r"\[([\w.-]+)#(\d+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/issues/(\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One class of bugs."""

    sin: str
    reports: str
    mutants: str

    @property
    def names(self) -> list[str]:
        """The mutants named."""
        return re.findall(r"`(\w+)`", self.mutants)

    @property
    def threads(self) -> list[str]:
        """The reports, as mutants cite them."""
        return [f"{repository}#{number}" for _, _, repository, number in _REPORT.findall(self.reports)]

    def problems(self, known: frozenset[str]) -> Iterator[str]:
        """Say what is wrong with it."""
        if unknown := sorted(set(self.names) - known):
            yield f"{self.sin}: no mutants {unknown}"
        form = ", ".join(f"`{name}`" for name in self.names)
        if self.mutants not in {form or None, *(f"none: {reason}" for reason in REASONS)}:
            yield f"{self.sin}: expected names of mutants or a reason, got {self.mutants!r}"
        spelt = ", ".join(match[0] for match in _REPORT.finditer(self.reports))
        if not spelt or self.reports != spelt:
            yield f"{self.sin}: expected links to reports, got {self.reports!r}"
        for short, number, repository, linked in _REPORT.findall(self.reports):
            if number != linked or not repository.lower().replace("lightning-", "").endswith(
                f"/{short.lower()}"
            ):
                yield f"{self.sin}: {short}#{number} leads to {repository}#{linked}"


def _rows(text: str) -> list[Row]:
    rows = []
    for line in text.splitlines():
        if not line.startswith("|") or line.startswith("|---"):
            continue
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        assert len(cells) == len(HEADER), line
        if cells != HEADER:
            rows.append(Row(sin=cells[0], reports=cells[1], mutants=cells[2]))
    return rows


ROWS = _rows(PAGE.read_text(encoding="utf-8"))
KNOWN = frozenset(mutant.name for mutant in MUTANTS)


def test_every_row_names_mutants_that_exist_or_says_why_none_does() -> None:
    assert [problem for row in ROWS for problem in row.problems(KNOWN)] == []
    assert len(ROWS) >= 85
    assert sum(bool(row.names) for row in ROWS) >= 70


def test_every_class_is_told_once() -> None:
    sins = [row.sin for row in ROWS]
    assert sorted(sins) == sorted(set(sins))
    threads = [thread for row in ROWS for thread in row.threads]
    assert sorted(threads) == sorted(set(threads))


def test_every_reason_is_given() -> None:
    given = {row.mutants.removeprefix("none: ") for row in ROWS if not row.names}
    assert given == REASONS


def test_a_mutant_after_a_report_of_the_page_is_named_there() -> None:
    """By its own row: a class whose report has mutants names one of them at least."""
    after = {row.sin: {m.name for m in MUTANTS if m.thread in row.threads} for row in ROWS}
    unnamed = {row.sin for row in ROWS if after[row.sin] and not after[row.sin] & set(row.names)}
    assert unnamed == set()


@pytest.mark.parametrize(
    "row",
    [
        "| a sin | [pytorch#1](https://github.com/pytorch/pytorch/issues/1) | `NoSuchMutant` |",
        "| a sin | [pytorch#1](https://github.com/pytorch/pytorch/issues/1) | none: too hard |",
        "| a sin | [pytorch#1](https://github.com/pytorch/pytorch/issues/1) | |",
        "| a sin | [pytorch#1](https://github.com/pytorch/pytorch/issues/2) | `NeverSynchronises` |",
        "| a sin | [vision#1](https://github.com/pytorch/pytorch/issues/1) | `NeverSynchronises` |",
        "| a sin | pytorch#1 | `NeverSynchronises` |",
    ],
)
def test_a_wrong_row_is_noticed(row: str) -> None:
    (parsed,) = _rows(row)
    assert list(parsed.problems(KNOWN))
