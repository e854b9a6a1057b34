"""Calls of collectives made by hand, for code that reads a call and never its group."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from shardproof.harness.tracing.collectives.call import Call, Pieces
from shardproof.harness.tracing.ledger import Op


# Any: the fields of a call.
def made_call(op: Op, inputs: Pieces = (), outputs: Pieces = (), **fields: Any) -> Call:
    """Make the call of the first of two ranks, which waits for it, with some fields changed."""
    plain: dict[str, Any] = {
        "group": cast(dist.ProcessGroup, None),
        "group_name": "everybody",
        "ranks": (0, 1),
        "rank": 0,
        "reduce_op": None,
        "peer": None,
        "tag": 0,
        "is_async": False,
        "device": torch.device("cpu"),
        "timeout_s": None,
        "site": "engine.py:1 in step",
    }
    return Call(op=op, inputs=inputs, outputs=outputs, **(plain | fields))
