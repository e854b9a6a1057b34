"""Trainings of cases: a problem, and the options that differ from the simplest training of it."""

from __future__ import annotations

from typing import Any

import torch

from shardproof import Clip, EachMicrobatch, Grouping, Layout, LossScaling, NamedOptimizer, Origin, Plan
from shardproof import Problem, Resume, Schedule, Script, Training, Watch
from shardproof.fixtures.optimizers import SGD


def train(
    problem: Problem,
    optimizer: NamedOptimizer = SGD,
    *,
    schedule: Schedule | None = None,
    steps: int = 3,
    microbatches: int = 1,
    clip: Clip | None = None,
    scaling: LossScaling | None = None,
    script: Script | None = None,
    convert: torch.dtype | None = None,
    resume: Resume | None = None,
    origin: Origin | None = None,
    watch: frozenset[Watch] = frozenset(),
    **plan: Any,  # by the names of its fields
) -> Training:
    """Make a training under a plan of these options, in the problem's units by default."""
    return Training(
        problem=problem,
        optimizer=optimizer,
        plan=Plan(**{"units": problem.units, **plan}),
        schedule=schedule or Schedule(steps=steps, microbatches=microbatches, clip=clip, scaling=scaling),
        script=script or EachMicrobatch(),
        convert=convert,
        resume=resume,
        origin=origin,
        watch=watch,
    )


# Any: as for `train`.
def train_sharded(problem: Problem, *optimizer: NamedOptimizer, **plan: Any) -> Training:
    """Make a training whose parameters are sharded, each of its units gathered separately by default."""
    return train(problem, *optimizer, **{"layout": Layout.SHARD, "grouping": Grouping.REQUIRED, **plan})
