"""Torch's own tests of FSDP2 on a CPU: on torch's engine, on the reference engine, and on mutants.

``python -m campaigns.upstream_tests FOLDER --mutants NAME NAME`` takes the folder of torch's files, which are no part
of this project, adds a line for each test to ``--out``, goes on there where it was interrupted, and prints the tables
of docs/torch-tests.md; ``--ours`` is a run of `shardproof mutants` to compare with. It needs the package expecttest.

The tests ask for GPUs. On loading, their words for a device are replaced by those for a CPU, and ranks are forked, not
spawned; nothing else of them changes, but for imports that this release of torch lacks, which are listed. A mutant runs
the tests that its engine passes, until one fails.

What the reference engine does not pass is in one of three classes, by rule: the test expects a refusal in torch's words
or type; it uses private names of torch's engine, which are listed; or any engine could show the difference.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import inspect
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import types
import unittest
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_cuda, common_distributed, common_fsdp, common_utils

from shardproof.engine.adapters import reference, torch_fsdp2
from shardproof.engine.contract import Engine, Plan, PreparedModel
from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.engine.registry import resolve
from shardproof.harness.audit.shipped_mutants import killed_in

_LIMIT_S = 150
_RANKS = 4
_WORDS = ((r'"cuda(:0)?"', '"cpu"'), (r"\.cuda\([^()]*\)", ".cpu()"), (r"\btorch\.cuda\.", "torch.cpu."))
_ADAPTERS = {"torch.fsdp2": torch_fsdp2, "reference": reference}
_MUTANTS = {mutant.name: mutant for mutant in MUTANTS}
_KILLS = {"failed", "hung"}
_CONTROL = "adopted."  # an honest engine that lets tests override what it prepares, as mutants do


_CLASSES = ("words", "private", "observable")
_OF_TESTS = {common_fsdp.__name__}

_CARRIED = {"__init__", "backward", "step", "composable"}
"""The methods of a prepared model that a mutant may override with effect on callers of ``fully_shard``."""


class Result(NamedTuple):
    """How one test ended."""

    engine: str
    file: str
    test: str
    state: str  # passed, failed, hung, skipped, or unreachable: a fault that no call of fully_shard can carry
    seconds: float
    said: str


def use_cpu() -> None:
    """Let tests that require GPUs run on a CPU."""
    # Any, throughout: the replaced functions have no such types.
    everything: Any = types.SimpleNamespace(
        cuda=common_cuda, distributed=common_distributed, fsdp=common_fsdp, utils=common_utils, cpu=torch.cpu
    )
    everything.cuda.TEST_CUDA = True
    everything.distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    everything.distributed.TIMEOUT_DEFAULT = _LIMIT_S
    everything.distributed.MultiProcessTestCase._spawn_processes = lambda case: case._start_processes(
        torch.multiprocessing.get_context("fork").Process
    )
    everything.fsdp.DEVICE_COUNT = _RANKS
    everything.fsdp.test_compiled_fsdp = common_fsdp.compiled_fsdp_test  # its name until torch 2.8
    everything.cpu.current_device = lambda: 0
    everything.cpu._sleep = lambda cycles: None
    everything.utils.get_cycles_per_ms = lambda *_: 0.0
    for module in (torch.accelerator, torch.cpu, torch.cuda):
        setattr(module, "device_count", lambda: _RANKS)  # noqa: B010 - typed
    honest = DistributedDataParallel.__init__
    everything.ddp = DistributedDataParallel
    everything.ddp.__init__ = lambda self, *args, device_ids=None, **named: honest(self, *args, **named)
    torch.set_num_threads(1)


def load(file: Path) -> types.ModuleType | None:
    """Import a file of tests for a CPU; None if this release of torch lacks one of its imports."""
    text = file.read_text(encoding="utf-8")
    for pattern, word in _WORDS:
        text = re.sub(pattern, word, text)
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    sys.modules[file.stem] = module  # where its classes are looked up
    while True:
        try:
            exec(compile(text, str(file), "exec"), module.__dict__)
        except ImportError as missing:
            print(f"{file.name}: {missing}", file=sys.stderr)
            if not _stub(str(missing)):
                return None
        else:
            return module


def _stub(missing: str) -> bool:
    """Put nothing in the place of a name that torch lacks; whether a name is what was missing."""
    found = re.match(r"cannot import name '(\w+)' from '(torch[\w.]*)'", missing)
    if found is not None:
        setattr(sys.modules[found[2]], found[1], None)
    return found is not None


def tests_of(part: Any) -> Iterator[unittest.TestCase]:
    """Yield the tests of a test, a suite, or several."""
    yield from [part] if isinstance(part, unittest.TestCase) else itertools.chain(*map(tests_of, part))


class Bridge(threading.local):
    """Puts an engine behind the names of FSDP2, and a mutant's faults into each root before it first runs.

    Each rank thread has one of its own.
    """

    def __init__(self, name: str, unreachable: Path) -> None:
        self._unreachable = unreachable  # exists as soon as the mutant's fault turns out to need a plan
        # Any: adapters have a type for prepared models, the contract has none.
        spec = _MUTANTS[name].engine_spec if name in _MUTANTS else name.removeprefix(_CONTROL)
        self.engine: Any = resolve(spec)
        self.base = base_of(self.engine)
        self.is_adopting = name not in _ADAPTERS
        self.adopted: list[tuple[PreparedModel, set[Any]]] = []  # with the graph nodes of all its outputs
        self._is_inside = False

    def install(self, modules: Sequence[types.ModuleType]) -> None:
        """Replace the names in the modules that tests use, once."""
        api, honest = self._api(), torch_fsdp2.FSDP2_API
        kept = {
            "sharded_module",
            "register_forward_method",
            "share_comm_ctx",
            "mixed_precision",
            "cpu_offload",
        }
        new = {getattr(honest, name): getattr(api, name) for name in kept}
        new[honest.fully_shard] = self._adopting(api.fully_shard)
        for module in (*modules, common_fsdp, torch.distributed.fsdp):
            for name, value in list(vars(module).items()):
                if isinstance(value, type | types.FunctionType) and value in new:
                    setattr(module, name, new[value])
        if self.is_adopting:
            setattr(_ADAPTERS[self.base], "apply_plan", self._opened)  # noqa: B010 - typed
            self._follow_backward_and_steps()

    def _api(self) -> Any:
        apis = (reference.REFERENCE_API,) if self.base == "reference" else ()
        return self.engine.prepared_type(nn.Module(), Plan(), *apis).composable()

    def _adopting(self, fully_shard: Any) -> Any:
        @functools.wraps(fully_shard)
        def call(module: Any, **options: Any) -> Any:
            module = fully_shard(module, **options)
            if self.is_adopting:
                for one in module if isinstance(module, list) else [module]:
                    one.register_forward_pre_hook(lambda root, _: self._adopt(root), prepend=True)
                    one.register_forward_hook(self._remember)
            return module

        return call

    def _opened(self, api: Any, model: nn.Module, plan: Plan, mesh: Any, shape: Any) -> None:
        if plan != self._plan:
            self._unreachable.write_text("unreachable")

    def _adopt(self, root: nn.Module) -> None:
        if any(root in set(prepared.module.modules()) for prepared, _ in self.adopted):
            return
        api = self._api()
        units = [name for name, m in root.named_modules() if name and isinstance(m, api.sharded_module)]
        mesh = next((p.device_mesh for p in root.parameters() if hasattr(p, "device_mesh")), None)
        self._plan = Plan(units=tuple(units))
        try:
            prepared = self.engine.prepare(root, self._plan, mesh)
        except Exception:  # in code of the mutant for other meshes or modules
            self._unreachable.write_text("skipped")
            raise
        if not _CARRIED.issuperset(n for n in vars(prepared) if callable(getattr(PreparedModel, n, None))):
            self._unreachable.write_text("unreachable")
        self.adopted.append((prepared, set()))

    def _remember(self, root: nn.Module, _: Any, output: Any) -> None:
        for prepared, nodes in self.adopted:
            if prepared.module is root:
                tensors = torch.utils._pytree.tree_leaves(output)
                nodes.update(t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn)

    def _follow_backward_and_steps(self) -> None:
        """Replace ``loss.backward()`` and ``optimizer.step()`` by those of the prepared model."""
        backward: Any = torch.Tensor.backward
        optimizer: Any = torch.optim.Optimizer
        construct = optimizer.__init__

        def new_backward(loss: torch.Tensor, *args: Any, **named: Any) -> None:
            found = [p for p, nodes in self.adopted if nodes & set(_graph_of(loss))]
            if self._is_inside or args or named or len(found) != 1:
                backward(loss, *args, **named)
                return
            self._inside(lambda: found[0].backward(loss))

        def new_init(self_: Any, parameters: Any, *args: Any, **named: Any) -> None:
            construct(self_, parameters, *args, **named)
            step = self_.step
            owned = {p for group in self_.param_groups for p in group["params"]}

            def new_step(_: Any, *args: Any, **named: Any) -> Any:
                found = [p for p, _ in self.adopted if owned & set(p.module.parameters())]
                if self._is_inside or args or named or len(found) != 1:
                    return step(*args, **named)
                found[0].optimizer(lambda _: self_)
                return self._inside(found[0].step)

            self_.step = types.MethodType(new_step, self_)  # schedulers look for a method

        setattr(torch.Tensor, "backward", new_backward)  # noqa: B010 - typed
        optimizer.__init__ = new_init

    def _inside(self, call: Any) -> Any:
        self._is_inside = True
        try:
            return call()
        finally:
            self._is_inside = False


def _graph_of(loss: torch.Tensor) -> Iterator[Any]:
    seen: set[Any] = {None}
    open_: list[Any] = [loss.grad_fn]
    while open_:
        if (node := open_.pop()) not in seen:
            seen.add(node)
            yield node
            open_ += (following for following, _ in node.next_functions)


def base_of(engine: Engine) -> str:
    """Return the name of the engine from which a mutant derives."""
    modules = {c.__module__ for c in type(engine).__mro__}
    return next((name for name, api in _ADAPTERS.items() if api.__name__ in modules), "")


def run(name: str, modules: Sequence[types.ModuleType], test: unittest.TestCase, scratch: Path) -> Result:
    """Run one test in a process of its own, from which its ranks are forked."""
    answer, unreachable = scratch / "answer", scratch / "unreachable"
    answer.write_text('["hung", ""]')
    began = time.monotonic()

    def body() -> None:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        outcome = unittest.TestResult()
        Bridge(name, unreachable).install(modules)
        test.run(outcome)
        bad = [text for _, text in (*outcome.errors, *outcome.failures)]
        state = "failed" if bad else "skipped" if outcome.skipped else "passed"
        answer.write_text(json.dumps([state, _headline(bad or [text for _, text in outcome.skipped])]))
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=body)
    child.start()
    child.join(_LIMIT_S + 5)
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


def names_in(code: types.CodeType, where: Mapping[str, Any], seen: set[types.CodeType]) -> set[str]:
    """Return the names that a function uses, and those that the tests' own functions use which it names."""
    if code in seen:
        return set()
    seen.add(code)
    names = {*code.co_names, *code.co_freevars}
    inside = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    named = [inspect.unwrap(where[name]) for name in names if inspect.isroutine(where.get(name))]
    inside += [
        f.__code__ for f in named if inspect.isfunction(f) and f.__module__ in _OF_TESTS | {where["__name__"]}
    ]
    return names.union(*(names_in(one, where, seen) for one in inside))


def private_names() -> set[str]:
    """Return what torch's folder of FSDP2 defines and does not export: classes, functions, and names with a bar."""
    folder = Path(torch.distributed.fsdp.__path__[0]) / "_fully_shard"
    nodes = [node for file in folder.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    stored = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    methods = {f.name for n in nodes if isinstance(n, ast.ClassDef) for f in n.body if hasattr(f, "name")}
    defined = {n.name for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)} - methods
    barred = {name for name in stored | methods if name.startswith("_") and not name.endswith("__")}
    return (defined | barred) - set(torch.distributed.fsdp.__all__)


class Campaign:
    """The results so far, in a file, and the remaining tests."""

    def __init__(self, folder: Path, out: Path, scratch: Path) -> None:
        self._modules = [m for file in sorted(folder.rglob("test_*.py")) if (m := load(file)) is not None]
        suites = [unittest.defaultTestLoader.loadTestsFromModule(module) for module in self._modules]
        self._tests = {_parts(test): test for test in tests_of(suites)}
        self._out, self._scratch = out, scratch
        kept = out.read_text().splitlines() if out.exists() else []
        self.results = [Result(*json.loads(line)) for line in kept]

    def classes(self) -> dict[str, list[tuple[Result, set[str]]]]:
        """Return what only torch's engine passes, by class, and the private names."""
        passed = {r[1:3] for r in self.results if r.engine == "torch.fsdp2" and r.state == "passed"}
        private, found = private_names(), {name: list[tuple[Result, set[str]]]() for name in _CLASSES}
        for result in self.results:
            if result.engine != "reference" or result.state == "passed" or result[1:3] not in passed:
                continue
            test: Any = self._tests[result.file, result.test]
            where = {
                **vars(common_fsdp),
                **vars(sys.modules[result.file]),
                **dict(inspect.getmembers(type(test))),
            }
            method = inspect.unwrap(where[result.test.rpartition(".")[2]])
            used = names_in(method.__code__, where, set())
            lacks = set(re.findall(r"^AttributeError: .* has no attribute '(\w+)'", result.said))
            names = (used & private) | (lacks - set(dir(torch.distributed.fsdp.FSDPModule)))
            refuses = {"assertRaises", "assertRaisesRegex"} & used and " not raised" not in result.said
            of = "private" if names else "words" if refuses else "observable"
            found[of].append((result, names))
        return found

    def run_honest(self) -> None:
        """Run everything on the engines from which mutants derive."""
        for name in _ADAPTERS:
            for file, test in self._tests:
                self._once(name, file, test)

    def run_mutant(self, name: str, longest_s: float) -> None:
        """Run its engine's passing tests until one fails, or shows that tests cannot reach the fault.

        Tests that failed for other mutants come first, and within both parts the shortest.
        """
        base = base_of(resolve(_MUTANTS[name].engine_spec))
        killers = {r[1:3] for r in self.results if r.engine in _MUTANTS and r.state in _KILLS}
        known = {r[1:3] for r in self.results if r.engine == name}
        passed = [
            r for r in self.results if (r.engine, r.state) == (base, "passed") and r.seconds <= longest_s
        ]
        for honest in sorted(passed, key=lambda r: (r[1:3] not in known, r[1:3] not in killers, r.seconds)):
            state = self._once(name, honest.file, honest.test).state
            if state == "unreachable":
                return
            if state in _KILLS and self._once(_CONTROL + base, honest.file, honest.test).state == "passed":
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
    parser.add_argument("--mutants", nargs="*", choices=sorted(_MUTANTS), default=[], metavar="NAME")
    parser.add_argument("--ours", type=Path, help="a run of `shardproof mutants`")
    parser.add_argument("--longest", type=float, default=_LIMIT_S, help="seconds of tests that mutants run")
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
    print(
        table(campaign.results, classes),
        table_of_mutants(campaign.results, options.mutants, killed or {}),
        sep="\n\n",
    )
    for name, found in classes.items():
        for result, names in found:
            print(f"{name}: {result.test}: {result.said} {sorted(names)}")


def table(results: Sequence[Result], classes: Mapping[str, Sequence[tuple[Result, Collection[str]]]]) -> str:
    """Return one line for each file: how many tests passed on each engine, why not on ours, and the time of torch's."""
    lines = [
        f"| file | tests | pass on torch.fsdp2 | of these on reference | {' | '.join(_CLASSES)} | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for file in [*dict.fromkeys(r.file for r in results), ""]:
        own = [r for r in results if file in {"", r.file}]
        of_torch, of_ours = (
            {r[1:3] for r in own if r.engine == n and r.state == "passed"} for n in _ADAPTERS
        )
        seconds = [r.seconds for r in own if r.engine == "torch.fsdp2"]
        rest = [sum(file in {"", r.file} for r, _ in classes[name]) for name in _CLASSES]
        counts = [len(seconds), len(of_torch), len(of_torch & of_ours), *rest, f"{sum(seconds):.0f}"]
        lines.append(f"| {file or 'all'} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def table_of_mutants(
    results: Sequence[Result], drawn: Sequence[str], ours: Mapping[str, Collection[str]]
) -> str:
    """Return one line for each mutant: the first test of torch's that fails, after how long, and cases of ours."""
    lines = ["| mutant | first test that fails | tests | seconds | our cases |", "|---|---|---|---|---|"]
    passed = {r[1:3] for r in results if r.engine.startswith(_CONTROL) and r.state == "passed"}
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
