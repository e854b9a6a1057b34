"""An engine may refuse where a case allows or requires it, on every rank or on none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof import Capability, Case, Plan, PreparedModel, Refusal, Returned, TrialSession
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.saved_result import SavedResult
from shardproof.harness.tracing.ledger import Entry, Ledger, Op
from shardproof.harness.verdicts.judgement import judge
from shardproof.harness.worlds.outcome import Abandoned, Died, Outcome, Raised, TimedOut, WorldResult
from shardproof.harness.worlds.spec import OWN_KINDS, WorldKind
from tests.judging import LAWS, judged
from tests.judging import TWO_STEPS as TRAINING
from tests.ledgers import entry, numbered

KINDS = list(OWN_KINDS)
MAY_OR_MUST = [Refusal.ALLOWED, Refusal.REQUIRED]
NO = "this I will not train"


class Dislikes(DistributedDataParallelEngine):
    """Refuses in forward, on every rank."""

    ranks: tuple[int, ...] = (0, 1)

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        if dist.get_rank() in self.ranks:
            prepared.module.register_forward_pre_hook(_refuse)
        return prepared


class DislikesOnRank0(Dislikes):
    """Leaves rank 1 to wait for gradients that never come."""

    ranks = (0,)


class DislikesOnRank1(Dislikes):
    """Leaves rank 0 to wait, which reaches each collective first."""

    ranks = (1,)


def _refuse(*_: object) -> None:
    raise NotImplementedError(NO)


def _case(refusal: Refusal) -> Case:
    return Case(id="case", training=TRAINING, laws=LAWS, refusal=refusal)


def _run(session: TrialSession, engine: str, kind: WorldKind, refusal: Refusal) -> Record:
    name = engine if "." in engine else f"tests.verdicts.test_refusals:{engine}"
    return judged(session, name, f"{kind}:2", refusal=refusal, deadline_s=5.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refusal", MAY_OR_MUST)
def test_all_ranks_may_refuse_in_training(session: TrialSession, kind: WorldKind, refusal: Refusal) -> None:
    record = _run(session, "Dislikes", kind, refusal)
    assert record.verdict is Verdict.PASSED, record.headline
    assert NO in record.headline


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refusal", MAY_OR_MUST)
@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_may_refuse_alone(
    session: TrialSession, kind: WorldKind, refusal: Refusal, rank: int
) -> None:
    record = _run(session, f"DislikesOnRank{rank}", kind, refusal)
    assert record.verdict is Verdict.FAILED, record.headline
    assert f"refused on rank(s) [{rank}] while rank(s) [{1 - rank}] went ahead: " in record.headline
    assert NO in record.headline


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_refuses_nothing_must_keep_every_law(session: TrialSession, kind: WorldKind) -> None:
    record = _run(session, "torch.ddp", kind, Refusal.ALLOWED)
    assert (record.verdict, len(record.laws)) == (Verdict.PASSED, 8), record.headline
    record = _run(session, "torch.ddp", kind, Refusal.REQUIRED)
    assert record.verdict is Verdict.FAILED
    assert record.headline == "went on with a plan that has no right outcome, without a word"


# The rest needs no world.


def _raised(rank: int, kind: str = "ValueError", *, is_symptom: bool = False) -> Raised:
    return Raised(rank=rank, kind=kind, message=NO, traceback="", is_symptom=is_symptom, at_s=float(rank))


def _kept(
    *outcomes: Outcome, ledgers: Mapping[int, Ledger] | None = None, leaks: tuple[str, ...] = ()
) -> SavedResult:
    return SavedResult(
        result=WorldResult(outcomes=outcomes, leaks=leaks),
        refusals={o.rank: str(o.value) for o in outcomes if isinstance(o, Returned) and o.value is not None},
        ledgers=tuple((ledgers or {}).get(o.rank, ()) for o in outcomes),
        ranks=(),
    )


def _not_asked() -> OracleObservation:
    raise AssertionError("numbers play no part in this")


def _verdict(kept: SavedResult, refusal: Refusal) -> tuple[Verdict, str]:
    engine = DistributedDataParallelEngine
    judgement = judge(_case(refusal), engine.capabilities, kept, _not_asked)
    assert [o.rank for o in judgement.outcomes] == [o.rank for o in kept.result.outcomes]
    return judgement.verdict, judgement.headline


GATHER = entry(Op.ALL_GATHER)
REDUCE = entry(Op.ALL_REDUCE)


@pytest.mark.parametrize("refusal", MAY_OR_MUST)
def test_a_rank_stopped_where_the_others_had_been_may_have_been_about_to_refuse(refusal: Refusal) -> None:
    ledgers = {0: numbered([GATHER, REDUCE]), 1: numbered([GATHER])}
    verdict, headline = _verdict(_kept(_raised(0), Abandoned(rank=1), ledgers=ledgers), refusal)
    assert verdict is Verdict.PASSED
    assert headline == f"refused, as it {'may' if refusal is Refusal.ALLOWED else 'must'}: ValueError: {NO}"


@pytest.mark.parametrize("refusal", MAY_OR_MUST)
@pytest.mark.parametrize("further", [REDUCE, entry(Op.SEND, peer=0)])
def test_a_rank_stopped_beyond_the_refusal_of_another_went_ahead(refusal: Refusal, further: Entry) -> None:
    ledgers = {0: numbered([GATHER]), 1: numbered([GATHER, further])}
    verdict, headline = _verdict(_kept(_raised(0), Abandoned(rank=1), ledgers=ledgers), refusal)
    assert verdict is Verdict.FAILED
    assert headline == f"refused on rank(s) [0] while rank(s) [1] went ahead: ValueError: {NO}"


def test_of_three_ranks_each_is_asked() -> None:
    common = [entry(Op.ALL_GATHER, world_size=3)]
    ahead = [*common, entry(Op.ALL_REDUCE, world_size=3)]
    ledgers = {0: numbered(common), 1: numbered(common), 2: numbered(ahead)}
    kept = _kept(_raised(0), Abandoned(rank=1), Abandoned(rank=2), ledgers=ledgers)
    verdict, headline = _verdict(kept, Refusal.ALLOWED)
    assert verdict is Verdict.FAILED
    assert "rank(s) [2] went ahead" in headline


@pytest.mark.parametrize("refusal", MAY_OR_MUST)
def test_a_refusal_in_prepare_counts_as_one_in_training_does(refusal: Refusal) -> None:
    verdict, _ = _verdict(_kept(Returned(rank=0, value=NO), _raised(1)), refusal)
    assert verdict is Verdict.PASSED


@pytest.mark.parametrize("refusal", MAY_OR_MUST)
def test_a_rank_that_trained_to_the_end_went_ahead(refusal: Refusal) -> None:
    for first in (_raised(0), Returned(rank=0, value=NO)):
        verdict, headline = _verdict(_kept(first, Returned(rank=1, value=None)), refusal)
        assert verdict is Verdict.FAILED
        assert "refused on rank(s) [0] while rank(s) [1] went ahead" in headline


@pytest.mark.parametrize("refusal", MAY_OR_MUST)
@pytest.mark.parametrize(
    "other",
    [
        TimedOut(rank=1, stack="", last_call=""),
        _raised(1, "DeadlockError"),
        _raised(1, "RuntimeError", is_symptom=True),
    ],
)
def test_a_rank_that_waits_in_vain_for_one_that_refused_went_ahead(refusal: Refusal, other: Outcome) -> None:
    verdict, headline = _verdict(_kept(Returned(rank=0, value=NO), other), refusal)
    assert verdict is Verdict.FAILED
    assert headline == f"refused on rank(s) [0] while rank(s) [1] went ahead: {NO}"


@pytest.mark.parametrize("refusal", MAY_OR_MUST)
def test_a_refusal_excuses_no_death(refusal: Refusal) -> None:
    for first in (_raised(0), Returned(rank=0, value=NO)):
        died = Died(rank=1, exit_code=-11, is_attributed=True, text="")
        verdict, headline = _verdict(_kept(first, died), refusal)
        assert verdict is Verdict.CRASHED
        assert headline == "rank 1 was killed by SIGSEGV"


@pytest.mark.parametrize("refusal", MAY_OR_MUST)
def test_a_refusal_excuses_no_process_left_behind(refusal: Refusal) -> None:
    kept = _kept(Returned(rank=0, value=NO), Returned(rank=1, value=NO), leaks=("rank 1 left a process",))
    assert _verdict(kept, refusal) == (Verdict.FAILED, "rank 1 left a process")


def test_a_refusal_that_is_not_allowed_is_a_crash() -> None:
    verdict, headline = _verdict(_kept(Returned(rank=0, value=NO), Returned(rank=1, value=NO)), Refusal.WRONG)
    assert verdict is Verdict.CRASHED
    assert headline == f"rank 0 refused a plan that the engine declares it can honour: {NO}"
    assert _verdict(_kept(_raised(0), _raised(1)), Refusal.WRONG)[0] is Verdict.CRASHED


@pytest.mark.parametrize("refusal", list(Refusal))
def test_processes_left_behind_are_a_failure_whichever_rank_refused(refusal: Refusal) -> None:
    kept = _kept(Returned(rank=0, value=None), Returned(rank=1, value=None), leaks=("rank 1 left a process",))
    assert _verdict(kept, refusal) == (Verdict.FAILED, "rank 1 left a process")


@pytest.mark.parametrize("refusal", list(Refusal))
def test_a_refusal_excuses_no_crash_after_the_result(refusal: Refusal) -> None:
    died = Died(rank=1, exit_code=-6, is_attributed=True, text="", is_after_result=True)
    verdict, headline = _verdict(_kept(Returned(rank=0, value=None), died), refusal)
    assert verdict is Verdict.CRASHED
    assert headline == "rank 1 was killed by SIGABRT after its result"


def test_a_rank_that_refuses_and_leaves_a_process_fails_though_it_declares_nothing() -> None:
    kept = _kept(Returned(rank=0, value=NO), Returned(rank=1, value=NO), leaks=("rank 1 left a process",))
    training = replace(TRAINING, plan=Plan(demands=frozenset({Capability.COMPLEX})))
    judgement = judge(replace(_case(Refusal.WRONG), training=training), frozenset(), kept, _not_asked)
    assert judgement.verdict is Verdict.FAILED
    assert judgement.headline.endswith("refused, and then: rank 1 left a process")


def test_a_rank_that_hangs_after_it_refused_hangs() -> None:
    late = TimedOut(rank=1, stack="", last_call="", is_after_result=True)
    verdict, headline = _verdict(_kept(Returned(rank=0, value=NO), late), Refusal.REQUIRED)
    assert verdict is Verdict.HUNG
    assert headline == "rank 1 returned its result and did not end"


@pytest.mark.parametrize(
    ("other", "verdict", "headline"),
    [
        (
            Died(rank=0, exit_code=-9, is_attributed=True, text=""),
            Verdict.CRASHED,
            "rank 0 was killed by SIGKILL",
        ),
        (
            TimedOut(rank=0, stack="", last_call="no collective yet"),
            Verdict.HUNG,
            "not ended at the deadline: rank(s) [0]",
        ),
    ],
)
def test_a_rank_that_ended_badly_before_its_first_call_did_not_go_ahead(
    other: Outcome, verdict: Verdict, headline: str
) -> None:
    training = replace(TRAINING, plan=Plan(demands=frozenset({Capability.COMPLEX})))
    kept = _kept(other, Returned(rank=1, value=NO), ledgers={})
    judgement = judge(replace(_case(Refusal.WRONG), training=training), frozenset(), kept, _not_asked)
    assert judgement.verdict is verdict, judgement.headline
    assert "refused, and then: " in judgement.headline
    assert judgement.headline.endswith(headline)
