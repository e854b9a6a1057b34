"""Formats values for people, and makes an engine's text safe to show. Plain text only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# Terminal escape sequences as a whole, so that no "[31m" is left; then every other control character, half surrogate
# pairs, non-characters, and the marks that reorder text and so can make a report lie.
_ESCAPES = re.compile("\x1b(?:\\[[0-9;?]*[ -/]*[@-~]|\\][^\x07\x1b]*(?:\x07|\x1b\\\\)?|.)?", re.DOTALL)
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufdd0-\ufdef\ufffe\uffff\ud800-\udfff"
    + "".join(chr(plane * 0x10000 + 0xFFFE) + chr(plane * 0x10000 + 0xFFFF) for plane in range(1, 17))
    + "]"
)


def printable(text: str) -> str:
    """Remove terminal escapes, control characters and broken Unicode.

    The result is allowed in XML 1.0; newlines and tabs are kept.
    """
    return _CONTROLS.sub("\ufffd", _ESCAPES.sub("", text.replace("\r\n", "\n")))


def one_line(text: str, limit: int = 300) -> str:
    """Return printable text as a single line of at most ``limit`` characters."""
    line = " ".join(printable(text).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def clip(text: str, limit: int) -> str:
    """Keep the two ends of a long text and insert how much was left out between them.

    Both ends, because an error's cause is often in its last lines.
    """
    text = printable(text).strip("\n")
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def number(value: float) -> str:
    """Format a tensor's element with as many digits as distinguish two float32 values."""
    return f"{value:.9g}"


def rough(value: float) -> str:
    """Format a measured size."""
    return f"{value:.3g}"


def times(ratio: float) -> str:
    """Format error / allowed as a comparison."""
    if math.isnan(ratio):
        return "not comparable with what is allowed (NaN)"
    if math.isinf(ratio):
        return "infinitely more than allowed"
    return f"{ratio:.3g} x what is allowed"


def size(num_bytes: int) -> str:
    """Format a number of bytes with a binary unit."""
    value = float(num_bytes)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def plausible(seconds: float) -> float:
    """Return a wall time as machines may read it: finite and not negative, whatever a record says."""
    return min(max(0.0, seconds), 1e9) if math.isfinite(seconds) else 0.0


def duration(seconds: float) -> str:
    """Format a wall time."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def ranks(members: Iterable[int]) -> str:
    """Format a set of ranks by its stretches: "ranks 0-3, 6"."""
    stretches: list[list[int]] = []
    for rank in sorted(set(members)):
        if stretches and stretches[-1][-1] == rank - 1:
            stretches[-1] = [stretches[-1][0], rank]
        else:
            stretches.append([rank])
    spelt = ", ".join("-".join(map(str, stretch)) for stretch in stretches)
    return f"rank {spelt}" if spelt.isdecimal() else f"ranks {spelt}"


def versions(releases: Mapping[str, str]) -> str:
    """Format names with versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in releases.items())
