"""A training may start from a state that a world of another size saved; tests its reference and its failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof import (
    Capability,
    LossScaling,
    MatchesOracle,
    Origin,
    Plan,
    PreparedModel,
    RanksBefore,
    Rows,
    StateForm,
    Training,
    TrialSession,
    Verdict,
    WorldKind,
)
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.harness.cases.training import loss_weight
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.worlds.spec import OWN_KINDS
from shardproof.suites.training import train
from tests.judging import judged

WHOLE = Origin(steps=2, ranks=RanksBefore.ONE_MORE, form=StateForm.WHOLE)
TRAINING = train(MLP_UNEVEN, ADAMW, steps=2, origin=WHOLE)


class _InOtherWorlds(DistributedDataParallelEngine):
    """Runs `begin` where the world has another size than two."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        if dist.get_world_size() != 2:
            self.begin()
        return super().prepare(model, plan, mesh)

    def begin(self) -> None:
        """Misbehave."""


class Raises(_InOtherWorlds):
    """Cannot be prepared."""

    def begin(self) -> None:
        raise RuntimeError("three are a crowd")


class Refuses(_InOtherWorlds):
    """Declares a capability and refuses it."""

    def begin(self) -> None:
        raise NotImplementedError("three are a crowd")


class SavesNothing(DistributedDataParallelEngine):
    """Declares no state, and refuses to be asked for it."""

    class Prepared(PreparedDdp):
        """Has no state."""

        def full_state(self) -> dict[str, Any]:
            raise TypeError("no state")

    prepared_type = Prepared
    capabilities = DistributedDataParallelEngine.capabilities - {Capability.STATE}

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        if Capability.STATE in plan.demands:
            raise NotImplementedError("state")
        return super().prepare(model, plan, mesh)


class LoadsNothing(DistributedDataParallelEngine):
    """Leaves a model as it was built."""

    class Prepared(PreparedDdp):
        """Ignores the state that it loads."""

        def load_full_state(self, state: dict[str, Any]) -> None:
            """Do nothing."""

    prepared_type = Prepared


@pytest.fixture
def judge(session: TrialSession) -> Callable[..., Any]:
    def ask(engine: str, kind: WorldKind = WorldKind.THREADS, origin: Origin = WHOLE) -> Any:
        name = engine if "." in engine else f"{__name__}:{engine}"
        training = replace(TRAINING, origin=origin)
        return judged(session, name, f"{kind}:2", training, laws=(MatchesOracle(),))

    return ask


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_an_honest_engine_continues(judge: Callable[..., Any], kind: WorldKind) -> None:
    record = judge("torch.ddp", kind)
    assert record.verdict is Verdict.PASSED, record.headline


def test_parameters_that_are_not_loaded_are_seen_before_the_first_step(judge: Callable[..., Any]) -> None:
    record = judge("LoadsNothing")
    assert record.verdict is Verdict.FAILED
    assert any("initial parameter" in law.summary for law in record.laws if not law.held)
    assert (
        "step 0, rank 0: expected what the ranks hold once they have loaded a whole state" in record.headline
    )


@pytest.mark.parametrize("engine", ["Raises", "Refuses"])
@pytest.mark.parametrize("kind", OWN_KINDS)
def test_an_error_in_the_world_before_is_reported_as_of_that_world(
    judge: Callable[..., Any], engine: str, kind: WorldKind
) -> None:
    record = judge(engine, kind)
    assert record.verdict is Verdict.CRASHED
    assert record.headline.startswith("in the world before, of 3 rank(s): rank ")
    assert "three are a crowd" in record.headline
    assert {outcome.rank for outcome in record.outcomes} == {0, 1, 2}


@pytest.mark.parametrize("before", [None, Plan(units=MLP_UNEVEN.units)])
def test_an_engine_without_state_refuses(judge: Callable[..., Any], before: Plan | None) -> None:
    record = judge("SavesNothing", origin=replace(WHOLE, plan=before))
    assert record.verdict is Verdict.UNSUPPORTED
    assert not record.headline.startswith("in the world before")


def test_the_files_of_the_world_before_are_deleted(session: TrialSession, tmp_path: Path) -> None:
    judged(session, "torch.ddp", training=TRAINING, laws=(MatchesOracle(),))
    session.close()
    assert not [path for path in tmp_path.rglob("*") if path.name in {"before", "whole.pt"}]


@pytest.mark.parametrize(("ranks", "before"), [(RanksBefore.ONE_MORE, 3), (RanksBefore.HALF, 1)])
def test_the_reference_trains_on_the_data_of_both_worlds(ranks: RanksBefore, before: int) -> None:
    training = replace(TRAINING, origin=replace(WHOLE, ranks=ranks))
    seen = run_oracle(training, 2)
    model = MLP_UNEVEN.build().double()
    optimizer = ADAMW(model.parameters())
    for num_ranks in (before, 2):
        for step in range(2):
            _take_step(training, model, optimizer, num_ranks, step)
        if num_ranks == before:
            assert _are_close(seen.initial, model)
    assert _are_close(seen.steps[-1].parameters, model)
    assert seen.is_trained_before
    alone = run_oracle(replace(training, origin=None), 2)
    assert not _are_close(alone.steps[-1].parameters, model)


def _take_step(
    training: Training, model: nn.Module, optimizer: torch.optim.Optimizer, num_ranks: int, step: int
) -> None:
    """Step on the mean over all rows of all ranks."""
    for rank in range(num_ranks):
        batch = MLP_UNEVEN.batch(step=step, microbatch=0, rank=rank)
        assert isinstance(batch, Rows)
        rows = Rows(inputs=tuple(x.double() for x in batch.inputs), target=batch.target.double())
        weight = loss_weight(training, num_ranks, step) / num_ranks
        (MLP_UNEVEN.loss_sum(model(*rows.inputs), rows) * weight).backward()
    optimizer.step()
    optimizer.zero_grad()


def _are_close(found: Any, model: nn.Module) -> bool:
    return all(torch.allclose(found[name], p, rtol=1e-10, atol=0.0) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"origin": replace(WHOLE, form=StateForm.SHARES)}, "whole tensors or files"),
        ({"compute_dtype": torch.bfloat16}, "computation in the parameters' dtype"),
        ({"scaling": LossScaling()}, "no loss scaling"),
        ({"demands": frozenset({Capability.SHARED_STATE}), "tensor_parallel": 2}, "data of its own"),
    ],
    ids=["shares", "dtype", "scaling", "tensor parallel"],
)
def test_a_training_without_a_reference_is_refused(change: dict[str, Any], words: str) -> None:
    from shardproof.fixtures.tensor_parallel import STACK_16

    problem = STACK_16 if "tensor_parallel" in change else MLP_UNEVEN
    with pytest.raises(ValueError, match=words):
        train(problem, ADAMW, **{"origin": WHOLE, **change})
