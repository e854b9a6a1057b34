"""Torch's own files of tests, loaded for a CPU, and what the code of a test names."""

from __future__ import annotations

import ast
import datetime
import functools
import inspect
import itertools
import multiprocessing
import re
import sys
import types
import unittest
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed._composable
import torch.distributed.fsdp
from torch.distributed._composable import replicate_with_fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_cuda, common_distributed, common_fsdp, common_utils

from shardproof.engine import reference

LIMIT_S = 150
RANKS = 4
_COLLECTIVE_LIMIT_S = 60  # for ranks that are kept between tests, and wait for one that failed
_CURRENT = r"torch\.(?:cuda|xpu|accelerator)\.current_device(?:_index)?\(\)"
_WORDS = (
    (rf"torch\.device\([\w\".]+, ({_CURRENT}|(self\.)?rank)\)", 'torch.device("cpu")'),
    (_CURRENT, '"cpu"'),
    (r"torch\.accelerator\.current_accelerator\([^()]*\)", 'torch.device("cpu")'),
    (r'"(cuda|xpu)(:0)?"', '"cpu"'),
    (r'"(nccl|xccl)"', '"gloo"'),
    (r"\.cuda\([^()]*\)", ".cpu()"),
    (r"(?<!import )(?<!from )\btorch\.(cuda|xpu)\.", "torch.cpu."),
    (r"\bnot TEST_CUDA and not TEST_XPU\b", "False"),
    (r"\bmin_world_size = 8\b", f"min_world_size = {RANKS}"),
    # Names of torch 2.6 in its own helpers of tests, of today's meaning.
    (r"\bCUDAInitMode\b", "DEVICEInitMode"),
    (r"\bCUDA_(BEFORE|AFTER|NEVER)\b", r"DEVICE_\1"),
    (r"\bcuda_init_mode\b", "device_init_mode"),
)
_OF_TESTS = {common_fsdp.__name__}

INTERFACES = {
    "replicate": replicate_with_fsdp.replicate,
    "fully_shard": torch.distributed.fsdp.fully_shard,
    "FullyShardedDataParallel": torch.distributed.fsdp.FullyShardedDataParallel,
}
"""The interfaces that both engines have."""


def use_cpu() -> None:
    """Let tests that require GPUs run on a CPU."""
    # Any, throughout: the replaced functions have no such types.
    everything: Any = types.SimpleNamespace(
        cuda=common_cuda, distributed=common_distributed, fsdp=common_fsdp, utils=common_utils, cpu=torch.cpu
    )
    everything.cuda.TEST_CUDA = True
    everything.distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    everything.distributed.TIMEOUT_DEFAULT = LIMIT_S
    everything.distributed.MultiProcessTestCase._spawn_processes = lambda case: case._start_processes(
        torch.multiprocessing.get_context("fork").Process
    )
    multiprocessing.set_start_method("fork", force=True)
    everything.distributed.MultiProcContinuousTest.timeout = datetime.timedelta(seconds=_COLLECTIVE_LIMIT_S)
    everything.fsdp.DEVICE_COUNT = everything.fsdp.FSDPTestContinuous.world_size = RANKS
    everything.fsdp.test_compiled_fsdp = common_fsdp.compiled_fsdp_test  # its name until torch 2.8
    torch.cuda.can_device_access_peer = lambda device, peer_device: False
    everything.cpu._sleep = lambda cycles: None
    everything.cpu.manual_seed = torch.manual_seed
    everything.cpu.Stream.synchronize = lambda stream: None
    torch.accelerator.set_device_index = lambda device: None
    torch.accelerator.synchronize = torch.cpu.synchronize
    everything.tensor = torch.Tensor
    everything.tensor.pin_memory = lambda tensor, *_: (
        tensor.clone()
    )  # torch refuses it where there is no device
    everything.utils.get_cycles_per_ms = lambda *_: 0.0
    for module in (torch.accelerator, torch.cpu, torch.cuda):
        setattr(module, "device_count", lambda: RANKS)  # noqa: B010 - typed
    honest = DistributedDataParallel.__init__
    everything.ddp = DistributedDataParallel
    everything.ddp.__init__ = lambda self, *args, device_ids=None, **named: honest(self, *args, **named)
    for wrapper in (torch.distributed.fsdp.FullyShardedDataParallel, reference.FullyShardedDataParallel):
        setattr(wrapper, "__init__", _on_cpu(wrapper.__init__))  # noqa: B010 - typed
    torch.set_num_threads(1)


def _on_cpu(construct: Any) -> Any:
    @functools.wraps(construct)
    def new(self: Any, *args: Any, device_id: Any = None, **named: Any) -> None:
        construct(self, *args, device_id=torch.device("cpu"), **named)

    return new


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


def interfaces_of(module: types.ModuleType) -> str:
    """Return the interfaces that a file tests: those that it imports."""
    own = list(vars(module).values())
    found = [name for name, interface in INTERFACES.items() if any(value is interface for value in own)]
    return ", ".join(found) or "none"


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
    """Return what torch's folders of FSDP define and do not export, and the reference engine lacks.

    These are names with a bar, and the classes, functions and constants of modules with one.
    """
    private = set[str]()
    for package in (torch.distributed.fsdp, torch.distributed._composable):
        folder = Path(package.__path__[0])
        for file in folder.rglob("*.py"):
            defined, inside = _defined_in(file.read_text(encoding="utf-8"))
            private |= {n for n in inside | defined if n.startswith("_") and not n.endswith("__")}
            if any(part.startswith("_") for part in file.relative_to(folder).parts):
                private |= defined
    wrapper = reference.FullyShardedDataParallel
    return private - {
        *torch.distributed.fsdp.__all__,
        *reference.__all__,
        *dir(wrapper),
        *_defined_in(inspect.getsource(wrapper))[1],
    }


def _defined_in(source: str) -> tuple[set[str], set[str]]:
    """Return the names of classes, functions and constants, and of methods and attributes that are written to."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    stored = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    methods = {f.name for n in nodes if isinstance(n, ast.ClassDef) for f in n.body if hasattr(f, "name")}
    defined = {n.name for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    assigned = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
    constants = {t.id for t in assigned if isinstance(t, ast.Name)}
    return defined - methods | constants, stored | methods
