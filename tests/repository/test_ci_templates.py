"""The GitHub action and the GitLab template: their shell steps are run as a runner would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardproof.harness.cli.exit_codes import NOTHING_JUDGED
from shardproof.harness.records.run import read_run
from tests.shell import ROOT

SUMS = "shardproof.engine.mutants.gradient_scale:SumsInsteadOfAveraging"


# Any, throughout: YAML.
def _action() -> dict[str, Any]:
    plain: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
    return plain


def _gitlab() -> dict[str, Any]:
    plain: dict[str, Any] = yaml.safe_load((ROOT / ".ci" / "gitlab.yml").read_text())
    return plain


def _shell(folder: Path, script: str, environment: Mapping[str, str]) -> int:
    """Run a script as runners do: bash that ends at the first error, with `shardproof` on the path."""
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    known = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=folder, env=known, timeout=110, check=False).returncode


class Runner:
    """Runs steps of the action by name, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary = folder / "summary"

    def run(self, step: str, **inputs: str) -> int:
        action = _action()
        unknown = inputs.keys() - action["inputs"].keys()
        assert not unknown, "an input that the action does not have"
        values = {name: str(spec["default"]) for name, spec in action["inputs"].items()} | inputs
        (found,) = [s for s in action["runs"]["steps"] if s.get("name") == step]
        environment = {
            key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda match: values[match[1]], text)
            for key, text in found["env"].items()
        }
        assert not any("${{" in text for text in environment.values())
        environment["GITHUB_STEP_SUMMARY"] = str(self.summary)
        return _shell(self.folder, found["run"], environment)


def test_no_input_is_pasted_into_a_script() -> None:
    """A name with a quote would be a command; values reach scripts by the environment alone."""
    for step in _action()["runs"]["steps"]:
        assert "${{" not in step.get("run", "")


def test_both_install_the_release_of_torch_that_is_proven() -> None:
    (pinned,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert _action()["inputs"]["torch"]["default"] == pinned
    assert _gitlab()["variables"]["TORCH"] == pinned


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_action_judges_shards_and_merges_them(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    options = "--suite smoke --no-expectations --shard"
    codes = {
        number: runner.run(
            "judge", engine=f"torch.ddp {SUMS}", arguments=f"{options} {number}/2", out=f"runs/{number}"
        )
        for number in (1, 2)
    }
    assert sorted(codes.values())[-1] == 1
    assert runner.run("merge", merge="runs/*", out="merged") == 1
    assert runner.run("summary", out="merged") == 0
    assert "not conforming" in runner.summary.read_text()
    assert SUMS in runner.summary.read_text()
    assert len(runner.summary.read_bytes()) < 60_000
    run = read_run(tmp_path / "merged")
    assert run.problems == ()
    assert {record.engine for record in run.records} == {"torch.ddp", SUMS}
    assert runner.run("merge", merge="runs/2", out="half") == 1
    assert "shard 1 of 2 is missing" in " ".join(read_run(tmp_path / "half").problems)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_judges_nothing_is_red_unless_it_is_allowed(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    nothing = {"engine": "torch.ddp", "arguments": "--suite zero"}
    assert runner.run("judge", **nothing, out="red") == NOTHING_JUDGED
    assert runner.run("judge", **nothing, out="green", **{"allow-unjudged": "true"}) == 0
    assert runner.run("merge", merge="green", out="merged") == NOTHING_JUDGED
    jobs = _gitlab()
    job = {**jobs["variables"], **jobs[".shardproof"]["variables"], "ARGUMENTS": "--suite zero"}
    script = "\n".join(jobs[".shardproof"]["script"])
    assert _shell(tmp_path, script, {**job, "CI_JOB_ID": "1"}) == NOTHING_JUDGED
    assert _shell(tmp_path, script, {**job, "CI_JOB_ID": "2", "ALLOW_UNJUDGED": "true"}) == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_gitlab_jobs_judge_and_merge(tmp_path: Path) -> None:
    jobs = _gitlab()
    job = {**jobs["variables"], **jobs[".shardproof"]["variables"], "ARGUMENTS": "--suite smoke"}
    for number, world in enumerate(("threads:1", "threads:2")):
        environment = {**job, "WORLD": world, "CI_JOB_ID": str(number)}
        assert _shell(tmp_path, "\n".join(jobs[".shardproof"]["script"]), environment) == 0
    assert _shell(tmp_path, "\n".join(jobs[".shardproof-merge"]["script"]), job) == 0
    assert read_run(tmp_path / "merged").header.worlds == ("threads:1", "threads:2")
    assert (tmp_path / jobs[".shardproof-merge"]["artifacts"]["reports"]["junit"]).is_file()
