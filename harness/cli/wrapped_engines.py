"""The names of engines that a user wraps, from --with and --wrap. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from shardproof.engine.names import absolute, parse, spelled
from shardproof.harness.errors import UsageError


def wrapped_engines(
    engines: list[str] | None, options: Sequence[str] | None, wrap: str | None
) -> list[str] | None:
    """Return the names with these options; raises UsageError for options that cannot be read."""
    if not options and not wrap:
        return engines
    if not engines:
        raise UsageError(
            "--with and --wrap",
            expected="--engine too",
            got="none",
            hint="--engine NAME, whose options they are",
        )
    try:
        _, given = parse(f"({', '.join(options or ())})")
    except ValueError as error:
        got = " ".join(options or ())
        raise UsageError(
            "--with", expected="NAME=VALUE", got=got, hint=str(error).rpartition("; try ")[2]
        ) from error
    return [spelled(engine, given | ({"wrap": absolute(wrap)} if wrap else {})) for engine in engines]
