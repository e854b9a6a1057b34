"""Fixtures: worlds for ranks, and the mark ``twin`` for tests of torch's own engine.

Twins show that what the tests demand holds for FSDP2 too, through the same interface, and what torch gets wrong;
`make twins` runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardproof.harness.worlds.launch import WorldPool
from tests.reference.ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by the parameter that names the interface."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is not None and parameters.params.get("api") == "torch":
            item.add_marker(pytest.mark.twin)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorldPool]:
    """Keep worlds of threads for the tests of one file."""
    pool = WorldPool(tmp_path_factory.mktemp("worlds"))
    yield pool
    pool.close()


@pytest.fixture
def ranks(pool: WorldPool, tmp_path: Path) -> Ranks:
    return Ranks(pool, tmp_path)
