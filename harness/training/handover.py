"""State that goes from one prepared model to another: as it is, or by way of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardproof.engine.contract import PreparedModel
from shardproof.harness.cases.training import StateForm
from shardproof.harness.training.reads import calling

__all__ = ["load_shares", "read_shares", "read_whole", "state_of", "write_shares", "write_whole"]

_WHOLE = "whole.pt"
_SHARES = "state"


# Any, here and below: states are nested dicts and lists of tensors and other values.
def state_of(prepared: PreparedModel, form: StateForm) -> dict[str, Any]:
    """Ask a model for its state and that of its optimizer; all ranks do."""
    if form is StateForm.WHOLE:
        with calling("full_state"):
            return prepared.full_state()
    with calling("shared_state"):
        return prepared.shared_state()


def write_whole(state: dict[str, Any], folder: Path, rank: int) -> None:
    """Write the state of whole tensors that the first rank has; the others have the same."""
    if rank == 0:
        torch.save(state, folder / _WHOLE)


def read_whole(folder: Path, device: torch.device) -> dict[str, Any]:
    """Read what `write_whole` wrote; each rank has a copy of its own."""
    # The run's own file, which may hold what an engine likes.
    state: dict[str, Any] = torch.load(folder / _WHOLE, map_location=device, weights_only=False)
    return state


def write_shares(state: dict[str, Any], folder: Path) -> None:
    """Write the shares of all ranks, as torch's distributed checkpoints are; all ranks do."""
    # Here and below, because they import slowly.
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state, checkpoint_id=folder / _SHARES)


def read_shares(prepared: PreparedModel, folder: Path) -> dict[str, Any]:
    """Read this rank's shares, as ``prepared`` has them, of what `write_shares` wrote; all ranks do."""
    from torch.distributed.checkpoint.state_dict_loader import load

    state = state_of(prepared, StateForm.SHARES)
    load(state, checkpoint_id=folder / _SHARES)
    return state


def load_shares(prepared: PreparedModel, state: dict[str, Any]) -> None:
    """Give a model the state that `state_of` returned in shares."""
    with calling("load_shared_state"):
        prepared.load_shared_state(state)
