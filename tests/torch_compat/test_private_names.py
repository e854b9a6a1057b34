"""Without a private name of torch only the features that need it fail, and the error names them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardproof.engine.registry import BUILT_IN
from shardproof.harness.errors import HarnessBug
from shardproof.harness.records.record import Record, Verdict
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
from tests.sample_records import TRAINS, records_by_engine
from tests.shell import ROOT, python


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_each_name_is_there_and_is_used(name: private_names.PrivateName) -> None:
    assert optional(name.path) is not None
    sources = [p.read_text() for p in (ROOT / "harness").rglob("*.py") if p.name != "private_names.py"]
    attribute = name.path.rpartition(":")[2].rpartition(".")[2]
    assert any(attribute in source for source in sources)


def test_a_missing_name_is_refused_with_the_lost_feature(monkeypatch: pytest.MonkeyPatch) -> None:
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


SMOKE = ("run", "--suite", "smoke")
TRAIN = (*SMOKE, "-k", "trains")
OF_DDP = (*SMOKE, "--engine", "torch.ddp")
# Several commands in one process, because importing torch takes longer than most of them.
CALLS = """
import json, sys
from shardproof.harness.cli.main import main

for words in json.loads(sys.argv[1]):
    print("code", main(words), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """Exit code, output and records, by engine, of one command."""

    code: int
    printed: str
    found: dict[str, Record]


def _call(tmp_path: Path, hidden: str, *commands: tuple[str, ...]) -> list[Called]:
    """Call the command line where torch lacks ``hidden``; each run leaves its records in a folder of its own."""
    (tmp_path / "sitecustomize.py").write_text(HIDES.format(hidden=hidden))
    outs = [tmp_path / str(number) for number in range(len(commands))]
    words = [
        [*command, f"--out={out}"] if command[0] == "run" else command
        for command, out in zip(commands, outs, strict=True)
    ]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = python("-c", CALLS, json.dumps(words), PYTHONPATH=path, XDG_CACHE_HOME=str(tmp_path))
    parts = re.findall(r"(.*?)^code (\d)$", done.stdout, re.M | re.S)
    assert len(parts) == len(commands), done.stdout + done.stderr
    return [
        Called(
            code=int(code),
            printed=printed + done.stderr,
            found=records_by_engine(read_run(out).records, TRAINS) if out.exists() else {},
        )
        for (printed, code), out in zip(parts, outs, strict=True)
    ]


def test_one_engine_that_lacks_a_name_fails_no_other_and_is_named_with_the_cause(tmp_path: Path) -> None:
    run, *tables = _call(
        tmp_path, "torch.distributed._composable.replicate_with_fsdp", TRAIN, ("list",), ("doctor",)
    )
    assert run.code == 1, run.printed  # not conforming: an engine that was selected is not judged
    assert {record.verdict for record in run.found.values()} == {Verdict.PASSED}, run.printed
    assert sorted(set(BUILT_IN) - set(run.found)) == ["torch.replicate"]
    why = r"not judged: torch.replicate: needs .*replicate_with_fsdp, which torch 2\S+ does not have"
    assert re.search(why, run.printed)
    assert [table.code for table in tables] == [0, 3]
    for table in tables:
        (line,) = (line for line in table.printed.splitlines() if "torch.replicate" in line)
        assert "needs torch.distributed._composable.replicate_with_fsdp, which torch" in line
        assert "torch.fsdp2" in table.printed
        assert "Traceback" not in table.printed


def test_a_watch_that_lacks_a_name_is_refused_and_the_rest_is_judged(tmp_path: Path) -> None:
    hidden = "torch.utils._python_dispatch:TorchDispatchMode"
    watched, plain = _call(tmp_path, hidden, (*OF_DDP, "--thorough"), OF_DDP)
    record = watched.found["torch.ddp"]
    assert (watched.code, record.verdict) == (3, Verdict.ERRORED), watched.printed
    assert "the watches over races and lifetimes: expected a release of torch that has" in record.headline
    assert (plain.code, plain.found["torch.ddp"].verdict) == (0, Verdict.PASSED), plain.printed


def test_worlds_of_threads_that_lack_a_name_are_refused_and_processes_are_judged(tmp_path: Path) -> None:
    hidden = "torch._C._distributed_c10d:_set_thread_isolation_mode"
    threads, processes = _call(tmp_path, hidden, OF_DDP, (*OF_DDP, "--world", "processes:2"))
    record = threads.found["torch.ddp"]
    assert (threads.code, record.verdict) == (3, Verdict.ERRORED), threads.printed
    expected = "worlds of threads: expected a release of torch that has torch._C._distributed_c10d"
    assert expected in record.headline
    assert (processes.code, processes.found["torch.ddp"].verdict) == (0, Verdict.PASSED), processes.printed


def test_an_engine_that_is_only_slower_without_a_name_is_judged(tmp_path: Path) -> None:
    hidden = "torch.distributed.tensor._sharding_prop:ShardingPropagator"
    (run,) = _call(tmp_path, hidden, (*SMOKE, "--engine", "torch.fsdp2"))
    assert (run.code, run.found["torch.fsdp2"].verdict) == (0, Verdict.PASSED), run.printed
