"""Worlds on an accelerator: their names, and cases and mutants on an accelerator made of host memory."""

from __future__ import annotations

import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from shardproof import UsageError, Verdict, WorldKind, WorldSpec, launch
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.accelerator_worlds import concrete
from shardproof.harness.torch_compat import accelerators
from shardproof.harness.torch_compat.accelerators import backends_for, is_here, require_device
from shardproof.harness.verdicts.known_failures import matches_world
from tests.shell import ROOT, python

pytestmark = pytest.mark.timeout(400)  # the first test that needs the device builds it, beside other tests

FOLDER = ROOT / "tests" / "hostmem"
MUTANTS = "shardproof.engine.mutants"
RACING = f"{MUTANTS}.races:ReducesBeforeGradientsAreThere"
FREEING = f"{MUTANTS}.races:FreesTheCopiedBuffer"
SUMMING = f"{MUTANTS}.gradient_scale:SumsInsteadOfAveraging"
UNPINNED = f"{MUTANTS}.device:DropsThePinnedCopy"
LEFT = f"{MUTANTS}.device:LeavesStateOnTheDevice"
KEPT = f"{MUTANTS}.device:KeepsOffloadedGradients"
EARLY = f"{MUTANTS}.device:UnscalesWithWhatHasNotArrived"
PARITY = "smoke/test_smoke.py::test_trains_the_same_model"
LAYOUTS = "parity/test_multi_group.py::test_trains_with_several_parameter_groups[mlp_uneven]"
SHARE = "smoke/test_share.py::test_holds_its_share"
RACES = "races/test_streams.py::test_streams_wait_whatever_the_layout"
PINNED = "gpu/test_cuda.py::test_trains_the_same_transformer_from_pinned_memory"
STATE = "zero/test_offload.py::test_trains_the_same_model_from_the_host[adamw-m3-zero2]"
SHARDS = "offload/test_host.py::test_shards_leave_the_device[pinned]"
SCALES = "offload/test_host.py::test_unscales_on_the_host_with_what_has_arrived"
BUFFERS = "composable/test_training.py::test_steps_leave_nothing_to_a_collector"
GRAPHS = "gpu/test_cuda.py::test_a_replayed_graph_equals_the_eager_step"
OVERLAP = "prefetch/test_overlap.py::test_reductions_overlap_backward[shard]"
WORLD, THREADS = "processes:2:hostmem", "threads:2:hostmem"
DIVIDED = "parity/test_divide_factor.py::test_divides_sums_of_shards_by_more_than_the_ranks[before-and-after]"
PREMULTIPLIED = "combinations/test_programs.py::test_units[baa67d91]"


@pytest.fixture(scope="module")
def hostmem() -> Any:  # Any: a module that is loaded by its path
    """The module that builds the device; it registers nothing in this process."""
    spec = spec_from_file_location("hostmem_to_build", FOLDER / "hostmem.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def on_path(hostmem: Any) -> str:
    """Return the PYTHONPATH that lets ``import torch`` find the device."""
    hostmem.build()
    return f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def test_a_world_may_be_on_any_device() -> None:
    assert str(WorldSpec.parse("processes:2:npu")) == "processes:2:npu"
    assert str(WorldSpec.parse("threads:2:npu")) == "threads:2:npu"
    with pytest.raises(UsageError, match="processes:2:npu"):
        WorldSpec.parse("simulated:2:npu")
    assert is_here("cpu")
    assert backends_for("cpu") == "gloo"


@pytest.mark.parametrize(("device", "got"), [("npu", "an unknown one"), ("mtia", "none of its kind")])
def test_a_device_that_is_not_here_starts_no_world(device: str, got: str, tmp_path: Path) -> None:
    spec = WorldSpec(kind=WorldKind.PROCESSES, size=2, device=device)
    with pytest.raises(UsageError, match=f"the device {device}: expected .* got {got}"):
        launch(spec, len, folder=tmp_path / "world")
    assert not (tmp_path / "world").exists()


@pytest.mark.parametrize(
    ("pattern", "world", "is_like"),
    [
        ("*:2", "processes:2:npu", True),
        ("!*:1", "processes:1:npu", False),
        ("*:*:cuda", "processes:2:cuda", True),
        ("*:*:cuda", "processes:2:npu", False),
        ("!*:*:*", "processes:2:npu", False),
        ("!*:*:*", "threads:2", True),
        ("!*:1 *:*:cpu", "threads:2", True),
        ("!*:1 *:*:cpu", "threads:1", False),
        ("!*:1 *:*:cpu", "threads:2:npu", False),
    ],
)
def test_a_known_failure_is_of_every_device_unless_it_names_one(
    pattern: str, world: str, is_like: bool
) -> None:
    assert matches_world(pattern, world) is is_like


def test_a_machine_without_a_compiler_is_reported(
    hostmem: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(hostmem.CannotBuildError, match=r"no no-such-compiler; install"):
        hostmem.build()


def test_a_build_that_takes_too_long_leaves_no_compiler_behind(
    hostmem: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for the compiler starts another process, as g++ does."""
    compiler, started = tmp_path / "compiler", tmp_path / "started"
    compiler.write_text(f"#!/bin/sh\nsleep 300 &\necho $! >> {started}\nwait\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(hostmem, "BUILD_LIMIT_S", 2.0)
    with pytest.raises(hostmem.CannotBuildError, match="expected a build within 2 s"):
        hostmem.build()
    children = [int(pid) for pid in started.read_text().split()]
    assert children
    assert not [pid for pid in children if _runs(pid)]


def _runs(pid: int) -> bool:
    """Return whether a process runs; an ended process may still wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


NO_BACKEND = """
import torch.distributed as dist
from shardproof.harness.torch_compat.accelerators import backends_for, num_devices, require_device
print(num_devices("hostmem"), backends_for("hostmem"))
del dist.Backend.default_device_backend_map["hostmem"]
require_device("hostmem")
"""


def test_a_device_without_a_backend_is_reported(on_path: str) -> None:
    done = python("-c", NO_BACKEND, PYTHONPATH=on_path)
    assert done.stdout == "2 cpu:gloo,hostmem:hostccl\n", done.stderr
    assert "the device hostmem: expected a backend registered for it, got none" in done.stderr


CELLS = """
import torch
def gradients(device, is_last_asked):
    torch.manual_seed(0)
    model = torch.nn.LSTM(5, 7, num_layers=2).to(device)
    output, (hidden, cell) = model(torch.randn(3, 4, 5).to(device))
    (cell.sum() if is_last_asked else output.square().sum()).backward()
    return [output.cpu(), *(parameter.grad.cpu() for parameter in model.parameters())]
for is_last_asked in (False, True):
    for device in zip(gradients("cpu", is_last_asked), gradients("hostmem", is_last_asked), strict=True):
        torch.testing.assert_close(*device)
print("alike")
"""


def test_the_cell_of_an_lstm_is_that_of_a_cpu(on_path: str) -> None:
    """Torch computes the cell by one operator of the device, which a CPU lacks."""
    done = python("-c", CELLS, PYTHONPATH=on_path)
    assert done.stdout == "alike\n", done.stderr


ROUNDING = """
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.oracle import oracle, oracle_actor
from shardproof.suites.training import train
from shardproof.harness.torch_compat.accelerators import use_only
use_only("hostmem")
where = []
forward = oracle_actor.OracleActor.forward
def noted(self, microbatch, *inputs, **options):
    where.append((inputs[0].dtype, inputs[0].device.type))
    return forward(self, microbatch, *inputs, **options)
oracle_actor.OracleActor.forward = noted
found = oracle.run_oracle(train(MLP_EVEN), 2, device="hostmem")
print(sorted({(str(dtype), device) for dtype, device in where}), any(found.noise.values()))
"""


def test_rounding_is_measured_where_the_ranks_compute(on_path: str) -> None:
    done = python("-c", ROUNDING, PYTHONPATH=on_path)
    assert done.stdout == "[('torch.float32', 'hostmem'), ('torch.float64', 'cpu')] True\n", done.stderr


def test_require_device_knows_the_cpu() -> None:
    require_device("cpu", 7)


def test_nccl_needs_a_device_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would refuse two ranks on one in each case, as an error of the engine."""
    monkeypatch.setattr(accelerators, "_backend", lambda kind: "nccl")
    monkeypatch.setattr(accelerators, "num_devices", lambda kind: 1)
    require_device("cuda", 1)
    with pytest.raises(UsageError, match=r"a device for each, .* got 1 on this machine; try threads:2:cuda"):
        require_device("cuda", 2)


def _node(engine: str, world: str, case: str) -> str:
    """Name a case as pytest does: engine and world come before its own parameters."""
    function, _, parameters = case.removesuffix("]").partition("[")
    return f"suites/{function}[{'-'.join(filter(None, (f'{engine}@{world}', parameters)))}]"


def test_cases_and_mutants_on_host_memory(on_path: str, tmp_path: Path) -> None:
    passed = dict.fromkeys((PARITY, SHARE, RACES), Verdict.PASSED)
    honest = passed | {PINNED: Verdict.PASSED, GRAPHS: Verdict.UNSUPPORTED}
    replicas = dict.fromkeys((SHARE, PINNED), Verdict.UNSUPPORTED)
    expected = {
        ("torch.ddp", WORLD): honest | replicas,
        ("torch.fsdp2", WORLD): honest | {BUFFERS: Verdict.PASSED, SHARDS: Verdict.PASSED},
        ("reference.zero2", WORLD): {STATE: Verdict.PASSED},
        ("torch.replicate", WORLD): {
            PARITY: Verdict.PASSED
        },  # reduces by calls that return no work, as nccl's
        ("reference", WORLD): honest | {BUFFERS: Verdict.PASSED},  # which once left buffers where they were
        (SUMMING, WORLD): {PARITY: Verdict.FAILED},
        (RACING, WORLD): {RACES: Verdict.FAILED},
        (UNPINNED, WORLD): {PINNED: Verdict.FAILED},
        (LEFT, WORLD): {STATE: Verdict.FAILED},
        (KEPT, WORLD): {SHARDS: Verdict.FAILED},
        ("torch.ddp", THREADS): passed | {SHARE: Verdict.UNSUPPORTED},
        ("torch.fsdp2", THREADS): passed
        | dict.fromkeys((DIVIDED, PREMULTIPLIED, PINNED, OVERLAP), Verdict.PASSED)
        | {SCALES: Verdict.KNOWN_FAILURE},
        ("reference", THREADS): passed | dict.fromkeys((DIVIDED, SHARDS, SCALES), Verdict.PASSED),
        (SUMMING, THREADS): {PARITY: Verdict.FAILED},
        (RACING, THREADS): {RACES: Verdict.FAILED},
        (KEPT, THREADS): {SHARDS: Verdict.FAILED},
        (EARLY, THREADS): {SCALES: Verdict.FAILED},
        # On the CPU of a machine that has an accelerator, whose streams torch offers.
        ("torch.fsdp2", "threads:2"): {RACES: Verdict.PASSED},
    }
    asked = {(*cell, case): verdict for cell, cases in expected.items() for case, verdict in cases.items()}
    engines, worlds = (dict.fromkeys(part) for part in zip(*expected, strict=True))
    chosen = [*(f"--engine={engine}" for engine in engines), *(f"--world={world}" for world in worlds)]
    nodes = [_node(*place) for place in asked]
    options = ("-m", "pytest", "-q", "-pno:cacheprovider", *chosen, f"--out={tmp_path / 'run'}", *nodes)
    done = python(*options, limit_s=380, PYTHONPATH=on_path)
    records = {(r.engine, r.world, r.case): r for r in read_run(tmp_path / "run").records}
    got = {place: record.verdict for place, record in records.items()}
    assert got == asked, done.stdout + done.stderr
    why = records["torch.fsdp2", WORLD, GRAPHS].headline
    assert why == "needs the device cuda, which this world lacks; not run"
    for world in (WORLD, THREADS):  # seen by the watch, not by numbers
        assert "streams wait for each other" in records[RACING, world, RACES].headline
    ledgers = [[c.num_bytes for c in records["reference", w, PARITY].ledger] for w in (WORLD, THREADS)]
    assert ledgers[0] == ledgers[1] != []


LATE = """
import torch
side, x = torch.Stream("hostmem"), torch.zeros(4, device="hostmem")
torch.accelerator.synchronize()
with side:
    x.add_(torch.ones(4, device="hostmem"))
seen = [x.sum().item()]
torch.accelerator.current_stream().wait_stream(side)
print(*seen, x.sum().item())
"""


def test_work_of_a_stream_is_late_until_somebody_waits(on_path: str) -> None:
    seeded = [python("-c", LATE, PYTHONPATH=on_path, HOSTMEM_SEED=str(seed)).stdout for seed in range(6)]
    assert set(seeded) == {"0.0 4.0\n", "4.0 4.0\n"}
    assert python("-c", LATE, PYTHONPATH=on_path).stdout == "4.0 4.0\n"


REUSED = """
import torch
side, first = torch.Stream("hostmem"), torch.full((9,), 1.0, device="hostmem")
torch.accelerator.synchronize()
with side:
    copied = first + 0
place = first.data_ptr()
if {is_recorded}:
    first.record_stream(side)
del first
second = torch.full((9,), 2.0, device="hostmem")
torch.accelerator.current_stream().synchronize()
side.synchronize()
print(second.data_ptr() == place, copied.cpu().tolist()[0])
"""


@pytest.mark.parametrize("is_recorded", [False, True])
def test_released_memory_is_used_again_unless_a_stream_is_recorded(on_path: str, is_recorded: bool) -> None:
    script = REUSED.format(is_recorded=is_recorded)
    seeded = {python("-c", script, PYTHONPATH=on_path, HOSTMEM_SEED=str(seed)).stdout for seed in range(6)}
    # Under some seeds the other stream is done by the time of the release.
    assert seeded == {"True 1.0\n", "False 1.0\n" if is_recorded else "True 2.0\n"}


def test_a_missing_wait_is_a_wrong_number_where_streams_are_late(on_path: str, tmp_path: Path) -> None:
    honest, wrong = ("torch.fsdp2", "reference"), (RACING, FREEING)
    judged = [_node(engine, THREADS, LAYOUTS) for engine in (*honest, *wrong)]
    chosen = [f"--engine={engine}" for engine in (*honest, *wrong)]
    options = ("-m", "pytest", "-q", "-pno:cacheprovider", *chosen, f"--world={THREADS}")
    done = python(
        *options, f"--out={tmp_path / 'run'}", *judged, limit_s=300, PYTHONPATH=on_path, HOSTMEM_SEED="1"
    )
    found = {r.engine: (r.verdict, r.headline) for r in read_run(tmp_path / "run").records}
    for engine in honest:
        assert found[engine][0] is Verdict.PASSED, done.stdout + done.stderr
    for engine in wrong:
        assert found[engine][0] is Verdict.FAILED, done.stdout + done.stderr
        assert "matches the oracle" in found[engine][1]


@pytest.mark.parametrize(
    ("shown", "best"),
    [("0,1", "processes:2:hostmem"), ("0", "threads:2:hostmem")],
    ids=["two devices", "one device"],
)
def test_the_best_world_of_a_machine_has_several_ranks(on_path: str, shown: str, best: str) -> None:
    script = "from shardproof.harness.runner.accelerator_worlds import concrete; print(concrete('gpu'))"
    done = python("-c", script, PYTHONPATH=on_path, HOSTMEM_VISIBLE_DEVICES=shown)
    assert done.stdout == f"{best}\n", done.stderr


def test_a_machine_without_an_accelerator_has_no_world_on_one() -> None:
    with pytest.raises(UsageError, match="--world gpu: expected an accelerator that torch finds on this"):
        concrete("gpu")


HIDDEN = """
import torch
from shardproof.harness.torch_compat.accelerators import hide_accelerators
hide_accelerators()
print(torch.accelerator.is_available(), torch.accelerator.current_accelerator(check_available=True))
"""


def test_a_world_on_the_cpu_finds_no_accelerator(on_path: str) -> None:
    done = python("-c", HIDDEN, PYTHONPATH=on_path)
    assert done.stdout == "False None\n", done.stderr
