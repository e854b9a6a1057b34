"""Records, and the other files of a run: written by hand, or drawn with every field."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from shardproof.harness.records.record import (
    SCHEMA_VERSION,
    Expectation,
    Footer,
    Header,
    LawRecord,
    Record,
    TensorRecord,
    Verdict,
)
from shardproof.harness.records.run import RunWriter

CASE = "parity/test_x.py::test_y[mlp_even-sgd-m3]"
TRAINS = "smoke/test_smoke.py::test_trains_the_same_model"
HEADER = Header(
    started_at="2030-01-01T00:00:00+00:00",
    command="shardproof run",
    engines=("torch.fsdp2", "torch.ddp"),
    worlds=("threads:4", "processes:2"),
    versions={"python": "3.11", "torch": "2.13.0"},
    hardware={"cpu": "x", "memory_bytes": "1073741824"},
    git_head="unknown",
    git_dirty=False,
    seed=0,
    num_cases=0,
)
FOOTER = Footer(ended_at="2030-01-01T00:01:00+00:00", duration_s=60.0)
WORST = TensorRecord(
    quantity="gradient",
    name="0.weight",
    step=1,
    rank=3,
    index=(2, 0),
    got=1.0,
    expected=0.25,
    error=0.75,
    allowed=0.01,
    ratio=75.0,
    share=0.5,
    looks_like="exactly 4 x the reference",
)
ENTRY = Expectation(
    number=1,
    engine="torch.fsdp2",
    version="torch >=2.11,<2.15",
    case="parity/test_x.py::test_y[*-sgd-*]",
    world="*",
    verdict=Verdict.FAILED,
    reason="Divides twice.",
    link="https://example.org/issues/1",
    expiry="2030-06-15",
    shows=("matches",),
)
_RECORD = Record(
    engine="torch.fsdp2",
    case=CASE,
    world="threads:2",
    verdict=Verdict.FAILED,
    headline="what was seen",
    suite="parity",
    engine_version="torch 2.13.0+cpu",
    laws=(LawRecord(law="matches", held=False, summary="differs"),),
)
# Surrogates too: an engine may write any text into its message.
_LEAVES: dict[type, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(), max_size=20),
    float: st.floats(allow_nan=False),
    int: st.integers(-(2**63), 2**63),
    bool: st.booleans(),
    NoneType: st.none(),
}


def records_by_engine(records: Iterable[Record], case: str) -> dict[str, Record]:
    """Return the record of each engine for one case; the records of other cases come in any order."""
    of_case = [record for record in records if record.case == case]
    found = {record.engine: record for record in of_case}
    assert len(found) == len(of_case), f"a record for each engine, got {len(of_case)} of {sorted(found)}"
    return found


def a_record(verdict: Verdict = Verdict.FAILED, **changes: Any) -> Record:  # Any: the fields of Record
    """Make the record of a case, by default of one that failed, with some fields changed."""
    return replace(_RECORD, verdict=verdict, **changes)


def write_run(folder: Path, *records: Record, header: Header = HEADER, footer: Footer | None = FOOTER) -> str:
    """Write a run of these records, an interrupted one where there is no footer; returns its folder."""
    writer = RunWriter(folder, replace(header, num_cases=len(records)))
    for record in records:
        writer.append(record)
    if footer is not None:
        writer.finish(footer)
    return str(folder)


@cache
def drawn(kind: Any) -> st.SearchStrategy[Any]:  # Any: type hints are values without a narrower type
    """Draw values of a type: of a dataclass field by field, so that a field that is added is drawn too."""
    if kind in _LEAVES:
        return _LEAVES[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind) | {"schema": None}
        parts = {f.name: hints[f.name] for f in fields(kind)}
        return st.builds(kind, **{n: drawn(h) if h else st.just(SCHEMA_VERSION) for n, h in parts.items()})
    inner = [drawn(argument) for argument in get_args(kind) if argument is not ...]
    if get_origin(kind) is tuple:
        return st.lists(*inner, max_size=2).map(tuple)
    if get_origin(kind) is dict:
        return st.dictionaries(*inner, max_size=2)
    return st.one_of(inner)
