"""Where a training first went wrong: told of engines whose fault is known, and of none that is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardproof import Case, Cell, Eventful, Freeze, Interlude, MatchesOracle, TrialSession, WorldSpec
from shardproof.engine.contract import Layout, Plan
from shardproof.engine.registry import shipped_mutants
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_EVEN, TRANSFORMER
from shardproof.fixtures.programs.space import SPACE
from shardproof.fixtures.programs.training import training_of
from shardproof.harness.cases.training import Clip, Resume, Schedule, Training
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.records.observation import digest
from shardproof.harness.records.record import FaultPhase, Located
from shardproof.harness.runner.locating import locate, probed
from shardproof.harness.runner.observations import Source
from shardproof.harness.runner.training_request import Request

PLAN = Plan(units=MLP_EVEN.units, layout=Layout.SHARD)
TRAINING = Training(problem=MLP_EVEN, optimizer=SGD, plan=PLAN, schedule=Schedule(steps=3, microbatches=2))
REPLICAS = replace(TRAINING, plan=Plan(layout=Layout.REPLICATE))
WORLD = WorldSpec.parse("threads:2", deadline_s=30.0)


def located(tmp_path: Path, mutant: str, training: Training) -> Located:
    (spec,) = (m.engine_spec for m in shipped_mutants() if m.name == mutant)
    session = TrialSession(Source(folder=tmp_path))
    case = Case(id="case", training=training, laws=(MatchesOracle(),))
    session.run(case, Cell(engine=spec, world=WORLD), suite="", command="")
    found = session.located()
    session.close()
    assert found is not None
    return found


@pytest.mark.parametrize(
    "training", [TRAINING, replace(TRAINING, problem=TRANSFORMER)], ids=["mlp", "transformer"]
)
@pytest.mark.parametrize("engine", ["reference", "torch.fsdp2", "torch.fsdp1", "torch.ddp"])
def test_probes_change_nothing_and_find_nothing_on_an_engine_that_is_right(
    tmp_path: Path, engine: str, training: Training
) -> None:
    training = replace(
        training, plan=replace(PLAN if engine != "torch.ddp" else REPLICAS.plan, units=training.problem.units)
    )
    session = TrialSession(Source(folder=tmp_path))
    request = Request(training=training, cell=Cell(engine=engine, world=WORLD), case="case")
    watching = replace(request, training=probed(training))
    observations = session._observations
    (plain, *_), (seen, *_) = observations.under((0,), request), observations.under((0,), watching)
    assert [digest(rank) for rank in seen.saved.ranks] == [digest(rank) for rank in plain.saved.ranks]

    def oracle() -> OracleObservation:
        return session._oracles.oracle(watching, limit_s=60.0)

    found = locate(watching, seen.saved, observations.folder(watching), oracle, limit_s=60.0)
    session.close()
    assert found.phase is None
    assert "did not repeat" in found.sentence


@pytest.mark.parametrize(
    ("mutant", "training", "told"),
    [
        pytest.param(
            "ComputesWithStaleParameters",
            TRAINING,
            "gather: step 1, microbatch 0, all 2 ranks: the parameter 'weight' as 'layers.0' has it in forward is "
            "wrong: that of step 0 (stale); the ranks' shards were right after step 0; gathered by all_gather",
            id="gather",
        ),
        pytest.param(
            "NeverSynchronises",
            REPLICAS,
            "reduce: step 0, all 2 ranks: the reduced gradient of 'layers.1.weight' and 5 more are wrong: only this "
            "rank's own gradient: not synchronised; each rank's own gradients were right",
            id="reduce",
        ),
        pytest.param(
            "KeepsOnlyTheLastMicrobatch", REPLICAS, "hold: step 0, all 2 ranks: the reduced", id="hold"
        ),
        pytest.param(
            "NeverUpdatesOneParameter", REPLICAS, "step: step 0, all 2 ranks: the parameter", id="step"
        ),
        pytest.param(
            "HalvesTheLastRank",
            TRAINING,
            "backward: step 0, microbatch 0, rank 1: the gradient of the output of 'layers.2' is wrong: 0.5 x the "
            "right one; its inputs and parameters and outputs were right",
            id="backward",
        ),
        pytest.param(
            "NeverClips",
            replace(TRAINING, schedule=replace(TRAINING.schedule, clip=Clip(max_norm=0.1))),
            "clip: step 0, all 2 ranks: the clipped gradient of ",
            id="clip",
        ),
        pytest.param(
            "LoadsNoParameters",
            replace(TRAINING, resume=Resume(after_steps=1, plan=PLAN)),
            "state loaded: step 1, all 2 ranks: the loaded parameter of ",
            id="load",
        ),
        pytest.param(
            "LosesTheStateOfWhatIsFrozen",
            replace(
                TRAINING,
                optimizer=ADAMW,
                schedule=Schedule(steps=4),
                script=Eventful(moves=((Interlude.BEFORE, Freeze(parts=("layers.0",), steps=(1, 2))),)),
                resume=Resume(after_steps=1, plan=PLAN, freezes_first=True),
            ),
            "state loaded: step 3, all 2 ranks: the parameter after the step of 'layers.0.",
            id="load that shows later",
        ),
        pytest.param(
            "SavesWhatIsFrozenAsItComputes",
            training_of(SPACE.parse("frozen=unit,compute=bfloat16,resume=same")),
            "state saved: step 1: a whole state was handed out that is not what the ranks hold",
            id="save that no value shows",
        ),
        pytest.param(
            "EvaluationDropsWhatIsHeld",
            training_of(SPACE.parse("side=first,accumulation=last,microbatches=2,evaluation=between")),
            "hold: step 0, all 2 ranks: the reduced gradient of ",
            id="hold, by what explains all that is wrong",
        ),
    ],
)
def test_names_the_phase_and_the_place(tmp_path: Path, mutant: str, training: Training, told: str) -> None:
    found = located(tmp_path, mutant, training)
    assert found.sentence.startswith(told)
    assert found.phase == told.partition(":")[0]


def test_every_mutant_with_wrong_numbers_declares_where_they_begin() -> None:
    phases = {str(phase) for phase in FaultPhase}
    wrong = [m.name for m in shipped_mutants() if (m.phase in phases) is not (m.trace.name == "NUMBERS")]
    assert wrong == []
