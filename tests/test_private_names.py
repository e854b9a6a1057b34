"""A torch that lacks a private name loses what stands on it, by name, and nothing else."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from shardproof.engine.registry import BUILT_IN
from shardproof.harness.errors import HarnessBug
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.torch_compat import private_names
from shardproof.harness.torch_compat.private_names import (
    NAMES,
    Feature,
    UnsupportedTorchError,
    optional,
    private,
    require,
)
from tests.records import TRAINS, records_by_engine
from tests.shell import ROOT, Done, python


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_each_name_is_there_and_is_used(name: private_names.PrivateName) -> None:
    assert optional(name.path) is not None
    sources = [p.read_text() for p in (ROOT / "harness").rglob("*.py") if p.name != "private_names.py"]
    attribute = name.path.rpartition(":")[2].rpartition(".")[2]
    assert any(attribute in source for source in sources)


def test_a_name_that_is_missing_is_refused_with_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_names, "_find", lambda path: None if "_World" in path else path)
    with pytest.raises(UnsupportedTorchError, match=r"^worlds of threads: .*distributed_c10d\._World"):
        private("torch.distributed.distributed_c10d:_World")
    with pytest.raises(UnsupportedTorchError, match="worlds of threads"):
        require(Feature.THREADS)
    require(Feature.OPERATORS, Feature.COLLECTIVES, Feature.CUDA_STREAMS)


def test_a_name_that_is_not_listed_is_a_bug_of_ours() -> None:
    with pytest.raises(HarnessBug, match="torch:_foreach_add_"):
        private("torch:_foreach_add_")


# A stand-in for a release without a name: Python runs it before anything else, in every process of the run. The name
# is hidden from our code alone, because the torch that is installed needs it.
HIDES = """
import builtins, sys
real = builtins.__import__

def hiding(name, globals=None, *rest, **options):
    if name == {hidden!r} and (globals or {{}}).get("__name__", "").startswith("shardproof.engine."):
        raise ModuleNotFoundError("No module named " + repr(name), name=name)
    module = real(name, globals, *rest, **options)
    ours = sys.modules.get("shardproof.harness.torch_compat.private_names")
    find = getattr(ours, "_find", None)
    if find is not None and not hasattr(ours, "is_hiding"):
        ours.is_hiding = True
        ours._find = lambda path: None if path == {hidden!r} else find(path)
    return module

builtins.__import__ = hiding
"""


def _call(tmp_path: Path, hidden: str, *arguments: str) -> Done:
    """Call the command line where torch lacks ``hidden``."""
    (tmp_path / "sitecustomize.py").write_text(HIDES.format(hidden=hidden))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    return python("-m", "shardproof", *arguments, PYTHONPATH=path, XDG_CACHE_HOME=str(tmp_path))


def _smoke(tmp_path: Path, hidden: str, *options: str) -> tuple[int, dict[str, tuple[Verdict, str]], str]:
    """Run smoke where torch lacks ``hidden``; returns the exit code, verdict and headline by engine, and the output."""
    out = tmp_path / "run"
    done = _call(tmp_path, hidden, "run", "--suite", "smoke", "--out", str(out), *options)
    records = read_run(out).records if out.exists() else ()
    found = {engine: (r.verdict, r.headline) for engine, r in records_by_engine(records, TRAINS).items()}
    return done.returncode, found, done.stdout + done.stderr


def test_one_engine_that_lacks_a_name_fails_no_other(tmp_path: Path) -> None:
    code, found, said = _smoke(tmp_path, "torch.distributed._composable.replicate_with_fsdp")
    assert code == 1, said  # not conforming: an engine that was selected is not judged
    assert {verdict for verdict, _ in found.values()} == {Verdict.PASSED}, found
    assert sorted(set(BUILT_IN) - set(found)) == ["torch.replicate"]
    assert re.search(
        r"not judged: torch.replicate: needs .*replicate_with_fsdp, which torch 2\S+ does not have", said
    )


@pytest.mark.parametrize(("command", "code"), [("list", 0), ("doctor", 3)])
def test_one_engine_that_lacks_a_name_is_named_with_the_cause(
    command: str, code: int, tmp_path: Path
) -> None:
    done = _call(tmp_path, "torch.distributed._composable.replicate_with_fsdp", command)
    assert done.returncode == code, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "torch.replicate" in line)
    assert "needs torch.distributed._composable.replicate_with_fsdp, which torch" in line
    assert "torch.fsdp2" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_watch_that_lacks_a_name_is_refused_and_the_rest_is_judged(tmp_path: Path) -> None:
    hidden = "torch.utils._python_dispatch:TorchDispatchMode"
    code, found, said = _smoke(tmp_path, hidden, "--engine", "torch.ddp", "--thorough")
    verdict, headline = found["torch.ddp"]
    assert (code, verdict) == (3, Verdict.ERRORED), said
    assert "the watches over races and lifetimes: expected a release of torch that has" in headline
    (plain := tmp_path / "plain").mkdir()
    code, found, said = _smoke(plain, hidden, "--engine", "torch.ddp")
    assert (code, found["torch.ddp"][0]) == (0, Verdict.PASSED), said


def test_worlds_of_threads_that_lack_a_name_are_refused_and_processes_are_judged(tmp_path: Path) -> None:
    hidden = "torch._C._distributed_c10d:_set_thread_isolation_mode"
    code, found, said = _smoke(tmp_path, hidden, "--engine", "torch.ddp")
    assert (code, found["torch.ddp"][0]) == (3, Verdict.ERRORED), said
    assert (
        "worlds of threads: expected a release of torch that has torch._C._distributed_c10d"
        in found["torch.ddp"][1]
    )
    (processes := tmp_path / "processes").mkdir()
    code, found, said = _smoke(processes, hidden, "--engine", "torch.ddp", "--world", "processes:2")
    assert (code, found["torch.ddp"][0]) == (0, Verdict.PASSED), said


def test_what_is_only_slower_without_a_name_is_judged(tmp_path: Path) -> None:
    hidden = "torch.distributed.tensor._sharding_prop:ShardingPropagator"
    code, found, said = _smoke(tmp_path, hidden, "--engine", "torch.fsdp2")
    assert (code, found["torch.fsdp2"][0]) == (0, Verdict.PASSED), said
