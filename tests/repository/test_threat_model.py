"""The page on threats: every test and engine that it names as evidence exists in the file that it links."""

from __future__ import annotations

import re

from tests.shell import ROOT

PAGE = ROOT / "docs" / "threat-model.md"
_EVIDENCE = re.compile(r"\[`(\w+)`\]\((\.\./[\w/]+\.py)\)")


def _missing(text: str) -> list[str]:
    return [
        name
        for name, file in _EVIDENCE.findall(text)
        if not re.search(rf"^(def|class) {name}\b", (PAGE.parent / file).read_text(), re.MULTILINE)
    ]


def test_all_evidence_exists() -> None:
    text = PAGE.read_text()
    assert len(_EVIDENCE.findall(text)) > 20
    assert _missing(text) == []


def test_evidence_that_does_not_exist_is_noticed() -> None:
    assert _missing("[`test_nothing`](../tests/verdicts/test_judging.py)") == ["test_nothing"]


def test_every_claim_has_evidence() -> None:
    claimed = PAGE.read_text().partition("## What an engine cannot do")[2].partition("## Lies")[0]
    rows = re.findall(r"^\|.*\|$", claimed, re.MULTILINE)
    claims = [row for row in rows if not re.match(r"\|( Claim| Attempt|---)", row)]
    assert len(claims) > 15
    assert [row for row in claims if not _EVIDENCE.search(row)] == []
