"""Torch's own tests on a CPU: on torch's engines, on the reference engine, and on mutants.

``python -m campaigns.upstream_tests FOLDER --mutants NAME NAME`` takes the folder of torch's files, which are no part
of this project, adds a line for each test to ``--out``, goes on there where it was interrupted, and prints the tables
of docs/torch-tests.md; ``--ours`` is a run of `shardproof mutants` to compare with. It needs the extra `bench`.

The tests ask for GPUs. On loading, their words for a device are replaced by those for a CPU, and ranks are forked, not
spawned; nothing else of them changes, but for imports that this release of torch lacks, which are listed. The reference
engine takes the place of all its interfaces at once: of ``fully_shard``, ``replicate`` and FSDP1's class. A mutant runs
the tests that its engine passes, until one fails.

What the reference engine does not pass is in one of three classes, by rule: the test expects a refusal in torch's words
or type; it uses private names of torch's engine, which are listed; or any engine could show the difference.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.testing._internal import common_fsdp

from campaigns.upstream_engines import BY_NAME, CONTROL, HONEST, Bridge, base_of
from campaigns.upstream_files import (
    LIMIT_S,
    interfaces_of,
    load,
    names_in,
    private_names,
    tests_of,
    use_cpu,
)
from shardproof.engine.registry import resolve
from shardproof.harness.audit.shipped_mutants import killed_in

_KILLS = {"failed", "hung"}
_CLASSES = ("words", "private", "observable")


class Result(NamedTuple):
    """How one test ended."""

    engine: str
    file: str
    test: str
    state: str  # passed, failed, hung, skipped, or unreachable: a fault that no call of fully_shard can carry
    seconds: float
    said: str


def run(name: str, modules: Sequence[types.ModuleType], test: unittest.TestCase, scratch: Path) -> Result:
    """Run one test in a process of its own, from which its ranks are forked."""
    answer, unreachable = scratch / "answer", scratch / "unreachable"
    answer.write_text('["hung", ""]')
    began = time.monotonic()

    def body() -> None:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        tempfile.tempdir = str(scratch)  # of files that tests leave behind
        outcome = unittest.TestResult()
        Bridge(name, unreachable).install(modules)
        test.run(outcome)
        bad = [text for _, text in (*outcome.errors, *outcome.failures)]
        state = "failed" if bad else "skipped" if outcome.skipped else "passed"
        answer.write_text(json.dumps([state, _headline(bad or [text for _, text in outcome.skipped])]))
        os.killpg(0, signal.SIGKILL)  # with its ranks, which some tests keep for the next

    child = multiprocessing.get_context("fork").Process(target=body)
    child.start()
    child.join(LIMIT_S + 5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid or 0, signal.SIGKILL)
    child.join()
    state, said = json.loads(answer.read_text())
    state = "hung" if "timed out" in said else state
    state = unreachable.read_text() if unreachable.exists() else state
    unreachable.unlink(missing_ok=True)
    return Result(name, *_parts(test), state, round(time.monotonic() - began, 2), said)


def _parts(test: unittest.TestCase) -> tuple[str, str]:
    file, _, name = test.id().partition(".")
    return file, name


def _headline(texts: Sequence[str]) -> str:
    errors = re.findall(
        r"^[\w.]*(?:Error|Exception|Warning)\b(?!.*exited with).*", "\n".join(texts), re.MULTILINE
    )
    return "".join(errors[-1:])[:200]


def class_of(result: Result, case: type[unittest.TestCase], private: Collection[str]) -> tuple[str, set[str]]:
    """Return why a test that torch's engine passes fails on ours, by rule, and the private names in its code."""
    where = {**vars(common_fsdp), **vars(sys.modules[result.file]), **dict(inspect.getmembers(case))}
    method = inspect.unwrap(where[result.test.rpartition(".")[2]])
    used = names_in(method.__code__, where, set())
    lacks = set(re.findall(r"^AttributeError: .* has no attribute '(\w+)'", result.said))
    named = {name for name in used & set(private) if name.startswith("_") or name in where}
    names = named | lacks.difference(*map(dir, (FSDPModule, FullyShardedDataParallel)))
    if names:
        return "private", names
    refuses = {"assertRaises", "assertRaisesRegex", "assertWarnsRegex"} & used
    # An assertion on an error's words begins with them; an error of gloo tells of another rank's.
    is_sentence = not re.search(r"^AssertionError: (?!\")|gloo", result.said)
    return "words" if refuses and is_sentence else "observable", names


class Campaign:
    """The results so far, in a file, and the remaining tests."""

    def __init__(self, folder: Path, out: Path, scratch: Path) -> None:
        self._modules = [m for file in sorted(folder.rglob("test_*.py")) if (m := load(file)) is not None]
        self.interfaces = {module.__name__: interfaces_of(module) for module in self._modules}
        suites = [unittest.defaultTestLoader.loadTestsFromModule(module) for module in self._modules]
        self._tests = {_parts(test): test for test in tests_of(suites)}
        self._out, self._scratch = out, scratch
        kept = out.read_text().splitlines() if out.exists() else []
        self.results = [Result(*json.loads(line)) for line in kept]

    def classes(self) -> dict[str, list[tuple[Result, set[str]]]]:
        """Return what only torch's engine passes, by class, and the private names."""
        passed = {r[1:3] for r in self.results if r.engine == "torch" and r.state == "passed"}
        private, found = private_names(), {name: list[tuple[Result, set[str]]]() for name in _CLASSES}
        for result in self.results:
            if result.engine != "reference" or result.state == "passed" or result[1:3] not in passed:
                continue
            of, names = class_of(result, type(self._tests[result.file, result.test]), private)
            found[of].append((result, names))
        return found

    def run_honest(self) -> None:
        """Run everything on torch's engines, and on the reference engine what passes there."""
        for file, test in self._tests:
            if self._once("torch", file, test).state == "passed":
                self._once("reference", file, test)

    def run_mutant(self, name: str, longest_s: float) -> None:
        """Run its engine's passing tests until one fails, or shows that tests cannot reach the fault.

        Tests that failed for other mutants come first, and within both parts the shortest.
        """
        base = base_of(resolve(BY_NAME[name].engine_spec))
        killers = {r[1:3] for r in self.results if r.engine in BY_NAME and r.state in _KILLS}
        known = {r[1:3] for r in self.results if r.engine == name}
        passed = [
            r for r in self.results if (r.engine, r.state) == (base, "passed") and r.seconds <= longest_s
        ]
        for honest in sorted(passed, key=lambda r: (r[1:3] not in known, r[1:3] not in killers, r.seconds)):
            state = self._once(name, honest.file, honest.test).state
            if state == "unreachable":
                return
            if state in _KILLS and self._once(CONTROL + base, honest.file, honest.test).state == "passed":
                return

    def _once(self, name: str, file: str, test: str) -> Result:
        found = [r for r in self.results if (r.engine, r.file, r.test) == (name, file, test)]
        if not found:
            found = [run(name, self._modules, self._tests[file, test], self._scratch)]
            self.results += found
            with self._out.open("a") as out:
                print(json.dumps(found[0]), file=out)
        return found[0]


def main() -> None:
    """Run the remaining tests, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mutants", nargs="*", choices=sorted(BY_NAME), default=[], metavar="NAME")
    parser.add_argument("--ours", type=Path, help="a run of `shardproof mutants`")
    parser.add_argument("--longest", type=float, default=LIMIT_S, help="seconds of tests that mutants run")
    parser.add_argument("--out", type=Path, default=Path("upstream-tests.jsonl"))
    options = parser.parse_args()
    use_cpu()
    with tempfile.TemporaryDirectory() as scratch:
        campaign = Campaign(options.folder, options.out, Path(scratch))
        campaign.run_honest()
        for name in options.mutants:
            campaign.run_mutant(name, options.longest)
    killed = killed_in([options.ours]) if options.ours else {}
    classes = campaign.classes()
    print(table(campaign.results, classes, campaign.interfaces), end="\n\n")
    if options.mutants:
        print(table_of_mutants(campaign.results, options.mutants, killed or {}), end="\n\n")
    for name, found in classes.items():
        for result, names in found:
            print(f"{name}: {result.test}: {result.said} {sorted(names)}")


def table(
    results: Sequence[Result],
    classes: Mapping[str, Sequence[tuple[Result, Collection[str]]]],
    interfaces: Mapping[str, str],
) -> str:
    """Return a line for each file: how many tests pass on each engine, why not on ours, and the time of torch's."""
    lines = [
        f"| interface | file | tests | pass on torch | of these on reference | {' | '.join(_CLASSES)} | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    names = sorted({*interfaces.values()})
    of = {name: sorted(file for file in interfaces if interfaces[file] == name) for name in names}
    rows = [(name, [file]) for name in names for file in of[name]]
    rows += [(name, of[name]) for name in names if len(of[name]) > 1]
    for interface, files in [*rows, ("all", [*interfaces])]:
        own = [r for r in results if r.file in files]
        of_torch, of_ours = ({r[1:3] for r in own if r.engine == n and r.state == "passed"} for n in HONEST)
        seconds = [r.seconds for r in own if r.engine == "torch"]
        rest = [sum(r.file in files for r, _ in classes[name]) for name in _CLASSES]
        counts = [len(seconds), len(of_torch), len(of_torch & of_ours), *rest, f"{sum(seconds):.0f}"]
        lines.append(
            f"| {interface} | {files[0] if len(files) == 1 else 'all'} | {' | '.join(map(str, counts))} |"
        )
    return "\n".join(lines)


def table_of_mutants(
    results: Sequence[Result], drawn: Sequence[str], ours: Mapping[str, Collection[str]]
) -> str:
    """Return one line for each mutant: the first test of torch's that fails, after how long, and cases of ours."""
    lines = ["| mutant | first test that fails | tests | seconds | our cases |", "|---|---|---|---|---|"]
    passed = {r[1:3] for r in results if r.engine.startswith(CONTROL) and r.state == "passed"}
    killers, killed_by_ours = [], 0
    for name in drawn:
        own = [r for r in results if r.engine == name]
        killer = [r.test.rpartition(".")[2] for r in own if r.state in _KILLS and r[1:3] in passed]
        cases = sum(name in mutants for mutants in ours.values())
        seconds = sum(r.seconds for r in own)
        lines.append(f"| `{name}` | {''.join(killer) or '-'} | {len(own)} | {seconds:.0f} | {cases} |")
        killers += killer
        killed_by_ours += cases > 0
    return "\n".join([*lines, f"| {len(drawn)} | {len(killers)} killed | | | {killed_by_ours} killed |"])


if __name__ == "__main__":
    main()
