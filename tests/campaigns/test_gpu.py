"""The campaign on an accelerator runs each stage once, says what it did not reach, and writes a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns import gpu


def _campaign(folder: Path, *options: str) -> tuple[int, str]:
    places = ("--out", str(folder / "runs"), "--page", str(folder / "page.md"))
    code = gpu.main(["--device", "cpu", "--only", "doctor", *places, *options])
    return code, (folder / "page.md").read_text()


def test_a_stage_runs_once_and_within_the_budget(tmp_path: Path) -> None:
    code, page = _campaign(tmp_path, "--budget", "0")
    assert (code, "not reached: the budget is spent" in page) == (1, True)
    (tmp_path / "runs" / "doctor").mkdir()
    (tmp_path / "runs" / "doctor" / "done.json").write_text(
        '{"name": "doctor", "code": 0, "seconds": 3.0, "result": "ok   world threads:2"}'
    )
    code, page = _campaign(tmp_path, "--budget", "0")
    assert (code, "ok   world threads:2" in page) == (0, True)


def test_several_ranks_share_the_one_device_that_a_machine_may_have() -> None:
    commands = [" ".join(stage.command) for stage in gpu.stages("cuda")]
    assert any("--world=threads:2:cuda" in command for command in commands)
    assert not any("processes:2:cuda" in command for command in commands)


def test_without_an_accelerator_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "expected an accelerator that torch finds, got none" in capsys.readouterr().err
