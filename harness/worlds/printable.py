"""Text that an engine made, in a form that any file, terminal or page can hold: of bounded length, without controls."""

from __future__ import annotations

import re

# All control characters but line feed and tab, what turns the direction of writing, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shortened(text: str, longest: int) -> str:
    """Return a text with its middle replaced by the number of characters left out, if it is longer than that."""
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {left_out} characters are left out ...\n{text[-half:]}"


def legible(text: str, longest: int) -> str:
    """Shorten a text, and write characters that no terminal should receive as Python escapes."""
    return _UNPRINTABLE.sub(_escaped, shortened(text, longest))


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
