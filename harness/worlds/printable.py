"""Bounds text that an engine made and escapes control characters, for any file, terminal or page."""

from __future__ import annotations

import re

# All control characters except line feed and tab, characters that change the text direction, and lone surrogates.
_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shortened(text: str, longest: int) -> str:
    """Return the text; if it is longer than ``longest``, replace its middle by the number of omitted characters."""
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {left_out} characters are left out ...\n{text[-half:]}"


def legible(text: str, longest: int) -> str:
    """Shorten a text, and escape characters that a terminal should not receive, as Python does."""
    return _UNPRINTABLE.sub(_escaped, shortened(text, longest))


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
