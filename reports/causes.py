"""Folds records that fail alike: a cause that broke many cases is shown once. No markup here."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from shardproof.harness.records.diff.comparison import broken_laws, steady
from shardproof.harness.records.record import Record, Verdict
from shardproof.reports.matrix import by_severity

_QUOTED = re.compile(r"'[^']*'")
_NUMBERS = re.compile(r"-?\d+(?:\.\d+)?(?:[-, ]+\d+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Records of one engine that fail in the same way; ``records`` are at least one, in the order of the run."""

    verdict: Verdict
    engine: str
    records: tuple[Record, ...]

    @property
    def example(self) -> Record:
        """The record whose headline is shown for all."""
        return self.records[0]

    @property
    def worlds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(record.world for record in self.records))


def causes(records: Iterable[Record]) -> tuple[Cause, ...]:
    """Fold the records that do not conform by engine, verdict, broken laws and headline; the worst verdict first."""
    found: dict[Hashable, list[Record]] = {}
    for record in by_severity(records):
        if not record.verdict.is_conforming:
            key = (record.verdict, record.engine, broken_laws(record), _what(record))
            found.setdefault(key, []).append(record)
    return tuple(
        Cause(verdict=alike[0].verdict, engine=alike[0].engine, records=tuple(alike))
        for alike in found.values()
    )


def shape(text: str) -> str:
    """Blank out what differs between cases that fail alike: quoted names, numbers, and lengths of lists."""
    blank = _NUMBERS.sub("N", _QUOTED.sub("'...'", steady(text)))
    return "; ".join(dict.fromkeys(blank.split("; ")))


def _what(record: Record) -> str:
    looks_like = record.worst.looks_like if record.worst is not None else ""
    return shape(looks_like) if looks_like and looks_like in record.headline else shape(record.headline)
