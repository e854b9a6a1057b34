"""The import rules, proven on the source: allowed imports, no cycles, and no file with an empty name."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.shell import ROOT, python

HOMELESS = frozenset({"utils", "util", "helpers", "helper", "common", "misc"})
PACKAGES = ("engine", "fixtures", "harness", "shardproof", "suites", "reports")
OURS = re.compile(r"^shardproof\.(?=(engine|fixtures|harness|suites|reports)\b)")


# The entries of harness/, each of which imports none that follow it.
ORDER = (
    "errors",
    "regular_file",
    "torch_compat",
    "tracing",
    "worlds",
    "cases",
    "records",
    "oracle",
    "training",
    "laws",
    "verdicts",
    "runner",
    "audit",
    "cli",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported name, in full; ``from a import b`` names ``a.b``, whatever ``b`` is.

    Of our own packages the `shardproof.` before them is left out, which all of them share.
    """

    name: str
    line: int
    alias: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file of a package: its path from the root, its dotted name, and its source."""

    path: str
    name: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Allowed imports of a package beside the standard library and itself; a name allows all below it."""

    package: str
    allowed: tuple[str, ...]
    # Additional imports of files below a path.
    entries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def offences(self, root: Path) -> list[str]:
        return [
            f"{module.path}:{found.line}: {self.package} may not import {found.name}"
            for module in modules(self.package, root)
            for found in imports(module)
            if not self._allows(module.path, found.name)
        ]

    def _allows(self, path: str, name: str) -> bool:
        top = name.partition(".")[0]
        besides = (name for below, names in self.entries.items() if path.startswith(below) for name in names)
        allowed = (self.package, *self.allowed, *besides)
        return top in sys.stdlib_module_names or any(_is_below(name, a) for a in allowed)


LAYERS = (
    Layer(
        package="engine",
        allowed=("torch",),
        entries={
            f"engine/third_party/{family}_engine.py": (package,)
            for family, package in {
                "accelerate": "accelerate",
                "colossalai": "colossalai",
                "deepspeed": "deepspeed",
                "fairscale": "fairscale",
                "ignite": "ignite",
                "lightning": "lightning_fabric",
                "mcore": "megatron.core",
                "megatron": "megatron_fsdp",
                "olmo": "olmo_core",
                "pipegoose": "pipegoose",
                "torchft": "torchft",
                "torchtitan": "torchtitan",
            }.items()
        },
    ),
    Layer(package="fixtures", allowed=("shardproof", "torch")),
    Layer(
        package="harness",
        allowed=(
            "torch",
            "engine.contract",
            "engine.capability",
            "engine.plan",
            "engine.shard",
            "engine.import_by_name",
            "engine.names",
            "engine.registry",
        ),
        entries={
            "harness/verdicts/": ("packaging",),
            "harness/runner/": ("pytest",),
            "harness/audit/": ("pytest",),
            "harness/tracing/": ("coverage",),
            "harness/cli/": ("pytest", "reports", "fixtures", "tomlkit", "rich"),
        },
    ),
    Layer(package="shardproof", allowed=("engine.contract", "engine.pieces", "harness")),
    Layer(
        package="suites", allowed=("shardproof", "harness", "fixtures", "engine.contract", "pytest", "torch")
    ),
    Layer(
        package="reports",
        allowed=(
            "harness.records.record",
            "harness.records.hang",
            "harness.records.proof",
            "harness.errors",
            "harness.records.run",
            "harness.audit.upstream_coverage",
            "harness.audit.kill_matrix",
            # Two runs compared, as values.
            "harness.records.diff.comparability",
            "harness.records.diff.comparison",
            "harness.records.diff.traffic",
            # Timelines: values over journals, which hold no tensors.
            "harness.records.rank_timeline",
            "harness.tracing.ledger",
            "harness.tracing.races.race_report",
            "jinja2",
            "tabulate",
        ),
    ),
)


def modules(package: str, root: Path) -> list[Module]:
    found = []
    for file in sorted((root / package).rglob("*.py")):
        path = file.relative_to(root).as_posix()
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        found.append(Module(path=path, name=name, source=file.read_text()))
    return found


@cache  # a dozen tests look at the same modules
def imports(module: Module) -> tuple[Import, ...]:
    """Return every import, those inside functions included; ruff allows no relative ones."""
    return tuple(
        Import(
            name=OURS.sub(
                "", f"{node.module}.{name.name}" if isinstance(node, ast.ImportFrom) else name.name
            ),
            line=node.lineno,
            alias=name.asname or name.name,
        )
        for node in ast.walk(ast.parse(module.source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    )


def private_torch(package: str, root: Path) -> list[str]:
    """List the private names of torch that a package imports, or reaches through a name that it imported."""
    found = []
    for module in modules(package, root):
        bound = {i.alias: i.name for i in imports(module) if "." not in i.alias}
        reached = [
            (node.lineno, _in_full(ast.unparse(node), bound))
            for node in ast.walk(ast.parse(module.source))
            if isinstance(node, ast.Attribute) and node.attr.startswith("_")
        ]
        named = [*((i.line, i.name) for i in imports(module)), *reached]
        found += [f"{module.path}:{line}: {name}" for line, name in named if _is_private_torch(name)]
    return found


def cycle(package: str, root: Path) -> list[str]:
    """Name the modules of an import cycle of a package; imports inside functions and for typing alone count."""
    files = {m.name: m for m in modules(package, root)}
    graph = {
        name: {_module_of(found.name, files) for found in imports(module)} - {None, name}
        for name, module in files.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def against_the_order(root: Path) -> list[str]:
    """List the imports of harness that go up: those for typing alone and those inside functions count."""
    entries = [f"harness.{entry}" for entry in ORDER]

    def place(name: str) -> int:
        return next((i for i, entry in enumerate(entries) if _is_below(name, entry)), len(entries))

    return [
        f"{module.path}:{found.line}: {found.name}"
        for module in modules("harness", root)
        for found in imports(module)
        if found.name.startswith("harness.") and place(found.name) > place(module.name)
    ]


def repeated(root: Path, names: Callable[[Module], list[str]]) -> list[str]:
    """List the names that stand in two modules of harness, engine and reports, with the modules."""
    places: dict[str, list[str]] = {}
    for module in (m for package in ("harness", "engine", "reports") for m in modules(package, root)):
        for name in names(module):
            places.setdefault(name, []).append(module.path)
    unique = {name: paths for name, paths in places.items() if len(paths) > 1 and name != "__init__.py"}
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(unique.items())]


def _public_classes(module: Module) -> list[str]:
    body = ast.parse(module.source).body
    return [node.name for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def homeless(root: Path) -> list[str]:
    """List files and folders whose names do not describe their contents."""
    paths = [f.relative_to(root) for p in (*PACKAGES, "tests") for f in (root / p).rglob("*.py")]
    return sorted(str(p) for p in paths if HOMELESS & {p.stem, *(part for part in p.parts[:-1])})


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.package)
def test_a_package_imports_only_modules_that_its_layer_allows(layer: Layer) -> None:
    assert modules(layer.package, ROOT), f"{layer.package}: no files, so nothing was proven"
    assert layer.offences(ROOT) == []


def test_every_package_has_a_layer() -> None:
    assert tuple(layer.package for layer in LAYERS) == PACKAGES


def test_the_reference_engine_stands_alone() -> None:
    layer = Layer(package="engine/reference", allowed=("torch", "engine.reference"))
    assert modules(layer.package, ROOT), "no files, so nothing was proven"
    assert layer.offences(ROOT) == []


def test_the_reference_engine_lists_its_private_names_of_torch_in_one_file() -> None:
    found = private_torch("engine/reference", ROOT)
    elsewhere = [use for use in found if not use.startswith("engine/reference/torch_private.py:")]
    assert elsewhere == []
    assert found, "the file that may use private names uses none"


PRIVATE_TORCH = {
    "fixtures": (),
    "harness": (),  # its private names are looked up by `harness.torch_compat.private_names`, which lists them
    "reports": (),
    "suites": (),
    "engine": (
        "engine/adapters/torch_internals.py:",
        "engine/reference/torch_private.py:",
        "engine/mutants/",  # which break code inside an engine
    ),
}


@pytest.mark.parametrize("package", PRIVATE_TORCH)
def test_private_names_of_torch_have_one_place(package: str) -> None:
    allowed = PRIVATE_TORCH[package]
    found = private_torch(package, ROOT)
    assert [use for use in found if not use.startswith(allowed)] == []
    assert all(any(use.startswith(place) for use in found) for place in allowed), (
        "a place that needs no private name"
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_no_import_cycle(package: str) -> None:
    assert cycle(package, ROOT) == []


def test_harness_has_thirteen_entries_in_one_order() -> None:
    found = {
        path.name.removesuffix(".py") for path in (ROOT / "harness").iterdir() if path.name[0] not in "_."
    }
    assert found - {"py.typed"} == set(ORDER)
    assert against_the_order(ROOT) == []


def test_the_oracle_and_the_loop_around_an_engine_know_nothing_of_each_other() -> None:
    """In an oracle that shared code with the engine's side, a defect of that code would look right."""
    for package, other in (("harness.oracle", "harness.training"), ("harness.training", "harness.oracle")):
        files = modules(package.replace(".", "/"), ROOT)
        assert files, f"{package}: no files, so nothing was proven"
        assert [m.path for m in files for i in imports(m) if _is_below(i.name, other)] == []


def test_no_module_name_stands_twice() -> None:
    """A command's file has the name that users type, which may also be that of a value, as a run is."""
    assert repeated(ROOT, _file_names) == []


def _file_names(module: Module) -> list[str]:
    folder, _, name = module.path.rpartition("/")
    return [] if folder == "harness/cli/commands" else [name]


def test_no_public_class_name_stands_twice() -> None:
    assert repeated(ROOT, _public_classes) == []


def test_no_file_is_named_for_nothing() -> None:
    assert homeless(ROOT) == []


def test_runs_and_reports_never_load_torch() -> None:
    names = ["shardproof.harness.records.provenance", "shardproof.harness.records.run"]
    names += [f"shardproof.{m.name}" for m in modules("reports", ROOT)]
    program = "\n".join(
        (
            "import importlib, sys",
            f"for name in {names!r}:",
            "    importlib.import_module(name)",
            "loaded = sorted(m for m in ('torch', 'shardproof.engine') if m in sys.modules)",
            "sys.exit(f'loaded {loaded}' if loaded else 0)",
        )
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


# The tests below run the checker on trees that break each rule once.

Write = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def tree(files: Mapping[str, str]) -> Path:
        for path, source in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(source)
        return tmp_path

    return tree


OFFENDERS = {
    "engine/adapters/mine.py": "import harness.cases.training\n",
    "engine/deep/__init__.py": "import suites\n",
    "fixtures/models.py": "def build():\n    from engine.contract import Plan\n",
    "harness/verdicts/judgement.py": "from engine.adapters.torch_ddp import PreparedDdp\n",
    "harness/runner/session.py": "from engine import mutants\n",
    "harness/training/engine_loop.py": "import pytest\n",
    "harness/records/record.py": "from reports.html import render\n",
    "suites/parity/test_mine.py": "from engine.registry import resolve\n",
    "reports/html.py": "if True:\n    import torch.nn as nn\n",
    "reports/junit.py": "from harness.cases.training import Case\n",
}


@pytest.mark.parametrize("path", OFFENDERS)
def test_checker_finds_a_forbidden_import(write: Write, path: str) -> None:
    root = write({path: OFFENDERS[path]})
    layer = next(x for x in LAYERS if x.package == path.partition("/")[0])
    (offence,) = layer.offences(root)
    assert offence.startswith(f"{path}:")


@pytest.mark.parametrize(
    "source",
    [
        "from harness.laws.law import Law\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import harness.cli.main\n",
        "def late():\n    from harness.runner import session\n",
    ],
)
def test_checker_finds_an_import_against_the_order(write: Write, source: str) -> None:
    root = write(
        {"harness/worlds/launch.py": source, "harness/laws/law.py": "import harness.worlds.launch\n"}
    )
    (found,) = against_the_order(root)
    assert found.startswith("harness/worlds/launch.py:")


def test_checker_accepts_allowed_imports(write: Write) -> None:
    root = write(
        {
            "harness/cli/main.py": "import os\nfrom reports import html\n",
            "harness/runner/plugin.py": "import pytest\nfrom engine.contract import Plan\n",
            "reports/html.py": "import jinja2\nfrom harness.records.record import Record\n",
        }
    )
    assert [o for layer in LAYERS for o in layer.offences(root)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo\n",
        "from torch.distributed._composable import replicate\n",
        "import torch\ntorch._C._log_api_usage_once('x')\n",
        "import torch.distributed as dist\ndist._coalescing_manager()\n",
        "from torch import nn\nnn.Module()._call_impl\nnn._reduction\n",
    ],
)
def test_checker_finds_private_names_of_torch(write: Write, source: str) -> None:
    assert private_torch("suites", write({"suites/test_mine.py": source}))


def test_checker_finds_names_that_stand_twice(write: Write) -> None:
    root = write(
        {
            "harness/a/__init__.py": "",
            "harness/a/law.py": "class Kind: ...\nclass _Own: ...\n",
            "reports/__init__.py": "",
            "reports/law.py": "class Kind: ...\nclass _Own: ...\n",
        }
    )
    assert repeated(root, _public_classes) == ["Kind: harness/a/law.py, reports/law.py"]
    assert repeated(root, lambda module: [module.path.rpartition("/")[2]]) == [
        "law.py: harness/a/law.py, reports/law.py"
    ]


def test_checker_leaves_public_names_and_dunders_alone(write: Write) -> None:
    source = "import torch\nfrom torch import nn\ntorch.__version__\nnn.Linear(1, 1)\nself._own\n"
    assert private_torch("suites", write({"suites/test_mine.py": source})) == []


@pytest.mark.parametrize(
    "source",
    [
        "from harness.c import x\n",
        "def f():\n    import harness.c\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from harness.c import x\n",
    ],
)
def test_checker_finds_a_cycle(write: Write, source: str) -> None:
    root = write(
        {"harness/b.py": source, "harness/c.py": "import harness.b\n", "harness/d.py": "import harness.b\n"}
    )
    assert set(cycle("harness", root)) == {"harness.b", "harness.c"}


def test_checker_finds_files_named_for_nothing(write: Write) -> None:
    assert homeless(write({"harness/utils.py": "", "suites/common/test_x.py": ""})) == [
        "harness/utils.py",
        "suites/common/test_x.py",
    ]


def _is_below(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def _is_private_torch(name: str) -> bool:
    top, *rest = name.split(".")
    return top == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def _in_full(name: str, bound: Mapping[str, str]) -> str:
    first, dot, rest = name.partition(".")
    return bound.get(first, first) + dot + rest


def _module_of(name: str, files: Mapping[str, Module]) -> str | None:
    """Name the module of the package that an import names: the name itself, or the owner of the attribute."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name or None
