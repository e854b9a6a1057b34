"""pytest glue of the suites: checks the marks that name torch's own tests, and names the values of parameters."""

from __future__ import annotations

from enum import Enum
from itertools import product

import pytest

from shardproof.harness.audit.upstream_coverage import read_tables
from shardproof.harness.errors import UsageError
from shardproof.harness.runner.session_end import refuse


@pytest.hookimpl(tryfirst=True)  # so that it sees what -k and others will deselect
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """End the session for a mark that names no row of its table."""
    try:
        for table, item in product(read_tables().values(), items):
            table.rows_of(item.iter_markers(table.mark), where=item.nodeid)
    except UsageError as error:
        refuse(config, items, error)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return a value's name for the id of a case: members of enums, problems, optimizers and dtypes have one."""
    if isinstance(val, Enum):
        return val.name.lower()
    if type(val).__name__ == "dtype":  # by name: a process that only collects does not need torch
        return str(val).removeprefix("torch.")
    name = getattr(val, "name", None)
    return name if isinstance(name, str) else None
