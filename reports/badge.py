"""A run as a badge: JSON for services that draw one, and an SVG of our own."""

from __future__ import annotations

import json
from typing import NamedTuple
from xml.sax.saxutils import escape

from shardproof.harness.records.run import Run
from shardproof.reports.summary import Conclusion, conclude, conforms, tally

_LABEL = "shardproof"
_COLOURS = {"brightgreen": "#3a7d1f", "red": "#b3261e", "lightgrey": "#5f6368"}  # dark enough for white text
_CHARACTER = 6.6  # width of one character of 11 px, with a margin
_HEIGHT = 20


class _Badge(NamedTuple):
    message: str
    colour: str


def endpoint(run: Run) -> str:
    """Return the JSON that a badge service reads: schemaVersion, label, message, color."""
    found = _badge(run)
    plain = {"schemaVersion": 1, "label": _LABEL, "message": found.message, "color": found.colour}
    return f"{json.dumps(plain)}\n"


def picture(run: Run) -> str:
    """Draw the badge."""
    found = _badge(run)
    left, right = (round(len(text) * _CHARACTER) + 12 for text in (_LABEL, found.message))
    message = escape(found.message)
    style = 'y="14" font-family="Verdana,sans-serif" font-size="11" fill="#fff" text-anchor="middle"'
    text = f'<text x="{{}}" {style}>{{}}</text>'
    parts = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="{_HEIGHT}" role="img">',
        f"<title>{_LABEL}: {message}</title>",
        f'<rect width="{left}" height="{_HEIGHT}" fill="#333"/>',
        f'<rect x="{left}" width="{right}" height="{_HEIGHT}" fill="{_COLOURS[found.colour]}"/>',
        text.format(left / 2, _LABEL),
        text.format(left + right / 2, message),
        "</svg>\n",
    )
    return "\n".join(parts)


def _badge(run: Run) -> _Badge:
    counted = tally(run.records)
    if conforms(run):
        beside = f", {counted.opted_out}" if counted.opted_out else ""
        return _Badge(f"{counted.passed} of {counted.declared} passed{beside}", "brightgreen")
    if counted.num_not_conforming:
        return _Badge(f"{counted.num_not_conforming} not conforming", "red")
    words = conclude(run).value.lower()
    return _Badge(words, "red" if conclude(run) is Conclusion.NOT_CONFORMING else "lightgrey")
