"""A damaged file costs only its contents: no reader ends in a traceback, and no damaged run is green."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from campaigns.fault_checks import call
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import JUDGED, read_run
from shardproof.reports.summary import Conclusion, conclude

CODES = {0, 1, 2, 3, 4}
OF_THE_RUN = ("records.jsonl", "run.jsonl", "SHA256SUMS")
OF_A_TIMELINE = ("rank0.ledger.jsonl", "rank1.ledger.jsonl", "rank0.races.json")
OF_A_WORLD = (
    *OF_A_TIMELINE,
    "SHA256SUMS",
    "engine.json",
    "outcomes.json",
    "rank0.observation",
    "rank1.observation",
    "schedule",
)
PIECES = [b"\n", b"0", b'"', b"{", b"\xff", b"1e999", b","]
GARBLES = """
import contextlib
import os
from pathlib import Path

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine


class Garbles(DistributedDataParallelEngine):
    def prepare(self, model, plan, mesh):
        for fd in os.listdir("/proc/self/fd"):
            target = Path("/proc/self/fd", fd)
            if target.exists() and os.readlink(target).endswith("rank1.ledger.jsonl"):
                with open(os.readlink(target), "a") as journal:
                    journal.write('{"entry":{"se')
        return super().prepare(model, plan, mesh)
"""


def _linked_pipe(path: Path) -> None:
    os.mkfifo(path.with_suffix(".pipe"))
    path.symlink_to(path.with_suffix(".pipe"))


# What is no file, by what makes it at a path.
STRANGE: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a pipe behind a link": _linked_pipe,
}
REPLACES = """
import contextlib
import os
from pathlib import Path

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine


class Replaces(DistributedDataParallelEngine):
    def prepare(self, model, plan, mesh):
        if mesh.get_rank() == 0:
            path = Path({folder!r}, {name!r})
            path.unlink(missing_ok=True)
            os.mkfifo(path)
        return super().prepare(model, plan, mesh)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedResult:
    """A run, a copy of it to compare with, and the folder of its one world."""

    run: Path
    copy: Path
    world: Path

    def file(self, name: str, *, is_of_world: bool) -> Path:
        return (self.world if is_of_world else self.run) / name


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> SavedResult:
    folder = tmp_path_factory.mktemp("kept")
    options = ["--engine=torch.ddp", "--suite=smoke", "-k=trains", "--thorough", "--keep=all"]
    assert call("run", *options, f"--out={folder / 'run'}")[0] == 0
    (outcomes,) = (folder / "run").rglob("outcomes.json")
    shutil.copytree(folder / "run", folder / "copy")
    found = SavedResult(run=folder / "run", copy=folder / "copy", world=outcomes.parent)
    assert all((found.world / name).is_file() for name in OF_A_WORLD)
    for command in (["report"], ["timeline"], ["diff", str(found.copy)], ["judge"]):
        assert call(*command, str(found.run))[0] == 0
    return found


def _mutated(data: st.DataObject, whole: bytes) -> bytes:
    """Change, cut off, put in, or repeat some bytes."""
    at = data.draw(st.integers(0, max(0, len(whole) - 1)), label="at")
    length = data.draw(st.integers(0, 60), label="length")
    before, piece, after = whole[:at], whole[at : at + length], whole[at + length :]
    match data.draw(st.sampled_from(["change", "cut", "put in", "repeat", "swap"]), label="how"):
        case "change":
            new = data.draw(st.binary(min_size=1, max_size=8))
            return before + new + whole[at + len(new) :]
        case "cut":
            return before
        case "put in":
            return before + data.draw(st.sampled_from(PIECES)) + piece + after
        case "repeat":
            return before + piece + piece + after
        case _:
            return before + after[:length] + piece + after[length:]


@contextlib.contextmanager
def _damaged(file: Path, data: st.DataObject) -> Iterator[bool]:
    """Damage a file for a while; yield whether a byte of it changed."""
    whole = file.read_bytes()
    mutated = _mutated(data, whole)
    file.write_bytes(mutated)
    try:
        yield mutated != whole
    finally:
        file.write_bytes(whole)


def _check(code: int, printed: str, *, is_changed: bool) -> None:
    assert code in CODES
    assert "Traceback" not in printed, printed
    assert bool(code) or not is_changed, "damage is never green"


def _bounded(num_examples: int) -> settings:
    # Module-scoped files are restored after each example; a loaded machine may take long for one.
    return settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@pytest.mark.parametrize("name", OF_THE_RUN)
@_bounded(40)
@given(data=st.data())
def test_commands_survive_a_damaged_run(name: str, kept: SavedResult, data: st.DataObject) -> None:
    merged = kept.run.with_name("merged")
    with _damaged(kept.file(name, is_of_world=False), data) as is_changed:
        run = str(kept.run)
        for command in (["report"], ["timeline"], ["diff", str(kept.copy)], ["merge", "--out", str(merged)]):
            _check(*call(*command, run), is_changed=is_changed)
        shutil.rmtree(merged, ignore_errors=True)
        _check(*call("expectations", run), is_changed=False)


@pytest.mark.parametrize("name", OF_A_TIMELINE)
@_bounded(60)
@given(data=st.data())
def test_report_and_timeline_survive_damaged_journals(
    name: str, kept: SavedResult, data: st.DataObject
) -> None:
    with _damaged(kept.file(name, is_of_world=True), data) as is_changed:
        for command in ("report", "timeline"):
            _check(*call(command, str(kept.run)), is_changed=is_changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OF_THE_RUN, *(f"world/{name}" for name in OF_A_WORLD)])
@_bounded(4)
@given(data=st.data())
def test_judge_survives_damage(name: str, kept: SavedResult, data: st.DataObject) -> None:
    file = kept.file(name.removeprefix("world/"), is_of_world=name.startswith("world/"))
    with _damaged(file, data) as is_changed:
        _check(*call("judge", str(kept.run)), is_changed=is_changed)


def test_a_red_record_that_is_damaged_away_leaves_no_green_run(kept: SavedResult, tmp_path: Path) -> None:
    shutil.copytree(kept.run, tmp_path / "run")
    records = tmp_path / "run" / "records.jsonl"
    (line,) = records.read_text().splitlines()
    red = line.replace("PASSED", "FA LED")
    records.write_text(f"{red}\n{line}\n")
    code, printed = call("report", str(tmp_path / "run"))
    assert code == 1
    assert "records.jsonl:1: damaged, skipped: " in " ".join(printed.split())
    assert conclude(read_run(tmp_path / "run")) is Conclusion.INCOMPLETE


def test_half_a_line_in_a_journal_costs_one_record(tmp_path: Path) -> None:
    (tmp_path / "garbles.py").write_text(GARBLES)
    engines = ["--engine", f"{tmp_path / 'garbles.py'}:Garbles", "--engine", "torch.ddp"]
    code, printed = call(
        "run", *engines, "--suite", "smoke", "-k", "trains", "--keep=all", "--out", str(tmp_path / "run")
    )
    assert code == 1, printed
    run = read_run(tmp_path / "run")
    garbled, honest = run.records
    assert (garbled.verdict, honest.verdict) == (Verdict.FAILED, Verdict.PASSED)
    assert "rank1.ledger.jsonl (1 damaged line(s), the first in line" in garbled.headline
    assert call("report", str(tmp_path / "run"))[0] == 1
    assert call("judge", str(tmp_path / "run"))[0] == 1
    again = read_run(tmp_path / "run" / JUDGED)
    assert [r.headline for r in again.records] == [garbled.headline, honest.headline]


@contextlib.contextmanager
def _replaced(file: Path, make: Callable[[Path], object]) -> Iterator[None]:
    """Put something strange in place of a file for a while."""
    kept = file.rename(file.with_suffix(".kept"))
    make(file)
    try:
        yield
    finally:
        for path in (file, file.with_suffix(".pipe")):
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        kept.rename(file)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", OF_THE_RUN)
def test_commands_refuse_what_is_no_file_of_a_run(name: str, kind: str, kept: SavedResult) -> None:
    with _replaced(kept.file(name, is_of_world=False), STRANGE[kind]):
        run, merged = str(kept.run), str(kept.run.with_name("merged"))
        for command in (
            ["report"],
            ["timeline"],
            ["diff", str(kept.copy)],
            ["merge", "--out", merged],
            ["judge"],
        ):
            _check(*call(*command, run), is_changed=True)
        shutil.rmtree(merged, ignore_errors=True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", OF_A_WORLD)
def test_commands_refuse_what_is_no_file_of_a_world(name: str, kind: str, kept: SavedResult) -> None:
    with _replaced(kept.file(name, is_of_world=True), STRANGE[kind]):
        for command in ("timeline", "judge"):
            _check(
                *call(command, str(kept.run)),
                is_changed=command == "judge" and name not in OF_A_TIMELINE[-1:],
            )


@pytest.mark.timeout(110)
@pytest.mark.parametrize("name", OF_THE_RUN)
def test_an_engine_that_replaces_files_of_the_run_makes_it_no_green(name: str, tmp_path: Path) -> None:
    (tmp_path / "replaces.py").write_text(REPLACES.format(folder=str(tmp_path / "run"), name=name))
    spec = f"{tmp_path / 'replaces.py'}:Replaces"
    code, printed = call("run", f"--engine={spec}", "--suite=smoke", "-k=trains", f"--out={tmp_path / 'run'}")
    assert code in {1, 2, 3}, printed
    assert "Traceback" not in printed, printed
