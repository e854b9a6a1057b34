"""Activation checkpointing within units, around them, and across groups of several modules."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from shardproof import SEVERAL, AllForwardsFirst, Backwards, Count, Exactly, Layout, Nothing
from shardproof import Problem, Reshard, Training, Trial, UnitDtypes
from shardproof.fixtures.decoders import CHECKPOINTED, CHECKPOINTED_REENTRANT, CHECKPOINTED_TIED
from shardproof.fixtures.decoders import CHECKPOINTED_TIED_REENTRANT
from shardproof.fixtures.precision import RECOMPUTED_CASTS
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train, train_sharded
from shardproof.suites.vocabulary import GATHERS_IN_BACKWARD, PARITY

# A checkpoint contains the unit, or the unit contains the checkpoint.
HELD, HOLDING = ("blocks.0.inner", "blocks.1.inner"), ("blocks.0", "blocks.1")
# The root has no parameters; the embeddings' backward does not need theirs.
EMBEDDINGS = "token,position"
GROUPS = (EMBEDDINGS, "blocks.0.inner,blocks.1.inner", "norm,head")
TIED_GROUPS = ("token,position,head", *HELD)
NESTED = ("blocks.0.inner.attention", "blocks.1.inner.attention", *HELD)


@dataclass(frozen=True, slots=True, kw_only=True)
class GathersOfFreedUnits:
    """The groups that backward gathers: units, and the root if it has parameters, without those gathered once."""

    root_owns: int
    name: str = "groups that backward needs"

    def __call__(self, training: Training, world_size: int) -> int:
        """Count them."""
        plan = training.plan
        return len(plan.units) + self.root_owns - len(plan.gathered_once)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.rows("T16")
@pytest.mark.kills("CountsRecomputedGradientsTwice")
@parametrize(
    "problem, units, root_owns",
    param(
        CHECKPOINTED_REENTRANT,
        HELD,
        1,
        id="held-reentrant",
        kills="GathersAgainAfterARecompute",
    ),
    param(CHECKPOINTED, NESTED, 1, id="nested", kills="GathersInnerUnitsAgain"),
    param(CHECKPOINTED, HOLDING, 1, id="holding", kills="GathersOnceMoreInBackward"),
    param(
        CHECKPOINTED,
        GROUPS,
        0,
        id="groups",
        kills="GathersWhatBackwardDoesWithout",
    ),
)
def test_freed_parameters_are_gathered_once_for_recompute_and_backward(
    trial: Trial, problem: Problem, units: tuple[str, ...], root_owns: int
) -> None:
    once = Count(select=GATHERS_IN_BACKWARD, expected=Exactly(GathersOfFreedUnits(root_owns=root_owns)))
    training = train_sharded(
        problem,
        units=units,
        reshard=Reshard.AFTER_FORWARD,
        gathered_once=(EMBEDDINGS,) if EMBEDDINGS in units else (),
    )
    trial.holds(training, *PARITY, once)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.rows("T16", "T26")
@pytest.mark.kills("CountsRecomputedGradientsTwice")
@parametrize(
    "problem, units",
    param(CHECKPOINTED, HELD, id="held"),
    param(CHECKPOINTED_TIED_REENTRANT, TIED_GROUPS, id="tied-reentrant"),
)
def test_kept_parameters_are_not_gathered_for_a_recompute(
    trial: Trial, problem: Problem, units: tuple[str, ...]
) -> None:
    none = Nothing(select=GATHERS_IN_BACKWARD)
    trial.holds(train_sharded(problem, units=units, reshard=Reshard.KEEP), *PARITY, none)


@pytest.mark.rows("R12", "R13")
@pytest.mark.kills("CountsRecomputedGradientsTwice")
@parametrize("problem", param(CHECKPOINTED_REENTRANT, kills="SearchesTheGraph"), param(CHECKPOINTED_TIED))
def test_replicas_recompute_alike(trial: Trial, problem: Problem) -> None:
    trial.holds(train(problem, layout=Layout.REPLICATE, units=HELD), *PARITY)


@pytest.mark.kills("RecomputesUncast")
@parametrize(
    "own",
    param((), id="inputs", rows="X12"),
    param(
        (UnitDtypes(unit="first", compute_dtype=torch.bfloat16, output_dtype=torch.float32),),
        id="outputs",
        rows="X13",
    ),
)
def test_a_recompute_casts_as_the_first_forward_did(trial: Trial, own: tuple[UnitDtypes, ...]) -> None:
    low, full = torch.bfloat16, torch.float32
    training = train_sharded(RECOMPUTED_CASTS, compute_dtype=low, reduce_dtype=full, unit_dtypes=own)
    trial.holds(training, *PARITY)


@pytest.mark.rows("T22")
@pytest.mark.kills("ForgetsEarlierForwards", "CountsRecomputedGradientsTwice")
@parametrize("reshard", param(Reshard.AFTER_FORWARD, id="freed"), param(Reshard.KEEP, id="kept"))
def test_two_forwards_through_nested_groups_both_count(trial: Trial, reshard: Reshard) -> None:
    script = AllForwardsFirst(backwards=Backwards.AT_ONCE)
    training = train_sharded(CHECKPOINTED, units=NESTED, reshard=reshard, microbatches=2, script=script)
    trial.holds(training, *PARITY)
