"""The page about the reference engine lists its files and private names, and its scripts run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import shardproof.engine.reference.torch_private
from tests.shell import ROOT, python

PAGE = ROOT / "docs" / "reference-engine.md"
FILES = ROOT / "engine" / "reference"


def test_files_are_listed_in_the_order_of_their_imports() -> None:
    listed = re.findall("^\\| \\[([\\w/]+)\\.py\\]", PAGE.read_text(), re.M)
    files = [f.relative_to(FILES).with_suffix("").as_posix() for f in FILES.rglob("*.py")]
    assert sorted(listed) == sorted(name for name in files if not name.endswith("__init__"))
    for index, name in enumerate(listed):
        nodes = ast.walk(ast.parse((FILES / f"{name}.py").read_text()))  # imports for typing alone count too
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        prefix = "shardproof.engine.reference."
        used = {m.removeprefix(prefix).replace(".", "/") for m in modules if m.startswith(prefix)}
        assert used <= set(listed[:index]), f"{name}.py imports from below itself"


def test_every_private_name_of_torch_is_listed() -> None:
    section = PAGE.read_text().partition("torch_private.py) | because")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert sorted(listed) == sorted(shardproof.engine.reference.torch_private.__all__)


# Where torch finalizes the interpreter, a thread of gloo that is late to free its last tensors aborts the process, on a
# busy machine now and then (pytorch/pytorch#190489). So a script here ends as ranks of a world do.
_ENDS = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.py", "train_wrapped.py"])
def test_the_script_runs(name: str, tmp_path: Path) -> None:
    (code,) = re.findall(rf"<!-- script: {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.S)
    script = tmp_path / name
    script.write_text(code + _ENDS)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = python(*launcher, str(script))
    assert done.returncode == 0, done.stderr
    # Not by lines: two ranks write to one pipe.
    lines = re.findall(r"rank (\d) step (\d) loss \d+\.\d{4} norm (\d+\.\d{4})", done.stdout)
    assert {(rank, step) for rank, step, _ in lines} == {(r, s) for r in "01" for s in "012"}
    assert len({norm for _, step, norm in lines if step == "0"}) == 1, "the norm is that of all ranks"
