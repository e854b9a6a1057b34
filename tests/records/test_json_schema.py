"""Every line that the code writes fits the published schema of runs, and a line with a fault does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator

from shardproof.harness.records.json_schema import run_schema
from shardproof.harness.records.record import SCHEMA_VERSION, Footer, Header, Record, to_json
from tests import sample_records
from tests.sample_records import a_record
from tests.shell import ROOT

PUBLISHED = ROOT / "docs" / "schema" / f"run-{SCHEMA_VERSION}.json"
VALIDATOR = Draft202012Validator(run_schema())


def _fits(plain: object) -> bool:
    return not list(VALIDATOR.iter_errors(plain))


def test_the_published_file_is_of_this_release() -> None:
    """Write it with ``python -m shardproof.harness.records.json_schema``, under a new version if it changed."""
    assert json.loads(PUBLISHED.read_text()) == run_schema()
    Draft202012Validator.check_schema(run_schema())


@given(sample_records.drawn(Record))
def test_every_record_fits(record: Record) -> None:
    assert _fits(json.loads(to_json(record)))


@given(sample_records.drawn(Header), sample_records.drawn(Footer))
def test_every_header_and_footer_fits(header: Header, footer: Footer) -> None:
    assert _fits(json.loads(to_json(header)))
    assert _fits(json.loads(to_json(footer)))


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "GOOD"},
        {"schema": SCHEMA_VERSION - 1},
        {"schema": str(SCHEMA_VERSION)},
        {"duration_s": "long"},
        {"duration_s": None},
        {"laws": {}},
        {"laws": [{"law": "parity"}]},
        {"worst": 1},
        {"hang": []},
        {"outcomes": ["Returned"]},
        {"unheard_of": 1},
        {"case": ...},
    ],
    ids=str,
)
def test_a_line_with_a_fault_does_not_fit(change: dict[str, Any]) -> None:  # Any: wrong values of any type
    plain = json.loads(to_json(a_record())) | change
    assert not _fits({name: value for name, value in plain.items() if value is not ...})
