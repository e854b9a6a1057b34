"""A script whose microbatches go through a pipeline of stages on several ranks, in the order of a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from shardproof.engine.contract import Capability
from shardproof.harness.cases.script import Actor, EachMicrobatch


class PipelineOrder(Enum):
    """The order of forwards and backwards on a rank of a pipeline, and its number of stages."""

    ONE_FORWARD_ONE_BACKWARD = ("a backward as soon as there is one, one stage on each rank", 1)
    INTERLEAVED = ("the same, with two stages on each rank that are no neighbours", 2)

    def __init__(self, meaning: str, stages_per_rank: int) -> None:
        self.meaning = meaning
        self.stages_per_rank = stages_per_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """All microbatches of a step go through the stages; gradients are reduced after each stage's last backward.

    ``harness.training.pipeline`` drives the ranks of a pipeline. A rank that holds the whole model runs one microbatch
    after the other, which is equivalent.
    """

    order: PipelineOrder
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.PIPELINE})

    def play(self, actor: Actor) -> None:
        EachMicrobatch().play(actor)
