"""Selections of a run: shards that add up to it, the rest of an interrupted run, and the last run's failures."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.harness.cli.exit_codes import CONFORMS, NOTHING_JUDGED
from shardproof.harness.cli.main import main
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import RecordKey, Verdict
from shardproof.harness.records.run import RECORDS, RUN, Run, read_run
from shardproof.harness.runner.selection import RunShard, cut

KEYS = st.lists(st.text(max_size=6), unique=True, max_size=40)
DURATIONS = st.dictionaries(st.text(max_size=6), st.floats(0, 1e3), max_size=40)
OF = st.integers(1, 12)


@given(KEYS, OF, DURATIONS)
def test_shards_are_disjoint_and_complete(keys: Sequence[str], of: int, took: Mapping[str, float]) -> None:
    parts = [cut(keys, RunShard(number=n, of=of), took) for n in range(1, of + 1)]
    assert sorted(key for part in parts for key in part) == sorted(keys)


@given(KEYS, OF, DURATIONS, st.randoms())
def test_a_shard_does_not_depend_on_the_order_of_cases(
    keys: Sequence[str], of: int, took: Mapping[str, float], random: object
) -> None:
    shuffled = list(keys)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis does not export the type
    shard = RunShard(number=of, of=of)
    assert cut(keys, shard, took) == cut(shuffled, shard, dict(sorted(took.items())))


@given(KEYS, OF)
def test_shards_without_durations_differ_by_one_case_at_most(keys: Sequence[str], of: int) -> None:
    sizes = [len(cut(keys, RunShard(number=n, of=of), {})) for n in range(1, of + 1)]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=40), OF)
def test_no_shard_takes_longer_than_an_even_share_and_one_case(took: list[float], of: int) -> None:
    known = {str(place): seconds for place, seconds in enumerate(took)}
    loads = [
        sum(known[key] for key in cut(list(known), RunShard(number=n, of=of), known))
        for n in range(1, of + 1)
    ]
    assert max(loads) <= sum(took) / of + max(took) + 1e-6


@pytest.mark.parametrize("text", ["", "2", "0/8", "9/8", "1/0", "-1/8", "a/b", "1/8/2", "1.5/8"])
def test_a_shard_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="from 1/1 on"):
        RunShard.parse(text)


# The tests below run cases. DDP refuses most of the suite clipping, which is quick.

ASKED = ("--engine", "torch.ddp", "--suite", "clipping", "--suite", "smoke", "--no-expectations")


def _run(*more: str, out: Path) -> int:
    return main(["run", *ASKED, *more, "--out", str(out)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert _run(out=out) == 0
    return out


def _verdicts(run: Run) -> dict[RecordKey, Verdict]:
    return {r.key: r.verdict for r in run.records}


@pytest.mark.slow
def test_shards_add_up_to_the_whole_run(whole: Path, tmp_path: Path) -> None:
    shards = [tmp_path / f"shard{n}" for n in (1, 2)]
    for number, out in enumerate(shards, start=1):
        assert _run("--shard", f"{number}/2", "--durations", str(whole), out=out) == 0
    assert main(["merge", *map(str, shards), "--out", str(tmp_path / "merged")]) == 0
    assert _verdicts(read_run(tmp_path / "merged")) == _verdicts(read_run(whole))
    ends = [read_run(shard).footer for shard in shards]
    assert [end.num_selected for end in ends if end is not None] == [len(read_run(whole).records)] * 2


@pytest.mark.slow
def test_a_shard_without_a_case_conforms_and_a_selection_without_one_does_not(tmp_path: Path) -> None:
    one = ("-k", "trains_the_same_model")
    codes = [_run(*one, "--shard", f"{n}/2", out=tmp_path / str(n)) for n in (1, 2)]
    assert sorted(codes) == [CONFORMS, NOTHING_JUDGED]
    assert sorted(len(read_run(tmp_path / str(n)).records) for n in (1, 2)) == [0, 1]
    assert main(["merge", str(tmp_path / "1"), str(tmp_path / "2"), "--out", str(tmp_path / "all")]) == 0
    assert _run("-k", "no_such_case", "--shard", "1/2", out=tmp_path / "none") == NOTHING_JUDGED


@pytest.mark.slow
def test_workers_agree_on_an_empty_shard(tmp_path: Path) -> None:
    one = ("-k", "trains_the_same_model", "-n", "1")
    codes = [_run(*one, "--shard", f"{n}/2", out=tmp_path / str(n)) for n in (1, 2)]
    assert sorted(codes) == [CONFORMS, NOTHING_JUDGED]


def _interrupted(whole: Path, out: Path, *, num_kept: int) -> Run:
    """Copy a run as a kill leaves it: some records, half of another, and no footer."""
    shutil.copytree(whole, out)
    lines = (out / RECORDS).read_text().splitlines(keepends=True)
    (out / RECORDS).write_text("".join(lines[:num_kept]) + lines[num_kept][:50])
    (out / RUN).write_text((out / RUN).read_text().splitlines(keepends=True)[0])
    (out / "SHA256SUMS").unlink()
    return read_run(out)


@pytest.mark.slow
def test_resuming_runs_only_cases_without_a_record(whole: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    kept = _interrupted(whole, stopped, num_kept=9).records
    assert _run("--resume", str(stopped), out=tmp_path / "rest") == 0
    run = read_run(tmp_path / "rest")
    assert run.problems == ()
    assert _verdicts(run) == _verdicts(read_run(whole))
    assert [r.duration_s for r in run.records[:9]] == [r.duration_s for r in kept]
    assert read_run(stopped).records == kept, "the interrupted run stays as it was"


@pytest.mark.slow
@pytest.mark.parametrize(
    "other", [("--schedule-seed", "3"), ("--world", "threads:3"), ("-k", "norm_2"), ("--deadline", "50")]
)
def test_resuming_with_other_options_is_refused(whole: Path, tmp_path: Path, other: tuple[str, ...]) -> None:
    _interrupted(whole, tmp_path / "stopped", num_kept=3)
    assert _run("--resume", str(tmp_path / "stopped"), *other, out=tmp_path / "rest") == 2
    assert not (tmp_path / "rest").exists()


def test_resuming_a_run_of_other_code_is_refused(whole: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    _interrupted(whole, stopped, num_kept=3)
    text = (stopped / RUN).read_text()
    (stopped / RUN).write_text(text.replace(read_run(whole).header.git_head, "b" * 40))
    assert _run("--resume", str(stopped), out=tmp_path / "rest") == 2


def test_resuming_a_run_that_ended_is_refused(whole: Path, tmp_path: Path) -> None:
    assert _run("--resume", str(whole), out=tmp_path / "rest") == 2


SUMS = """
from shardproof.engine.mutants.gradient_scale import SumsInsteadOfAveraging as Sums
"""


@pytest.mark.slow
def test_only_cases_that_did_not_conform_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    engines = ["--engine", "torch.ddp", "--engine", "sums.py:Sums"]
    (tmp_path / "sums.py").write_text(SUMS)
    code = main(["run", *engines, "--suite", "smoke", "--no-expectations", "--out", "conformance/1"])
    assert code == 1
    red = [r for r in read_run(Path("conformance/1")).records if not r.verdict.is_conforming]
    assert red

    assert main(["run", "--last-failed", "--no-expectations", "--out", "conformance/2"]) == 1

    again = read_run(Path("conformance/2")).records
    assert [r.key for r in again] == [r.key for r in red]
    assert main(["run", "--last-failed", str(whole), "--out", "conformance/3"]) == 2
