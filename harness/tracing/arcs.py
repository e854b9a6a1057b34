"""Records which lines of the engine's code a rank executed: jumps from line to line, which coverage.py calls arcs.

It counts torch's packages for parallel training, and the packages of the adapter and its imports.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from shardproof.engine.contract import Engine
from shardproof.harness.tracing.collectives.call_site import short_path

Arc = tuple[str, int, int]  # of a file, from a line to a line; -N enters or leaves the function of line N
COUNTS_ARCS = "coverage"  # the package that counts arcs; not every environment has it
_OF_TORCH = ("distributed/fsdp", "distributed/_composable", "nn/parallel")
_LIBRARIES = sys.stdlib_module_names | {"torch"}
_HARNESS = "shardproof.harness."


def can_count() -> bool:
    """Return whether the package is installed, and nothing else traces this process."""
    return find_spec(COUNTS_ARCS) is not None and sys.gettrace() is None


@contextmanager
def counting_arcs(engine: Engine, path: Path) -> Iterator[None]:
    """Count the arcs of this thread in the engine until exit, and write them to a file; for one rank per process."""
    import coverage  # here, because most sessions count no arcs

    counter = coverage.Coverage(data_file=None, branch=True, include=_files_of(engine), config_file=False)
    counter.start()
    try:
        yield
    finally:
        counter.stop()
        data = counter.get_data()
        arcs = ((short_path(f), *arc) for f in data.measured_files() for arc in data.arcs(f) or ())
        part = path.with_name(f"{path.name}.part")  # a rank that is killed here leaves no partial file
        part.write_text(json.dumps(sorted(arcs)))
        part.replace(path)


def _files_of(engine: Engine) -> list[str]:
    """Return file patterns: the folders of the adapter and of its module's imports."""
    adapter = sys.modules[type(engine).__module__]
    names = {
        adapter.__name__,
        *(getattr(value, "__module__", None) or "" for value in vars(adapter).values()),
    }
    named = [n for n in names if n.partition(".")[0] not in _LIBRARIES and not n.startswith(_HARNESS)]
    files = (getattr(sys.modules.get(name), "__file__", None) for name in named)
    folders = {Path(file).parent for file in files if file}
    folders |= {Path(torch.__file__).parent / part for part in _OF_TORCH}
    return sorted(f"{folder}/*" for folder in folders)


def read_arcs(path: Path) -> set[Arc]:
    """Read the arcs of one rank."""
    return {(file, before, line) for file, before, line in json.loads(path.read_text())}
