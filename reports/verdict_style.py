"""The style of a verdict: a letter for text, a sign and a tone for pages, and a phrase that explains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from shardproof.harness.records.record import Verdict


class Tone(StrEnum):
    """The colour of a verdict; the value is its CSS class."""

    GOOD = "good"  # proven
    BAD = "bad"  # the engine is wrong
    DOUBTFUL = "doubtful"  # neither proven nor refuted: look at the harness or the expectations
    KNOWN = "known"  # it fails as an expectation predicts
    MUTED = "muted"  # not declared, and refused


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictStyle:
    """One verdict's style; no two share a letter or a sign, so that colour is never the only difference."""

    letter: str  # one ASCII character
    sign: str  # for pages: the letter, if no better character is in every font
    tone: Tone
    phrase: str


MARKS: Mapping[Verdict, VerdictStyle] = MappingProxyType(
    {
        Verdict.PASSED: VerdictStyle(
            letter=".", sign="\u2713", tone=Tone.GOOD, phrase="every law held, and each could have failed"
        ),
        Verdict.FAILED: VerdictStyle(letter="F", sign="F", tone=Tone.BAD, phrase="a law was broken"),
        Verdict.CRASHED: VerdictStyle(letter="C", sign="C", tone=Tone.BAD, phrase="a rank raised or died"),
        Verdict.HUNG: VerdictStyle(
            letter="H", sign="H", tone=Tone.BAD, phrase="a rank did not end before the deadline"
        ),
        Verdict.UNSUPPORTED_SILENT: VerdictStyle(
            letter="S", sign="S", tone=Tone.BAD, phrase="not declared, yet accepted without a word"
        ),
        Verdict.UNEXPECTED_PASS: VerdictStyle(
            letter="X", sign="X", tone=Tone.DOUBTFUL, phrase="expected to fail, and did not"
        ),
        Verdict.VACUOUS: VerdictStyle(
            letter="V",
            sign="V",
            tone=Tone.DOUBTFUL,
            phrase="nothing could have gone wrong: proves nothing",
        ),
        Verdict.ERRORED: VerdictStyle(
            letter="E",
            sign="E",
            tone=Tone.DOUBTFUL,
            phrase="the harness's own fault: says nothing of the engine",
        ),
        Verdict.NOT_RUN: VerdictStyle(
            letter="N", sign="N", tone=Tone.DOUBTFUL, phrase="selected, never reached"
        ),
        Verdict.KNOWN_FAILURE: VerdictStyle(
            letter="k", sign="k", tone=Tone.KNOWN, phrase="failed as an expectation says it would"
        ),
        Verdict.UNSUPPORTED: VerdictStyle(
            letter="-", sign="\u2013", tone=Tone.MUTED, phrase="not declared, and refused loudly: opted out"
        ),
    }
)
