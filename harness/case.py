"""What is asked: a case is one law set on one training of one problem under one plan. Values only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from engine.contract import Plan

if TYPE_CHECKING:
    from harness.law import Law

__all__ = ["Batch", "Case", "LoopOrder", "NamedOptimizer", "Problem", "Schedule", "Training", "ZeroGrad"]


class Batch(Protocol):
    """One rank's data for one microbatch."""

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Arguments of forward, rows first."""

    @property
    def target(self) -> torch.Tensor:
        """What the loss compares the output with, rows first."""


class Problem(Protocol):
    """A model with its data and loss; implemented in ``fixtures``, picklable, the same on every rank."""

    @property
    def name(self) -> str:
        """Short id used in case names."""

    @property
    def units(self) -> tuple[str, ...]:
        """Submodule names that are natural communication groups."""

    @property
    def is_exact(self) -> bool:
        """Whether every intermediate is an integer multiple of a power of two that float32 holds exactly."""

    def build(self) -> nn.Module:
        """Build the model with the same float32 values every time, whatever the default RNG's state."""

    def num_items(self, *, step: int, microbatch: int, rank: int) -> int:
        """Say how many items (rows, tokens) this microbatch averages over."""

    def batch(self, *, step: int, microbatch: int, rank: int) -> Batch:
        """Make the microbatch, different for each (step, microbatch, rank), floats in float32."""

    def loss_sum(self, output: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Sum the loss over the microbatch's items; a scalar in the output's dtype."""


class NamedOptimizer(Protocol):
    """An optimizer factory with an id; implemented in ``fixtures``, picklable."""

    @property
    def name(self) -> str:
        """Short id used in case names."""

    def __call__(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimizer."""


class LoopOrder(Enum):
    """Where the loop clears gradients."""

    STEP_THEN_ZERO = "step, then clear: what a training loop does"
    ZERO_THEN_STEP = "clear, then step: nothing is ever learnt, so nothing can be proven"


class ZeroGrad(Enum):
    """How the loop clears gradients."""

    SET_TO_NONE = "always to None"
    ALTERNATE = "to None after even steps, to zeros after odd ones"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How long and in what pieces a training runs."""

    steps: int = 3
    microbatches: int = 1
    order: LoopOrder = LoopOrder.STEP_THEN_ZERO
    zero_grad: ZeroGrad = ZeroGrad.ALTERNATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Everything that decides what a run observes, but for the engine and the world."""

    problem: Problem
    optimizer: NamedOptimizer
    plan: Plan = field(default_factory=Plan)
    schedule: Schedule = field(default_factory=Schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training and the laws that must hold of it; ``id`` names neither engine nor world."""

    id: str
    training: Training
    laws: tuple[Law, ...]
