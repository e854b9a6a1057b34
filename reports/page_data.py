"""The data of the page's script: an index of all records, and their evidence in compressed pieces.

[Note: how much a browser holds] A page with the markup of 20,000 records does not open. So the page contains one index,
which is all that the matrix, the list and the search need, and the evidence in compressed pieces, each unpacked when
its record is opened. Every text is in the index once.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from shardproof.harness.records.record import Record
from shardproof.reports.causes import Cause
from shardproof.reports.expected import expectation_text
from shardproof.reports.matrix import Matrix
from shardproof.reports.text import duration, one_line, printable
from shardproof.reports.verdict_style import MARKS

RECORDS_PER_PIECE = 128


def pack(value: object) -> str:
    """Return a value as JSON, compressed, in base64: text that a browser cannot take for markup."""
    plain = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    return base64.b64encode(gzip.compress(plain, 6, mtime=0)).decode("ascii")


def pieces(evidence: Iterable[str]) -> Iterator[str]:
    """Pack the evidence of records, in the order of the index."""
    left = iter(evidence)
    while some := list(islice(left, RECORDS_PER_PIECE)):
        yield pack(some)


# Any: JSON.
def index(matrix: Matrix, ordered: Sequence[Record], causes: Sequence[Cause]) -> dict[str, Any]:
    """Return the data of each record that is shown before it is opened: cell, verdict, headline, time and search words.

    Records are in the order of ``ordered``; a record is a list of numbers that point into the other lists.
    """
    numbers = {id(record): number for number, record in enumerate(ordered)}
    cause_numbers = {id(record): number for number, cause in enumerate(causes) for record in cause.records}
    verdicts = {verdict: number for number, verdict in enumerate(MARKS)}
    texts = _Texts()
    suites: list[dict[str, Any]] = []
    of_records: list[list[int]] = [[] for _ in ordered]
    row = 0
    for suite in matrix.suites:
        suites.append(
            {
                "name": printable(suite.suite) or "no suite",
                "cases": [[printable(r.label), printable(r.case)] for r in suite.rows],
            }
        )
        for of_case in suite.rows:
            for column, cell in enumerate(of_case.cells):
                for record in cell:
                    of_records[numbers[id(record)]] = [
                        row,
                        column,
                        verdicts[record.verdict],
                        texts.number(one_line(record.headline)),
                        texts.number(duration(record.duration_s)),
                        texts.number(_words(record)),
                        cause_numbers.get(id(record), -1),
                    ]
            row += 1
    return {
        "columns": [[printable(c.engine), printable(c.world)] for c in matrix.columns],
        "verdicts": [[str(v), style.sign, str(style.tone)] for v, style in MARKS.items()],
        "suites": suites,
        "records": of_records,
        "texts": texts.found,
        "perPiece": RECORDS_PER_PIECE,
    }


def _words(record: Record) -> str:
    """Return a record's search words besides its cell and headline: its expectation, broken laws and threads."""
    broken = [law.law for law in record.laws if not law.held]
    hang = record.hang
    threads = [rank.call.thread for rank in hang.ranks if rank.call is not None] if hang is not None else []
    frames = [frame for rank in hang.ranks for frame in rank.frames] if hang is not None else []
    return one_line(
        " ".join(dict.fromkeys([expectation_text(record), *broken, *threads, *frames])), limit=2000
    )


class _Texts:
    """Texts, each once, by number."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of a text; a new text gets a new number."""
        if text not in self._numbers:
            self._numbers[text] = len(self.found)
            self.found.append(text)
        return self._numbers[text]
