"""The law over the census that needs no layout: a rank that shows as much as before holds no more than before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.records.observation import Observation

_COUNT_BYTES = 4  # of a parameter's steps
_CONSTANTS_BYTES = 16  # numbers that an engine makes once, such as FSDP1's zero for the norm of no gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavesNothingBehind:
    """After a backward, an update or a clearing a rank holds no more than before, if it shows the same.

    Counts are compared at which the engine shows gradients of the same parameters and the same optimizer state: what
    it pads and the buffers that it keeps are then alike too. So outputs that an engine keeps until a step are more, and
    gradients that it keeps after a step that it skips, and a model in whose place another one was loaded. What is made
    and freed between two counts is not seen.
    """

    name: str = "no step leaves memory behind"

    def judge(self, evidence: Evidence) -> Ruling:
        """Compare each count with the fewest bytes of those before it, on every rank."""
        if leaves_gradients(evidence):
            return rule(self.name, [], held=NOT_COUNTED)
        largest = max(map(_size, evidence.ranks))
        broken = [
            f"rank {observation.rank}, {breach}"
            for observation in evidence.ranks
            for breach in _breaches(observation, _added(evidence, observation, largest))
        ]
        num_counts = len([count for o in evidence.ranks for count in o.counts if count.shown])
        return rule(self.name, broken, held=f"at {num_counts} moments")


# Why memory is not judged where the optimizer leaves gradients.
NOT_COUNTED = "not counted: gradients that the optimizer does not clear keep the buffers that they lie in"


def leaves_gradients(evidence: Evidence) -> bool:
    """Return whether parameters that the optimizer did not receive have gradients, which nothing clears."""
    return any(
        step.gradients.get(name) is not None
        for step in evidence.oracle.steps
        for name in evidence.oracle.untrained
    )


def _size(observation: Observation) -> int:
    """Return the bytes of a rank's parameters at first."""
    return sum(shard.tensor.nbytes for shard in observation.initial.values())


def _added(evidence: Evidence, observation: Observation, largest: int) -> float:
    """Return the bytes that a load may add on a rank, where the largest parameters of a rank have so many.

    A model that is left behind has the rank's parameters at least, and counts of steps in tensors of their own are few,
    unless parameters have few elements themselves. But a rank whose shards are smaller than another's may receive
    padded ones, and another layout may need more.
    """
    steps = range(len(evidence.oracle.steps))
    has_one_plan = all(evidence.training.at(step).plan == evidence.training.plan for step in steps)
    size = _size(observation)
    has_few_counts = _COUNT_BYTES * len(observation.initial) <= size / 2
    return size / 2 if has_one_plan and has_few_counts and size == largest else math.inf


def _breaches(observation: Observation, added: float) -> Iterator[str]:
    fewest: dict[str, dict[int, int]] = {}  # by what is shown, and the loads before
    for count in (count for count in observation.counts if count.shown):
        alike = fewest.setdefault(count.shown, {})
        before = [n + added for loads, n in alike.items() if loads != count.num_loads]
        since_loaded = alike.get(count.num_loads, count.left_bytes)
        most = min([since_loaded, *before])
        alike[count.num_loads] = min(since_loaded, count.left_bytes)
        if count.left_bytes > most + _CONSTANTS_BYTES:
            since = "since then: " if count.since else "the largest: "
            since += "; ".join(map(str, count.since or count.largest))
            yield (
                f"step {count.step}, {count.moment}: expected at most {most:.0f} bytes, as before with the same "
                f"gradients and optimizer state, got {count.left_bytes}; {since}"
            )
