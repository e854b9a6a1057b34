"""Torch's own tests of FSDP2 on a CPU, with torch's engine, the reference engine, or a mutant behind ``fully_shard``.

``python -m benchmarks.upstream_tests FOLDER ENGINE ...`` takes the folder of torch's files, which are not part of this
project, and adds a line for each test to ``--out``; the same command goes on where it was interrupted, and prints the
table of docs/torch-tests.md. ENGINE is ``torch.fsdp2``, ``reference``, a mutant, or ``mutants/N``: every Nth
of those that can stand behind ``fully_shard``.

The tests ask for GPUs. On loading, their words for a device are replaced by those for a CPU, and ranks are forked, not
spawned; nothing else of them changes. A mutant runs the tests that its engine passes, each file until one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import signal
import sys
import threading
import time
import types
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_cuda, common_distributed, common_fsdp, common_utils

from shardproof.engine.adapters import reference, torch_fsdp2
from shardproof.engine.adapters.composable import PreparedComposable
from shardproof.engine.contract import Engine, Plan, PreparedModel
from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.engine.registry import resolve

_LIMIT_S = 150
_RANKS = 4
_WORDS = ((r'"cuda(:0)?"', '"cpu"'), (r"\.cuda\([^()]*\)", ".cpu()"), (r"\btorch\.cuda\.", "torch.cpu."))
_DOORS = {"torch.fsdp2": torch_fsdp2, "reference": reference}
_MUTANTS = {mutant.name: mutant for mutant in MUTANTS}


_CARRIED = {"__init__", "backward", "step", "composable"}
"""What a mutant may override of what it prepares, to be seen by who calls ``fully_shard`` alone."""


class Result(NamedTuple):
    """How one test ended."""

    engine: str
    file: str
    test: str
    state: str  # passed, failed, skipped, hung, or unreachable: a sin that no call of fully_shard can carry
    seconds: float
    said: str


def use_cpu() -> None:
    """Let tests that ask for GPUs run on a CPU."""
    # Any, throughout: what is replaced has no types that say so.
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
    """Import a file of tests for a CPU; None where this release of torch lacks what it imports."""
    text = file.read_text(encoding="utf-8")
    for pattern, word in _WORDS:
        text = re.sub(pattern, word, text)
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    sys.modules[file.stem] = module  # where its classes are looked for
    try:
        exec(compile(text, str(file), "exec"), module.__dict__)
    except ImportError as missing:
        print(f"{file.name}: {missing}", file=sys.stderr)
        return None
    return module


def tests_of(suite: Any) -> Iterator[unittest.TestCase]:
    """Yield the tests of a suite of suites."""
    for part in suite:
        if isinstance(part, unittest.TestCase):
            yield part
        else:
            yield from tests_of(part)


class Bridge(threading.local):
    """Puts an engine behind the names of FSDP2, and a mutant's sins into each root before it first runs.

    Each rank that is a thread has one of its own.
    """

    def __init__(self, name: str, unreachable: int) -> None:
        self._unreachable = (
            unreachable  # a pipe: what is written there says that the mutant's sin needs a plan
        )
        spec = _MUTANTS[name].engine_spec if name in _MUTANTS else name
        # Any: adapters have a type for what they prepare, the contract has none.
        self.engine: Any = resolve(spec)
        self.base = base_of(self.engine)
        self.is_mutant = name in _MUTANTS
        self.adopted: list[tuple[PreparedModel, set[Any]]] = []  # with the graph nodes of all its outputs
        self._is_inside = False

    def install(self, modules: Sequence[types.ModuleType]) -> None:
        """Replace the names in the modules that tests see, and open no door once more."""
        door = self._door()
        honest = torch_fsdp2.FSDP2_DOOR
        new = {
            honest.fully_shard: self._adopting(door.fully_shard),
            honest.sharded_module: door.sharded_module,
            honest.register_forward_method: door.register_forward_method,
            honest.share_comm_ctx: door.share_comm_ctx,
            honest.mixed_precision: door.mixed_precision,
            honest.cpu_offload: door.cpu_offload,
        }
        for module in (*modules, common_fsdp, torch.distributed.fsdp):
            for name, value in list(vars(module).items()):
                if isinstance(value, type | types.FunctionType) and value in new:
                    setattr(module, name, new[value])
        if self.is_mutant:
            setattr(_DOORS[self.base], "open_door", self._opened)  # noqa: B010 - typed
            self._follow_backward_and_steps()

    def _door(self) -> Any:
        if self.base == "reference":
            return self.engine.prepared_type(nn.Module(), Plan(), reference._DOOR).composable()
        return self.engine.prepared_type(nn.Module(), Plan()).composable()

    def _adopting(self, fully_shard: Any) -> Any:
        @functools.wraps(fully_shard)
        def call(module: Any, **options: Any) -> Any:
            module = fully_shard(module, **options)
            if self.is_mutant:
                for one in module if isinstance(module, list) else [module]:
                    one.register_forward_pre_hook(lambda root, _: self._adopt(root), prepend=True)
                    one.register_forward_hook(self._remember)
            return module

        return call

    def _opened(self, door: Any, model: nn.Module, plan: Plan, mesh: Any, shape: Any) -> None:
        if plan != self._plan:
            os.write(self._unreachable, b"!")

    def _adopt(self, root: nn.Module) -> None:
        if any(root in set(prepared.module.modules()) for prepared, _ in self.adopted):
            return
        door = self._door()
        units = [name for name, m in root.named_modules() if name and isinstance(m, door.sharded_module)]
        mesh = next((p.device_mesh for p in root.parameters() if hasattr(p, "device_mesh")), None)
        self._plan = Plan(units=tuple(units))
        prepared = self.engine.prepare(root, self._plan, mesh)
        if not _CARRIED.issuperset(n for n in vars(prepared) if callable(getattr(PreparedModel, n, None))):
            os.write(self._unreachable, b"!")
        self.adopted.append((prepared, set()))

    def _remember(self, root: nn.Module, _: Any, output: Any) -> None:
        for prepared, nodes in self.adopted:
            if prepared.module is root:
                tensors = torch.utils._pytree.tree_leaves(output)
                nodes.update(t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn)

    def _follow_backward_and_steps(self) -> None:
        """Let ``loss.backward()`` and ``optimizer.step()`` be those of the prepared model that they are of."""
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
    seen, open_ = set(), [loss.grad_fn]
    while open_:
        node = open_.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            open_.extend(following for following, _ in node.next_functions)


def reachable() -> Iterator[str]:
    """Yield the mutants of these engines whose sins may show behind ``fully_shard``."""
    for mutant in MUTANTS:
        engine: Any = resolve(mutant.engine_spec)
        if base_of(engine) and not {"misreads", "Unit"} & vars(type(engine)).keys():
            own = [c for c in engine.prepared_type.__mro__ if ".mutants." in c.__module__]
            names = {name for c in own for name in vars(c) if hasattr(PreparedComposable, name)}
            if {n for n in names - _CARRIED if not n.startswith("__")} == set():
                yield mutant.name


def base_of(engine: Engine) -> str:
    """Return the name of the engine that a mutant spoils."""
    return next(
        (n for n, door in _DOORS.items() if any(c.__module__ == door.__name__ for c in type(engine).__mro__)),
        "",
    )


def run(name: str, modules: Sequence[types.ModuleType], test: unittest.TestCase) -> Result:
    """Run one test in a process of its own, which its ranks are forks of."""
    began, (read, write), (heard, unreachable) = time.monotonic(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        os.close(read)
        outcome = unittest.TestResult()
        Bridge(name, unreachable).install(modules)
        test.run(outcome)
        bad = [text for _, text in (*outcome.errors, *outcome.failures)]
        state = "failed" if bad else "skipped" if outcome.skipped else "passed"
        os.write(write, json.dumps([state, _headline(bad or [text for _, text in outcome.skipped])]).encode())
        os._exit(0)
    for end in (write, unreachable):
        os.close(end)
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.alarm(_LIMIT_S + 5)
    with os.fdopen(read, "rb") as answers:
        answer = answers.read()
    signal.alarm(0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    state, said = json.loads(answer) if answer else ("hung", "")
    with os.fdopen(heard, "rb") as pipe:
        state = "unreachable" if pipe.read() else state
    if "timed out" in said:
        state = "hung"  # or the machine was busy: no kill is counted
    return Result(name, *_parts(test), state, round(time.monotonic() - began, 2), said)


def _parts(test: unittest.TestCase) -> tuple[str, str]:
    file, _, name = test.id().partition(".")
    return file, name


def _headline(texts: Sequence[str]) -> str:
    lines = [line for text in texts for line in text.splitlines()]
    errors = [
        s for s in lines if re.match(r"[\w.]*(Error|Exception|Warning)\b", s) and "exited with" not in s
    ]
    return "".join((errors or lines)[-1:])[:200]


def main() -> None:
    """Run what has not been run yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("engine", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("upstream-tests.jsonl"))
    options = parser.parse_args()
    use_cpu()
    modules = [m for file in sorted(options.folder.rglob("test_*.py")) if (m := load(file)) is not None]
    tests = [t for m in modules for t in tests_of(unittest.defaultTestLoader.loadTestsFromModule(m))]
    kept = options.out.read_text().splitlines() if options.out.exists() else []
    results = [Result(*json.loads(line)) for line in kept]
    took = {(r.file, r.test): r.seconds for r in results}
    tests.sort(key=lambda test: took.get(_parts(test), 0))  # what kills a mutant soon comes first
    with options.out.open("a") as out:
        for name in _expanded(options.engine):
            for test in tests:
                if is_done(results, name, *_parts(test)):
                    continue
                results.append(run(name, modules, test))
                print(json.dumps(results[-1]), file=out, flush=True)
    print(table(results))


def table(results: Sequence[Result]) -> str:
    """Return one line for each file of tests: what passed, how long that took, and how many mutants it killed."""
    lines = [
        "| file | tests | torch.fsdp2 | reference | seconds | mutants killed |",
        "|---|---|---|---|---|---|",
    ]
    mutants = {r.engine for r in results if r.engine in _MUTANTS}
    mutants -= {r.engine for r in results if r.state == "unreachable"}
    for file in [*dict.fromkeys(r.file for r in results), None]:
        own = [r for r in results if file in {None, r.file}]
        of_torch = [r for r in own if r.engine == "torch.fsdp2"]
        passed = [sum(r.engine == name and r.state == "passed" for r in own) for name in _DOORS]
        killed = {r.engine for r in own if r.engine in mutants and r.state == "failed"}
        seconds = sum(r.seconds for r in of_torch)
        cells = (file or "all", len(of_torch), *passed, f"{seconds:.0f}", f"{len(killed)} of {len(mutants)}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _expanded(engines: Sequence[str]) -> Iterator[str]:
    for engine in engines:
        of_mutants = re.fullmatch(r"mutants/(\d+)", engine)
        yield from [*reachable()][:: int(of_mutants[1])] if of_mutants else [engine]


def is_done(results: Sequence[Result], name: str, file: str, test: str) -> bool:
    """Whether nothing more is to be learned from this test: it was run, or would not matter for a mutant."""
    own = [r for r in results if r.engine == name]
    if any((r.file, r.test) == (file, test) for r in own):
        return True
    if name not in _MUTANTS:
        return False
    base = base_of(resolve(_MUTANTS[name].engine_spec))
    passed = any((r.engine, r.file, r.test, r.state) == (base, file, test, "passed") for r in results)
    settled = any(r.state == "unreachable" or (r.file == file and r.state in {"failed", "hung"}) for r in own)
    return not passed or settled


if __name__ == "__main__":
    main()
