"""Step time, peak memory and overlap of DDP, FSDP2 and the reference engine, side by side on one accelerator.

    python -m campaigns.gpu_step --world processes:1:cuda --world threads:2:cuda

One transformer is trained by each engine in turn, step by step in one world, so that a ratio is one of the same minute.
Times are medians of the rounds. Peaks are the caching allocator's, over what was held before
the step; where ranks are threads they are of all ranks together, and hold the transport's copies.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine_work import (
    COMPOSABLE,
    LOSS_TOLERANCE,
    Contender,
    Name,
    Reshard,
    Work,
    contender_of,
    microbatches_of,
)
from shardproof.harness.torch_compat.accelerators import backends_for, device_of_rank, make_current
from shardproof.harness.torch_compat.process_groups import FileStore
from shardproof.harness.worlds.launch import launch
from shardproof.harness.worlds.outcome import Raised, causal
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import WorldSpec
from shardproof.harness.worlds.threads.buffer_guard import BufferGuard

_WARM_UPS = 3
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One engine on one rank: milliseconds of each round, bytes, and milliseconds of work beside other work."""

    name: Name
    step_ms: tuple[float, ...]
    peak_bytes: int | None
    overlap_ms: float | None
    loss: float


def measure(device: torch.device, rank: int, work: Work, *, is_alone: bool) -> list[Figures]:
    """Train with each engine in turn on the calling rank; ``is_alone`` says that no other rank shares its process."""
    tokens = [microbatch.to(device) for microbatch in microbatches_of(work, rank)]
    contenders = [_contender(name, work, device) for name in work.names]
    peaks = {one.name: _peak_bytes(one, tokens, device) for one in contenders}
    times: dict[Name, list[float]] = {name: [] for name in work.names}
    losses: dict[Name, float] = {}
    for turn in range(work.num_rounds):
        first = turn % len(contenders)
        for one in contenders[first:] + contenders[:first]:
            dist.barrier()
            elapsed, losses[one.name] = _timed(one, tokens, device)
            times[one.name].append(elapsed)
    overlaps: dict[Name, float] = {}
    if is_alone and device.type == "cuda":
        overlaps = {one.name: _overlap_ms(one, tokens, device) for one in contenders}
    return [
        Figures(
            name=name,
            step_ms=tuple(times[name]),
            peak_bytes=peaks[name],
            overlap_ms=overlaps.get(name),
            loss=losses[name],
        )
        for name in work.names
    ]


def _contender(name: Name, work: Work, device: torch.device) -> Contender:
    contender = contender_of(name, work, device.type)
    return replace(contender, optimizer=torch.optim.AdamW(contender.module.parameters(), lr=1e-3))


def _peak_bytes(one: Contender, tokens: Sequence[torch.Tensor], device: torch.device) -> int | None:
    """Warm up, and return the peak of one step over what is held before it; None on a device that does not count."""
    for _ in range(_WARM_UPS):
        one.step(tokens)
    memory = torch.get_device_module(device)
    if not hasattr(memory, "max_memory_allocated"):
        return None
    _meet(device)
    before = memory.memory_allocated(device)
    memory.reset_peak_memory_stats(device)
    _meet(device)
    one.step(tokens)
    _meet(device)
    return int(memory.max_memory_allocated(device)) - int(before)


def _meet(device: torch.device) -> None:
    torch.accelerator.synchronize(device)
    dist.barrier()


def _timed(one: Contender, tokens: Sequence[torch.Tensor], device: torch.device) -> tuple[float, float]:
    """Return the milliseconds of a step, from an idle device to an idle device, and its loss."""
    torch.accelerator.synchronize(device)
    began = time.perf_counter()
    loss = one.step(tokens)
    torch.accelerator.synchronize(device)
    return (time.perf_counter() - began) * 1000, loss


def _overlap_ms(one: Contender, tokens: Sequence[torch.Tensor], device: torch.device) -> float:
    """Return the time of kernels and copies in which another stream works too, of one step, from torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        one.step(tokens)
        torch.accelerator.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return _more_than_one(events) / 1000


def _more_than_one(events: Sequence[Mapping[str, Any]]) -> float:
    """Return the microseconds in which pieces of work on two streams or more overlap."""
    edges = [
        edge
        for event in events
        if event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}
        for edge in ((event["ts"], 1), (event["ts"] + event["dur"], -1))
    ]
    shared, running, since = 0.0, 0, 0.0
    for moment, change in sorted(edges):
        shared += moment - since if running > 1 else 0.0
        running, since = running + change, moment
    return shared


# --- worlds -----------------------------------------------------------------------------------------------------------


def on_rank(context: RankContext, work: Work) -> None:
    """Measure on a rank of a world, and write what was found.

    The guard of asynchronous buffers stays out: it reads them on the host, and so blocks the engines that hold works,
    as the reference does, and not those that wait on streams of their own. On an H200 that was a fifth of a step.
    """
    BufferGuard.violations = lambda _: iter(())  # type: ignore[assignment]
    figures = measure(context.device, context.rank, work, is_alone=False)
    (context.folder / f"rank{context.rank}.pickle").write_bytes(pickle.dumps(figures))


def _in_this_process(kind: str, work: Work) -> list[Figures]:
    """Measure one rank over the device's own backend, without a world, whose interceptor would hold tensors."""
    device = device_of_rank(kind, 0)
    make_current(device)
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group(backends_for(kind), store=store, rank=0, world_size=1)
        try:
            return measure(device, 0, work, is_alone=True)
        finally:
            dist.destroy_process_group()


def _in_a_world(spec: WorldSpec, work: Work) -> list[Figures]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # By its module's name: a rank cannot import the program that runs.
        ended = launch(
            spec, partial(importlib.import_module("campaigns.gpu_step").on_rank, work=work), folder=folder
        )
        if any(isinstance(outcome, Raised) for outcome in ended.outcomes):
            sys.exit(str(causal(ended)))
        figures: list[Figures] = pickle.loads((folder / "rank0.pickle").read_bytes())
        return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in each world, and print a table; 1 if engines compute different losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--world", action="append", required=True, help="processes:1:DEVICE or threads:N:DEVICE"
    )
    parser.add_argument("--blocks", type=int, default=12, help="default: %(default)d")
    parser.add_argument("--width", type=int, default=1024, help="default: %(default)d")
    parser.add_argument("--rows", type=int, default=8, help="of a rank; default: %(default)d")
    parser.add_argument("--length", type=int, default=512, help="of a row; default: %(default)d")
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)d")
    asked = parser.parse_args(argv)
    work = Work(
        names=COMPOSABLE,
        num_blocks=asked.blocks,
        width=asked.width,
        num_rows=asked.rows,
        length=asked.length,
        reshard=Reshard.AFTER_FORWARD,
        num_microbatches=1,
        num_rounds=asked.rounds,
    )
    rows, agree = list[list[object]](), True
    for text in asked.world:
        spec = WorldSpec.parse(text, deadline_s=300.0)
        is_alone = spec.size == 1 and not spec.kind.shares_a_process
        figures = _in_this_process(spec.device, work) if is_alone else _in_a_world(spec, work)
        beside = next(one for one in figures if one.name is Name.FSDP2)
        agree &= all(abs(one.loss - beside.loss) <= LOSS_TOLERANCE * abs(beside.loss) for one in figures)
        rows += [[text, *_cells(one, beside)] for one in figures]
    headers = ["world", "engine", "step ms", "of FSDP2's", "peak MiB", "of FSDP2's", "overlap ms", "loss"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    return int(not agree)


def _cells(one: Figures, beside: Figures) -> list[str]:
    step, its = median(one.step_ms), median(beside.step_ms)
    return [
        one.name,
        f"{step:.2f}",
        f"{step / its:.2f}",
        f"{one.peak_bytes / _MIB:.1f}" if one.peak_bytes else "-",
        f"{one.peak_bytes / beside.peak_bytes:.2f}" if one.peak_bytes and beside.peak_bytes else "-",
        "-" if one.overlap_ms is None else f"{one.overlap_ms:.2f}",
        f"{one.loss:.5f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
