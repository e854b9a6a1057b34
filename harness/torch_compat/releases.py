"""The releases of torch that the whole catalogue was run on, oldest first. No torch here."""

from __future__ import annotations

TESTED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")


def minor(version: str) -> tuple[int, int]:
    """Return major and minor number of a version such as ``2.15.0+cpu``; raises ValueError for other text."""
    major, number, *_ = version.split(".")
    return int(major), int(number)


def remark(version: str) -> str | None:
    """Return one line for a release outside of those tested, None for the others."""
    if minor(version) > minor(TESTED[-1]):
        return f"torch {version} is newer than {TESTED[-1]}, the last that was tested: a verdict may be ours"
    if minor(version) < minor(TESTED[0]):
        return f"torch {version} is older than {TESTED[0]}, the first that was tested"
    return None
