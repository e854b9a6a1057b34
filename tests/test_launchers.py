"""Under a launcher of ranks nothing is judged on each rank: one sentence says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof.harness.errors import UsageError
from shardproof.harness.runner.launchers import refuse_launcher

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (TORCHRUN, "process 1 of 2 of torchrun: "),
        ({"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "a"}, "process 0 of 8 of a launcher of ranks: "),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, "process 3 of 4 of srun: "),
    ],
    ids=["torchrun", "other", "slurm"],
)
def test_one_of_several_processes_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_launcher(environment)
    text = str(caught.value)
    assert text.startswith(words)
    assert "--world processes:" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "8"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "many", "MASTER_ADDR": "a"},
    ],
    ids=str,
)
def test_one_process_may_run(environment: dict[str, str]) -> None:
    refuse_launcher(environment)


def _torchrun(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    return subprocess.run(
        [sys.executable, *launcher, *command],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("called", ["shardproof", "pytest", "own_suite"])
def test_torchrun_ends_with_a_sentence(tmp_path: Path, called: str) -> None:
    out = tmp_path / "run"
    own = tmp_path / "test_own.py"
    own.write_text("def test_it(trial):\n    raise AssertionError\n")
    commands = {
        "shardproof": ("shardproof", "run", "--suite", "smoke"),
        "pytest": ("pytest", "suites/smoke"),
        "own_suite": ("pytest", "-p", "shardproof.harness.runner.plugin", str(own)),
    }
    done = _torchrun(tmp_path, *commands[called], "--engine", "torch.ddp", "--out", str(out))
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "of 2 of torchrun: expected one process" in said
    assert "--world processes:2" in said
    assert "shardproof/harness" not in said, "no traceback of ours"
    assert not out.exists()
