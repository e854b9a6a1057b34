"""A run as JUnit XML: one test suite for each engine in each world, one test case for each record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal
from xml.etree import ElementTree

from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports import evidence
from shardproof.reports.evidence import headroom, outcome_groups, place
from shardproof.reports.expected import expectation_text, stale
from shardproof.reports.matrix import Column
from shardproof.reports.summary import conforms, warnings
from shardproof.reports.text import clip, one_line, plausible, printable

_Element = ElementTree.Element
_Kind = Literal["skipped", "failure", "error"]
_TEXT_LIMIT = 20_000  # characters of evidence for each case; CI servers hold whole reports in memory


def render(run: Run) -> str:
    """Render the run; if it is not whole, that is a failing test case, so that no CI shows it green."""
    columns: dict[Column, list[Record]] = {}
    for record in run.records:
        columns.setdefault(Column(engine=record.engine, world=record.world), []).append(record)
    root = ElementTree.Element("testsuites", name="shardproof")
    for column, records in columns.items():
        cases = [_case(record) for record in records]
        root.append(_suite(f"{column.engine} in {column.world}", cases, run))
    itself = [*_incomplete(warnings(run)), *_stale(stale(run))]
    if not run.records and not itself and not conforms(run):
        itself = [_of_run("some case is judged", "error", "EMPTY", ["the run has no records"])]
    if itself:
        root.append(_suite("the run itself", itself, run))
    _sum_up(root, root.iter("testcase"))
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _suite(name: str, cases: Sequence[_Element], run: Run) -> _Element:
    # Readers of this format expect a time of day without an offset.
    started = run.header.started_at.partition("+")[0]
    suite = ElementTree.Element("testsuite", name=printable(name), timestamp=printable(started))
    _sum_up(suite, cases)
    properties = ElementTree.SubElement(suite, "properties")
    known = {"command": run.header.command, "git_head": run.header.git_head, "seed": str(run.header.seed)}
    for key, value in (known | run.header.versions | run.header.hardware).items():
        ElementTree.SubElement(properties, "property", name=printable(key), value=printable(value))
    suite.extend(cases)
    return suite


def _sum_up(of: _Element, cases: Iterable[_Element]) -> None:
    found = list(cases)
    of.set("tests", str(len(found)))
    counted = [("failures", "failure"), ("errors", "error")]
    if of.tag == "testsuite":  # Jenkins' schema has no count of skipped tests over all suites
        counted.append(("skipped", "skipped"))
    for attribute, tag in counted:
        of.set(attribute, str(sum(case.find(tag) is not None for case in found)))
    of.set("time", f"{sum(float(case.get('time', 0)) for case in found):.3f}")


def _case(record: Record) -> _Element:
    case = ElementTree.Element(
        "testcase",
        classname=printable(".".join(part for part in (record.engine, record.world, record.suite) if part)),
        name=printable(record.case),
        time=f"{plausible(record.duration_s):.3f}",
    )
    if kind := _kind(record.verdict):
        known = f"{expectation_text(record)}: " if record.verdict is Verdict.KNOWN_FAILURE else ""
        message = one_line(f"{record.verdict}: {known}{record.headline}", limit=1000)
        element = ElementTree.SubElement(case, kind, type=str(record.verdict), message=message)
        element.text = evidence_text(record)
    return case


def _kind(verdict: Verdict) -> _Kind | None:
    if verdict is Verdict.PASSED:
        return None
    if verdict.is_conforming:
        return "skipped"
    return "error" if verdict is Verdict.ERRORED else "failure"


def evidence_text(record: Record) -> str:
    """Return a record's evidence as plain text, cut to a size that CI servers accept."""
    return clip(_evidence(record), _TEXT_LIMIT)


def _evidence(record: Record) -> str:
    lines = [line for line in (record.headline, expectation_text(record)) if line]
    lines += [f"first wrong: {record.located.sentence}"] if record.located else []
    for law in record.laws:
        lines += [f"{('held' if law.held else 'BROKEN')}: {law.law}: {law.summary}", *law.details]
    if record.worst is not None:
        lines += [place(record.worst), headroom(record.worst), f"looks like: {record.worst.looks_like}"]
    lines += [] if record.hang is None else evidence.hang_lines(record.hang)
    for group in outcome_groups(record):
        lines += [f"{group.ranks}: {group.kind}", group.text]
    return "\n".join([*lines, f"again: {record.command}"] if record.command else lines)


def _incomplete(problems: Sequence[str]) -> list[_Element]:
    return [_of_run("the run is whole", "error", "INCOMPLETE", problems)] if problems else []


def _stale(texts: Sequence[str]) -> list[_Element]:
    return [_of_run("no expectation is stale", "failure", "STALE", texts)] if texts else []


def _of_run(name: str, kind: _Kind, type_: str, texts: Sequence[str]) -> _Element:
    case = ElementTree.Element("testcase", classname="shardproof", name=name, time="0.000")
    element = ElementTree.SubElement(case, kind, type=type_, message=one_line(texts[0], limit=1000))
    element.text = printable("\n".join(texts))
    return case
