"""`merge` joins runs of one matrix; runs of other matrices or with missing parts are never green."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardproof.harness.cli.main import main
from shardproof.harness.records.record import Expectations, Footer, Header, Record, UnusedExpectation, Verdict
from shardproof.harness.records.run import RECORDS, RUN, read_run
from tests import sample_records
from tests.sample_records import write_run

HEADER = replace(
    sample_records.HEADER,
    engines=("torch.ddp",),
    worlds=("threads:2",),
    versions={"python": "3.11.7", "torch": "2.13.0+cpu", "shardproof": "0.1.0"},
    hardware={"cpu": "x"},
    git_head="a" * 40,
)
ENTRY = replace(sample_records.ENTRY, engine="torch.ddp", version="", case="smoke/*", shows=("matches*",))
KNOWN = Expectations(source="known.toml", today="2030-01-01", entries=(ENTRY,))


def a_record(case: str, verdict: Verdict = Verdict.PASSED, **changes: str) -> Record:
    plain = sample_records.a_record(
        verdict, engine="torch.ddp", case=case, suite="smoke", headline="h", laws=()
    )
    return replace(plain, **{"engine_version": "torch 2.13.0", **changes})  # type: ignore[arg-type]  # texts alone


def a_footer(*records: Record, unused: tuple[UnusedExpectation, ...] = (), is_whole: bool = False) -> Footer:
    counts: dict[str, int] = {}
    for record in records:
        counts[str(record.verdict)] = counts.get(str(record.verdict), 0) + 1
    return Footer(
        ended_at="2030-01-01T00:01:00+00:00", duration_s=60.0, counts=counts, unused=unused, is_whole=is_whole
    )


class Farm:
    """Writes runs side by side."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(
        self,
        name: str,
        *records: Record,
        header: Header = HEADER,
        footer: Footer | None = None,
        is_ended: bool = True,
    ) -> str:
        ended = footer or a_footer(*records) if is_ended else None
        return write_run(self.root / name, *records, header=header, footer=ended)

    def merge(self, *runs: str) -> int:
        return main(["merge", *runs, "--out", str(self.root / "merged")])


@pytest.fixture
def farm(tmp_path: Path) -> Farm:
    return Farm(tmp_path)


def test_runs_of_a_matrix_become_one_run_with_reports(farm: Farm) -> None:
    four = a_record("smoke/a", world="threads:4")
    one = farm.run("one", a_record("smoke/a"), a_record("smoke/b", Verdict.UNSUPPORTED))
    two = farm.run("two", four, header=replace(HEADER, worlds=("threads:4",), hardware={"cpu": "y"}))

    assert farm.merge(one, two) == 0

    run = read_run(farm.root / "merged")
    assert [(r.case, r.world) for r in run.records] == [
        ("smoke/a", "threads:2"),
        ("smoke/b", "threads:2"),
        ("smoke/a", "threads:4"),
    ]
    assert run.problems == ()
    assert run.header.worlds == ("threads:2", "threads:4")
    assert run.header.hardware == {"cpu": "x; y"}
    assert run.header.num_cases == 3
    assert run.footer is not None
    assert run.footer.counts == {"PASSED": 2, "UNSUPPORTED": 1}
    assert run.footer.duration_s == 120.0
    assert (farm.root / "merged" / "report.html").is_file()


def test_a_failure_in_one_run_fails_the_merged_one(farm: Farm) -> None:
    one, two = farm.run("one", a_record("smoke/a")), farm.run("two", a_record("smoke/b", Verdict.FAILED))
    assert farm.merge(one, two) == 1
    assert farm.merge(one, str(farm.root / "nothing")) == 2


@pytest.mark.parametrize("command", ["report", "merge"])
def test_commands_that_read_runs_print_a_document(
    farm: Farm, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = farm.run("one", a_record("smoke/a"))
    out = ["--out", str(farm.root / "merged")] if command == "merge" else []
    main([command, run, "--json", *out])
    assert json.loads(capsys.readouterr().out)["counts"] == {"PASSED": 1}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(HEADER, schema=6), "schema"),
        (replace(HEADER, versions={**HEADER.versions, "torch": "2.14.0"}), "torch 2.13.0+cpu"),
        (replace(HEADER, versions={**HEADER.versions, "shardproof": "0.2.0"}), "shardproof 0.1.0"),
        (replace(HEADER, git_head="b" * 40), "bbbbbbbbbbbb"),
        (replace(HEADER, git_dirty=True, git_changes="123"), "with changed files"),
        (replace(HEADER, seed=7), "schedule seed"),
        (replace(HEADER, num_schedules=20), "schedules"),
        (replace(HEADER, is_thorough=True), "thorough"),
        (replace(HEADER, hash_seeds=(5,)), "hash seeds"),
        (replace(HEADER, expectations=KNOWN), "known failures"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_runs_made_differently_are_refused_in_one_sentence(
    farm: Farm, other: Header, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = farm.run("one", a_record("smoke/a")), farm.run("two", a_record("smoke/b"), header=other)
    assert farm.merge(one, two) == 2
    printed = capsys.readouterr().err
    assert words in printed
    assert printed.count("\n") == 1
    assert not (farm.root / "merged").exists()


def test_changed_files_that_no_run_names_are_refused(farm: Farm) -> None:
    """Two runs of one commit with changed files may come from two states of the code."""
    dirty = replace(HEADER, git_dirty=True)
    runs = [farm.run(name, a_record(f"smoke/{name}"), header=dirty) for name in ("one", "two")]
    assert farm.merge(*runs) == 2


def test_the_same_changed_files_belong_together(farm: Farm) -> None:
    dirty = replace(HEADER, git_dirty=True, git_changes="abc")
    runs = [farm.run(name, a_record(f"smoke/{name}"), header=dirty) for name in ("one", "two")]
    assert farm.merge(*runs) == 0


def test_entries_of_one_file_belong_together_wherever_the_file_lay(farm: Farm) -> None:
    there = replace(KNOWN, source="/else/where.toml", entries=(replace(ENTRY, number=1),))
    headers = [replace(HEADER, expectations=known) for known in (KNOWN, there)]
    records = [a_record(f"smoke/{n}", Verdict.KNOWN_FAILURE) for n in range(2)]
    runs = [farm.run(f"r{n}", records[n], header=headers[n]) for n in range(2)]
    assert farm.merge(*runs) == 0


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.NOT_RUN, Verdict.KNOWN_FAILURE])
def test_one_cell_with_two_verdicts_is_refused(
    farm: Farm, verdict: Verdict, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = farm.run("one", a_record("smoke/a")), farm.run("two", a_record("smoke/a", verdict))
    assert farm.merge(one, two) == 2
    printed = capsys.readouterr().err
    assert "smoke/a" in printed
    assert str(verdict) in printed
    assert "PASSED" in printed


def test_one_cell_with_one_verdict_is_one_record(farm: Farm) -> None:
    assert farm.merge(farm.run("one", a_record("smoke/a")), farm.run("two", a_record("smoke/a"))) == 0
    assert len(read_run(farm.root / "merged").records) == 1


def test_two_releases_of_one_engine_are_refused(farm: Farm) -> None:
    later = a_record("smoke/b", engine_version="torch 2.13.1")
    assert farm.merge(farm.run("one", a_record("smoke/a")), farm.run("two", later)) == 2


def test_one_folder_twice_is_refused(farm: Farm) -> None:
    one = farm.run("one", a_record("smoke/a"))
    assert farm.merge(one, f"{one}/../one") == 2


def test_an_interrupted_run_makes_the_merged_one_incomplete(
    farm: Farm, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = farm.run("one", a_record("smoke/a")), farm.run("two", a_record("smoke/b"), is_ended=False)
    assert farm.merge(one, two) == 1
    assert "two: the run was interrupted" in capsys.readouterr().out
    assert main(["report", str(farm.root / "merged")]) == 1


def test_a_damaged_run_makes_the_merged_one_incomplete(
    farm: Farm, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = farm.run("one", a_record("smoke/a")), farm.run("two", a_record("smoke/b"), a_record("smoke/c"))
    lines = Path(two, RECORDS).read_text().splitlines(keepends=True)
    Path(two, RECORDS).write_text(f"{lines[0]}{lines[1][:40]}\n")
    assert farm.merge(one, two) == 1
    assert "two: records.jsonl:2: damaged" in capsys.readouterr().out


def test_a_run_without_a_header_is_refused(farm: Farm) -> None:
    one, two = farm.run("one", a_record("smoke/a")), farm.run("two", a_record("smoke/b"))
    Path(two, RUN).write_text("{}\n")
    assert farm.merge(one, two) == 2


def _shard(number: int, of: int, *more: tuple[str, str]) -> Header:
    return replace(HEADER, options={"cases": "smoke", "shard": f"{number}/{of}", **dict(more)})


def test_a_missing_shard_makes_the_merged_run_incomplete(
    farm: Farm, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [farm.run(f"s{n}", a_record(f"smoke/{n}"), header=_shard(n, 4)) for n in (1, 3)]
    assert farm.merge(*runs) == 1
    assert "shards 2, 4 of 4 are missing" in capsys.readouterr().out


def test_all_shards_make_one_whole_run_with_an_empty_shard(farm: Farm) -> None:
    runs = [farm.run(f"s{n}", a_record(f"smoke/{n}"), header=_shard(n, 3)) for n in (1, 2)]
    assert farm.merge(*runs, farm.run("s3", header=_shard(3, 3))) == 0


def test_shards_of_other_cases_do_not_add_up(farm: Farm, capsys: pytest.CaptureFixture[str]) -> None:
    """The machine of the second shard collected one case less, so that a case may be in no shard."""
    records = [a_record("smoke/1"), a_record("smoke/2")]
    runs = [
        farm.run(
            f"s{n}",
            record,
            header=_shard(n, 2),
            footer=replace(a_footer(record), num_selected=4 - n),
        )
        for n, record in enumerate(records, start=1)
    ]
    assert farm.merge(*runs) == 1
    assert "the 2 shards hold 2 cases, and were cut from 2, 3" in capsys.readouterr().out


def test_shards_that_were_cut_by_other_durations_are_not_one_run(farm: Farm) -> None:
    cuts = [("durations", "aaa"), ("durations", "bbb")]
    runs = [farm.run(f"s{n}", a_record(f"smoke/{n}"), header=_shard(n + 1, 2, cuts[n])) for n in range(2)]
    assert farm.merge(*runs) == 1


def _unused(why: str, *, is_stale: bool) -> UnusedExpectation:
    return UnusedExpectation(expectation=ENTRY, why=why, is_stale=is_stale)


def test_an_entry_that_one_run_used_is_not_stale(farm: Farm) -> None:
    known = replace(HEADER, expectations=KNOWN)
    refused, failed = (
        a_record("smoke/a", Verdict.UNSUPPORTED),
        a_record("smoke/a", Verdict.KNOWN_FAILURE, world="threads:4"),
    )
    stale = a_footer(refused, unused=(_unused("refused", is_stale=True),), is_whole=True)
    one, two = farm.run("one", refused, header=known, footer=stale), farm.run("two", failed, header=known)
    assert main(["report", one]) == 1
    assert farm.merge(one, two) == 0


def test_an_entry_that_no_run_used_is_stale_if_one_run_reports_it(farm: Farm) -> None:
    known = replace(HEADER, expectations=KNOWN)
    records = [a_record("parity/a"), a_record("parity/b")]
    footers = [
        a_footer(records[n], unused=(_unused("no such case", is_stale=n == 1),), is_whole=n == 1)
        for n in range(2)
    ]
    runs = [farm.run(f"r{n}", records[n], header=known, footer=footers[n]) for n in range(2)]
    assert farm.merge(*runs) == 1


def test_an_entry_with_only_refused_cases_in_all_shards_is_stale(farm: Farm) -> None:
    records = [a_record("smoke/a", Verdict.UNSUPPORTED), a_record("parity/b")]
    runs = [
        farm.run(
            f"s{n}",
            records[n],
            header=replace(_shard(n + 1, 2), expectations=KNOWN),
            footer=a_footer(records[n], unused=(_unused("idle here", is_stale=False),), is_whole=True),
        )
        for n in range(2)
    ]
    assert farm.merge(*runs) == 1


def _observed(farm: Farm, run: str, record: Record) -> Path:
    folder = farm.root / run / record.observation
    folder.mkdir(parents=True)
    (folder / "rank0.ledger.jsonl").write_text("{}\n")
    return folder


def test_observations_of_failures_are_copied_and_others_stay_where_they_are(farm: Farm) -> None:
    place = "observations/main/torch.ddp/threads-2/mlp"
    failed = a_record("smoke/a", Verdict.FAILED, observation=place)
    passed = a_record("smoke/b", observation=f"{place}-b")
    runs = [farm.run("one", failed), farm.run("two", passed), farm.run("three", a_record("smoke/c"))]
    _observed(farm, "one", failed)
    _observed(farm, "two", passed)

    assert farm.merge(*runs) == 1

    merged = farm.root / "merged"
    found = {r.case: r.observation for r in read_run(merged).records}
    assert found["smoke/a"].startswith("observations/")
    assert found["smoke/b"] == f"../two/{place}-b"
    assert found["smoke/c"] == ""
    assert all((merged / found[case] / "rank0.ledger.jsonl").is_file() for case in ("smoke/a", "smoke/b"))


def test_a_path_that_leaves_its_run_is_not_followed(farm: Farm) -> None:
    """A record may come from anywhere."""
    (farm.root / "secret").mkdir()
    (farm.root / "secret" / "key").write_text("x")
    run = farm.run("one", a_record("smoke/a", Verdict.FAILED, observation="observations/../../secret"))
    assert farm.merge(run) == 1
    merged = farm.root / "merged"
    assert read_run(merged).records[0].observation == ""
    assert not list(merged.rglob("key"))
