"""Finds out whether a user's model or loss communicates between ranks, as losses over all ranks' rows do.

One process then computes another loss than the ranks, whatever the engine does. So the reference of such a model runs
all ranks at once. The model is called here as the first of two ranks, in a group that moves no data, so the numbers
mean nothing. To ask for the number of ranks counts as communication: a loss may be scaled by it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardproof.harness.cases.batch import arguments_of
from shardproof.harness.cases.draws import Seeds
from shardproof.harness.cases.sync_batch_norm import BatchNormOverRanks
from shardproof.harness.cases.user_model import UserModel
from shardproof.harness.worlds.threads.process_group import BACKEND, register_threads_backend

_OF_TORCH = str(Path(torch.__file__).parent)
_INTERFACES = tuple(
    f"{_OF_TORCH}/distributed/{file}.py"
    for file in ("distributed_c10d", "_functional_collectives", "nn/functional")
)
_KINDS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
    "send",
    "recv",
    "barrier",
)
_NUMBERS = ("get_rank", "get_world_size")


def own_communication(problem: UserModel) -> str:
    """Return the first call by which the model or its loss communicates, and its place; empty if there is none."""
    # Without other ranks' numbers the user's code may raise anything; whether it called is known by then.
    with _as_first_of_two(), _noting_calls() as calls, contextlib.suppress(Exception):
        model = problem.build()  # here, because some models ask for ranks only when they are built
        batch = problem.batch(step=0, microbatch=0, rank=0)
        args, kwargs = arguments_of(batch.inputs)
        for name, module in model.named_modules():
            if isinstance(module, BatchNormOverRanks):
                return f"{name!r} is a SyncBatchNorm"
        Seeds(step=0, rank=0).begin(0)
        problem.loss_sum(model(*args, **kwargs), batch)
    return calls[0] if calls else ""


@contextlib.contextmanager
def _as_first_of_two() -> Iterator[None]:
    register_threads_backend()
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=2)  # type: ignore[attr-defined]  # torch does not list it
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _noting_calls() -> Iterator[list[str]]:
    found: list[str] = []

    # Any: what a profile function is called with.
    def see(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_name
        if event == "call" and frame.f_code.co_filename in _INTERFACES:
            is_asked = name in _NUMBERS and frame.f_back is not None and not _is_torchs(frame.f_back)
            if is_asked or name.startswith(_KINDS):
                found.append(f"{name}{_place(frame)}")

    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _is_torchs(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OF_TORCH)


def _place(frame: FrameType) -> str:
    """Return the line outside torch that led to a call."""
    caller: FrameType | None = frame
    while caller is not None and _is_torchs(caller):
        caller = caller.f_back
    if caller is None:
        return ""
    return f" at {Path(caller.f_code.co_filename).name}:{caller.f_lineno}, in {caller.f_code.co_name}"
