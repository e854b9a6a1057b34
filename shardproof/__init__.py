"""The public interface: all that an adapter, a problem, a case or a law of your own needs, under one name.

An adapter implements `Engine` and `PreparedModel`, a problem implements `Problem`. A case is a pytest function that
takes the fixture `trial` and checks a `Training` against laws. Each has a page in docs/.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path

_STUB = Path(__file__).with_suffix(".pyi")


@cache
def _modules() -> dict[str, str]:
    """Return the module of each public name, as the stub lists them."""
    imports = [node for node in ast.parse(_STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {name.name: node.module or "" for node in imports for name in node.names}


# A name is imported when it is asked for: importing a module below this package must not import all others.
def __getattr__(name: str) -> object:
    if name.startswith("__") or name not in _modules():
        raise AttributeError(f"module 'shardproof' has no attribute {name!r}")
    value: object = getattr(import_module(_modules()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_modules())
