"""State that one prepared model passes to another, in memory or in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardproof.engine.contract import PreparedModel
from shardproof.harness.cases.state_form import StateForm
from shardproof.harness.training.reads import calling
from shardproof.harness.worlds.rank import RankContext

_WHOLE = "whole.pt"
_NOTE = "difference-of-rank-"
_SHARES = "state"
_CHECKPOINT = "checkpoint"


def write_files(prepared: PreparedModel, form: StateForm, context: RankContext) -> None:
    """Write the shards in that form to files in the world's folder; called on all ranks."""
    if form is StateForm.CHECKPOINT:
        _write_checkpoint(prepared, context)
    else:
        _write_shares(state_of(prepared, form), context.folder)


def load_files(prepared: PreparedModel, form: StateForm, folder: Path) -> None:
    """Load the files of `write_files`, unless they contain whole tensors; called on all ranks."""
    if form is StateForm.CHECKPOINT:
        with calling("load_checkpoint"):
            prepared.load_checkpoint(folder / _CHECKPOINT)
    else:
        load_shares(prepared, _read_shares(prepared, folder))


# Any, here and below: states are nested dicts and lists of tensors and other values.
def state_of(prepared: PreparedModel, form: StateForm) -> dict[str, Any]:
    """Get the state of a model and of its optimizer; called on all ranks."""
    if form is StateForm.WHOLE:
        with calling("full_state"):
            return prepared.full_state()
    with calling("shared_state"):
        return prepared.shared_state()


def load_shares(prepared: PreparedModel, state: dict[str, Any]) -> None:
    """Load this rank's shards, as returned by `state_of`."""
    with calling("load_shared_state"):
        prepared.load_shared_state(state)


def read_whole(folder: Path, device: torch.device) -> dict[str, Any]:
    """Read the whole state that the first rank wrote; each rank has its own copy."""
    # A file of this run, which may contain any type that an engine uses.
    state: dict[str, Any] = torch.load(folder / _WHOLE, map_location=device, weights_only=False)
    return state


def read_note(folder: Path) -> str:
    """Read the first difference between a whole state and the shards of some rank that saved it; empty if none."""
    return next(filter(None, (file.read_text() for file in sorted(folder.glob(f"{_NOTE}*")))), "")


def write_whole(state: dict[str, Any], difference: str, context: RankContext) -> None:
    """Write the first rank's state of whole tensors, and each rank's note of what it holds otherwise."""
    (context.folder / f"{_NOTE}{context.rank}").write_text(difference)
    if context.rank == 0:
        torch.save(state, context.folder / _WHOLE)


def _write_shares(state: dict[str, Any], folder: Path) -> None:
    """Write the shards of all ranks in the format of torch's distributed checkpoints."""
    # Here and below, because they import slowly.
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state, checkpoint_id=folder / _SHARES)


def _read_shares(prepared: PreparedModel, folder: Path) -> dict[str, Any]:
    """Read this rank's shards into the layout of ``prepared``.

    torch makes state of all parameters to load into, of which the files have none for those without a gradient.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder / _SHARES)
    paths = reader.read_metadata().planner_data  # of keys, by their names in the files
    assert paths is not None, "written by torch's default planner"
    saved = {path[2] for path in paths.values() if path[:2] == ("optimizer", "state")}
    state = state_of(prepared, StateForm.SHARES)
    of_parameters = state["optimizer"]["state"]
    for name in of_parameters.keys() - saved:
        del of_parameters[name]
    load(state, storage_reader=reader)
    return state


def _write_checkpoint(prepared: PreparedModel, context: RankContext) -> None:
    """Call the engine's own method, and wait for all ranks."""
    folder = context.folder / _CHECKPOINT
    folder.mkdir(exist_ok=True)
    with calling("save_checkpoint"):
        prepared.save_checkpoint(folder)
    dist.barrier()
