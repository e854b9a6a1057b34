"""Selections of a run: shards that add up to it, the rest of one, the last run's failures, and what fits in a time."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.harness.audit.shipped_mutants import shipped
from shardproof.harness.cases.case_id import SUITES
from shardproof.harness.cli.exit_codes import CONFORMS, NOTHING_JUDGED, USAGE
from shardproof.harness.cli.main import main
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import RecordKey, Verdict
from shardproof.harness.records.run import RECORDS, RUN, Run, read_run
from shardproof.harness.runner.kill_power import most_telling_first, read_kill_power, seconds_of
from shardproof.harness.runner.selection import RunShard, cut
from shardproof.suites.combinations.rows import FAMILIES, rows_in

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


@pytest.mark.slow
def test_a_time_that_suffices_changes_no_verdict(whole: Path, tmp_path: Path) -> None:
    assert _run("--within", "1h", out=tmp_path / "all") == CONFORMS
    run = read_run(tmp_path / "all")
    assert run.problems == ()
    assert _verdicts(run) == _verdicts(read_run(whole))
    assert run.footer is not None
    (had,) = run.footer.powers
    assert had.num_ran == had.num_cases == len(run.records)
    assert had.num_killed == had.num_killable > 0
    shown = run.records[0]
    assert shown.verdict is Verdict.PASSED, "what an engine declares comes before what it may refuse"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_a_time_that_is_over_leaves_a_whole_run_to_resume(
    whole: Path, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    short = tmp_path / "short"
    assert _run("--within", "0.001s", *workers, out=short) == NOTHING_JUDGED
    begun = read_run(short)
    assert begun.problems == () == begun.records
    assert begun.footer is not None
    assert begun.footer.num_beyond == begun.header.num_cases > 0
    assert begun.footer.powers[0].num_killed == 0
    assert _run("--resume", str(short), out=tmp_path / "rest") == CONFORMS
    assert _verdicts(read_run(tmp_path / "rest")) == _verdicts(read_run(whole))


@pytest.mark.parametrize("text", ["", "0", "0s", "-1s", "soon", "1d", "1m30s"])
def test_a_time_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="a time"):
        seconds_of(text)


CASES = st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 255), st.floats(0.01, 10)), max_size=20)


@given(CASES)
def test_each_case_of_the_order_kills_most_per_second_of_what_is_left(
    cases: Mapping[str, tuple[int, float]],
) -> None:
    kills, seconds = ({name: pair[part] for name, pair in cases.items()} for part in (0, 1))
    order = most_telling_first(kills, seconds)  # type: ignore[arg-type]  # of one type each
    assert sorted(order) == sorted(cases)
    dead = 0

    def rate(name: str) -> float:
        return (cases[name][0] & ~dead).bit_count() / cases[name][1]

    for number, name in enumerate(order):
        assert rate(name) == max(map(rate, order[number:]))
        dead |= cases[name][0]


def test_the_table_is_current() -> None:
    table, names = read_kill_power(), {target.name for target in shipped()}
    again = "python -m campaigns.kill_power"
    assert set(table.mutants) == names, f"try {again}"
    gone = [case for case in table.cases if not (SUITES / case.partition("::")[0]).is_file()]
    assert not gone, f"try {again}"
    proven = 0
    for case in table.cases.values():
        for mutants in case.kills.values():
            proven |= mutants
    # The others die on devices and in simulated worlds.
    assert proven.bit_count() > 0.98 * len(names), f"some case kills each mutant; try {again}"
    rows = {f"[{row.id}]" for family in FAMILIES for row in rows_in(family)}
    of_arrays = {
        f"[{case.partition('[')[2]}" for case in table.cases if "test_programs.py::test_units" in case
    }
    assert of_arrays <= rows, f"try {again}"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_a_keyword_that_cannot_be_parsed_leaves_no_run(
    tmp_path: Path, workers: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert _run("-k", "trains and", *workers, out=tmp_path / "run") == USAGE
    assert "Wrong expression" in "".join(capfd.readouterr())
    assert not (tmp_path / "run").exists()
