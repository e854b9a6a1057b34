"""The law over the census: between steps, and while a model is filled, no rank holds more than the layout explains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardproof.engine.contract import Cut, Offload
from shardproof.harness.cases.units import shares_of
from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.laws.memory.left_behind import NOT_COUNTED, leaves_gradients
from shardproof.harness.oracle.oracle_observation import Quantity
from shardproof.harness.records.observation import Observation
from shardproof.harness.tracing.memory.memory_report import CensusEntry
from shardproof.harness.training.layout_memory import (
    Explained,
    HeldGradients,
    StateTensor,
    explained,
    explained_in_filling,
    form_of,
    state_bytes,
)

_SCALER_BYTES = 8  # a gradient scaler's factor and its count of steps


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryIsExplained:
    """After each optimizer step the rank's storages together are no larger than its share of everything.

    The count comes from the census, so what an adapter shows plays no part. Numbers cannot show this, and neither
    can the shards: an engine that holds everything whole may show slices of it. On an accelerator what a plan keeps on
    the host is explained there alone. A model without memory is filled unit by unit: a rank that has all of it whole at
    one moment cannot load what only all ranks together can hold.
    """

    name: str = "memory between steps is explained by the layout"

    def judge(self, evidence: Evidence) -> Ruling:
        """Compare every count on every rank with the closed form."""
        if not any(observation.counts for observation in evidence.ranks):
            return rule(self.name, [], held="not counted: these observations hold no census")
        if leaves_gradients(evidence):
            return rule(self.name, [], held=NOT_COUNTED)
        broken: list[str] = []
        most = 0
        num_counts = len(evidence.ranks[0].counts)
        for observation in evidence.ranks:
            counts = observation.counts
            most = max([most, *(count.num_bytes for count in counts)])
            limits = [_explained_at(count, evidence, observation) for count in counts]
            broken += [
                _breach(observation.rank, count, most_now)
                for count, most_now in zip(counts, limits, strict=True)
                if count.num_bytes > most_now.num_bytes
            ]
            broken += list(_while_filled(evidence, observation))
            broken += list(_growth(evidence, observation))
            broken += list(_left_on_the_device(evidence, observation))
            if len(observation.counts) != num_counts:
                broken.append(
                    f"rank {observation.rank}: expected {num_counts} counts, as on rank 0, "
                    f"got {len(observation.counts)}"
                )
        broken += _breaches_in_sum(evidence)
        limit = _explained(evidence, evidence.ranks[0], 0)
        return rule(self.name, broken, held=f"at most {most} of {limit.num_bytes} bytes on each rank")


def _while_filled(evidence: Evidence, observation: Observation) -> Iterator[str]:
    count, training = observation.filled, evidence.training
    if count is None:
        return
    limit = explained_in_filling(form_of(training), training, evidence.world_size, cut=observation.cut)
    if count.num_bytes > limit.num_bytes:
        yield _breach(observation.rank, count, limit)


def _growth(evidence: Evidence, observation: Observation) -> Iterator[str]:
    """Compare the growth of the whole process; half of what sharding saves in parameters is left for all else."""
    for count in (count for count in observation.counts if count.process_bytes is not None):
        limit = _explained(evidence, observation, count.step)
        shares = shares_of(evidence.training.at(count.step).plan, evidence.world_size).parameters
        most = limit.num_bytes + limit.parameters * (shares - 1) // 2
        if count.process_bytes is not None and count.process_bytes > most:
            yield (
                f"rank {observation.rank}, step {count.step}, {count.moment}: expected the process to have grown by at "
                f"most {most} bytes, {limit} among them, got {count.process_bytes}, of which operators on the rank's "
                f"own thread made {count.num_bytes}"
            )
            return


def _left_on_the_device(evidence: Evidence, observation: Observation) -> Iterator[str]:
    """Compare what an accelerator holds where the plan keeps some of it on the host."""
    for count in observation.counts:
        offload = evidence.training.at(count.step).plan.offload
        if offload is Offload.NONE:
            continue
        limit = _explained(evidence, observation, count.step)
        most = limit.whole + limit.buffer
        if evidence.training.schedule.scaling is not None:
            most += _SCALER_BYTES
        if offload is Offload.OPTIMIZER:
            most += limit.parameters + limit.gradients
        if count.device_bytes > most:
            largest = "; ".join(str(piece) for piece in count.largest if piece.device != "cpu")
            yield (
                f"rank {observation.rank}, step {count.step}, {count.moment}: expected at most {most} bytes on the "
                f"device, beside what the plan keeps on the host, got {count.device_bytes}; the largest: {largest}"
            )


def _explained_at(count: CensusEntry, evidence: Evidence, observation: Observation) -> Explained:
    """Return what is explained at one moment: before the first update only the state that the engine reported."""
    gradients = HeldGradients.at(count.moment, count.step, evidence.training)
    return _explained(evidence, observation, count.step, gradients=gradients, reported=count.state_bytes)


def _breaches_in_sum(evidence: Evidence) -> Iterator[str]:
    """Compare the sum over ranks where one may hold more because another holds less."""
    if not any(observation.cut is Cut.PARAMETERS for observation in evidence.ranks):
        return
    for counts in zip(*(observation.counts for observation in evidence.ranks), strict=False):
        first, held = counts[0], sum(count.num_bytes for count in counts)
        limits = (_explained(evidence, each, first.step, Cut.EVENLY) for each in evidence.ranks)
        if held > (most := sum(limit.num_bytes for limit in limits)):
            yield (
                f"step {first.step}, {first.moment}: expected at most {most} bytes on all ranks together, got {held}"
            )


def _explained(
    evidence: Evidence,
    observation: Observation,
    step: int,
    cut: Cut | None = None,
    *,
    gradients: HeldGradients = HeldGradients.SHARES,
    reported: int | None = None,
) -> Explained:
    training, size, cut = evidence.training.at(step), evidence.world_size, cut or observation.cut
    oracle, form = evidence.oracle, form_of(training)
    state = (
        StateTensor(
            parameter=name.partition("/")[0],
            shape=tuple(whole.shape),
            bytes_per_element=oracle.dtype(Quantity.OPTIMIZER_STATE, name).itemsize,
        )
        for name, whole in oracle.optimizer_state.items()
    )
    num_bytes = state_bytes(form, training, size, cut=cut, state=state)
    num_bytes = num_bytes if reported is None else min(num_bytes, reported)
    return explained(
        form, training, size, cut=cut, state=num_bytes, copies=observation.copies, gradients=gradients
    )


def _breach(rank: int, count: CensusEntry, limit: Explained) -> str:
    largest = "; ".join(map(str, count.largest))
    return (
        f"rank {rank}, step {count.step}, {count.moment}: expected at most {limit}, got {count.num_bytes} bytes; "
        f"the largest: {largest}"
    )
