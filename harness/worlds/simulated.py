"""Collectives of a rank whose peers do not exist: recorded like any other, and answered by the rank itself.

[Note: simulated results] A gather returns the rank's own piece in every place, a reduction the rank's own contribution.
So shapes, dtypes and metadata are as engines expect, and the numbers have no meaning. torch's own fake group does
nearly the same, piece by piece, but DDP finds no result in its works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from shardproof.harness.tracing.collectives.call import Call
from shardproof.harness.tracing.collectives.interception import Interceptor
from shardproof.harness.tracing.ledger import Op, ViolationKind
from shardproof.harness.tracing.operators import current_witnesses
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.worlds.threads.process_group import global_ranks


def simulating(recorder: Callable[[], Recorder | None]) -> Interceptor:
    """Return an interceptor that records the calls of simulated ranks, and answers them."""
    return Interceptor(
        recorder=recorder,
        ranks_of=cache(global_ranks),  # a list of thousands, per call
        transport=_OwnAnswers(),
        observer=current_witnesses,
        is_split=False,
    )


class _OwnAnswers:
    """Answers each call at once."""

    def start(
        self, call: Call, on_violation: Callable[[ViolationKind, str], None] | None = None
    ) -> dist.Work:
        """Fill the outputs from the rank's own inputs."""
        if call.op not in {Op.BARRIER, Op.SEND, Op.RECV}:
            with torch.no_grad():
                for inputs, outputs in zip(call.inputs, call.outputs, strict=True):
                    _answer(call, inputs, outputs)
        return _Done(call)


def _answer(call: Call, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    if not inputs or not outputs:
        return
    own = inputs[call.rank] if len(inputs) > 1 else inputs[0]
    if outputs[0] is own:  # reduced in place
        return
    if call.op is Op.REDUCE_SCATTER and len(inputs) == 1:
        own = own.reshape(len(call.ranks), -1)[call.rank]
    own = own.clone()  # it may be a part of the outputs
    for output in outputs:
        rows = output.view(-1) if output.numel() == own.numel() else output.view(-1, own.numel() or 1)
        rows.copy_(own.reshape(-1))


class _Done(dist.Work):
    """The work of a completed call."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._outputs = [tensor for piece in call.outputs for tensor in piece]

    def wait(self, timeout: object = None) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> Any:  # Any: torch.futures.Future over a list of tensors
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True
