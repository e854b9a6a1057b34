"""A rank sends only data to the process that judges, so that no code of an engine runs there."""

from __future__ import annotations

import json
import os
from multiprocessing import Pipe
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.runner.session import TrialSession
from shardproof.harness.worlds.messages import (
    Done,
    Dying,
    FilePiece,
    Finished,
    Garbled,
    Hello,
    HostState,
    Inbox,
    LastThread,
    Leaving,
    Message,
    Ready,
    Started,
    encode,
    send,
)
from shardproof.harness.worlds.outcome import Abandoned, Died, Outcome, Raised, Returned, TimedOut
from shardproof.harness.worlds.spec import OWN_KINDS, WorldKind
from tests.judging import judged

KINDS = list(OWN_KINDS)
TRAPS = """
import gc
from multiprocessing.connection import Connection
from pathlib import Path

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine

PATCH = '''
import pathlib, shardproof.harness.verdicts.judgement
from shardproof.harness.records.record import Verdict
pathlib.Path({marker!r}).touch()
'''


class Trap(str):
    def __reduce__(self):
        return exec, (PATCH,)


class Loud(Exception):
    def __str__(self):
        return Trap("no")


class InItsMessage(DistributedDataParallelEngine):
    def prepare(self, model, plan, mesh):
        raise Loud


class InItsKind(DistributedDataParallelEngine):
    def prepare(self, model, plan, mesh):
        raise type(Trap("Kind"), (Exception,), {{}})("no")


class InItsVersion(DistributedDataParallelEngine):
    def version(self):
        return Trap("1.0")

    def prepare(self, model, plan, mesh):
        raise Loud


class OnThePipe(DistributedDataParallelEngine):
    def prepare(self, model, plan, mesh):
        for found in gc.get_objects():
            if type(found) is Connection:
                try:
                    found.send(Trap())
                except OSError:
                    pass
        return super().prepare(model, plan, mesh)
"""


def _judged(session: TrialSession, engine: str, kind: WorldKind, folder: Path) -> Record:
    (folder / "traps.py").write_text(TRAPS.format(marker=str(folder / "I_WAS_RUN")))
    return judged(session, f"{folder / 'traps.py'}:{engine}", f"{kind}:2", deadline_s=20.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["InItsMessage", "InItsKind", "InItsVersion", "OnThePipe"])
def test_an_engine_runs_no_code_where_it_is_judged(
    session: TrialSession, engine: str, kind: WorldKind, tmp_path: Path
) -> None:
    record = _judged(session, engine, kind, tmp_path)
    assert not (tmp_path / "I_WAS_RUN").exists()
    assert record.verdict is Verdict.CRASHED, record.headline


OUTCOMES: list[Outcome] = [
    Returned(rank=0, value=None),
    Returned(rank=1, value=("a", [1, 2.5, True], {1: "x", "y": ()}, float("inf"))),
    Raised(rank=1, kind="E", message="m\n\ud800", traceback="t", is_symptom=True, at_s=1),
    Died(rank=2, exit_code=-9, is_attributed=False, text=""),
    TimedOut(rank=3, stack="s", last_call="c"),
    Abandoned(rank=4),
]
MESSAGES: list[Message] = [
    Ready(),
    Started(rank=1, thread_ident=2**40),
    Dying(rank=0, call="os._exit(0)"),
    *(Finished(outcome=outcome) for outcome in OUTCOMES),
    Leaving(ident=2**40, threads=(LastThread(name="t", ident=1, rank=None),)),
    Done(),
    Hello(token="t", rank=1, host="h", local_rank=0, node="n", releases="r", folder="/f", clock_s=1.5),
    HostState(answered=3, outcome=OUTCOMES[2], leaks=("l",)),
    FilePiece(name="rank1.observation", start=0, data="AAAA"),
]


def _read(*pieces: bytes) -> list[object]:
    """Read a stream of these pieces, one piece a read."""
    ours, theirs = Pipe()
    inbox = Inbox(ours)
    found: list[object] = []
    for piece in pieces:
        os.write(theirs.fileno(), piece)
        while ours.poll():
            found += inbox.read()
    theirs.close()
    with pytest.raises(EOFError):
        inbox.read()
    ours.close()
    return found


def test_messages_come_back_as_they_were() -> None:
    sent = b"".join(map(encode, MESSAGES))
    assert _read(sent) == MESSAGES
    assert _read(*(sent[i : i + 7] for i in range(0, len(sent), 7))) == MESSAGES


def test_a_message_is_sent_whole() -> None:
    ours, theirs = Pipe()
    send(theirs, Ready())
    assert Inbox(ours).read() == [Ready()]


def test_a_value_that_is_not_plain_is_refused() -> None:
    for value in (object(), {1}, lambda: None, 1j):
        with pytest.raises(TypeError, match="plain values"):
            encode(Finished(outcome=Returned(rank=0, value=value)))


def test_a_text_of_absurd_length_is_cut() -> None:
    outcome = Raised(rank=0, kind="E", message="x" * 10**7, traceback="", is_symptom=False, at_s=0.0)
    data = encode(Finished(outcome=outcome))
    assert len(data) < 10**6
    assert b"characters are left out" in data


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\x80\x04N.",
        b"[" * 10**5,
        b"null",
        b'{"": "Returned", "rank": 0, "value": 1}',
        b'{"": "Started", "rank": "0", "thread_ident": 1}',
        b'{"": "Started", "rank": 0}',
        b'{"": "Finished", "outcome": {"": "Ready"}}',
        b'{"": "exec", "items": []}',
        b'{"": "dict", "items": [[[], 1]]}',
        b'{"": ["Ready"]}',
    ],
)
def test_a_line_that_is_no_message_is_named_as_such(line: bytes) -> None:
    (found,) = _read(line + b"\n")
    assert isinstance(found, Garbled)


def test_a_line_without_end_is_refused() -> None:
    ours, theirs = Pipe()
    inbox = Inbox(ours, longest=1000)
    os.write(theirs.fileno(), b"x" * 2000)
    (found,) = inbox.read()
    assert isinstance(found, Garbled)
    os.write(theirs.fileno(), b"x" * 2000 + b"\n" + encode(Ready()))
    assert inbox.read() == [], "the reader must ignore all later lines"


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.data())
def test_mutated_messages_never_raise(data: st.DataObject) -> None:
    line = bytearray(encode(data.draw(st.sampled_from(MESSAGES))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(line) - 1))
        line[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        line = line or bytearray(b"\n")
    assert all(isinstance(found, (*get_args(Message), Garbled)) for found in _read(bytes(line) + b"\n"))


def test_every_kind_of_message_is_here() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))


def test_a_message_is_one_line_of_json() -> None:
    assert json.loads(encode(Started(rank=1, thread_ident=5))) == {
        "": "Started",
        "rank": 1,
        "thread_ident": 5,
    }
