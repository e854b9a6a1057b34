"""The whole parameters of a flat group in the caller's hands: gathered in their own dtype, shown, written back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from engine.reference.collectives import DefaultAllGather
from engine.reference.flat import FLAT_NAME, EndToEnd
from engine.reference.group import Group

__all__ = ["Showing", "arrangement_of", "gathered", "showing_whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Showing:
    """How whole parameters are shown.

    ``writeback``: what is written to them outlives the showing, each rank keeping its share. ``rank0_only``: the
    other ranks of the shard group show their shares. ``offloads``: they lie on the host. ``with_grads``: so do
    gradients, where a parameter has one.
    """

    writeback: bool = False
    rank0_only: bool = False
    offloads: bool = False
    with_grads: bool = False


def arrangement_of(group: Group) -> EndToEnd:
    """Give the arrangement of a wrapper's group."""
    assert isinstance(group.arrangement, EndToEnd)
    return group.arrangement


def gathered(share: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather equal 1-D shares of the group's ranks, in rank order; of one rank, give the share itself. Collective."""
    ranks = group.mesh.shard_size
    if ranks == 1 or group.mesh.shard_group is None:
        return share
    local = share.to(group.device)
    whole = local.new_empty(ranks * local.numel())
    if local.numel():
        DefaultAllGather()(whole, local.contiguous(), group.mesh.shard_group)
    return whole


@contextmanager
@torch.no_grad()
def showing_whole(group: Group, how: Showing) -> Iterator[bool]:
    """Have modules show the whole parameters of ``group``; gives whether this rank does. Collective.

    Where one rank has everything, what is shown is the parameters' own memory, and writes always last.
    """
    group.reshard()
    group.take_over()
    flat = arrangement_of(group)
    whole = gathered(flat.memory, group)
    gradients = gathered(_gradients(flat), group) if how.with_grads else None
    if how.rank0_only and flat.rank:
        yield False
        return
    if how.offloads:
        whole = whole.cpu()
    shown = _show(flat, whole, gradients)
    if flat.flat_parameter is not None and flat.holder is not None:
        del flat.holder._parameters[FLAT_NAME]
    try:
        with torch.enable_grad():
            yield True
    finally:
        if flat.flat_parameter is not None and flat.holder is not None:
            flat.holder._parameters[FLAT_NAME] = flat.flat_parameter
        if how.writeback:
            _write_back(flat, whole, shown, gradients)
        for piece in flat.parameters:
            piece.register_sharded()
        group.shards_were_written()


def _show(flat: EndToEnd, whole: torch.Tensor, gradients: torch.Tensor | None) -> list[nn.Parameter]:
    shown = []
    for piece in flat.parameters:
        span = slice(piece.start, piece.start + piece.shape.numel())
        parameter = nn.Parameter(whole[span].view(piece.shape), piece.owned.requires_grad)
        if gradients is not None and piece.owned.grad is not None:
            parameter.grad = gradients[span].view(piece.shape)
        piece.show_whole(parameter)
        shown.append(parameter)
    return shown


def _write_back(
    flat: EndToEnd, whole: torch.Tensor, shown: list[nn.Parameter], gradients: torch.Tensor | None
) -> None:
    """Keep this rank's share of what is shown by now, parameters that were put in the place of others included."""
    for piece, parameter in zip(flat.parameters, shown, strict=True):
        found = piece.sites[0].holds()
        if found is not None and found.data_ptr() != parameter.data_ptr() and found.shape == piece.shape:
            whole[piece.start : piece.start + found.numel()].copy_(found.reshape(-1))
    if flat.num_ranks > 1 or whole.device != flat.memory.device:
        flat.memory.copy_(flat.share_of(whole))
    if gradients is None:
        return
    for piece, parameter in zip(flat.parameters, shown, strict=True):
        if piece.owned.grad is not None and parameter.grad is not None:
            local = parameter.grad.reshape(-1)[piece.first : piece.first + piece.local_numel]
            piece.owned.grad.copy_(local.view(piece.owned.grad.shape))


def _gradients(flat: EndToEnd) -> torch.Tensor:
    """Lay the visible parameters' gradients out as the share; zeros where there is none."""
    if flat.flat_parameter is not None:
        grad = flat.flat_parameter.grad
        return torch.zeros_like(flat.memory) if grad is None else grad
    share = torch.zeros_like(flat.memory)
    for piece in flat.parameters:
        if piece.owned.grad is not None:
            share[piece.offset : piece.offset + piece.local_numel].copy_(piece.owned.grad.reshape(-1))
    return share
