"""pytest glue of the suites: the marks by which a case says what of torch's own it stands for are checked."""

from __future__ import annotations

from itertools import product

import pytest

from shardproof.harness.audit.upstream_coverage import read_tables
from shardproof.harness.errors import UsageError
from shardproof.harness.runner.collection import refuse


@pytest.hookimpl(tryfirst=True)  # so that it sees what -k and others will leave out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """End the session for a mark that names no row of its table."""
    try:
        for table, item in product(read_tables().values(), items):
            table.rows_of(item.iter_markers(table.mark), where=item.nodeid)
    except UsageError as error:
        refuse(config, items, error)
