"""Shorthands for pytest's parameters: values are arguments, and their marks have names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from shardproof import Sizes

Names = tuple[str, ...] | str


def parametrize(
    names: str, *values: object, ids: Callable[[Any], str] | Iterable[str] | None = None
) -> pytest.MarkDecorator:
    """Run a test for each value: `pytest.mark.parametrize`; for several names each value is a tuple or a `param`."""
    return pytest.mark.parametrize(names, values, ids=ids)


def param(
    *values: object,
    id: str | None = None,
    kills: Names = (),
    rows: Names = (),
    worlds: Sizes | None = None,
    marks: Iterable[pytest.MarkDecorator] | pytest.MarkDecorator = (),
) -> Any:  # pytest has no public name for its result
    """Make a value for `parametrize`, or several at once: `pytest.param`, whose most frequent marks have names."""
    chosen = [marks] if isinstance(marks, pytest.MarkDecorator) else [*marks]
    chosen += [pytest.mark.worlds(worlds)] if worlds else []
    chosen += [pytest.mark.kills(*_each(kills))] if kills else []
    chosen += [pytest.mark.rows(*_each(rows))] if rows else []
    return pytest.param(*values, id=id, marks=chosen)


def _each(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
