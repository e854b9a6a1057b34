"""Checkpoints of `Zero2`: a file of each rank's pieces, which any number of ranks read and cut again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardproof.engine.reference.zero import OwnPiece, Zero2

__all__ = ["file_of", "load", "save"]

_EXTRA = "_extra_state"  # the end of the names of what `nn.Module.get_extra_state` returns, as its documentation says

# Of a piece: its start, its values, and its optimizer state. Any: numbers and tensors.
_Saved = Mapping[str, Any]


def file_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"rank{rank}.pt"


def save(zero: Zero2, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write this rank's pieces, their optimizer state, the options of parameter groups, its buffers and extra state."""
    zero.take_weights()
    pieces = {
        name: {"start": piece.start, "value": piece.own.detach(), "state": optimizer.state.get(piece.own, {})}
        for name, piece in zero.pieces.items()
    }
    rest = {name: p.detach() for name, p in zero.module.named_parameters() if name not in zero.pieces}
    whole = rest | dict(zero.module.named_buffers())
    groups = [_options(group) for group in optimizer.param_groups]
    extra = {name: value for name, value in zero.module.state_dict().items() if name.endswith(_EXTRA)}
    saved = {"pieces": pieces, "whole": whole, "groups": groups, "extra": extra}
    torch.save(saved, file_of(folder, zero.rank))


def load(zero: Zero2, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load the files of a world of any size; all but pieces of trained parameters is the first rank's.

    Raises ValueError, before any change, if the optimizer has another number of parameter groups than the saved one.
    """
    num_ranks = len(list(folder.glob("rank*.pt")))
    first, *others = (torch.load(file_of(folder, rank)) for rank in range(num_ranks))
    if len(first["groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"the checkpoint in {folder}: expected {len(optimizer.param_groups)} parameter groups, got "
            f"{len(first['groups'])}; build the optimizer as it was saved"
        )
    whole = dict(zero.module.named_parameters()) | dict(zero.module.named_buffers())
    with torch.no_grad():
        for name, value in first["whole"].items():
            whole[name].copy_(value)
        for name, piece in zero.pieces.items():
            _load_piece(piece, optimizer, [saved["pieces"][name] for saved in (first, *others)])
    zero.module.load_state_dict(first["extra"], strict=False)
    for group, options in zip(optimizer.param_groups, first["groups"], strict=True):
        group.update(options)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, such as the learning rate."""
    return {key: value for key, value in group.items() if key != "params"}


def _load_piece(piece: OwnPiece, optimizer: torch.optim.Optimizer, saved: list[_Saved]) -> None:
    size, device = piece.parameter.numel(), piece.own.device
    piece.parameter.copy_(_joined(saved, (s["value"] for s in saved), size).view_as(piece.parameter))
    own = slice(piece.start, piece.start + piece.own.numel())
    piece.own.copy_(piece.parameter.view(-1)[own])
    state: dict[str, Any] = {}
    for key, value in saved[0]["state"].items():
        is_of_elements = isinstance(value, torch.Tensor) and value.shape == saved[0]["value"].shape
        state[key] = (
            _joined(saved, (s["state"][key] for s in saved), size)[own].to(device, copy=True)
            if is_of_elements
            else value
        )
    if state:
        optimizer.state[piece.own] = state


def _joined(saved: list[_Saved], values: Iterable[torch.Tensor], size: int) -> torch.Tensor:
    """Copy the pieces of all ranks to their positions in the flattened whole."""
    pieces = list(values)
    whole = pieces[0].new_empty(size)
    for place, value in zip(saved, pieces, strict=True):
        whole[place["start"] : place["start"] + value.numel()] = value
    return whole
