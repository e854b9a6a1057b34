"""The documentation is right: its code runs, its commands parse, and its links have targets."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import json
import re
import shlex
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import date
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import shardproof
import shardproof.engine.capability
import shardproof.engine.plan
import shardproof.fixtures.optimizers
import shardproof.fixtures.problems
import shardproof.harness.laws.communication.counts
import shardproof.suites.closed_forms
import shardproof.suites.vocabulary
from benchmarks import case_stages
from shardproof import AfterPhase, Law, MemoryKind, Phase, Select, UsageError, WorldSpec
from shardproof.engine.contract import Engine, PreparedModel
from shardproof.engine.registry import (
    BUILT_IN,
    EngineNotFoundError,
    resolve,
    shipped_mutants,
    what_is_missing,
)
from shardproof.harness.cli import exit_codes
from shardproof.harness.cli.main import main, parser
from shardproof.harness.laws.tolerance import MULTIPLE
from shardproof.harness.records.record import Expectations, Record, Verdict, from_json
from shardproof.harness.records.run import read_run
from shardproof.harness.runner import invoke
from shardproof.harness.runner.accelerator_worlds import BEST
from shardproof.harness.verdicts.known_failures_file import read
from tests.sample_records import TRAINS, records_by_engine
from tests.shell import ROOT, python

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
ADAPTERS = ROOT / "docs" / "write-an-adapter.md"
CASES = ROOT / "docs" / "write-a-case.md"
REPORTS = ROOT / "docs" / "read-a-report.md"
FOUND = ROOT / "docs" / "what-it-found.md"
KNOWN_FAILURES = ROOT / "docs" / "known-failures.md"

_ADAPTER = re.compile(
    r"<!-- file: (?P<file>\S+):(?P<name>\w+), at most (?P<limit>\d+) lines -->\n```python\n(?P<code>.*?)```",
    re.S,
)
_MEANT_BY_READER = re.compile(r"\.\.|path/to/")  # paths that exist on the reader's machine only


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _marked(page: Path, marker: str) -> str:
    """Return the one code block that follows a comment."""
    found = re.findall(rf"<!-- {marker} -->\n```\w+\n(.*?)```", _text(page), re.S)
    assert len(found) == 1, f"{page.name}: expected one block marked {marker!r}, got {len(found)}"
    return str(found[0])


def _write_adapters(folder: Path) -> list[str]:
    specs = []
    for match in _ADAPTER.finditer(_text(ADAPTERS)):
        (folder / match["file"]).write_text(match["code"])
        specs.append(f"{folder / match['file']}:{match['name']}")
    return specs


def _write_unsynchronised(folder: Path) -> str:
    """Break the first adapter of the page: its prepared model never communicates."""
    code = next(_ADAPTER.finditer(_text(ADAPTERS)))["code"]
    broken, times = re.subn(r"return PreparedModel\(.*\)", "return PreparedModel(model)", code)
    assert times == 1
    (folder / "unsynchronised.py").write_text(broken)
    return f"{folder / 'unsynchronised.py'}:MyDdp"


# Code


@pytest.mark.parametrize("match", list(_ADAPTER.finditer(_text(ADAPTERS))), ids=lambda m: m["file"])
def test_adapter_is_as_short_as_it_says(match: re.Match[str]) -> None:
    lines = [line.strip() for line in match["code"].splitlines()]
    count = sum(bool(line) and not line.startswith("#") for line in lines)
    assert count <= int(match["limit"])
    headings = re.findall(r"^## .*: (\d+) lines$", _text(ADAPTERS)[: match.start()], re.M)
    promised = re.search(r": (\d+) lines", _text(ADAPTERS)[: match.start()].rpartition("\n## ")[2])
    assert headings, "the page opens with adapters and their numbers of lines"
    assert promised is None or int(promised[1]) == count


def test_adapters_resolve(tmp_path: Path) -> None:
    specs = _write_adapters(tmp_path)
    assert len(specs) == 3
    assert all(isinstance(resolve(spec), Engine) for spec in specs)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_adapters_pass_and_a_broken_one_fails(tmp_path: Path) -> None:
    honest = [*_write_adapters(tmp_path), "examples/my_engine.py:MyEngine"]
    broken = _write_unsynchronised(tmp_path)
    out = tmp_path / "run"
    engines = [f"--engine={spec}" for spec in [*honest, broken]]

    code = main(["run", *engines, "--world=threads:2", "--suite=smoke", f"--out={out}"])

    records = records_by_engine(read_run(out).records, TRAINS)
    found = {engine: record.verdict for engine, record in records.items()}
    assert found == {**dict.fromkeys(honest, Verdict.PASSED), broken: Verdict.FAILED}
    assert code == exit_codes.DOES_NOT_CONFORM
    assert all((out / name).is_file() for name in ("report.html", "report.md", "junit.xml", "run.jsonl"))


@pytest.mark.slow
def test_case_passes_and_catches_a_broken_engine(tmp_path: Path) -> None:
    case = tmp_path / "test_promise.py"
    case.write_text(_marked(CASES, "case: test_promise.py"))
    broken, out = _write_unsynchronised(tmp_path), tmp_path / "run"
    engines = ["--engine=torch.ddp", f"--engine={broken}", "--world=threads:2"]
    assert invoke.call_pytest([str(case), *engines, f"--out={out}"]) == pytest.ExitCode.TESTS_FAILED
    found = {record.engine: record.verdict for record in read_run(out).records}
    assert found == {"torch.ddp": Verdict.PASSED, broken: Verdict.FAILED}


@pytest.mark.slow
def test_unittest_example_passes() -> None:
    tests = unittest.defaultTestLoader.loadTestsFromModule(_example("test_unittest_style"))
    result = unittest.TestResult()
    tests.run(result)
    assert (result.testsRun, result.failures, result.errors) == (4, [], [])


def _example(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"examples.{name}", ROOT / "examples" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_laws_of_the_table_can_be_written() -> None:
    rows = re.findall(
        r"^\| `(\w+\(.*?\))` \|", _text(CASES).partition("## Laws")[2].partition("\n## ")[0], re.M
    )
    known = {name: getattr(shardproof, name) for name in dir(shardproof)}
    known |= vars(shardproof.suites.closed_forms)
    known |= dict.fromkeys("SAB", Select()) | {"LOW": 1, "HIGH": 2, "Phase": Phase}
    known |= {"P": Phase.FORWARD, "K": (MemoryKind.GATHERED,), "W": AfterPhase.FORWARD}
    laws: list[Law] = [eval(row, {"__builtins__": {}}, known) for row in rows]
    shown = {type(law).__name__ for law in laws}
    assert shown >= {*shardproof.harness.laws.communication.counts.__all__, "RanksAgree", "MatchesOracle"}
    assert all(law.name for law in laws)


def test_every_method_of_the_contract_is_documented() -> None:
    methods = [name for name, _ in inspect.getmembers(PreparedModel, inspect.isfunction) if name[0] != "_"]
    assert [m for m in methods if f"{m}(" not in _text(ADAPTERS)] == []


# Commands


def _commands(text: str) -> Iterator[list[str]]:
    """Find commands in code blocks and inline code; repeat a workflow's commands for each entry of its matrix."""
    matrix = {
        key: re.findall(r"[^\s,\"]+", values) for key, values in re.findall(r"^ +(\w+): \[(.+)\]", text, re.M)
    }
    lines = re.findall(r"^(?: *- run: \.venv/bin/)?((?:shardproof|pytest) .+)$", text, re.M)
    for line in [*lines, *re.findall(r"`((?:shardproof|pytest) [^`\n]+)`", text)]:
        keys = re.findall(r"\$\{\{ matrix\.(\w+) \}\}", line)
        for values in itertools.product(*(matrix[key] for key in keys)):
            spelt = line
            for key, value in zip(keys, values, strict=True):
                spelt = spelt.replace(f"${{{{ matrix.{key} }}}}", value)
            yield shlex.split(spelt, comments=True)


def _problem(command: list[str]) -> str | None:
    """Return the error of a shardproof command; None when it can be run."""
    try:
        arguments = parser().parse_args(command[1:])
        _check_names(arguments)
    except (SystemExit, UsageError, EngineNotFoundError) as error:
        return f"{shlex.join(command)}: {error}"
    return None


def _check_names(arguments: argparse.Namespace) -> None:
    for world in getattr(arguments, "world", None) or []:
        if world != BEST:  # which needs an accelerator
            WorldSpec.parse(world)
    invoke.suites(getattr(arguments, "suite", None))
    shown = {f"{match['file']}:{match['name']}" for match in _ADAPTER.finditer(_text(ADAPTERS))}
    for spec in getattr(arguments, "engine", None) or []:
        if spec in BUILT_IN or what_is_missing(spec) or not (spec in shown or _MEANT_BY_READER.match(spec)):
            resolve(spec)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_can_be_run(page: Path) -> None:
    commands = [c for c in _commands(_text(page)) if c[0] == "shardproof"]
    assert [p for p in map(_problem, commands) if p] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "shardproof run --wrold threads:2",
        "shardproof run --world thread:2",
        "shardproof run --suite smok",
        "shardproof run --engine torch.dpd",
        "shardproof run --engine nowhere.py:MyDdp",
        "shardproof merge A B",
    ],
)
def test_a_wrong_command_is_noticed(wrong: str) -> None:
    assert [_problem(c) for c in _commands(f"text\n```sh\n{wrong}\n```\n")] != [None]
    assert [_problem(c) for c in _commands(f"text `{wrong}` text")] != [None]


def test_workflow_matrix_is_expanded() -> None:
    commands = list(_commands(_marked(ROOT / "docs" / "run-on-a-cluster.md", "workflow")))
    assert [c[1] for c in commands] == ["run"] * 2 * 4 + ["merge"]
    assert ["--world", "threads:3"] in [c[4:6] for c in commands]


_COLLECT = """
import json, sys, pytest
codes = [int(pytest.main([*c, "--collect-only", "-q", "-n0", "-pno:cacheprovider"])) for c in json.loads(sys.argv[1])]
print("codes", codes)
"""


def _runnable(command: Sequence[str]) -> tuple[str, ...]:
    """Replace an engine whose package is missing by FSDP2; the selected cases do not depend on it."""
    return tuple("torch.fsdp2" if what_is_missing(word) else word for word in command)


@pytest.mark.slow
@pytest.mark.timeout(260)  # some sixty collections in one process
def test_pytest_commands_select_cases() -> None:
    commands = {_runnable(c[1:]) for page in PAGES for c in _commands(_text(page)) if c[0] == "pytest"}
    selecting_nothing = ("suites", "--engine", "torch.ddp", "-k", "no_such_case")
    done = python("-c", _COLLECT, json.dumps([*sorted(commands), selecting_nothing]), limit_s=250)
    assert len(commands) >= 3
    assert f"codes {[0] * len(commands) + [5]}" in done.stdout, done.stdout[-2000:]


# Words and numbers


@pytest.mark.parametrize(
    "path", [*itertools.chain(*case_stages.STAGES_OF_SESSION.values(), *case_stages.STAGES_OF_FORKS.values())]
)
def test_stages_of_a_case_are_functions(path: str) -> None:
    owner, name = case_stages.find(path)
    assert callable(getattr(owner, name))


def test_verdicts_are_documented_as_they_are() -> None:
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| .* \| (yes|no).* \|$", _text(REPORTS), re.M))
    assert rows == {str(v): "yes" if v.is_conforming else "no" for v in Verdict}


def test_exit_codes_are_documented_as_they_are() -> None:
    rows = {int(c): words for c, words in re.findall(r"^\| (\d) \| (.*) \|$", _text(REPORTS), re.M)}
    assert sorted(rows) == [
        exit_codes.CONFORMS,
        exit_codes.DOES_NOT_CONFORM,
        exit_codes.USAGE,
        exit_codes.OUR_FAULT,
        exit_codes.NOTHING_JUDGED,
    ]
    assert rows[exit_codes.CONFORMS].startswith("conforming")
    assert rows[exit_codes.DOES_NOT_CONFORM].startswith("not conforming")
    assert "usage" in rows[exit_codes.USAGE]
    assert "our own" in rows[exit_codes.OUR_FAULT]
    assert "nothing was judged" in rows[exit_codes.NOTHING_JUDGED]


def test_the_tolerance_is_documented_as_it_is() -> None:
    documented = {n for page in PAGES for n in re.findall(r"(\d+) times (?:what|that noise)", _text(page))}
    assert documented == {f"{MULTIPLE:g}"}


def test_the_readme_counts_what_there_is() -> None:
    readme = _text(ROOT / "README.md")
    found = len(re.findall(r"^## \d+\. ", _text(ROOT / "docs" / "what-it-found.md"), re.M))
    assert f"[found {found} divergences]" in readme
    assert f"more than {len(shipped_mutants()) // 50 * 50} engines are wrong on purpose" in readme


def test_names_in_capitals_exist() -> None:
    modules = (
        shardproof.fixtures.problems,
        shardproof.fixtures.optimizers,
        shardproof,
        shardproof.suites.closed_forms,
        shardproof.suites.vocabulary,
    )
    known = {name for module in modules for name in getattr(module, "__all__", dir(module))}
    known |= {"BUILT_IN", "IN_NO_PROGRAM"}  # of engine/registry.py and fixtures/programs/dimensions.py
    known |= {member.name for member in shardproof.engine.capability.Capability} | {str(v) for v in Verdict}
    named = {name for page in PAGES for name in re.findall(r"`([A-Z][A-Z_]+)`", _text(page))}
    assert named - known == set()
    assert {"MLP_UNEVEN", "SEVERAL", "ACCUMULATE", "VACUOUS"} <= named


def test_expectations_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "known.toml").write_text(_marked(KNOWN_FAILURES, "expectations"))
    (entry,) = read(tmp_path / "known.toml", today=date(2027, 1, 1)).entries
    assert entry.verdict is Verdict.FAILED
    keys = {f.name for f in fields(entry)} - {"number"}
    assert keys == set(re.findall(r"^\| `([a-z]+)` \|", _text(KNOWN_FAILURES), re.M))


def test_record_is_one() -> None:
    plain = json.loads(_marked(REPORTS, "record"))
    record = from_json(Record, json.dumps(plain), where=REPORTS.name)
    assert record.verdict is Verdict.FAILED
    assert record.worst is not None
    assert record.worst.ratio == pytest.approx(record.worst.error / record.worst.allowed)
    del plain["headline"]
    with pytest.raises(UsageError, match="headline"):
        from_json(Record, json.dumps(plain), where=REPORTS.name)


# Links and form


def _dead_links(page: Path, text: str) -> list[str]:
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", prose) if not t.startswith("https://")]
    return [t for t in targets if not _leads_somewhere(page, t)]


def _leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    if not file.exists():
        return False
    headings = re.findall(r"^#+ (.*)$", _text(file), re.M) if anchor else []
    return not anchor or anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert _dead_links(page, _text(page)) == []


@pytest.mark.parametrize(
    "dead", ["[x](nowhere.md)", "[x](README.md#nothing)", "![x](docs/no.svg)", "[x](#no)"]
)
def test_a_dead_link_is_noticed(dead: str) -> None:
    assert len(_dead_links(ROOT / "README.md", f"some {dead} text")) == 1


def test_pages_are_ascii_and_pictures_well_formed() -> None:
    assert [page.name for page in PAGES if not _text(page).isascii()] == []
    pictures = list((ROOT / "docs").glob("*.svg"))
    assert pictures
    assert all(ElementTree.parse(picture).getroot().tag.endswith("svg") for picture in pictures)


# Findings


def test_every_divergence_is_a_known_failure_of_its_engine() -> None:
    known = _known().entries
    commands = re.findall(
        r"^(?:pytest suites/|shardproof run --case \")([^\s:]+)\S* --engine (\S+) --world \S+ --no-expectations",
        _text(FOUND),
        re.M,
    )
    assert len(commands) == len(re.findall(r"^## \d+\. ", _text(FOUND), re.M)) >= 10
    for file, name in commands:
        assert any(entry.engine == name and entry.case.startswith(f"{file}::") for entry in known), (
            file,
            name,
        )


def test_every_known_failure_is_documented() -> None:
    assert (
        sorted(
            {entry.link for entry in _known().entries} - set(re.findall(r"\((https:[^)]+)\)", _text(FOUND)))
        )
        == []
    )


def _known() -> Expectations:
    return read(ROOT / "suites" / "known_failures.toml", today=date(2026, 1, 1))
