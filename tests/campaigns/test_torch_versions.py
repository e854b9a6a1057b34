"""Releases of torch: the tested ones, and their table."""

from __future__ import annotations

import pytest

from campaigns.torch_versions import Release, _divergences, _seen_in, _with_releases
from shardproof.harness.records.run import Run
from shardproof.harness.torch_compat.releases import TESTED, minor, remark
from tests.sample_records import HEADER


@pytest.mark.parametrize("version", [*TESTED, "2.15.0+cu132", "2.13.1+cpu", "2.12.0a0+git12"])
def test_a_tested_release_needs_no_remark(version: str) -> None:
    assert remark(version) is None


@pytest.mark.parametrize(
    ("version", "word"), [("2.16.0", "newer"), ("3.0.0+cpu", "newer"), ("2.10.1", "older")]
)
def test_another_release_has_one_line(version: str, word: str) -> None:
    line = remark(version)
    assert line is not None
    assert line.startswith(f"torch {version} is {word} than 2.")
    assert "\n" not in line


def test_releases_are_in_order() -> None:
    assert sorted(TESTED, key=minor) == list(TESTED)


def _release(version: str, verdict: str) -> Release:
    run = Run(header=HEADER, records=(), footer=None)
    return Release(version=version, catalogue=run, processes=run, private_names={}, divergences={1: verdict})


def test_a_divergence_names_the_releases_that_show_it() -> None:
    verdicts = {"2.11.0": "not supported", "2.13.0": "seen", "2.14.1": "seen", "2.15.0": "not seen"}
    releases = [_release(version, verdict) for version, verdict in verdicts.items()]
    line = "Seen in torch 2.13.0, 2.14.1; not seen in 2.15.0; not supported in 2.11.0."
    assert _seen_in(1, releases) == line
    text = "# Page\n\n## 1. Twice\n\nIt is so.\n\n```sh\npytest suites\n```\n\n## Else\n"
    once = _with_releases(text, releases)
    assert f"It is so.\n\n{line}\n\n```sh\npytest suites\n```\n\n## Else" in once
    assert _with_releases(once, releases) == once


def test_every_divergence_has_a_command() -> None:
    found = _divergences()
    assert [d.number for d in found] == list(range(1, len(found) + 1))
    assert all(d.command.startswith(("pytest suites/", "shardproof run --case ")) for d in found)
