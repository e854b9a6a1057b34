"""Arcs record which code of an engine runs, and explore draws programs by them."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from shardproof import Cell, Dimension, Program, ProgramRule, Space, WorldSpec
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.fixtures.programs.laws import laws_of
from shardproof.fixtures.programs.space import SPACE
from shardproof.fixtures.programs.training import training_of
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.runner.exploration import Exploration, Hunt
from shardproof.harness.tracing.arcs import Arc, can_count, counting_arcs, read_arcs
from shardproof.harness.tracing.collectives.call_site import short_path
from tests.sample_records import a_record

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
