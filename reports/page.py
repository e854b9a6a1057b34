"""A run as one self-contained HTML page; the markup, style and script are in ``templates``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from shardproof.harness.records.record import FaultPhase, RecordKey, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports import evidence, expected, text, user_model_result
from shardproof.reports.causes import causes
from shardproof.reports.matrix import arrange, by_severity, label
from shardproof.reports.overview import overview
from shardproof.reports.page_data import index, pack, pieces
from shardproof.reports.summary import conclude, declared_zeros, limited, tally, warnings
from shardproof.reports.verdict_style import MARKS, VerdictStyle

_TEMPLATES = Path(__file__).parent / "templates"
_TEXT_LIMIT = 20_000  # characters of one rank's stack


def render(run: Run, pictures: Mapping[RecordKey, str] = MappingProxyType({})) -> str:
    """Render the run as a page without external resources; its causes and counts are readable without a script.

    ``pictures`` are timelines as SVG, by engine, case and world of their records. See [Note: how much a browser holds].
    """
    ordered = by_severity(run.records)
    # By identity: two records may be equal, and the page must show both.
    numbers = {id(record): number for number, record in enumerate(ordered)}
    matrix, found = arrange(run), causes(run.records)
    evidence_of = _environment().get_template("record.html").render
    fragments = (evidence_of(record=r, picture=pictures.get(r.key, "")) for r in ordered)
    return (
        _environment()
        .get_template("page.html")
        .render(
            run=run,
            overview=overview(run),
            tally=tally(run.records),
            conclusion=conclude(run),
            warnings=warnings(run),
            stale=expected.stale(run),
            idle=expected.idle(run),
            zeros=declared_zeros(run),
            limited=limited(run),
            check=user_model_result.render(run) if run.header.model else "",
            causes=found,
            known=expected.known(run),
            number=lambda record: numbers[id(record)],
            index=pack(index(matrix, ordered, found)),
            pieces=pieces(fragments),
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_safe,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["legend"] = [(verdict, mark) for verdict, mark in MARKS.items()]
    environment.globals["phases"] = [*FaultPhase]
    environment.filters |= {
        "address": expected.address,
        "bar": evidence.bar,
        "cycle": evidence.hang_cycle,
        "clip": lambda value: text.clip(value, _TEXT_LIMIT),
        "duration": text.duration,
        "headroom": evidence.headroom,
        "label": label,
        "ledger_rows": evidence.ledger_rows,
        "mark": _mark,
        "number": text.number,
        "one_line": text.one_line,
        "outcome_groups": evidence.outcome_groups,
        "place": evidence.place,
        "state_cards": evidence.state_cards,
        "ranks": text.ranks,
        "rough": text.rough,
        "size": _size,
        "steps": evidence.hang_steps,
    }
    return environment


def _safe(value: object) -> object:
    """Clean every string that goes into the page; markup made by the templates passes."""
    return text.printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _mark(verdict: Verdict) -> VerdictStyle:
    return MARKS[verdict]


def _size(num_bytes: str) -> str:
    return text.size(int(num_bytes)) if num_bytes.isdecimal() else num_bytes
