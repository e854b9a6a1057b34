"""How many cases are told in few words: by test, with the number of its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from reports.matrix import label
from reports.text import one_line

__all__ = ["by_test"]


def by_test(cases: Iterable[str], *, limit: int | None = None) -> list[str]:
    """Name each test once, with how many of its cases there are; beyond ``limit`` tests, only their number."""
    counts = Counter(case.partition("[")[0] for case in cases)
    told = []
    for test, count in counts.items():
        suite = test.split("/")[0] if "/" in test else ""
        name = one_line(f"{suite}/{label(test, suite)}" if suite else test)
        told.append(name if count == 1 else f"{name} ({count})")
    if limit is None or len(told) <= limit:
        return told
    return [*told[:limit], f"and {len(told) - limit} more"]
