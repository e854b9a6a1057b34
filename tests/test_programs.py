"""The space of programs: its rules, covering arrays, texts of models, shrinking, and the command that explores it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from shardproof.fixtures.composed import ComposedProblem, source
from shardproof.fixtures.program_laws import laws_of
from shardproof.fixtures.program_space import DIMENSIONS, RULES, SPACE
from shardproof.fixtures.programs import training_of
from shardproof.fixtures.standalone import standalone
from shardproof.harness.cases.space import Dimension, Program, ProgramRule, Space
from shardproof.harness.cli.explore import read_programs, write_finding
from shardproof.harness.cli.main import main
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import LawRecord, Record, Verdict
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.exploration import Exploration, Hunt, ShrunkFailure, Symptom, symptom_of
from shardproof.harness.worlds.spec import WorldSpec
from shardproof.suites.combinations.rows import FAMILIES, programs_in, space_of
from tests.sample_records import a_record

CHOICES = [(d.name, value) for d in DIMENSIONS for value in d.values[1:]]
CONTEXT = {
    "microbatches": "2",
    "evaluation": "before",
    "layout": "shard",
}  # in which other choices make sense


@cache
def _small_programs() -> list[Program]:
    """Return all programs of up to two choices, with one microbatch and with two."""
    small = [c for size in (0, 1, 2) for c in combinations(CHOICES, size)]
    made = [SPACE.program(dict(c) | more) for c in small for more in ({}, {"microbatches": "2"}, CONTEXT)]
    return list(dict.fromkeys(made))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.why)
def test_each_rule_excludes_what_no_other_does(rule: ProgramRule) -> None:
    others = [r for r in RULES if r is not rule]
    alone = (p for p in _small_programs() if rule.holds(p) and not any(r.holds(p) for r in others))
    assert next(alone, None) is not None


def test_the_plainest_program_makes_sense_and_every_value_stands_in_one_that_does() -> None:
    assert SPACE.contradiction(Program()) is None
    assert [choice for choice in CHOICES if SPACE.completion(frozenset({choice})) is None] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_cover_every_combination_that_makes_sense(family: str) -> None:
    space, rows = space_of(family), programs_in(family)
    assert [row for row in rows if space.contradiction(row) is not None or not space.has(row)] == []
    left = space.combinations.difference(*map(space.combinations_in, rows))
    assert next(space.cover(unseen=left), None) is None, "run python -m shardproof.suites.combinations.rows"


@pytest.mark.parametrize("file", [*FAMILIES, "found_units", "found_wrapped", "found_replicas"])
def test_every_row_is_a_training_with_laws(file: str) -> None:
    for program in programs_in(file):
        training = training_of(program)
        assert SPACE.needs(program) <= training.needs
        assert {law.name for law in laws_of(program)} >= {"matches the oracle"}
        assert set(training.plan.units) <= {
            *(",".join(unit.split(",")) for unit in training.problem.units),
        }


def test_a_program_is_spelt_by_what_is_not_plain_and_read_again() -> None:
    program = SPACE.program({"reuse": "twice", "layout": "native", "clip": "inf"})
    assert str(program) == "reuse=twice,clip=inf"
    assert SPACE.parse(str(program)) == program
    assert SPACE.parse(str(Program())) == Program()
    with pytest.raises(UsageError, match="once, twice, without_grad"):
        SPACE.parse("reuse=thrice")


def test_draws_make_sense_and_repeat_with_the_seed() -> None:
    drawn = [[SPACE.draw(rng) for _ in range(20)] for rng in (random.Random(3), random.Random(3))]
    assert drawn[0] == drawn[1]
    assert all(SPACE.contradiction(program) is None for program in drawn[0])
    assert len(set(drawn[0])) > 15


def test_the_script_shows_the_model_that_is_judged() -> None:
    program = SPACE.parse("reuse=twice,checkpoint=around,output=dict,microbatches=2,failure=first,clip=2")
    problem = training_of(program).problem
    assert isinstance(problem, ComposedProblem)
    text = standalone(program, "torch.fsdp2", "some symptom")
    assert text is not None
    compile(text, "script", "exec")
    assert source(problem.program, is_guarded=True) in text
    assert "FloatingPointError" in text
    assert "shardproof" not in text


@pytest.mark.parametrize(
    "engine", ["torch.fsdp2", "torch.replicate", "torch.fsdp1", "torch.ddp", "reference", "reference.wrapper"]
)
def test_scripts_are_python_for_whatever_is_drawn(engine: str) -> None:
    rng = random.Random(1)
    texts = [standalone(SPACE.draw(rng), engine, "some symptom") for _ in range(40)]
    written = [text for text in texts if text is not None]
    assert len(written) > 5
    for text in written:
        compile(text, "script", "exec")


# A small space, judged by a function and not by an engine.
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


def test_a_failure_shrinks_to_the_least_that_fails_in_the_same_way() -> None:
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
    assert hunt.seen == {
        c for c in SMALL.combinations if not {("c", "1")} < c or dict(c).get("a", "0") == "0"
    }


def test_a_vacuous_program_is_no_finding_and_shows_no_combination() -> None:
    hunt = _hunt(lambda _: "")
    judge = hunt.exploration.judge
    object.__setattr__(
        hunt.exploration, "judge", lambda p: replace(judge(p), verdict=Verdict.VACUOUS, headline="still")
    )
    assert hunt.check(SMALL.program({"a": "1"})) is None
    assert (hunt.findings, hunt.seen, hunt.verdicts) == ([], set(), {"VACUOUS": 1})


def test_found_programs_are_read_with_comments(tmp_path: Path) -> None:
    (tmp_path / "found.txt").write_text("# first\nreuse=twice,clip=2  # 1\n\nreuse=twice,clip=2\nplain\n")
    found = read_programs(tmp_path / "found.txt", tmp_path / "none.txt")
    assert [str(program) for program in found] == ["reuse=twice,clip=2", "plain"]


@pytest.mark.slow
def test_explore_writes_down_what_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    mutant = "shardproof.engine.mutants.gradient_scale:SumsInsteadOfAveraging"
    arguments = ["--engine", mutant, "--programs", "1", "--out", str(tmp_path / "out")]
    assert main(["explore", *arguments]) == 1
    assert read_programs(tmp_path / "out" / "found.txt") == [Program()]
    report = (tmp_path / "out" / "finding-1.md").read_text()
    assert "FAILED: matches the oracle" in report
    assert 'SPACE.parse("plain")' in report
    assert "the plain program fails" in capsys.readouterr().out


def test_what_fails_as_a_known_program_does_is_not_new(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def judge(_: Exploration, program: Program) -> Record:
        return a_record(Verdict.CRASHED if "clip" in dict(program.choices) else Verdict.PASSED)

    monkeypatch.setattr(Exploration, "judge", judge)
    known = tmp_path / "known.txt"
    known.write_text("clip=inf\n")
    monkeypatch.setattr("shardproof.harness.cli.explore.KNOWN", (known,))
    assert main(["explore", "--engine=torch.fsdp2", "--programs=20", f"--out={tmp_path / 'out'}"]) == 1
    said = capsys.readouterr().out
    assert "CRASHED" in said.splitlines()[-1]
    assert "; 0 new failures" in said
    assert not (tmp_path / "out" / "found.txt").exists()


@pytest.mark.parametrize(
    "summary",
    [
        "rank {} step 1: expected 4 reductions, got {}: reduce_scatter({}, float32[2, 72]) as #25 of group [0, 1]",
        "rank 0: expected at most {} bytes, got 5048 bytes; the largest: {} bytes of shape [{}] from empty",
        "step 0, gradient '{}': rank {}: expected a tensor, got None{}",
    ],
)
def test_what_a_law_lists_is_no_part_of_a_symptom(summary: str) -> None:
    def symptom(*texts: str) -> Symptom | None:
        laws = (LawRecord(law="a law", held=False, summary=summary.format(*texts)),)
        return symptom_of(a_record(laws=laws))

    assert symptom("0", "5", "") == symptom("1", "6", " (and 1 more ranks)")


@pytest.mark.parametrize(
    ("law", "is_shown"),
    [("", True), ("matches the oracle", True), ("memory between steps is explained", False)],
)
def test_a_script_is_written_of_what_it_can_show(law: str, is_shown: bool, tmp_path: Path) -> None:
    program, symptom = Program(), Symptom(verdict="FAILED", law=law, kind="too much")
    finding = ShrunkFailure(program=program, symptom=symptom, record=a_record(), drawn=program)
    write_finding(finding, "torch.fsdp2", "threads:2", tmp_path)
    assert (tmp_path / "finding-1.py").exists() is is_shown
    assert ("torchrun" in (tmp_path / "finding-1.md").read_text()) is is_shown


@pytest.mark.parametrize(
    "text",
    [
        # Mended in laws and loops: a checkpoint's own backward reduces apart; gradients cleared to zeros stay zeros.
        "checkpoint=around_reentrant,layout=shard,microbatches=3,order=sum",
        "checkpoint=around_reentrant,layout=shard,units=joint",
        "side=steps,failure=again,zero_grad=alternate",
        # Mended in the reference engine: a joint unit reduced in parts; what a module shows was left out of clipping.
        "layout=shard,units=joint,microbatches=2,order=forwards_first",
        "evaluation=end,layout=shard,clip=2",
        # A gradient that only the last microbatch had kept the memory of all that it was reduced with.
        "side=last,layout=shard,units=none,microbatches=2",
        # Mended in the oracle: it expected buffers in the compute dtype, and no zeros of an overflow that was cleared.
        "buffers=changed,compute=float64",
        "side=steps,zero_grad=alternate,scaling=overflow",
        # Mended in the contract's default: frozen parameters were not read beside optimizers in backward.
        "frozen=before,stepped=in_backward",
        # Mended in the laws: a probe by inputs reduces zeros where ranks use other parts.
        "side=ranks,accumulation=last,layout=shard,microbatches=3,probe=of_inputs",
        # Mended in the engine: what thawed while units were whole stayed frozen in the shards.
        "reshard=keep,evaluation=end,freezing=first",
        "resume=units,probe=dropped,probed=end,freezing=middle",
    ],
)
def test_what_our_own_fault_once_failed_passes(text: str) -> None:
    cell = Cell(engine="reference", world=WorldSpec.parse("threads:2"))
    exploration = Exploration(space=SPACE, training=training_of, laws=laws_of, cell=cell)
    record = exploration.judge(SPACE.parse(text))
    assert record.verdict is Verdict.PASSED, record.headline


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("compute=float64,reduce=float64", "param_dtype=torch.float64, reduce_dtype=torch.float64"),
        ("born=meta", "model.to_empty(device='cpu')"),
        ("inputs=with_gradients", "rows = rows.detach().requires_grad_()"),
        ("probe=of_inputs", "torch.autograd.grad(loss, rows)"),
        ("backward=halves", "        backward(loss_of(model, batches[m], weight))"),
        ("freezing=middle", "requires_grad_(step != 1)"),
        ("stepped=in_backward", "register_post_accumulate_grad_hook(lambda _, own=own: own.step())"),
        ("hooks=backward", "self.blocks[1].register_full_backward_hook("),
    ],
)
def test_a_script_shows_what_its_program_adds(text: str, shown: str) -> None:
    script, plain = (standalone(SPACE.parse(t), "torch.fsdp2", "some symptom") or "" for t in (text, "plain"))
    assert shown in script
    assert shown not in plain
    compile(script, "script", "exec")


def test_a_script_clears_gradients_as_its_program_does() -> None:
    for choice, clears in (("none", "True"), ("alternate", "step % 2 == 0")):
        text = standalone(SPACE.parse(f"zero_grad={choice}"), "torch.fsdp2", "some symptom") or ""
        assert f"zero_grad(set_to_none={clears})" in text


@pytest.mark.parametrize(
    ("engine", "effort"),
    [
        ("late:TrustsTheOrderOfArrival", ["--schedules=4"]),
        ("reference_races:FreesTheCopiedBuffer", ["--thorough"]),
    ],
)
def test_explore_draws_schedules_and_watches_where_asked_to(
    engine: str, effort: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shardproof.harness.cli.explore.KNOWN", ())
    explore = ["explore", f"--engine=shardproof.engine.mutants.{engine}", "--world=threads:3", "--minutes=0"]
    assert main([*explore, f"--out={tmp_path / 'plain'}"]) == 0
    assert main([*explore, *effort, f"--out={tmp_path / 'with_effort'}"]) == 1
