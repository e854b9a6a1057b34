"""The page on classes of bugs: each row names the mutants after its reports, or the reason why there is none.

``python -m tests.engine.test_bug_classes`` writes the mutants into the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.engine.mutants.mutant import Mutant
from tests.shell import ROOT

PAGE = ROOT / "docs" / "bug-classes.md"
HEADER = ("class of bug", "reports", "mutants")
# Reasons why a class has no mutant; a new reason needs a decision.
REASONS = {
    "needs a GPU",
    "a framework's own trainer computes the loss, and here the harness does",
    "to free what is free shows in nothing that is held or crosses",
}
_REPORT = re.compile(r"\[([\w.-]+)#(\d+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/issues/(\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One class of bugs."""

    fault: str
    reports: str
    mutants: str

    @property
    def names(self) -> list[str]:
        return re.findall(r"`(\w+)`", self.mutants)

    @property
    def threads(self) -> list[str]:
        """The reports, as mutants cite them."""
        return [f"{repository}#{number}" for _, _, repository, number in _REPORT.findall(self.reports)]

    @property
    def line(self) -> str:
        return f"| {self.fault} | {self.reports} | {self.mutants} |"

    def rendered(self, mutants: Sequence[Mutant]) -> Row:
        """Name the mutants of its reports in order, then mutants of other reports with the same defect."""
        own = sorted(mutant.name for mutant in mutants if mutant.thread in self.threads)
        known = {mutant.name for mutant in mutants}
        names = dict.fromkeys([*own, *(name for name in self.names if name in known)])
        return replace(self, mutants=", ".join(f"`{name}`" for name in names)) if names else self

    def problems(self, known: frozenset[str]) -> Iterator[str]:
        if unknown := sorted(set(self.names) - known):
            yield f"{self.fault}: no mutants {unknown}"
        form = ", ".join(f"`{name}`" for name in self.names)
        if self.mutants not in {form or None, *(f"none: {reason}" for reason in REASONS)}:
            yield f"{self.fault}: expected names of mutants or a reason, got {self.mutants!r}"
        spelt = ", ".join(match[0] for match in _REPORT.finditer(self.reports))
        if not spelt or self.reports != spelt:
            yield f"{self.fault}: expected links to reports, got {self.reports!r}"
        for short, number, repository, linked in _REPORT.findall(self.reports):
            if number != linked or not repository.lower().replace("lightning-", "").endswith(
                f"/{short.lower()}"
            ):
                yield f"{self.fault}: {short}#{number} leads to {repository}#{linked}"


def _row(line: str) -> Row | None:
    """Read a line of the page; None where it is no row of a table's body."""
    if not line.startswith("|") or line.startswith("|---"):
        return None
    cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
    assert len(cells) == len(HEADER), line
    return None if cells == HEADER else Row(fault=cells[0], reports=cells[1], mutants=cells[2])


def _rows(text: str) -> list[Row]:
    return [row for line in text.splitlines() if (row := _row(line)) is not None]


def _rendered(text: str, mutants: Sequence[Mutant] = MUTANTS) -> str:
    """Write the mutants into the rows of a page, and leave the rest as it is."""
    rows = ((line, _row(line)) for line in text.splitlines())
    return "".join(f"{line if row is None else row.rendered(mutants).line}\n" for line, row in rows)


ROWS = _rows(PAGE.read_text(encoding="utf-8"))
KNOWN = frozenset(mutant.name for mutant in MUTANTS)


def test_every_row_names_existing_mutants_or_a_reason() -> None:
    assert [problem for row in ROWS for problem in row.problems(KNOWN)] == []
    assert len(ROWS) >= 85
    assert sum(bool(row.names) for row in ROWS) >= 70


def test_every_class_has_one_row() -> None:
    faults = [row.fault for row in ROWS]
    assert sorted(faults) == sorted(set(faults))
    threads = [thread for row in ROWS for thread in row.threads]
    assert sorted(threads) == sorted(set(threads))


def test_every_report_that_a_mutant_cites_has_its_row() -> None:
    listed = {thread for row in ROWS for thread in row.threads}
    assert sorted({mutant.thread for mutant in MUTANTS} - listed) == []


def test_every_reason_is_given() -> None:
    reasons = {row.mutants.removeprefix("none: ") for row in ROWS if not row.names}
    assert reasons == REASONS


def test_every_row_names_all_mutants_after_its_reports() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert _rendered(text) == text, "try python -m tests.engine.test_bug_classes"


def test_mutants_are_written_into_a_page() -> None:
    link = "[pytorch#1](https://github.com/pytorch/pytorch/issues/1)"
    own, other, gone = "NeverSynchronises", "StepsTwice", "NoSuchMutant"
    mutants = [
        Mutant(name=own, engine_spec="a:b", fault="a fault", thread="pytorch/pytorch#1"),
        Mutant(name=other, engine_spec="a:c", fault="another", thread="pytorch/pytorch#2"),
    ]
    page = f"Text\n| a fault | {link} | `{gone}`, `{other}` |\n"
    assert _rendered(page, mutants) == f"Text\n| a fault | {link} | `{own}`, `{other}` |\n"
    without = f"| a fault | {link} | none: needs a GPU |\n"
    assert _rendered(without, mutants[1:]) == without


@pytest.mark.parametrize(
    "row",
    [
        "| a fault | [pytorch#1](https://github.com/pytorch/pytorch/issues/1) | `NoSuchMutant` |",
        "| a fault | [pytorch#1](https://github.com/pytorch/pytorch/issues/1) | none: too hard |",
        "| a fault | [pytorch#1](https://github.com/pytorch/pytorch/issues/1) | |",
        "| a fault | [pytorch#1](https://github.com/pytorch/pytorch/issues/2) | `NeverSynchronises` |",
        "| a fault | [vision#1](https://github.com/pytorch/pytorch/issues/1) | `NeverSynchronises` |",
        "| a fault | pytorch#1 | `NeverSynchronises` |",
    ],
)
def test_a_wrong_row_is_noticed(row: str) -> None:
    (parsed,) = _rows(row)
    assert list(parsed.problems(KNOWN))


if __name__ == "__main__":
    PAGE.write_text(_rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
