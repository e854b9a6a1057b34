"""A record survives its JSON line whole, and a line that is no record is refused with a reason."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from jsonschema import Draft202012Validator

from shardproof.harness.errors import UsageError
from shardproof.harness.records.json_schema import run_schema
from shardproof.harness.records.record import SCHEMA_VERSION, Footer, Header, Record, from_json, to_json
from shardproof.harness.records.tensor_file import TensorWriter, read_tree, write_tree
from tests import sample_records
from tests.sample_records import WORST
from tests.shell import ROOT

WHERE = "run/records.jsonl:7"

a_record = partial(sample_records.a_record, worst=WORST)


def edited(**changes: object) -> str:
    """Return the line of a record with some fields changed; ``...`` removes a field."""
    plain = json.loads(to_json(a_record())) | changes
    return json.dumps({name: value for name, value in plain.items() if value is not ...})


@settings(max_examples=200, deadline=None)
@given(sample_records.drawn(Record))
def test_a_record_is_read_back_equal(record: Record) -> None:
    line = to_json(record)
    assert from_json(Record, line, where=WHERE) == record
    assert line.isascii()
    assert "\n" not in line


@settings(max_examples=50, deadline=None)
@given(sample_records.drawn(Header), sample_records.drawn(Footer))
def test_a_header_and_a_footer_are_read_back_equal(header: Header, footer: Footer) -> None:
    assert from_json(Header, to_json(header), where=WHERE) == header
    assert from_json(Footer, to_json(footer), where=WHERE) == footer


@pytest.mark.parametrize(("value", "spelling"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_float_that_is_not_finite_survives_strict_json(value: float, spelling: str) -> None:
    worst = a_record().worst
    assert worst is not None
    line = to_json(a_record(worst=dataclasses.replace(worst, got=value)))

    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is no JSON")

    assert json.loads(line, parse_constant=refuse)["worst"]["got"] == spelling
    read = from_json(Record, line, where=WHERE).worst
    assert read is not None
    assert repr(read.got) == repr(value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param(edited(verdict=...), ["field 'verdict'"], id="missing"),
        pytest.param(edited(laws=...), ["field 'laws'"], id="missing-though-it-has-a-default"),
        pytest.param(edited(enginge="x"), ["enginge", "unknown", "try engine"], id="unknown"),
        pytest.param(edited(verdict="PASED"), ["verdict", "'PASED'", "try PASSED"], id="verdict"),
        pytest.param(edited(verdict=["PASSED"]), ["verdict", "['PASSED']"], id="verdict-list"),
        pytest.param(edited(engine=None), ["engine", "a string", "None"], id="null"),
        pytest.param(edited(duration_s=True), ["duration_s", "a number", "True"], id="bool-for-float"),
        pytest.param(edited(duration_s="NaN"), ["duration_s", "'nan'", "'NaN'"], id="misspelt-nan"),
        pytest.param(edited(duration_s=10**400), ["duration_s", "a number"], id="beyond-float"),
        pytest.param(
            edited(outcomes=[{"rank": True, "kind": "Raised", "text": ""}]),
            ["outcomes[0].rank", "an integer", "True"],
            id="bool-for-int",
        ),
        pytest.param(
            edited(laws=[{"law": "a", "held": 1, "summary": "", "details": []}]),
            ["laws[0].held", "true or false"],
            id="int-for-bool",
        ),
        pytest.param(
            edited(laws=[{"law": "a", "held": True, "summary": "", "details": "b"}]),
            ["laws[0].details", "a list", "'b'"],
            id="string-for-list",
        ),
        pytest.param(edited(worst={"name": "w"}), ["worst", "field 'quantity'"], id="nested-missing"),
        pytest.param(edited(worst=[]), ["worst", "TensorRecord", "[]"], id="list-for-object"),
        pytest.param(edited(schema=SCHEMA_VERSION + 1), ["schema", "newer shardproof"], id="newer-schema"),
        pytest.param(edited(schema="1"), ["schema", "'1'"], id="schema-string"),
        pytest.param(edited(schema=...), ["schema", "None"], id="no-schema"),
        pytest.param("[]", ["JSON object", "[]"], id="array"),
        pytest.param("", ["one JSON object"], id="empty"),
        pytest.param(to_json(a_record())[:-5], ["one JSON object"], id="cut-off"),
        pytest.param('{"schema": NaN}', ["strict JSON", "NaN", "'nan'"], id="nan-literal"),
        pytest.param('{"schema": 1, "schema": 1}', ["each field once"], id="repeated"),
        pytest.param("[" * 100_000, ["one JSON object"], id="deep"),
        pytest.param('{"schema": 1' + "0" * 5000 + "}", ["one JSON object"], id="absurd-integer"),
        pytest.param('{"schema": 1, "duration_s": 1e999}', ["duration_s"], id="overflow"),
    ],
)
def test_a_broken_line_is_refused_with_place_and_reason(line: str, words: list[str]) -> None:
    if "1e999" in line:
        line = to_json(a_record()).replace('"duration_s":0.0', '"duration_s":1e999')
    with pytest.raises(UsageError) as caught:
        from_json(Record, line, where=WHERE)
    text = str(caught.value)
    assert text.startswith(f"{WHERE}: ")
    assert all(word in text for word in [*words, "; try "]), text
    assert len(text) < 700, "an error quotes only a part of the input"


def test_a_header_is_not_a_footer() -> None:
    footer = to_json(Footer(ended_at="", duration_s=1.0))
    with pytest.raises(UsageError, match="kind: expected 'header', got 'footer'"):
        from_json(Header, footer, where=WHERE)
    with pytest.raises(UsageError, match="expected a field of Record, got an unknown one"):
        from_json(Record, footer, where=WHERE)


def test_a_line_of_an_older_schema_may_lack_fields_with_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    line = edited(command=..., laws=...)
    with pytest.raises(UsageError):
        from_json(Record, line, where=WHERE)
    monkeypatch.setattr("shardproof.harness.records.record.SCHEMA_VERSION", SCHEMA_VERSION + 1)
    assert from_json(Record, line, where=WHERE) == a_record(laws=())
    with pytest.raises(UsageError, match="'case'"):
        from_json(Record, edited(case=...), where=WHERE)


def test_every_line_has_the_fields_that_readers_in_other_languages_need() -> None:
    plain = json.loads(to_json(a_record()))
    assert {"engine", "case", "world", "verdict"} <= plain.keys()
    assert plain["verdict"] == "FAILED"


# The published schema.


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


# Files of tensors.


TENSORS = [
    torch.arange(6, dtype=torch.float32).view(2, 3),
    torch.tensor(3.5, dtype=torch.float64),
    torch.empty(0, 4),
    torch.tensor([True, False, True]),
    torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    torch.arange(12).view(3, 4).t(),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
]


LARGE = torch.randn(3, 2**18, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("is_mapped", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("tensor", [*TENSORS, LARGE], ids=lambda t: f"{t.dtype}-{list(t.shape)}")
def test_a_tensor_comes_back_beside_others(tensor: torch.Tensor, is_mapped: bool, tmp_path: Path) -> None:
    write_tree(
        {"first": torch.ones(1, dtype=torch.uint8), "deep": [{"x": tensor, "y": 2}], "plain": None},
        tmp_path / "f",
    )
    tree = read_tree(tmp_path / "f", is_mapped=is_mapped)
    (tmp_path / "f").unlink()
    found = tree["deep"][0]["x"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)
    assert tree["deep"][0]["y"] == 2
    assert tree["plain"] is None


def test_a_mapped_file_is_mapped_anew_each_time(tmp_path: Path) -> None:
    write_tree({"x": LARGE}, tmp_path / "f")
    tree = read_tree(tmp_path / "f", is_mapped=True)
    tree["x"].zero_()
    assert torch.equal(tree["x"], LARGE)


def test_tensors_are_kept_before_they_change(tmp_path: Path) -> None:
    large, small = LARGE.clone(), torch.ones(2)
    with TensorWriter(tmp_path / "f") as writer:
        kept = [writer.keep({"large": large, "small": small}) for _ in range(2)]
        large.zero_()
        small.zero_()
        assert torch.equal(kept[0]["large"] + kept[1]["small"][0], LARGE + 1)
        kept.append(writer.keep({"large": LARGE, "small": torch.ones(2)}))
        writer.finish({"kept": kept})
    for found in read_tree(tmp_path / "f")["kept"]:
        assert torch.equal(found["large"], LARGE)
        assert torch.equal(found["small"], torch.ones(2))


def test_a_tree_without_tensors_is_a_tree(tmp_path: Path) -> None:
    write_tree({"rank": 3, "facts": (1.5, "a")}, tmp_path / "f")
    assert read_tree(tmp_path / "f") == {"rank": 3, "facts": [1.5, "a"]}


def test_a_value_outside_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="expected tensors and JSON types, got set"):
        write_tree({"x": {1}}, tmp_path / "f")


@pytest.mark.parametrize("is_mapped", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-1], "expected a complete file of tensors"),
        (lambda data: data[:20], "expected a complete file of tensors"),
        (lambda data: b"", "expected a complete file of tensors"),
        (lambda data: data.replace(b"[2, 3]", b"[9, 9]"), "expected .9, 9. of float32 at byte 32"),
        (lambda data: data.replace(b"[2, 3]", b"[-2,3]"), "expected a start and sizes"),
        (lambda data: data.replace(b"float32", b"blast32"), "expected the name of a dtype"),
    ],
    ids=["cut", "cut in the header", "empty", "too long", "negative", "no dtype"],
)
def test_a_damaged_file_is_refused(
    damage: Callable[[bytes], bytes], why: str, is_mapped: bool, tmp_path: Path
) -> None:
    file = tmp_path / "f"
    write_tree(TENSORS, file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=why):
        read_tree(file, is_mapped=is_mapped)
