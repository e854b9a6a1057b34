"""Scripts that observe features of CUDA devices - graphs, kernels, pools - and are plain loops elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from shardproof.engine.contract import Capability
from shardproof.harness.cases.script import Actor, EachMicrobatch

# Subjects of the notes, and the value noted in a correct run.
REPLAY, EQUAL = "a captured forward and backward, replayed on other inputs,", "equal to the eager one"
COPIES, FEW = "the number of kernels in backward that copy", "below that of parameters"
POOL, OWN_POOL = "memory outside the allocator's common pool", "there"

_NUM_WARM_UPS = 3  # torch's manual recommends three before a capture
_COPYING = ("cat", "copy", "memcpy dtod")  # parts of the names of kernels that move and do not compute


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaysAGraph:
    """Before each step's microbatches: capture on other inputs, replay on the first microbatch's, compare bits."""

    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.GRAPHS})

    def play(self, actor: Actor) -> None:
        if actor.has_engine and actor.batch(0).target.is_cuda:
            actor.note(REPLAY, EQUAL if _replay_is_equal(actor) else "another one")
        EachMicrobatch().play(actor)


def _replay_is_equal(actor: Actor) -> bool:
    inputs = actor.batch(0).inputs
    eager = _seen(actor, _once(actor, inputs))
    held = tuple(torch.zeros_like(tensor) for tensor in inputs)
    graph = torch.cuda.CUDAGraph()
    side = torch.Stream(device=inputs[0].device)
    side.wait_stream(torch.cuda.current_stream())
    with side:
        for _ in range(_NUM_WARM_UPS):
            _once(actor, held)
            _clear(actor)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        output = _once(actor, held)
    is_equal = True
    for _ in range(2):
        for mine, given in zip(held, inputs, strict=True):
            mine.copy_(given)
        graph.replay()
        replayed = [output.detach(), *_gradients(actor)]
        is_equal &= all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))
    _clear(actor)
    return is_equal


def _once(actor: Actor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run forward and backward; the loss stays on the device, because a capture needs it there."""
    output: torch.Tensor = actor.forward(0, *inputs)
    actor.backward(0, output.float().square().sum(), is_counted=False)
    return output


def _seen(actor: Actor, output: torch.Tensor) -> list[torch.Tensor]:
    copies = [tensor.clone() for tensor in (output.detach(), *_gradients(actor))]
    _clear(actor)
    return copies


def _gradients(actor: Actor) -> list[torch.Tensor]:
    found = [p.grad for p in actor.part("").parameters() if p.grad is not None]
    return [g.to_local() if isinstance(g, DTensor) else g for g in found]


def _clear(actor: Actor) -> None:
    for parameter in actor.part("").parameters():
        parameter.grad = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountsCopies:
    """A plain loop over one microbatch that counts the copy kernels in its backward.

    One for each parameter means that gradients are packed one by one.
    """

    demands: ClassVar[frozenset[Capability]] = frozenset()

    def play(self, actor: Actor) -> None:
        output = actor.forward(0, *actor.batch(0).inputs)
        loss = actor.loss(0, output)
        if not (actor.has_engine and loss.is_cuda):
            actor.backward(0, loss)
            return
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            actor.backward(0, loss)
            torch.cuda.synchronize()
        num_copies = sum(map(_copies, profiler.events() or ()))
        num_parameters = len(list(actor.part("").parameters()))
        is_few = num_copies < num_parameters
        actor.note(COPIES, FEW if is_few else f"{num_copies}, for {num_parameters} parameters")


# Any: the profiler's events have no public type.
def _copies(event: Any) -> bool:
    is_kernel = str(event.device_type).endswith("CUDA")
    return is_kernel and any(part in event.name.lower() for part in _COPYING)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchesPools:
    """A plain loop that then reads which pools memory was allocated from."""

    demands: ClassVar[frozenset[Capability]] = frozenset()

    def play(self, actor: Actor) -> None:
        EachMicrobatch().play(actor)
        if actor.has_engine and actor.batch(0).target.is_cuda:
            segments: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            is_there = any(tuple(segment["segment_pool_id"]) != (0, 0) for segment in segments)
            actor.note(POOL, OWN_POOL if is_there else "not there")
