"""The exit codes of all commands and of pytest, and how ours follow from pytest's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

CONFORMS, DOES_NOT_CONFORM, USAGE, OUR_FAULT, NOTHING_JUDGED = 0, 1, 2, 3, 4
INTERRUPTED = 130  # of a program that ends by SIGINT, in a shell

# Members of pytest.ExitCode, because importing pytest takes a while.
_PASSED, _FAILED, PYTEST_INTERRUPTED, PYTEST_USAGE, _NOTHING_COLLECTED = 0, 1, 2, 4, 5
PYTEST_ENDED = (_PASSED, _FAILED, _NOTHING_COLLECTED)  # every collected case has been run


def code_of_run(out: Path, pytest_code: int, show: Callable[[], int]) -> int:
    """Return our exit code for pytest's; if cases ran, the records decide, which ``show`` prints and judges."""
    has_records = (out / "records.jsonl").exists()
    if pytest_code == PYTEST_USAGE:
        if has_records:  # some of the selected engines could not be judged; the others were
            show()
        return USAGE
    if pytest_code == _NOTHING_COLLECTED and not has_records:
        print("shardproof: no case was selected; see `shardproof list --cases`", file=sys.stderr)
        return NOTHING_JUDGED
    if not has_records:
        print("shardproof: no case was run; see the messages above", file=sys.stderr)
        return OUR_FAULT
    code = show()
    if pytest_code not in PYTEST_ENDED:
        return OUR_FAULT
    return DOES_NOT_CONFORM if code == CONFORMS and pytest_code else code
