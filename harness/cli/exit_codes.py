"""The exit codes of all commands, and what pytest's becomes for a command that runs cases."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

CONFORMS, DOES_NOT_CONFORM, USAGE, OUR_FAULT = 0, 1, 2, 3

# Of pytest.ExitCode, whose import takes a while.
_PASSED, _FAILED, _USAGE, _NOTHING_COLLECTED = 0, 1, 4, 5


def conclude(out: Path, pytest_code: int, show: Callable[[], int]) -> int:
    """Turn pytest's exit code into ours; where cases ran the records decide, which ``show`` prints and judges."""
    has_records = (out / "records.jsonl").exists()
    if pytest_code == _USAGE:
        if has_records:  # some of the engines asked for could not be judged; the others were
            show()
        return USAGE
    if pytest_code == _NOTHING_COLLECTED:
        print("shardproof: no case was selected; see `shardproof list --cases`", file=sys.stderr)
        return USAGE
    if not has_records:
        print("shardproof: no case was run; see the messages above", file=sys.stderr)
        return OUR_FAULT
    code = show()
    if pytest_code not in (_PASSED, _FAILED):
        return OUR_FAULT
    return DOES_NOT_CONFORM if code == CONFORMS and pytest_code else code
