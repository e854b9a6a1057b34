"""Converts the arguments of each c10d operator to the normal form of a call, and back to its return value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardproof.harness.tracing.collectives.call import Pieces
from shardproof.harness.tracing.ledger import Op

Tensors = Sequence[torch.Tensor]
# Any: operators box their arguments; the operator's schema fixes the type of each.
Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveTensors:
    """The tensors of a call and its root, destination or source."""

    inputs: Pieces = ()
    outputs: Pieces = ()
    peer: int | None = None
    tag: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSchema:
    """One c10d operator: which collective it is and how its tensors are laid out.

    ``exchanged`` takes the arguments by name, the caller's group rank and the group's size.
    ``returned`` names the argument that the operator returns beside the work, if any.
    """

    op: Op
    exchanged: Callable[[Arguments, int, int], CollectiveTensors]
    returned: str | None = None
    returns_work: bool = field(default=True)


def _each(tensors: Tensors) -> Pieces:
    return tuple((t,) for t in tensors)


def _pieces(buffer: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    # view, not reshape: with a copy of a non-contiguous buffer, writes to the pieces would be lost.
    return tuple(buffer.view(-1).tensor_split(size))


def _split(buffer: torch.Tensor, sizes: Sequence[int], size: int) -> tuple[torch.Tensor, ...]:
    rows = list(sizes) if sizes else [buffer.shape[0] // size] * size
    return tuple(torch.split(buffer, rows))


def _all_reduce(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors(inputs=_each(a["tensors"]), outputs=_each(a["tensors"]))


def _broadcast(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    tensors = _each(a["tensors"])
    root = a["root_rank"]
    return CollectiveTensors(
        inputs=tensors if rank == root else ((),) * len(tensors), outputs=tensors, peer=root
    )


def _reduce(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    tensors = _each(a["tensors"])
    root = a["root_rank"]
    return CollectiveTensors(
        inputs=tensors, outputs=tensors if rank == root else ((),) * len(tensors), peer=root
    )


def _all_gather_list(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors(
        inputs=_each(a["input_tensors"]), outputs=tuple(tuple(o) for o in a["output_tensors"])
    )


def _all_gather_lists(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    # Coalesced lists are rank-major: output_lists[rank][i] belongs to input_list[i].
    outputs = tuple(zip(*a["output_lists"], strict=True))
    return CollectiveTensors(inputs=_each(a["input_list"]), outputs=outputs)


def _all_gather_base(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors(inputs=((a["input_tensor"],),), outputs=(_pieces(a["output_tensor"], size),))


def _all_gather_bases(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors(inputs=_each(a["inputs"]), outputs=tuple(_pieces(o, size) for o in a["outputs"]))


def _reduce_scatter_list(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors(
        inputs=tuple(tuple(i) for i in a["input_tensors"]), outputs=_each(a["output_tensors"])
    )


def _reduce_scatter_base(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors(inputs=(_pieces(a["input_tensor"], size),), outputs=((a["output_tensor"],),))


def _reduce_scatter_bases(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors(inputs=tuple(_pieces(i, size) for i in a["inputs"]), outputs=_each(a["outputs"]))


def _gather(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    outputs = tuple(tuple(o) for o in a["output_tensors"]) or ((),) * len(a["input_tensors"])
    return CollectiveTensors(inputs=_each(a["input_tensors"]), outputs=outputs, peer=a["root_rank"])


def _scatter(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    inputs = tuple(tuple(i) for i in a["input_tensors"]) or ((),) * len(a["output_tensors"])
    return CollectiveTensors(inputs=inputs, outputs=_each(a["output_tensors"]), peer=a["root_rank"])


def _all_to_all_list(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors(inputs=(tuple(a["input_tensors"]),), outputs=(tuple(a["output_tensors"]),))


def _all_to_all_base(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors(
        inputs=(_split(a["input"], a["input_split_sizes"], size),),
        outputs=(_split(a["output"], a["output_split_sizes"], size),),
    )


def _send(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors(inputs=_each(a["tensors"]), peer=a["dst"], tag=a["tag"])


def _recv(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors(outputs=_each(a["tensors"]), peer=a["src"], tag=a["tag"])


def _recv_any(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors(outputs=_each(a["tensors"]), tag=a["tag"])


def _barrier(a: Arguments, rank: int, size: int) -> CollectiveTensors:
    return CollectiveTensors()


SCHEMAS: Mapping[str, CollectiveSchema] = {
    "allreduce_": CollectiveSchema(op=Op.ALL_REDUCE, exchanged=_all_reduce, returned="tensors"),
    "allreduce_coalesced_": CollectiveSchema(op=Op.ALL_REDUCE, exchanged=_all_reduce),
    "broadcast_": CollectiveSchema(op=Op.BROADCAST, exchanged=_broadcast, returned="tensors"),
    "reduce_": CollectiveSchema(op=Op.REDUCE, exchanged=_reduce),
    "allgather_": CollectiveSchema(op=Op.ALL_GATHER, exchanged=_all_gather_list, returned="output_tensors"),
    "allgather_coalesced_": CollectiveSchema(op=Op.ALL_GATHER, exchanged=_all_gather_lists),
    "_allgather_base_": CollectiveSchema(
        op=Op.ALL_GATHER, exchanged=_all_gather_base, returned="output_tensor"
    ),
    "allgather_into_tensor_coalesced_": CollectiveSchema(op=Op.ALL_GATHER, exchanged=_all_gather_bases),
    "reduce_scatter_": CollectiveSchema(
        op=Op.REDUCE_SCATTER, exchanged=_reduce_scatter_list, returned="output_tensors"
    ),
    "_reduce_scatter_base_": CollectiveSchema(
        op=Op.REDUCE_SCATTER, exchanged=_reduce_scatter_base, returned="output_tensor"
    ),
    "reduce_scatter_tensor_coalesced_": CollectiveSchema(
        op=Op.REDUCE_SCATTER, exchanged=_reduce_scatter_bases
    ),
    "gather_": CollectiveSchema(op=Op.GATHER, exchanged=_gather),
    "scatter_": CollectiveSchema(op=Op.SCATTER, exchanged=_scatter, returned="output_tensors"),
    "alltoall_": CollectiveSchema(op=Op.ALL_TO_ALL, exchanged=_all_to_all_list, returned="output_tensors"),
    "alltoall_base_": CollectiveSchema(op=Op.ALL_TO_ALL, exchanged=_all_to_all_base),
    "send": CollectiveSchema(op=Op.SEND, exchanged=_send),
    "recv_": CollectiveSchema(op=Op.RECV, exchanged=_recv),
    "recv_any_source_": CollectiveSchema(op=Op.RECV, exchanged=_recv_any),
    "barrier": CollectiveSchema(op=Op.BARRIER, exchanged=_barrier),
    "monitored_barrier_": CollectiveSchema(op=Op.BARRIER, exchanged=_barrier, returns_work=False),
}


def process_group(a: Arguments) -> dist.ProcessGroup:
    """Unbox the group in the arguments of any c10d operator."""
    return dist.ProcessGroup.unbox(a["process_group"])
