"""What several files of tests ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardproof.harness.runner.session import Source, TrialSession


@pytest.fixture
def session(tmp_path: Path) -> Iterator[TrialSession]:
    """Judge cases, and keep what was observed below the test's own folder."""
    session = TrialSession(Source(folder=tmp_path))
    yield session
    session.close()
