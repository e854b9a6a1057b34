"""The list of engines, as ``shardproof list`` prints it: the capabilities of each, determined once per release.

[Note: what is remembered] To examine an engine, a process imports torch, which takes seconds. The results for built-in
engines are cached in the user's cache folder, under a hash of everything that they may depend on: our sources and
torch's release by name, size and time. Only the list reads the cache: a run examines the engine itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from shardproof.engine.registry import BUILT_IN, EngineNotFoundError, known_engines, what_is_missing
from shardproof.harness.records.provenance import version_of

_SOURCES = Path(__file__).parents[2] / "engine"


def engine_lines() -> Iterator[str]:
    """Yield a line for each known engine."""
    kept = _cache_file()
    declared = _read(kept)
    asked = {
        name: declared.get(name) or what_is_missing(name) or _ask(name) for name in sorted(known_engines())
    }
    if any(name not in declared for name in BUILT_IN):
        _write(kept, {name: asked[name] for name in BUILT_IN if not asked[name].startswith(_UNAVAILABLE)})
    yield from (f"  {name:26} {words}" for name, words in asked.items())


_UNAVAILABLE = "unavailable: "


def _ask(name: str) -> str:
    from shardproof.harness.runner.engines import describe  # here, because it starts the fork server

    try:
        return ", ".join(sorted(capability.name for capability in describe(name).capabilities))
    except EngineNotFoundError as error:
        return f"{_UNAVAILABLE}{error.problem}"


def _cache_file() -> Path:
    stats = [(str(path), path.stat()) for path in sorted(_SOURCES.rglob("*.py"))]
    facts = [sys.version, sys.prefix, version_of("torch"), *((n, s.st_size, s.st_mtime_ns) for n, s in stats)]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "shardproof"
        / f"engines-{key}.json"
    )


def _read(file: Path) -> dict[str, str]:
    """Return the cached lines of built-in engines; empty if the file is missing or damaged."""
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    known = BUILT_IN.keys() & kept.keys() if isinstance(kept, dict) else ()
    return {name: kept[name] for name in known if isinstance(kept[name], str)}


def _write(file: Path, declared: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # a home directory that is full or read-only
        file.parent.mkdir(parents=True, exist_ok=True)
        for older in file.parent.glob("engines-*.json"):
            older.unlink()
        whole = file.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(declared))
        whole.replace(file)
