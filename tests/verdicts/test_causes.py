"""An engine's error is reported as its own, whatever it does when printed and whichever error it quotes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof import Schedule, Training, TrialSession
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.errors import (
    CollectiveTimeoutError,
    DeadlockError,
    WorldAbandonedError,
)
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.worlds.exception_outcome import is_abandonment, raised
from shardproof.harness.worlds.messages import Finished, encode
from shardproof.harness.worlds.outcome import Raised
from tests import judging
from tests.verdicts import culprits

SOON_S = 15.0  # far from the deadline, for busy machines
TRAINING = Training(problem=MLP_EVEN, optimizer=SGD, schedule=Schedule(steps=3))
UNPRINTABLE = r"Error: \(its message cannot be shown\), at tests/verdicts/culprits\.py:\d+ in fail$"
HEADLINES = {
    "RaisesWordless": f"Wordless{UNPRINTABLE}",
    "RaisesTextless": f"Textless{UNPRINTABLE}",
    "RaisesEnding": f"Ending{UNPRINTABLE}",
    "RaisesSlow": "SlowError: at last$",
    "RaisesUncaused": "UncausedError: a text$",
    "RaisesNameless": "NamelessError: a text$",
    "RaisesMuch": r"RuntimeError: begins here x+\n\.\.\. 49996022 characters are left out \.\.\.\nx+ ends here$",
    "RaisesManyLines": r"RuntimeError: begins here\n+\.\.\. 19996020 characters are left out \.\.\.\n+ends here$",
    "RaisesOddCharacters": r"RuntimeError: half \\ud800 nothing \\x00 red \\x1b\[31m line\\r over$",
    "QuotesATimeout": "RuntimeError: lease on the checkpoint server timed out$",
    "QuotesAPeer": r"RuntimeError: Connection closed by peer \[10\.0\.0\.1\]:4711$",
    "QuotesADistError": "DistNetworkError: the tracker's socket closed$",
    "QuotesAConnection": "ConnectionResetError: connection reset by the metrics server$",
    "QuotesAMismatch": r"tests\.verdicts\.culprits\.CollectiveMismatchError: CollectiveMismatchError: all_reduce",
    "QuotesADeadlock": r"[a-z_.]+\.errors\.DeadlockError: my queue: expected a job",
}
# The others do not depend on the kind of world.
IN_PROCESSES = ("RaisesWordless", "RaisesEnding", "RaisesMuch", "QuotesATimeout")


pytestmark = pytest.mark.usefixtures("warm")


def judged(session: TrialSession, engine: str, world: str) -> Record:
    """Judge an engine of `tests.verdicts.culprits`, long before the deadline."""
    return judging.judged(session, f"tests.verdicts.culprits:{engine}", world, TRAINING, within_s=SOON_S)


@pytest.mark.parametrize(
    ("engine", "world"),
    [*((name, "threads:2") for name in HEADLINES), *((name, "processes:2") for name in IN_PROCESSES)],
)
def test_an_error_of_an_engine_is_told_at_once_as_its_own(
    session: TrialSession, engine: str, world: str
) -> None:
    record = judged(session, engine, world)
    assert record.verdict is Verdict.CRASHED, record.headline[:1000]
    assert re.match(f"rank 1 raised {HEADLINES[engine]}", record.headline), record.headline[:1000]
    (text,) = (outcome.text for outcome in record.outcomes if outcome.rank == 1)
    assert "tests/verdicts/culprits.py" in text
    assert len(text) < 50_000


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("RefusesWithoutWords", r"UnsupportedWordlessError: \(its message cannot be shown\)$"),
        ("RefusesAtLength", r"NotImplementedError: no no .*\n\.\.\. 149996000 characters are left out"),
    ],
)
def test_words_of_a_refusal_are_kept_in_short(session: TrialSession, engine: str, words: str) -> None:
    record = judged(session, engine, "threads:2")
    assert record.verdict is Verdict.CRASHED
    start = "rank 0 refused a plan that the engine declares it can honour: "
    assert re.match(start + words, record.headline), record.headline[:1000]


def test_every_engine_that_raises_is_here() -> None:
    assert set(HEADLINES) == set(culprits.ERRORS)


# The rest needs no world.


def _caught(call: Callable[[], object]) -> Raised:
    try:
        call()
    except BaseException as error:
        return raised(0, error)
    raise AssertionError("expected an error")


def _raise(error: BaseException) -> None:
    raise error


def test_an_error_about_freed_memory_is_told_without_reading_it() -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    assert _caught(lambda: _raise(KeyError(torch.ones(2)))).message == "tensor([1., 1.])"
    outcome = _caught(lambda: _raise(KeyError(freed)))
    assert outcome.message == "'a tensor of shape [4] without memory'"
    assert outcome.message in outcome.traceback
    assert "cannot be shown" in _caught(lambda: _raise(KeyError(torch.ones(2).as_subclass(_Closed)))).message


class _Closed(torch.Tensor):
    """A tensor of which nothing can be asked."""

    @classmethod
    def __torch_function__(cls, *given: Any, **named: Any) -> Any:  # Any: as torch's
        raise NotImplementedError


def _lose_a_peer() -> None:
    """Raise torch's error for a peer that is gone."""
    scope: dict[str, Callable[[], None]] = {}
    source = "def wait():\n    raise RuntimeError('Connection closed by peer')"
    exec(compile(source, str(Path(torch.__file__).with_name("made_up.py")), "exec"), scope)
    scope["wait"]()


def _retry() -> None:
    try:
        _lose_a_peer()
    except RuntimeError as error:
        raise RuntimeError(f"all attempts failed: {error}") from error


def _report_it() -> None:
    try:
        _lose_a_peer()
    except RuntimeError:
        raise RuntimeError("the metrics server timed out") from None


def test_a_lost_peer_is_a_symptom_and_so_is_what_is_raised_of_it() -> None:
    assert _caught(_lose_a_peer).is_symptom
    assert _caught(_retry).is_symptom
    assert _caught(_report_it).is_symptom, "raised while a lost peer was handled"
    assert not _caught(lambda: _raise(RuntimeError("Connection closed by peer"))).is_symptom
    assert not _caught(lambda: _raise(ValueError("timed out"))).is_symptom


def test_an_error_of_the_transport_is_known_by_its_origin() -> None:
    def timeout(kind: type[CollectiveTimeoutError] | type[DeadlockError]) -> Callable[[], None]:
        return lambda: _raise(kind("all_reduce", expected="rank 1", got="none", hint="waiting"))

    found = _caught(timeout(CollectiveTimeoutError))
    assert (found.kind, found.is_symptom) == (
        "shardproof.harness.errors.CollectiveTimeoutError",
        False,
    )
    assert _caught(timeout(DeadlockError)).kind == "shardproof.harness.errors.DeadlockError"


def test_a_rank_that_abandons_itself_has_raised() -> None:
    with pytest.raises(WorldAbandonedError) as caught:
        raise WorldAbandonedError
    assert not is_abandonment(caught.value)


def test_an_error_without_words_has_its_place() -> None:
    assert re.fullmatch(
        r"\(no message\), at tests/verdicts/test_causes\.py:\d+ in _raise",
        _caught(lambda: _raise(KeyError())).message,
    )
    assert (
        _caught(lambda: _raise(SystemExit(culprits.WordlessError()))).message
        == "the rank called sys.exit(...)"
    )


class _OddError(Exception):
    def __init__(self, text: str, fault: type[BaseException] | None) -> None:
        super().__init__()
        self.text, self.fault = text, fault

    def __str__(self) -> str:
        if self.fault is not None:
            raise self.fault(self.text)
        return self.text


FAULTS = [None, ValueError, SystemExit, KeyboardInterrupt, WorldAbandonedError, RecursionError]


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=())),
    times=st.sampled_from([1, 2000]),
    fault=st.sampled_from(FAULTS),
)
def test_any_text_arrives_in_a_form_that_a_file_can_hold(
    text: str, times: int, fault: type[BaseException] | None
) -> None:
    found = _caught(lambda: _raise(_OddError(text * times, fault)))
    for part in (found.message, found.traceback):
        assert part.encode("utf-8")  # no halves of surrogate pairs
        assert all(c.isprintable() or unicodedata.category(c) != "Cc" or c in "\n\t" for c in part)
        assert len(part) < 6 * 50_000
    assert "tests/verdicts/test_causes.py" in found.traceback
    encode(Finished(outcome=found))


def test_a_long_chain_of_causes_is_cut() -> None:
    def nested(depth: int) -> None:
        if depth == 0:
            raise ValueError("x" * 10**6)
        try:
            nested(depth - 1)
        except ValueError:
            raise ValueError("y" * 10**6) from None

    assert len(_caught(lambda: nested(30)).traceback) < 50_000
