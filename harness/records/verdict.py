"""The verdicts and what each does to the exit code. No torch here."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Verdict"]


class Verdict(StrEnum):
    """What is said of one engine on one case in one world."""

    PASSED = "PASSED"  # every law held, and each could have failed
    FAILED = "FAILED"  # a law was broken
    VACUOUS = "VACUOUS"  # nothing could have gone wrong, so nothing was proven
    UNSUPPORTED = "UNSUPPORTED"  # not declared, and refused loudly
    UNSUPPORTED_SILENT = "UNSUPPORTED_SILENT"  # not declared, yet accepted without a word
    HUNG = "HUNG"  # a rank did not end before the deadline, or waits for one that never comes
    CRASHED = "CRASHED"  # a rank raised or died
    ERRORED = "ERRORED"  # our own fault; says nothing about the engine
    KNOWN_FAILURE = "KNOWN_FAILURE"  # failed as an expectation file says it would
    UNEXPECTED_PASS = "UNEXPECTED_PASS"  # an expectation file says it fails, and it did not
    NOT_RUN = "NOT_RUN"  # selected, but never reached

    @property
    def is_conforming(self) -> bool:
        """Whether a run with only such verdicts exits 0."""
        return self in {Verdict.PASSED, Verdict.UNSUPPORTED, Verdict.KNOWN_FAILURE}
