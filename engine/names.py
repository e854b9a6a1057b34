"""The names of engines with options: reads and writes them. No torch here.

[Note: one spelling] The name ``torch.ddp(static_graph=True)`` is the engine torch.ddp with an option, and
``torch.ddp(wrap='train.py:wrap')`` is that engine with a model that the user's function wraps. Records, commands and
ranks know an engine only by its name, so the name says all. A plan that the options or the function decide themselves
is no longer declared.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_EXAMPLE = "find_unused_parameters=True, with numbers, strings, True, False or None as values"


# Any, here and below: options are any values.
def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a name into the engine's and the options; raises ValueError for options that are not values."""
    name, bracket, given = spec.partition("(")
    if not bracket or not spec.endswith(")"):
        return spec, {}
    try:
        call = ast.parse(f"f({given}", mode="eval").body
        assert isinstance(call, ast.Call)
        return name, {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"expected options such as {_EXAMPLE}, got {given[:-1]!r}; try a function of your own, by --wrap"
        ) from error


def spelled(name: str, options: Mapping[str, Any]) -> str:
    """Return the name of an engine with options; `parse` reads it."""
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"{name}({given})" if given else name


def absolute(spec: str) -> str:
    """Return a name whose file, if it is one, is found from any folder."""
    name, options = parse(spec)
    location, _, attribute = name.rpartition(":")
    return spelled(f"{Path(location).resolve()}:{attribute}", options) if location.endswith(".py") else spec
