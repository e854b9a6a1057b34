"""Values of a test's parameters, with the marks of the cases that they make."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import Sizes


def param(
    *values: object,
    id: str | None = None,
    kills: tuple[str, ...] | str = (),
    rows: tuple[str, ...] | str = (),
    worlds: Sizes | None = None,
) -> Any:  # pytest has no public name for what it makes of them
    """Make a value for `pytest.mark.parametrize`, or several at once: a `pytest.param` whose marks have names."""
    marks = [pytest.mark.worlds(worlds)] if worlds else []
    marks += [pytest.mark.kills(*_each(kills))] if kills else []
    marks += [pytest.mark.rows(*_each(rows))] if rows else []
    return pytest.param(*values, id=id, marks=marks)


def _each(names: tuple[str, ...] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
