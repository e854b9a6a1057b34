"""Pages on engines show the verdicts of records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from campaigns import engines, gpu
from campaigns.engine_pages import Judged, columns, columns_of, page, summary
from campaigns.torch_versions import Release, _divergences, _seen_in, _with_releases
from shardproof.engine.registry import BUILT_IN, THIRD_PARTY
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.harness.torch_compat.releases import TESTED, minor, remark
from tests.sample_records import ENTRY, FOOTER, HEADER, a_record
from tests.shell import ROOT


def _judged(*records: Record) -> Judged:
    run = Run(header=HEADER, records=records, footer=FOOTER)
    return Judged(engine="torch.ddp", run=run, capabilities=("REPLICATE",), install="pip install shardproof")


def _record(verdict: Verdict, suite: str = "parity", headline: str = "") -> Record:
    expectation = ENTRY if verdict is Verdict.KNOWN_FAILURE else None
    case = f"{suite}/test_x.py::test_y"
    return a_record(
        verdict, engine="torch.ddp", suite=suite, case=case, headline=headline, expectation=expectation
    )


def test_a_row_counts_each_verdict() -> None:
    judged = _judged(
        *map(_record, (Verdict.PASSED, Verdict.KNOWN_FAILURE, Verdict.UNSUPPORTED, Verdict.UNSUPPORTED))
    )
    text = summary(columns([judged]))
    assert "| [torch.ddp](engines/torch.ddp.md) | torch 2.13.0+cpu | 2030-01-01 | " in text
    assert " threads:4 processes:2 | 1 | 1 | 2 | 0 |" in text
    assert "| parity | 1 of 2 (1 known) |" in text


def test_a_verdict_that_does_not_conform_is_bold_and_named() -> None:
    judged = _judged(_record(Verdict.PASSED, "smoke"), _record(Verdict.HUNG, "parity", "rank 1 waits"))
    assert "| **1** |" in summary(columns([judged]))
    assert "| **0 of 1** |" in summary(columns([judged]))
    assert "| 1 of 1 |" in summary(columns([judged]))
    assert "- HUNG: rank 1 waits: `parity/test_x.py::test_y`" in page(judged, ROOT)


def test_an_undeclared_promise_is_no_pass() -> None:
    assert "| zero | - |" in summary(columns([_judged(_record(Verdict.UNSUPPORTED, "zero"))]))


def test_a_divergence_shows_its_reason_and_link() -> None:
    text = page(_judged(_record(Verdict.KNOWN_FAILURE), _record(Verdict.KNOWN_FAILURE, "smoke")), ROOT)
    assert f"{ENTRY.reason}" in text.replace("\\", "")
    assert f"([where]({ENTRY.link})) 2 of the cases show it." in text
    assert "## Not decided\n\nNothing.\n" in text
    assert "](../divergences/ddp_reentrant_checkpoint.py)" in text


def test_the_engine_is_shown_as_it_was_judged() -> None:
    judged = _judged(_record(Verdict.PASSED))
    header = replace(HEADER, git_head="a" * 40, git_dirty=True, options={"cases": "smoke"})
    text = page(replace(judged, run=replace(judged.run, header=header)), ROOT)
    assert "by the suites smoke." in text
    whole = replace(judged.run, footer=replace(FOOTER, is_whole=True))
    assert "by the whole catalogue." in page(replace(judged, run=whole), ROOT)
    assert "judged on 2030-01-01 with Shardproof at `aaaaaaaaaa with changes`, torch 2.13.0" in text
    assert "[`engine/adapters/torch_ddp.py`](../../engine/adapters/torch_ddp.py)" in text


def test_no_page_is_written_where_nothing_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "RUNS", tmp_path / "none")
    with pytest.raises(SystemExit, match="2"):
        engines.main(["--pages-only"])
    assert "expected runs below" in capsys.readouterr().err


@pytest.mark.parametrize("missing", [(), ("torch.ddp",)])
def test_the_page_of_all_engines_is_written_if_all_have_run(
    missing: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs, docs = tmp_path / "runs", tmp_path / "docs"
    for engine in {*BUILT_IN, *THIRD_PARTY} - {*missing}:
        (runs / engine).mkdir(parents=True)
        (runs / engine / "capabilities.json").touch()
    docs.mkdir()
    monkeypatch.setattr(engines, "RUNS", runs)
    monkeypatch.setattr(engines, "DOCS", docs)
    monkeypatch.setattr(
        engines, "_read", lambda folder, _: replace(_judged(_record(Verdict.PASSED)), engine=folder.name)
    )
    assert engines.main(["--pages-only"]) == 0
    assert (docs / "engines.md").exists() == (not missing)
    assert (docs / "engines" / "reference.md").exists()


def test_the_row_of_an_engine_that_has_not_run_stays() -> None:
    """A page that is read again stays equal; an engine that runs again changes only its own row and column."""
    first = _judged(_record(Verdict.PASSED, "smoke"), _record(Verdict.KNOWN_FAILURE, "parity"))
    other = replace(_judged(_record(Verdict.HUNG, "zero")), engine="torch.zero1")
    text = summary(columns([first, other]))
    assert summary(columns_of(text)) == text
    anew = replace(_judged(_record(Verdict.PASSED, "zero")), engine="torch.zero1")
    assert summary(columns_of(text) | columns([anew])) == summary(columns([first, anew]))


# The campaign on an accelerator.


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


# Releases of torch.


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
