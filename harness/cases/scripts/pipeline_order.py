"""A script whose microbatches go through a pipeline of stages on several ranks, in an order that a schedule gives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from shardproof.engine.contract import Capability
from shardproof.harness.cases.script import Actor, EachMicrobatch


class PipelineOrder(Enum):
    """In what order a rank of a pipeline takes forwards and backwards; how many stages it has."""

    ONE_FORWARD_ONE_BACKWARD = ("a backward as soon as there is one, one stage on each rank", 1)
    INTERLEAVED = ("the same, with two stages on each rank that are no neighbours", 2)

    def __init__(self, meaning: str, stages_per_rank: int) -> None:
        self.meaning = meaning
        self.stages_per_rank = stages_per_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """All microbatches of a step go through the stages, gradients are reduced after each stage's last backward.

    Ranks of a pipeline are driven by ``harness.training.pipeline``; a rank that holds the whole model takes one
    microbatch after the other, which comes to the same.
    """

    order: PipelineOrder
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.PIPELINE})

    def play(self, actor: Actor) -> None:
        EachMicrobatch().play(actor)
