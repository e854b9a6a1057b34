"""What a machine can run: the checks of ``shardproof doctor``, each of which runs what it reports on."""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardproof.engine.registry import EngineNotFoundError, known_engines, what_is_missing
from shardproof.harness.errors import MachineError
from shardproof.harness.runner.accelerator_worlds import BEST, accelerator_worlds
from shardproof.harness.runner.engines import describe
from shardproof.harness.torch_compat.accelerators import accelerator, num_devices
from shardproof.harness.torch_compat.releases import TESTED, minor, remark
from shardproof.harness.worlds.launch import launch
from shardproof.harness.worlds.machine import require_loopback
from shardproof.harness.worlds.outcome import Returned
from shardproof.harness.worlds.processes.lineage import can_adopt
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import OWN_KINDS, WorldSpec

_NEEDS_DESCRIPTORS = 256  # a world of eight ranks, with its sockets and journals
_NEEDS_FREE_BYTES = 200 * 2**20  # a run of the bundled suites keeps far less than half of this


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check; ``detail`` is what it found and, if the check failed, what to try."""

    what: str
    is_ok: bool
    detail: str


def examine() -> list[Finding]:
    """Check versions and disk, and run a world of two ranks of each kind that this machine should support."""
    specs = [WorldSpec(kind=kind, size=2, deadline_s=30.0) for kind in OWN_KINDS]
    worlds = [_world(spec) for spec in (*specs, *accelerator_worlds())]
    return [
        _python(),
        _torch(),
        _disk(),
        _accelerators(accelerator()),
        _leaked_processes(),
        _loopback(),
        _descriptors(),
        *worlds,
        *(_engine(name) for name in sorted(known_engines()) if not what_is_missing(name)),
    ]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        what="python", is_ok=sys.version_info >= (3, 11), detail=f"{version} (needs 3.11 or newer)"
    )


def _torch() -> Finding:
    has_gloo = dist.is_available() and dist.is_gloo_available()
    untested = remark(torch.__version__)
    parts = [
        f"{torch.__version__} (tested: {', '.join(TESTED)})",
        f"gloo {'available' if has_gloo else 'missing'}",
    ]
    is_supported = minor(torch.__version__) >= minor(TESTED[0])
    return Finding(
        what="torch",
        is_ok=is_supported and has_gloo,
        detail="; ".join([*parts, *([untested] if untested else [])]),
    )


def _disk() -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    detail = f"{free // 2**20} MiB free in {folder} (needs {_NEEDS_FREE_BYTES // 2**20})"
    return Finding(what="disk", is_ok=free >= _NEEDS_FREE_BYTES, detail=detail)


def _accelerators(kind: torch.device | None) -> Finding:
    if kind is None:
        detail = "none (worlds on the CPU need none)"
    else:
        num, best = num_devices(kind.type), accelerator_worlds()[0]
        why = "; backends such as nccl refuse two ranks on one device, so ranks are threads" * (num == 1)
        detail = f"{num} of {kind.type}: --world {BEST} is {best}{why}"
    return Finding(what="accelerators", is_ok=True, detail=detail)


def _loopback() -> Finding:
    try:
        require_loopback()
    except MachineError as error:
        return Finding(what="loopback", is_ok=False, detail=str(error))
    return Finding(what="loopback", is_ok=True, detail="processes of this machine reach each other")


def _descriptors() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"at most {limit} open files in a process (needs {_NEEDS_DESCRIPTORS})"
    return Finding(what="files", is_ok=limit >= _NEEDS_DESCRIPTORS, detail=detail)


def _engine(name: str) -> Finding:
    try:
        version = describe(name).version
    except EngineNotFoundError as error:
        return Finding(what=f"engine {name}", is_ok=False, detail=error.problem)
    return Finding(what=f"engine {name}", is_ok=True, detail=version)


def _leaked_processes() -> Finding:
    """Check that processes that a rank started are found after they have left its process group."""
    if can_adopt():
        detail = "every process that a rank starts is found and ended, even in a session of its own"
        return Finding(what="left processes", is_ok=True, detail=detail)
    detail = "only those in the process group of a rank are found and ended; a Linux machine finds all"
    return Finding(what="left processes", is_ok=False, detail=detail)


def _world(spec: WorldSpec) -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcomes = launch(spec, _sum_of_ranks, folder=Path(folder)).outcomes
        except MachineError as error:
            return Finding(what=f"world {spec}", is_ok=False, detail=str(error))
    expected = sum(range(spec.size))
    bad = [o for o in outcomes if not (isinstance(o, Returned) and o.value == expected)]
    detail = (
        f"{spec.size} ranks agreed on a sum"
        if not bad
        else f"expected {expected} on every rank, got {bad[0]}"
    )
    return Finding(what=f"world {spec}", is_ok=not bad, detail=detail)


def _sum_of_ranks(context: RankContext) -> float:
    mine = torch.tensor([float(context.rank)], device=context.device)
    dist.all_reduce(mine)
    return float(mine)
