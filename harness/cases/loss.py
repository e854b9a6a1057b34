"""The weight of a microbatch's loss: the one convention that the oracle and the training loop share."""

from __future__ import annotations

from harness.cases.training import Training

__all__ = ["loss_weight"]


def loss_weight(training: Training, world_size: int, step: int) -> float:
    """Give what each rank multiplies ``loss_sum`` with, so that averaging over ranks gives the global mean.

    The global mean divides by the items of all ranks and microbatches of the step; an engine averages
    gradients over ranks, hence the factor ``world_size``. A plan with a divide factor of its own changes
    neither data nor loss: its gradient is then that of the global mean times ``world_size`` / factor.
    """
    problem = training.problem
    total = sum(
        problem.num_items(step=step, microbatch=microbatch, rank=rank)
        for microbatch in range(training.schedule.microbatches)
        for rank in range(world_size)
    )
    return world_size / total
