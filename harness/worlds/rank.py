"""Runs a rank's body: the one place that catches every exception of a body, and turns it into an outcome."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.worlds.exception_outcome import is_abandonment, raised
from shardproof.harness.worlds.messages import Job
from shardproof.harness.worlds.outcome import Abandoned, Outcome, Returned


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankContext:
    """The argument of a rank's body: its rank, the device of its tensors, the folder for its files, and its ledger."""

    rank: int
    size: int
    device: torch.device
    folder: Path
    recorder: Recorder
    shares_a_process: bool = False  # with all other ranks
    is_simulated: bool = False  # the other ranks do not exist, and numbers have no meaning


def journal_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's journal."""
    return folder / f"rank{rank}.ledger.jsonl"


def run_rank(context: RankContext, job: Job, enter: Callable[[], None]) -> Outcome:
    """Run ``enter`` (join the process group) and the body on the calling thread; never raises."""
    context.recorder.claim_thread()
    outcome = _outcome(context, job, enter)
    try:
        context.recorder.close()
        return replace(outcome, digests=_digests(context)) if isinstance(outcome, Returned) else outcome
    except Exception as error:  # a rank whose ledger is incomplete has not returned
        return raised(context.rank, error) if isinstance(outcome, Returned) else outcome


def _digests(context: RankContext) -> dict[str, str]:
    """Hash the rank's files: the journal as the recorder wrote it, the others, just written, as they are."""
    found = {journal_path(context.folder, context.rank).name: context.recorder.digest}
    for file in context.folder.glob(f"rank{context.rank}.*"):
        if file.name not in found and file.is_file():
            with file.open("rb") as opened:
                found[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return found


def _outcome(context: RankContext, job: Job, enter: Callable[[], None]) -> Outcome:
    try:
        enter()
        return Returned(rank=context.rank, value=job.body(context, *job.args))
    # Includes SystemExit, KeyboardInterrupt and pytest's Skipped: none of them is a pass.
    except BaseException as error:
        found = raised(context.rank, error)
        return Abandoned(rank=context.rank, stack=found.traceback) if is_abandonment(error) else found
