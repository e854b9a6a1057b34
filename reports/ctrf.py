"""A run in the Common Test Report Format: JSON that CI dashboards read, one test for each record."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime
from typing import Any

from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports.expected import stale
from shardproof.reports.junit import evidence_text
from shardproof.reports.summary import conforms, warnings
from shardproof.reports.text import one_line, plausible, printable

_SPEC_VERSION = "0.0.0"  # the format has no other release yet
_STATUSES = ("passed", "failed", "skipped", "pending", "other")
# Opting out is no pass, and neither is a known failure.
_QUIET = {Verdict.PASSED: "passed", Verdict.UNSUPPORTED: "skipped", Verdict.KNOWN_FAILURE: "other"}


def render(run: Run) -> str:
    """Render the run; if it does not conform as a whole, at least one test fails."""
    tests = [_test(record) for record in run.records]
    itself = {"the run is whole": warnings(run), "no expectation is stale": stale(run)}
    tests += [_of_run(name, "\n".join(texts)) for name, texts in itself.items() if texts]
    if not conforms(run) and not any(test["status"] == "failed" for test in tests):
        tests.append(_of_run("some case is judged", "the run has no records"))
    counts = Counter(test["status"] for test in tests)
    header = run.header
    results = {
        "tool": {"name": "shardproof", "version": header.versions.get("shardproof", "unknown")},
        "summary": {
            "tests": len(tests),
            **{status: counts[status] for status in _STATUSES},
            "start": _milliseconds(header.started_at),
            "stop": _milliseconds(run.footer.ended_at if run.footer else header.started_at),
        },
        "tests": tests,
        "environment": {
            "commit": printable(header.git_head),
            "osPlatform": printable(header.hardware.get("platform", "unknown")),
            "healthy": conforms(run),
        },
    }
    plain = {
        "reportFormat": "CTRF",
        "specVersion": _SPEC_VERSION,
        "generatedBy": "shardproof",
        "results": results,
    }
    return json.dumps(plain, indent=1)


# Any: JSON.
def _test(record: Record) -> dict[str, Any]:
    places = (record.engine, record.world, record.suite)
    test: dict[str, Any] = {
        "name": printable(record.case) or "(no name)",
        "status": _QUIET.get(record.verdict, "failed"),
        "duration": round(plausible(record.duration_s) * 1000),
        "rawStatus": str(record.verdict),
        "suite": [text for place in places if (text := printable(place))] or ["shardproof"],
        "filePath": printable(f"suites/{record.case.partition('::')[0]}"),
        "labels": {"engine": printable(record.engine), "world": printable(record.world)},
    }
    if record.verdict is not Verdict.PASSED:
        test["message"] = one_line(record.headline, limit=1000)
    if test["status"] in {"failed", "other"}:
        test["trace"] = evidence_text(record)
    return test


def _of_run(name: str, message: str) -> dict[str, Any]:
    return {
        "name": name,
        "status": "failed",
        "duration": 0,
        "suite": ["the run itself"],
        "message": printable(message),
    }


def _milliseconds(moment: str) -> int:
    try:
        return max(0, round(datetime.fromisoformat(moment).timestamp() * 1000))
    except (ValueError, OverflowError, OSError):  # a damaged header says "unknown"
        return 0
