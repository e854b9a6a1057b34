"""Explore draws programs, by the code that an engine runs too; failures shrink and are written as cases."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from shardproof import Cell, Dimension, Program, ProgramRule, Space, WorldSpec
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.fixtures.programs.laws import laws_of
from shardproof.fixtures.programs.space import SPACE
from shardproof.fixtures.programs.training import training_of
from shardproof.harness.cli.findings import read_programs, write_finding
from shardproof.harness.cli.main import main
from shardproof.harness.records.record import LawRecord, Record, Verdict
from shardproof.harness.runner.exploration import Exploration, Hunt, ShrunkFailure, Symptom, symptom_of
from shardproof.harness.tracing.arcs import Arc, can_count, counting_arcs, read_arcs
from shardproof.harness.tracing.collectives.call_site import short_path
from tests.sample_records import a_record

SMALL = Space(dimensions=tuple(Dimension(name=name, values=("0", "1", "2")) for name in "abcdefgh"))
Fails = Callable[[dict[str, str]], str]


class _Judged(Exploration):
    fails: Fails
    judged: int

    def judge(self, program: Program) -> Record:
        object.__setattr__(self, "judged", getattr(self, "judged", 0) + 1)
        why = self.fails(dict(program.choices))
        return Record(
            engine="none",
            case=str(program),
            world="threads:2",
            verdict=Verdict.CRASHED if why else Verdict.PASSED,
            headline=why,
            suite="explore",
            engine_version="",
        )


def _hunt(fails: Fails) -> Hunt:
    cell = Cell(engine="none", world=WorldSpec.parse("threads:2"))
    exploration = _Judged(space=SMALL, training=training_of, laws=laws_of, cell=cell)
    object.__setattr__(exploration, "fails", fails)
    return Hunt(exploration=exploration)


def test_a_failure_shrinks_to_the_smallest_program_with_the_same_failure() -> None:
    def fails(p: dict[str, str]) -> str:
        if p.get("b") == "1":
            return "rank 3 raised ValueError" if p.get("f") == "2" else "rank 0 raised KeyError"
        return ""

    finding = _hunt(fails).check(SMALL.program(dict.fromkeys("abcdeh", "1") | {"f": "2"}))
    assert finding is not None
    assert str(finding.program) == "b=1,f=2"


def test_finds_pairs_once_and_then_sees_all_others() -> None:
    def fails(p: dict[str, str]) -> str:
        return f"rank {len(p)} raised" if p.get("a") in {"1", "2"} and p.get("c") == "1" else ""

    hunt = _hunt(fails)
    found = list(hunt.run(until=time.monotonic() + 60, num_programs=300))
    assert len(found) == 1, "the other value of a is the same failure"
    assert {str(f.program) for f in hunt.findings} == {"a=1,c=1", "a=2,c=1"}
    assert hunt.combinations_seen == {
        c for c in SMALL.combinations if not {("c", "1")} < c or dict(c).get("a", "0") == "0"
    }


def test_a_vacuous_program_is_no_finding_and_shows_no_combination() -> None:
    hunt = _hunt(lambda _: "")
    judge = hunt.exploration.judge
    object.__setattr__(
        hunt.exploration, "judge", lambda p: replace(judge(p), verdict=Verdict.VACUOUS, headline="still")
    )
    assert hunt.check(SMALL.program({"a": "1"})) is None
    assert (hunt.findings, hunt.combinations_seen, hunt.verdicts) == ([], set(), {"VACUOUS": 1})


def test_found_programs_are_read_with_comments(tmp_path: Path) -> None:
    (tmp_path / "found.txt").write_text("# first\nreuse=twice,clip=2  # 1\n\nreuse=twice,clip=2\nplain\n")
    found = read_programs(tmp_path / "found.txt", tmp_path / "none.txt")
    assert [str(program) for program in found] == ["reuse=twice,clip=2", "plain"]


@pytest.mark.slow
def test_explore_writes_failing_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    mutant = "shardproof.engine.mutants.gradient_scale:SumsInsteadOfAveraging"
    arguments = ["--engine", mutant, "--programs", "1", "--out", str(tmp_path / "out")]
    assert main(["explore", *arguments]) == 1
    assert read_programs(tmp_path / "out" / "found.txt") == [Program()]
    report = (tmp_path / "out" / "finding-1.md").read_text()
    assert "FAILED: matches the oracle" in report
    assert 'SPACE.parse("plain")' in report
    assert "the plain program fails" in capsys.readouterr().out


def test_a_program_that_fails_as_a_known_one_is_not_new(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def judge(_: Exploration, program: Program) -> Record:
        return a_record(Verdict.CRASHED if "clip" in dict(program.choices) else Verdict.PASSED)

    monkeypatch.setattr(Exploration, "judge", judge)
    known = tmp_path / "known.txt"
    known.write_text("clip=inf\n")
    monkeypatch.setattr("shardproof.harness.cli.findings.KNOWN", (known,))
    assert main(["explore", "--engine=torch.fsdp2", "--programs=20", f"--out={tmp_path / 'out'}"]) == 1
    printed = capsys.readouterr().out
    assert "CRASHED" in printed.splitlines()[-1]
    assert "; 0 new failures" in printed
    assert not (tmp_path / "out" / "found.txt").exists()


@pytest.mark.parametrize(
    "summary",
    [
        "rank {} step 1: expected 4 reductions, got {}: reduce_scatter({}, float32[2, 72]) as #25 of group [0, 1]",
        "rank 0: expected at most {} bytes, got 5048 bytes; the largest: {} bytes of shape [{}] from empty",
        "step 0, gradient '{}': rank {}: expected a tensor, got None{}",
    ],
)
def test_numbers_and_lists_of_a_law_are_no_part_of_a_symptom(summary: str) -> None:
    def symptom(*texts: str) -> Symptom | None:
        laws = (LawRecord(law="a law", held=False, summary=summary.format(*texts)),)
        return symptom_of(a_record(laws=laws))

    assert symptom("0", "5", "") == symptom("1", "6", " (and 1 more ranks)")


@pytest.mark.parametrize(
    ("law", "is_shown"),
    [("", True), ("matches the oracle", True), ("memory between steps is explained", False)],
)
def test_a_script_is_written_for_a_failure_that_it_can_show(law: str, is_shown: bool, tmp_path: Path) -> None:
    program, symptom = Program(), Symptom(verdict="FAILED", law=law, kind="too much")
    finding = ShrunkFailure(program=program, symptom=symptom, record=a_record(), drawn=program)
    write_finding(finding, "torch.fsdp2", "threads:2", tmp_path)
    assert (tmp_path / "finding-1.py").exists() is is_shown
    assert ("torchrun" in (tmp_path / "finding-1.md").read_text()) is is_shown


@pytest.mark.parametrize(
    ("engine", "effort"),
    [
        ("late:TrustsTheOrderOfArrival", ["--schedules=4"]),
        ("races:FreesTheCopiedBuffer", ["--thorough"]),
    ],
)
def test_explore_draws_schedules_and_watches_on_demand(
    engine: str, effort: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shardproof.harness.cli.findings.KNOWN", ())
    explore = ["explore", f"--engine=shardproof.engine.mutants.{engine}", "--world=threads:3", "--minutes=0"]
    assert main([*explore, f"--out={tmp_path / 'plain'}"]) == 0
    assert main([*explore, *effort, f"--out={tmp_path / 'with_effort'}"]) == 1


# Arcs record which code of an engine runs.


_CELL = Cell(engine="reference", world=WorldSpec.parse("threads:2"))


class _Adapter(DistributedDataParallelEngine):
    """An adapter that its user wrote."""


def _chosen(is_left: bool) -> str:
    if is_left:
        return "left"
    return "right"


def _arcs_of(file: Path, *choices: bool) -> set[Arc]:
    with counting_arcs(_Adapter(), file):
        for is_left in choices:
            _chosen(is_left)
    return read_arcs(file)


def test_another_branch_runs_other_arcs(tmp_path: Path) -> None:
    left = _arcs_of(tmp_path / "left", True)
    both = _arcs_of(tmp_path / "both", True, False)
    assert left < both
    assert {file for file, *_ in both} == {short_path(__file__)}


def test_code_after_the_exit_is_not_counted(tmp_path: Path) -> None:
    before = _arcs_of(tmp_path / "before", True)
    _chosen(False)
    assert read_arcs(tmp_path / "before") == before
    assert before < _arcs_of(tmp_path / "both", True, False)


def test_a_rank_that_is_killed_while_it_writes_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    def write_half(path: Path, text: str) -> None:
        path.write_bytes(text[: len(text) // 2].encode())
        raise KilledError

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(KilledError):
        _arcs_of(tmp_path / "arcs", True)
    assert not (tmp_path / "arcs").exists()


def test_where_a_debugger_traces_nothing_is_counted() -> None:
    def debugger(*_: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        assert not can_count()
    finally:
        sys.settrace(before)


def test_a_program_adds_the_code_of_the_engine_that_it_runs() -> None:
    exploration = Exploration(space=SPACE, training=training_of, laws=laws_of, cell=_CELL)
    assert exploration.judge(Program()).verdict is Verdict.PASSED
    plain = set(exploration.arcs)
    assert {file.rpartition("/")[0] for file, *_ in plain} >= {"engine/reference"}
    assert not any(file.startswith(("harness/", "fixtures/")) for file, *_ in plain)
    exploration.judge(Program())
    assert exploration.arcs == plain, "the same program ran other code"
    exploration.judge(SPACE.parse("clip=2"))
    assert exploration.arcs > plain


_DIGITS = Space(dimensions=tuple(Dimension(name=name, values=("0", "1", "2")) for name in "abcdefghij"))


class _Locked(Exploration):
    """An engine whose code opens step by step: each dimension's last value opens the next one's."""

    def judge(self, program: Program) -> Record:
        for depth, dimension in enumerate(_DIGITS.dimensions):
            if program[dimension] != dimension.values[-1]:
                break
            self.arcs.add(("engine.py", depth, depth + 1))
        return a_record(Verdict.PASSED)


def test_neighbours_of_pioneers_run_code_that_draws_alone_do_not() -> None:
    hunt = Hunt(exploration=_Locked(space=_DIGITS, training=training_of, laws=laws_of, cell=_CELL), seed=1)
    assert not list(hunt.run(until=float("inf"), num_programs=2000))
    assert len(hunt.exploration.arcs) == len(_DIGITS.dimensions)
    drawn = _Locked(space=_DIGITS, training=training_of, laws=laws_of, cell=_CELL)
    rng = random.Random(1)
    for _ in range(2000):
        drawn.judge(_DIGITS.draw(rng))
    assert len(drawn.arcs) < len(_DIGITS.dimensions)
    points = [(p.num_programs, p.num_combinations, p.num_arcs) for p in hunt.progress]
    assert points == sorted(points)
    assert points[-1] == (2000, len(_DIGITS.combinations), len(_DIGITS.dimensions))


def test_a_pioneer_that_leads_nowhere_is_left() -> None:
    hunt = Hunt(exploration=_Locked(space=_DIGITS, training=training_of, laws=laws_of, cell=_CELL), seed=1)
    assert not list(hunt.run(until=float("inf"), num_programs=2500))
    assert len(hunt.exploration.arcs) == len(_DIGITS.dimensions)
    assert not hunt.pioneers


def test_a_neighbour_differs_and_makes_sense() -> None:
    rng, rule = random.Random(2), ProgramRule(why="never", holds=lambda p: ("a", "1") in p.choices)
    space = Space(dimensions=_DIGITS.dimensions, rules=(rule,))
    program = space.parse("b=2,c=1")
    for _ in range(50):
        other = space.varied(program, rng)
        assert space.contradiction(other) is None
        assert 1 <= len(set(other.choices) ^ set(program.choices)) <= 6


def test_where_no_neighbour_makes_sense_any_program_is_drawn() -> None:
    rule = ProgramRule(why="never", holds=lambda p: bool(p.choices))
    space = Space(dimensions=(Dimension(name="a", values=("0", "1")),), rules=(rule,))
    assert space.varied(Program(), random.Random(3)) == Program()


_FEW = _DIGITS.dimensions[:6]


def _drawn_rule(rng: random.Random) -> ProgramRule:
    """Return a rule that reads one value, then perhaps others; or one that forbids or demands choices together."""
    one, two, three = rng.sample(_FEW, 3)
    values = [rng.choice(d.values) for d in (one, two, three)]
    some = _DIGITS.program({one.name: values[0], two.name: values[1]})
    holds = rng.choice(
        [
            lambda p: p[one] == values[0] and (p[two] != values[1] or p[three] == values[2]),
            lambda p: p[one] != values[0] and p[two] == values[1],
            lambda p: p.contains(some) and p[three] == values[2],
            lambda p: not p.contains(some) and p[three] == values[2],
            lambda p: len(p.choices) == 2,
        ]
    )
    return ProgramRule(why="drawn", holds=holds)


@pytest.mark.parametrize("seed", range(20))
def test_a_completion_is_found_exactly_where_two_more_choices_make_sense(seed: int) -> None:
    rng = random.Random(seed)
    space = Space(dimensions=_FEW, rules=tuple(_drawn_rule(rng) for _ in range(8)))
    every = [
        space.program(dict(zip((d.name for d in _FEW), values, strict=True)))
        for values in product(*(d.values for d in _FEW))
    ]
    for target in rng.sample(sorted(space.combinations, key=sorted), 40):
        fitting = [p for p in every if target in space.combinations_in(p) and space.makes_sense(p)]
        num_more = [sum(name not in dict(target) for name, _ in p.choices) for p in fitting]
        found = space.completion(target)
        assert (found is None) == (min(num_more, default=3) > 2)
        assert found is None or found in fitting
        assert found is None or sum(n not in dict(target) for n, _ in found.choices) == min(num_more)
