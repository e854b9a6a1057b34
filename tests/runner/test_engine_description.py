"""A run names an engine that it cannot judge with the cause, and judges the other engines."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.engine.capability import Capability
from shardproof.engine.registry import EngineNotFoundError, resolve
from shardproof.harness.cli.main import main
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.runner import engines
from shardproof.harness.runner.engines import describe, unavailable
from shardproof.reports.summary import Conclusion, conclude

BROKEN = "tests/runner/broken_engines.py"
WHY = {
    "TakesArguments": r"TakesArguments\(\) raised TypeError: .*bucket_bytes.*; an adapter's class takes no arguments",
    "HasNoVersion": r"version\(\): expected a text such as 'torch 2.13.0', got None",
    "FailsToSayItsVersion": r"asking for .* raised RuntimeError: no such file:\nVERSION",
    "EndsTheProcess": r"ended without an answer, with exit status 7",
    "DeclaresNothing": r"raised TypeError: 'NoneType' object is not iterable",
    "DeclaresNonsense": r"raised ValueError: 'fast' is not a valid Capability",
}
MODULES = {
    "exits.py": ("import sys\nsys.exit(3)\n", r"called sys.exit\(3\)"),
    "exits_as_if_all_were_well.py": ("import sys\nsys.exit(0)\n", r"called sys.exit\(0\)"),
    "needs.py": ("import no_such_engine.zero\n", r"^no_such_engine is not installed, or not on the path"),
    "half.py": (
        "from torch import no_such_name\n",
        r"failed: ImportError: cannot import name 'no_such_name'",
    ),
    "old.py": (
        "from shardproof.engine.import_by_name import EngineUnavailableError as Unavailable\n"
        "raise Unavailable('needs torch >= 9')\n",
        r"^needs torch >= 9$",
    ),
    "mute.py": (
        "class Mute(Exception):\n    def __str__(self):\n        raise Mute\nraise Mute\n",
        r"failed: Mute: \(its message cannot be shown\)",
    ),
}


@pytest.mark.parametrize("name", WHY)
def test_an_engine_that_cannot_be_judged_is_named_with_the_cause(name: str) -> None:
    with pytest.raises(EngineNotFoundError) as caught:
        describe(f"{BROKEN}:{name}")
    assert re.search(WHY[name], caught.value.problem), caught.value.problem


@pytest.mark.parametrize("file", MODULES)
def test_a_module_that_cannot_be_imported_is_named_with_the_cause(file: str, tmp_path: Path) -> None:
    source, why = MODULES[file]
    (tmp_path / file).write_text(source)
    with pytest.raises(EngineNotFoundError) as caught:
        describe(f"{tmp_path / file}:Engine")
    assert re.search(why, caught.value.problem), caught.value.problem


@pytest.mark.parametrize("name", ["loops.py:Engine", "HangsInItsVersion"])
def test_an_answer_that_does_not_come_ends_with_the_deadline(name: str, tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text("while True:\n    pass\n")
    with pytest.raises(EngineNotFoundError, match="took longer than 1 s"):
        describe(f"{tmp_path / name}" if ":" in name else f"{BROKEN}:{name}", limit_s=1.0)


def test_a_description_matches_the_declarations_of_the_engine() -> None:
    found = describe("torch.ddp")
    assert found.capabilities == resolve("torch.ddp").capabilities
    assert Capability.REPLICATE in found.capabilities
    assert found.version == resolve("torch.ddp").version()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(data=st.data())
def test_a_mutated_answer_is_an_error_of_the_engine(data: st.DataObject) -> None:
    mutated = bytearray(engines._answer("torch.ddp"))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        mutated[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=4))
        mutated = mutated or bytearray(b"0")
    with contextlib.suppress(EngineNotFoundError):
        engines._read(bytes(mutated), "torch.ddp")


def test_engines_are_examined_one_by_one() -> None:
    broken = f"{BROKEN}:HasNoVersion"
    assert list(unavailable(["torch.ddp", broken])) == [broken]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_judges_the_other_engines_and_ends_as_wrong_usage(
    workers: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken, out = f"{BROKEN}:HasNoVersion", tmp_path / "run"
    options = [f"--engine={broken}", "--engine=torch.ddp", "--suite=smoke", "-k=trains", f"--out={out}"]
    code = main(["run", *options, *([f"-n={workers}"] if workers else [])])
    shown = capfd.readouterr()
    assert code == 2
    assert f"engine {broken!r}: version(): expected a text" in shown.err
    run = read_run(out)
    assert [(r.engine, r.verdict) for r in run.records] == [("torch.ddp", Verdict.PASSED)]
    assert run.footer is not None
    assert list(run.footer.unavailable) == [broken]
    assert conclude(run) is Conclusion.INCOMPLETE
    assert "HasNoVersion was not judged: version()" in (out / "report.md").read_text()
