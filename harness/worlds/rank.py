"""The edge of a rank: the one place that catches everything a rank's body may do, and turns it into an outcome."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness.ledger.recorder import Recorder
from harness.worlds.collective_errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    WorldAbandonedError,
)
from harness.worlds.message import Job
from harness.worlds.outcome import Abandoned, Outcome, Raised, Returned

__all__ = ["RankContext", "journal_path", "run_rank"]

# How gloo, nccl and the store word the news that a peer is gone or late. Torch raises plain RuntimeErrors for
# some of them, so the text is all there is.
_PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed out|timeout|socket closed|remote process exited",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankContext:
    """What a rank's body is given: who it is, where tensors go, where files go, and its ledger."""

    rank: int
    size: int
    device: torch.device
    folder: Path
    recorder: Recorder


def journal_path(folder: Path, rank: int) -> Path:
    """Name the file in which a rank's ledger is kept as it happens."""
    return folder / f"rank{rank}.ledger.jsonl"


def run_rank(context: RankContext, job: Job, enter: Callable[[], None]) -> Outcome:
    """Run ``enter`` (join the process group) and the body on the calling thread; never raises."""
    context.recorder.claim_thread()
    outcome = _outcome(context, job, enter)
    try:
        context.recorder.close()
    except OSError as error:  # a rank whose ledger is not whole has not returned
        return _raised(context, error) if isinstance(outcome, Returned) else outcome
    return outcome


def _outcome(context: RankContext, job: Job, enter: Callable[[], None]) -> Outcome:
    try:
        enter()
        return Returned(rank=context.rank, value=job.body(context, *job.args))
    except WorldAbandonedError as error:
        return Abandoned(rank=context.rank, stack="".join(traceback.format_exception(error)))
    except (
        BaseException
    ) as error:  # SystemExit, KeyboardInterrupt and pytest's Skipped included: nothing is a pass
        return _raised(context, error)


def _raised(context: RankContext, error: BaseException) -> Raised:
    return Raised(
        rank=context.rank,
        kind=type(error).__name__,
        message=_message(error),
        traceback="".join(traceback.format_exception(error)),
        is_symptom=_is_symptom(error),
        at_s=time.monotonic(),
    )


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the rank called sys.exit({error.code!r})"
    if type(error).__name__ in {"Skipped", "SkipTest"}:
        return f"the rank skipped ({error}); a rank may not skip"
    return str(error)


def _is_symptom(error: BaseException) -> bool:
    if isinstance(error, CollectiveMismatchError | DeadlockError):
        return False
    if isinstance(error, CollectiveTimeoutError):
        return True
    is_comm_error = isinstance(error, dist.DistError | RuntimeError | ConnectionError)
    return is_comm_error and _PEER_IS_GONE.search(str(error)) is not None
