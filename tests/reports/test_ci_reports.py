"""Files for CI servers: JUnit for Jenkins, CTRF, a badge, and a summary of failures that fits a comment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import xmlschema
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from shardproof.harness.records.record import Record, UnusedExpectation, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports import badge, ctrf, failure_summary, junit
from shardproof.reports.summary import conforms
from tests import sample_records
from tests.sample_records import FOOTER, HEADER
from tests.sample_runs import ENTRY, HOSTILE, a_record, a_run, one_of_each

# Rules of our own for Jenkins' xUnit plugin, GitLab and CTRF's schema, whose files are not copied here.
JUNIT = xmlschema.XMLSchema(
    """
<xs:schema xmlns:xs="http://www.w3.org/2001/XMLSchema">
  <xs:simpleType name="count">
    <xs:restriction base="xs:string"><xs:pattern value="[0-9]+"/></xs:restriction>
  </xs:simpleType>
  <xs:simpleType name="seconds">
    <xs:restriction base="xs:string"><xs:pattern value="[0-9]+[.][0-9]{3}"/></xs:restriction>
  </xs:simpleType>
  <xs:simpleType name="moment">
    <xs:restriction base="xs:string"><xs:pattern value="[^Z+]*"/></xs:restriction>
  </xs:simpleType>
  <xs:complexType name="said"><xs:simpleContent><xs:extension base="xs:string">
    <xs:attribute name="type" type="xs:string" use="required"/>
    <xs:attribute name="message" type="xs:string" use="required"/>
  </xs:extension></xs:simpleContent></xs:complexType>
  <xs:complexType name="case"><xs:choice minOccurs="0">
    <xs:element name="skipped" type="said"/>
    <xs:element name="failure" type="said"/>
    <xs:element name="error" type="said"/>
  </xs:choice>
    <xs:attribute name="name" use="required"/>
    <xs:attribute name="classname" use="required"/>
    <xs:attribute name="time" type="seconds" use="required"/>
  </xs:complexType>
  <xs:complexType name="suite"><xs:sequence>
    <xs:element name="properties"><xs:complexType><xs:sequence>
      <xs:element name="property" maxOccurs="unbounded"><xs:complexType>
        <xs:attribute name="name" use="required"/><xs:attribute name="value" use="required"/>
      </xs:complexType></xs:element>
    </xs:sequence></xs:complexType></xs:element>
    <xs:element name="testcase" type="case" minOccurs="0" maxOccurs="unbounded"/>
  </xs:sequence>
    <xs:attribute name="name" use="required"/>
    <xs:attribute name="tests" type="count" use="required"/>
    <xs:attribute name="failures" type="count" use="required"/>
    <xs:attribute name="errors" type="count" use="required"/>
    <xs:attribute name="skipped" type="count" use="required"/>
    <xs:attribute name="time" type="seconds" use="required"/>
    <xs:attribute name="timestamp" type="moment" use="required"/>
  </xs:complexType>
  <xs:element name="testsuites"><xs:complexType><xs:sequence>
    <xs:element name="testsuite" type="suite" minOccurs="0" maxOccurs="unbounded"/>
  </xs:sequence>
    <xs:attribute name="name" use="required"/>
    <xs:attribute name="tests" type="count" use="required"/>
    <xs:attribute name="failures" type="count" use="required"/>
    <xs:attribute name="errors" type="count" use="required"/>
    <xs:attribute name="time" type="seconds" use="required"/>
  </xs:complexType></xs:element>
</xs:schema>
"""
)


def _closed(**properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT, _NAME, _NUMBER = (
    {"type": "string"},
    {"type": "string", "minLength": 1},
    {"type": "integer", "minimum": 0},
)
_STATUSES = ["passed", "failed", "skipped", "pending", "other"]
_TEST = _closed(
    name=_NAME,
    status={"enum": _STATUSES},
    duration=_NUMBER,
    suite={"type": "array", "minItems": 1, "items": _NAME},
    message=_TEXT,
    trace=_TEXT,
    rawStatus=_TEXT,
    filePath=_TEXT,
    labels={"type": "object", "additionalProperties": _TEXT},
)
_TEST["required"] = ["name", "status", "duration"]
_SUMMARY = dict.fromkeys(("tests", *_STATUSES, "start", "stop"), _NUMBER)
CTRF = Draft202012Validator(
    _closed(
        reportFormat={"const": "CTRF"},
        specVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        generatedBy=_TEXT,
        results=_closed(
            tool=_closed(name=_NAME, version=_TEXT),
            summary=_closed(**_SUMMARY),
            tests={"type": "array", "items": _TEST},
            environment=_closed(commit=_TEXT, osPlatform=_TEXT, healthy={"type": "boolean"}),
        ),
    )
)
STALE = replace(FOOTER, unused=(UnusedExpectation(expectation=ENTRY, why="gone", is_stale=True),))
RUNS: dict[str, Callable[[], Run]] = {
    "each_verdict": one_of_each,
    "passed": lambda: a_run(a_record()),
    "interrupted": lambda: a_run(a_record(), footer=None),
    "stale": lambda: a_run(a_record(), footer=STALE),
    "hostile": lambda: a_run(
        a_record(case=HOSTILE, engine=HOSTILE, headline=HOSTILE, verdict=Verdict.FAILED)
    ),
    "damaged": lambda: replace(a_run(a_record()), problems=("records.jsonl:2: damaged",)),
    "nothing": a_run,
    "undated": lambda: replace(a_run(a_record()), header=replace(HEADER, started_at="unknown")),
}


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_junit_fits_the_rules_of_jenkins_and_gitlab(make: Callable[[], Run]) -> None:
    JUNIT.validate(junit.render(make()))


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_ctrf_fits_its_schema_and_counts_its_tests(make: Callable[[], Run]) -> None:
    plain = json.loads(ctrf.render(make()))
    CTRF.validate(plain)
    results = plain["results"]
    statuses = [test["status"] for test in results["tests"]]
    assert results["summary"]["tests"] == len(statuses)
    assert {status: results["summary"][status] for status in _STATUSES} == {
        s: statuses.count(s) for s in _STATUSES
    }


@settings(max_examples=20)
@given(st.lists(sample_records.drawn(Record), max_size=2))
def test_any_record_makes_valid_files(records: list[Record]) -> None:
    run = a_run(*records)
    CTRF.validate(json.loads(ctrf.render(run)))
    JUNIT.validate(junit.render(run))


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_no_file_is_green_where_the_run_does_not_conform(make: Callable[[], Run]) -> None:
    run = make()
    is_red = not conforms(run)
    root = ElementTree.fromstring(junit.render(run))
    results = json.loads(ctrf.render(run))["results"]
    assert (int(root.get("failures", 0)) + int(root.get("errors", 0)) > 0) is is_red
    assert (results["summary"]["failed"] > 0) is is_red
    assert results["environment"]["healthy"] is not is_red
    assert (json.loads(badge.endpoint(run))["color"] == "brightgreen") is not is_red
    assert ("conforming" in failure_summary.render(run).splitlines()[0].split(": ")[1].split()) or is_red


def test_opting_out_is_no_pass_in_any_file() -> None:
    quiet = (Verdict.UNSUPPORTED, Verdict.KNOWN_FAILURE)
    run = a_run(*(a_record(case=f"parity/{verdict}", verdict=verdict) for verdict in quiet))
    summary = json.loads(ctrf.render(run))["results"]["summary"]
    assert (summary["passed"], summary["skipped"], summary["other"], summary["failed"]) == (0, 1, 1, 0)


def test_the_badge_is_an_endpoint_and_a_picture() -> None:
    run = a_run(a_record(), a_record(case="parity/b", verdict=Verdict.UNSUPPORTED))
    plain = json.loads(badge.endpoint(run))
    assert plain == {
        "schemaVersion": 1,
        "label": "shardproof",
        "message": "1 of 1 passed, 1 not declared",
        "color": "brightgreen",
    }
    root = ElementTree.fromstring(badge.picture(run))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "1 of 1 passed, 1 not declared" in "".join(root.itertext())
    red = json.loads(badge.endpoint(a_run(a_record(verdict=Verdict.FAILED))))
    assert (red["message"], red["color"]) == ("1 not conforming", "red")
    cut = json.loads(badge.endpoint(a_run(a_record(), footer=None)))
    assert (cut["message"], cut["color"]) == ("incomplete", "lightgrey")


def test_the_summary_holds_failures_alone_each_cause_once() -> None:
    many = [
        a_record(case=f"parity/c{n}", verdict=Verdict.FAILED, headline="off by 2.5e-3") for n in range(18)
    ]
    text = failure_summary.render(
        a_run(*many, a_record(case="parity/quiet"), a_record("parity/o", Verdict.CRASHED))
    )
    assert text.count("off by") == 1
    assert "18 records" in text
    assert "and 10 more" in text
    assert "parity/quiet" not in text
    assert "CRASHED" in text


def test_the_summary_fits_a_comment() -> None:
    many = [
        a_record(f"parity/{n}", Verdict.FAILED, engine=f"engine-{n}", headline=f"{n} {'x<' * 200}")
        for n in range(5000)
    ]
    text = failure_summary.render(a_run(*many))
    assert len(text.encode()) <= failure_summary.LIMIT_BYTES == 60_000
    assert "more causes" in text


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_the_summary_names_the_reason_why_a_run_is_not_whole(make: Callable[[], Run]) -> None:
    run = make()
    text = failure_summary.render(run)
    assert "<script>" not in re.sub(r"(`+).*?\1", "", text), "but in a code span"
    for problem in run.problems:
        assert problem.split(":")[0] in text
