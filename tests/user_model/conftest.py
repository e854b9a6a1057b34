"""The file of a user's model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.user_model.models import GOOD


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    return file
