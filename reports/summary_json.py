"""A run's conclusion as one JSON document, for programs that call ``shardproof run --json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from shardproof.harness.records.run import Run
from shardproof.reports.causes import Cause, causes
from shardproof.reports.expected import stale
from shardproof.reports.summary import conclude, conforms, limited, tally, warnings


def render(run: Run, folder: Path, reports: Sequence[Path]) -> str:
    """Render the run; ``reports`` are the written files. Contains every cause with all of its cases."""
    return json.dumps(
        {
            "conclusion": conclude(run).value,
            "conforms": conforms(run),
            "counts": {str(verdict): count for verdict, count in tally(run.records).counts.items()},
            "causes": [_cause(cause) for cause in causes(run.records)],
            "stale_expectations": list(stale(run)),
            "warnings": list(warnings(run)),
            "limited": list(limited(run)),
            "duration_s": run.footer.duration_s if run.footer and isfinite(run.footer.duration_s) else None,
            "run": str(folder),
            "reports": [str(path) for path in reports],
        },
        indent=2,
        allow_nan=False,
    )


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "verdict": str(cause.verdict),
        "engine": cause.engine,
        "headline": cause.example.headline,
        "repeat": cause.example.command,
        "cases": [{"case": record.case, "world": record.world} for record in cause.records],
    }
