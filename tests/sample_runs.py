"""Runs for tests of reports, written by hand: evidence of every kind, hostile texts, and a hang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardproof.harness.records.hang import CallRecord, Divergence, HangReport, RankActivity, RankState, Side
from shardproof.harness.records.record import Footer, LawRecord, LedgerLine, OutcomeRecord, Record, Verdict
from shardproof.harness.records.run import Run
from tests import sample_records
from tests.sample_records import FOOTER, HEADER, WORST

HOSTILE = "<script>alert(1)</script> ]]> & | `a` \x1b[31mred\x1b[0m \x00\ufffe\ud800 \u202e</details>"
CALL = CallRecord(
    text="all_reduce",
    op="all_reduce",
    group=(0, 1, 2, 3),
    axis="data",
    group_name="",
    position=4,
    dtype="float32",
    num_bytes=8,
    peer=None,
    phase="backward",
    step=1,
    microbatch=0,
    unit="blocks.0",
    thread="",
    site="engine.py:7 in reduce",
)
ENTRY = replace(sample_records.ENTRY, engine="torch.ddp", version="", case="parity/*", expiry="2031-02-03")


_RECORD = sample_records.a_record(
    Verdict.PASSED,
    engine="torch.ddp",
    case="parity/test_single.py::test_matches[mlp]",
    world="threads:4",
    headline="headline",
    engine_version="2.13.0",
    laws=(LawRecord(law="matches", held=False, summary="differs", details=("rank 2 first",)),),
    worst=WORST,
    ledger=tuple(
        LedgerLine(
            rank=r, phase="forward", op="all_gather", axis="data", dtype="float32", count=2, num_bytes=8
        )
        for r in range(4)
    ),
    outcomes=tuple(OutcomeRecord(rank=r, kind="Returned", text="") for r in range(4)),
    command="pytest -k mlp",
    duration_s=0.5,
)


def a_record(
    case: str = _RECORD.case,
    verdict: Verdict = Verdict.PASSED,
    engine: str = _RECORD.engine,
    headline: str = _RECORD.headline,
    **changes: Any,  # Any: the other fields of Record
) -> Record:
    """Make the record of a case with evidence of every kind, by default of one that passed."""
    return replace(_RECORD, case=case, verdict=verdict, engine=engine, headline=headline, **changes)


def a_hang(text: str) -> HangReport:
    """Ranks 0 to 2 wait for rank 3, which is somewhere else; ``text`` is the text of the engine."""
    call = replace(CALL, site=text, unit=text)
    waiting = RankState(
        rank=0,
        ended="late",
        doing=RankActivity.WAITING,
        call=call,
        awaits=(3,),
        frames=(text,),
        stack=(text, text),
    )
    lost = replace(waiting, rank=3, doing=RankActivity.OUTSIDE, awaits=())
    return HangReport(
        summary=text,
        suspects=(3,),
        cycle=(0, 3),
        ranks=(*(replace(waiting, rank=r) for r in range(3)), lost),
        difference=Divergence(
            group=(0, 1, 2, 3),
            axis=text,
            group_name="",
            position=4,
            common=replace(call, position=3),
            sides=(Side(ranks=(0, 1, 2), call=call), Side(ranks=(3,), call=None)),
        ),
    )


def a_run(*records: Record, footer: Footer | None = FOOTER, problems: tuple[str, ...] = ()) -> Run:
    return Run(header=HEADER, records=records, footer=footer, problems=problems)


def one_of_each() -> Run:
    return a_run(*(a_record(f"parity/case-{v}", v, headline=f"headline of {v}") for v in Verdict))
