"""The file of a user's model, and the command that judges it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.user_model.models import GOOD, Check


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    return file


@pytest.fixture
def check(file: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    return Check(file, capsys)
