"""A comparison of two runs as JSON: every change, in plain values, for programs to read."""

from __future__ import annotations

import json

from shardproof.harness.records.diff.comparability import ComparedRun
from shardproof.harness.records.diff.comparison import Comparison, RecordChange, broken_laws
from shardproof.harness.records.diff.traffic import Traffic, TrafficChange
from shardproof.harness.records.record import Record
from shardproof.reports.summary import tally

VERSION = 1  # raised when a field is renamed, removed, or changes its meaning


def render_json(comparison: Comparison) -> str:
    """Render as one JSON object with sorted records; ASCII only, so that no terminal interprets it."""
    plain = {
        "version": VERSION,
        "is_changed": bool(comparison.changes),
        "before": _run(comparison.before),
        "after": _run(comparison.after),
        "settings": [
            {"name": found.name, "before": found.before, "after": found.after}
            for found in comparison.settings
        ],
        "warnings": list(comparison.warnings),
        "counts": {str(news): count for news, count in comparison.counts.items()},
        "num_unchanged": comparison.num_unchanged,
        "num_unmeasured": comparison.num_unmeasured,
        "changes": [_change(change) for change in comparison.changes],
    }
    return json.dumps(plain, indent=2) + "\n"


def _run(compared: ComparedRun) -> dict[str, object]:
    header = compared.run.header
    counted = tally(compared.run.records)
    return {
        "folder": compared.folder,
        "started_at": header.started_at,
        "is_interrupted": compared.run.is_interrupted,
        "engines": list(compared.engines),
        "worlds": list(compared.worlds),
        "versions": header.versions,
        "verdicts": {str(verdict): count for verdict, count in counted.counts.items()},
    }


def _change(change: RecordChange) -> dict[str, object]:
    return {
        "engine": change.engine,
        "case": change.case,
        "world": change.world,
        "news": [str(news) for news in change.news],
        "before": _record(change.before),
        "after": _record(change.after),
        "communication": [_traffic_change(found) for found in change.traffic],
    }


def _record(record: Record | None) -> dict[str, object] | None:
    if record is None:
        return None
    entry = record.expectation
    return {
        "verdict": str(record.verdict),
        "headline": record.headline,
        "broken_laws": list(broken_laws(record)),
        "engine_version": record.engine_version,
        "expectation": None
        if entry is None
        else {"verdict": str(entry.verdict), "reason": entry.reason, "link": entry.link},
    }


def _traffic_change(found: TrafficChange) -> dict[str, object]:
    return {
        "ranks": list(found.ranks),
        "phase": found.phase,
        "op": found.op,
        "axis": found.axis,
        "dtype": found.dtype,
        "before": _traffic(found.before),
        "after": _traffic(found.after),
    }


def _traffic(traffic: Traffic) -> dict[str, int]:
    return {"count": traffic.count, "num_bytes": traffic.num_bytes}
