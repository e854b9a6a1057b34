"""The parameters and buffers of a pipeline rank: those of its stages, as the problem cuts the model."""

from __future__ import annotations

from functools import cache

from shardproof.harness.cases.scripts.pipeline_order import Pipelined
from shardproof.harness.cases.training import Problem, Training


def num_stages(training: Training) -> int:
    """Count the stages of the whole pipeline; 1 where there is none."""
    script = training.script
    per_rank = script.order.stages_per_rank if isinstance(script, Pipelined) else 1
    return training.plan.pipeline_stages * per_rank


def stages_of(training: Training, rank: int, world_size: int) -> tuple[int, ...]:
    """Return the stages of one rank, in order, dealt round-robin along the outermost mesh axis."""
    ring = training.plan.pipeline_stages
    return tuple(range(rank // (world_size // ring), num_stages(training), ring))


def is_on_rank(training: Training, rank: int, world_size: int, name: str) -> bool:
    """Return whether a rank's stages have a parameter or buffer of that name; always true where there are no stages."""
    if training.plan.pipeline_stages == 1:
        return True
    names = _names(training.problem, num_stages(training))  # type: ignore[arg-type]  # Protocol without a hash
    return any(name in names[stage] for stage in stages_of(training, rank, world_size))


@cache  # problems are frozen values
def _names(problem: Problem, count: int) -> tuple[frozenset[str], ...]:
    if problem.stages is None:
        raise ValueError(f"problem {problem.name!r}: expected one that can be cut into stages")
    return tuple(
        frozenset(
            name for tensors in (stage.named_parameters(), stage.named_buffers()) for name, _ in tensors
        )
        for stage in problem.stages(problem.build(), count)
    )
