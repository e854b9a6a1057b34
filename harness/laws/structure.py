"""The form of observed tensors: names, shapes, dtypes, and whether the shards make up the whole. No values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch

from shardproof.engine.contract import Cut, Layout, NoGradient, Shard
from shardproof.harness.cases.units import is_on_rank
from shardproof.harness.cases.user_model import written_by_forward
from shardproof.harness.laws.law import Evidence
from shardproof.harness.oracle.absolute_error import largest
from shardproof.harness.oracle.oracle_observation import LOSSES, NORM, Quantity, TensorKey
from shardproof.harness.records.observation import Observation

Tensors = Mapping[str, Shard | None]

_PARAMETERS = frozenset({Quantity.INITIAL, Quantity.PARAMETER})
# By layout, the quantities of which every rank holds the whole.
_WHOLE: Mapping[Layout, Set[Quantity]] = {
    Layout.REPLICATE: _PARAMETERS | {Quantity.GRADIENT, Quantity.OPTIMIZER_STATE},
    Layout.ZERO1: _PARAMETERS,
    Layout.ZERO2: _PARAMETERS,
}
_ONE_VALUE = frozenset({Quantity.LOSS, Quantity.NORM})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankShard:
    """One rank's shard of one tensor, in a form that can be compared."""

    rank: int
    shard: Shard


def observed(evidence: Evidence, observation: Observation, quantity: Quantity, step: int) -> Tensors:
    """Return one rank's tensors of a quantity; losses as this rank's column of one tensor."""
    match quantity:
        case Quantity.INITIAL:
            return observation.initial
        case Quantity.OPTIMIZER_STATE:
            return observation.optimizer_state
        case Quantity.BUFFER:
            return observation.buffers
        case Quantity.LOSS | Quantity.GRADIENT | Quantity.NORM | Quantity.PARAMETER if step >= len(
            observation.steps
        ):
            return {}
        case Quantity.GRADIENT:
            return observation.steps[step].gradients
        case Quantity.PARAMETER:
            return observation.steps[step].parameters
        case Quantity.LOSS:
            losses = torch.tensor(observation.steps[step].losses, dtype=torch.float64).unsqueeze(1)
            shape = tuple(evidence.oracle.steps[step].losses.shape)
            place = (0, evidence.data_rank(observation.rank))
            return {LOSSES: Shard(tensor=losses, offsets=place, global_shape=shape)}
        case Quantity.NORM:
            norm = observation.steps[step].norm
            if norm is None:
                return {}
            whole = torch.tensor(norm, dtype=torch.float64)
            return {NORM: Shard(tensor=whole, offsets=(), global_shape=())}


def structural_faults(evidence: Evidence, place: TensorKey) -> tuple[str, ...]:
    """Return the faults in the form of one tensor on any rank; values are not checked."""
    faults = [
        f"rank {observation.rank}: {fault}"
        for observation in evidence.ranks
        if (fault := _fault(evidence, observation, place)) is not None
    ]
    if not faults:
        faults = [gap for gap in [_gap(evidence, place)] if gap is not None]
    return tuple(faults)


def layout_fault(evidence: Evidence, places: Sequence[TensorKey]) -> str | None:
    """Find a rank that lacks part of one quantity at one moment although it is not divided between ranks.

    It is not where the plan's layout says so. In an engine's own layout it is not where some rank shows all of several
    tensors that have rows to share, one for each rank at least, and whole parameters too: an empty or a partial shard
    is an answer only if all ranks have shares. Optimizer state that lies by parameter is left out: a rank may have
    drawn parameters that are never updated, and so have no state.
    """
    if not places:
        return None
    plan = evidence.training.at(places[0].step).plan
    is_cut = plan.cut_axis is not None or plan.pipeline_stages > 1
    if places[0].quantity in _ONE_VALUE or is_cut:
        return None
    # Parameters that forward writes are observed with the buffers, and lie as the layout has parameters.
    written = written_by_forward(evidence.training.problem)
    known = _references(evidence, evidence.ranks[0], places[0])
    there = [place for place in places if known.get(place.name) is not None and place.name not in written]
    lacking = {o.rank: [p.name for p in there if not _is_whole(evidence, o, p)] for o in evidence.ranks}
    is_buffer = places[0].quantity is Quantity.BUFFER  # no layout divides buffers
    is_asked = is_buffer or places[0].quantity in _WHOLE.get(plan.layout, ())
    wholes = [
        o.rank for o in evidence.ranks if not lacking[o.rank] and all(s.is_whole for s in o.initial.values())
    ]
    divisible = [place for place in there if _has_rows(known[place.name])]
    is_state = places[0].quantity is Quantity.OPTIMIZER_STATE
    is_by_parameter = is_state and any(o.cut is Cut.PARAMETERS for o in evidence.ranks)
    is_native = plan.layout is Layout.NATIVE and not is_by_parameter
    is_own = is_native and wholes and len(divisible) >= evidence.world_size
    if not (is_asked or is_own):
        return None
    because = plan.layout.value if is_asked else f"rank {wholes[0]} has all of them whole"
    because = "every rank holds every buffer" if is_buffer else because
    return next(
        (
            f"rank {rank} lacks {names[0]!r} or a part of it ({len(names)} of {len(there)} tensors), and {because}"
            for rank, names in lacking.items()
            if names
        ),
        None,
    )


def _has_rows(tensor: torch.Tensor | None) -> bool:
    """Whether ranks can share a tensor: of a single row one rank holds all, and the others nothing."""
    return tensor is not None and tensor.dim() > 0 and len(tensor) > 1


def _is_whole(evidence: Evidence, observation: Observation, place: TensorKey) -> bool:
    """Whether a rank shows all of a tensor."""
    shard = observed(evidence, observation, place.quantity, place.step).get(place.name)
    return shard is not None and shard.is_whole


def pieces_of(evidence: Evidence, place: TensorKey) -> tuple[RankShard, ...]:
    """Return the shards of one tensor on all ranks that have it in the right form."""
    pieces = []
    for observation in evidence.ranks:
        if _reference(evidence, observation, place) is None:
            continue  # there is nothing to compare with
        shard = observed(evidence, observation, place.quantity, place.step).get(place.name)
        if shard is None or _fault(evidence, observation, place) is not None:
            continue
        is_number_of_state = place.quantity is Quantity.OPTIMIZER_STATE and not shard.global_shape
        if is_number_of_state and _owns_nothing(evidence, observation, place):
            continue  # some optimizers create a step count for it at once, and never step
        pieces.append(RankShard(rank=observation.rank, shard=shard))
    return tuple(pieces)


def num_declared_zeros(evidence: Evidence) -> int:
    """Count the declared zero gradients where the reference has none: over all ranks and steps."""
    return sum(
        shard is not None and evidence.oracle.steps[step].gradients.get(name, shard) is None
        for observation in evidence.ranks
        if observation.no_gradient is NoGradient.ZEROS
        for step, seen in enumerate(observation.steps)
        for name, shard in seen.gradients.items()
    )


def _fault(evidence: Evidence, observation: Observation, place: TensorKey) -> str | None:
    tensors = observed(evidence, observation, place.quantity, place.step)
    if place.quantity not in {Quantity.LOSS, Quantity.NORM}:
        name, rank = place.name.partition("/")[0], observation.rank
        if not is_on_rank(evidence.training, rank, evidence.world_size, name):
            return "unexpected name, of another stage" if place.name in tensors else None
    if place.name not in _references(evidence, observation, place):
        return "unexpected name, the oracle has none such" if place.name in tensors else None
    reference, shard = _reference(evidence, observation, place), tensors.get(place.name)
    if shard is None:
        return _absence(evidence, observation, place, reference, tensors)
    if reference is None:
        return _excess(evidence, observation, place, shard)
    return _misfit(shard, reference, evidence, place)


def _references(
    evidence: Evidence, observation: Observation, place: TensorKey
) -> Mapping[str, torch.Tensor | None]:
    rank = evidence.data_rank(observation.rank)
    return evidence.oracle.reference(place.quantity, place.step, rank)


def _reference(evidence: Evidence, observation: Observation, place: TensorKey) -> torch.Tensor | None:
    return _references(evidence, observation, place).get(place.name)


def _excess(evidence: Evidence, observation: Observation, place: TensorKey, shard: Shard) -> str | None:
    """Excuse a gradient where the oracle has none if the engine declares to show zeros there, and does."""
    if shard.tensor.any():
        return f"expected None, got {_unexpected(evidence, observation, place, shard)}"
    if observation.no_gradient is NoGradient.ZEROS:
        return None
    return "expected None, got zeros; engines that show zeros for none declare PreparedModel.no_gradient"


def _unexpected(evidence: Evidence, observation: Observation, place: TensorKey, shard: Shard) -> str:
    """Describe a gradient where there must be none; a common cause is one left from an earlier step."""
    for step in reversed(range(place.step)):
        earlier = _reference(evidence, observation, replace(place, step=step))
        if earlier is None or tuple(earlier.shape) != shard.global_shape or not shard.is_inside:
            continue
        if torch.allclose(shard.tensor.to(earlier.dtype), shard.of(earlier), rtol=1e-4, atol=0.0):
            return f"the gradient of step {step} (stale)"
    return f"a tensor with values up to {largest(shard.tensor):.3g}"


def _absence(
    evidence: Evidence,
    observation: Observation,
    place: TensorKey,
    reference: torch.Tensor | None,
    tensors: Tensors,
) -> str | None:
    """Excuse a missing tensor where the oracle has none, or where this rank owns nothing of the parameter."""
    is_listed = place.name in tensors
    if reference is None and is_listed:
        return None
    if place.quantity is Quantity.OPTIMIZER_STATE and not is_listed and _is_held(evidence, place):
        return None  # an engine may divide the state by parameter instead of by row
    if place.quantity in {Quantity.GRADIENT, Quantity.OPTIMIZER_STATE} and _owns_nothing(
        evidence, observation, place
    ):
        return None
    if is_listed:
        return "expected a tensor, got None"
    strange = next((name for name in tensors if name.endswith(f".{place.name}")), None)
    found = f"; the engine shows {strange!r}" if strange else ""
    return f"expected a tensor, the name is missing{found}"


def _owns_nothing(evidence: Evidence, observation: Observation, place: TensorKey) -> bool:
    """Whether this rank's shard of the parameter of a gradient or state is empty in its step; resuming moves shards."""
    parameters = observed(evidence, observation, Quantity.PARAMETER, place.step)
    parameter = parameters.get(place.name.partition("/")[0])
    return parameter is not None and parameter.tensor.numel() == 0


def _is_held(evidence: Evidence, place: TensorKey) -> bool:
    shown = (observed(evidence, o, place.quantity, place.step).get(place.name) for o in evidence.ranks)
    return any(shard is not None for shard in shown)


def _misfit(shard: Shard, reference: torch.Tensor, evidence: Evidence, place: TensorKey) -> str | None:
    shape = tuple(reference.shape)
    if shard.global_shape != shape:
        return f"expected global shape {shape}, got {shard.global_shape}"
    if not shard.is_inside:
        local = f"{'flat ' if shard.is_flat else ''}shape {tuple(shard.tensor.shape)}"
        return f"expected a shard inside {shape}, got {local} at offset {shard.offsets}"
    if place.quantity not in {Quantity.LOSS, Quantity.NORM}:
        dtype = evidence.oracle.dtype(place.quantity, place.name)
        if shard.tensor.dtype != dtype:
            return f"expected {dtype}, got {shard.tensor.dtype}"
    return None


def are_consecutive(shards: Iterable[Shard]) -> bool:
    """Whether shards, replicas aside, are consecutive intervals of the flattened whole from start to end.

    Then no element is missing, and only replicas share one. False proves nothing. It takes no time per element.
    """
    end, size = 0, -1
    for interval in sorted({interval_of(shard) for shard in shards if shard.tensor.numel()}):
        start, next_end, size = interval
        if start != end:
            return False
        end = next_end
    return end == size


def interval_of(shard: Shard) -> tuple[int, int, int]:
    """Return start, end and size of the whole; for a block that is no interval, an invalid start."""
    whole, local = shard.global_shape, tuple(shard.tensor.shape)
    size, length = math.prod(whole), math.prod(local)
    if shard.is_flat:
        return shard.offsets[0], shard.offsets[0] + length, size
    if local[1:] != whole[1:]:
        return -1, -1, size
    start = shard.offsets[0] * math.prod(whole[1:]) if whole else 0
    return start, start + length, size


def _gap(evidence: Evidence, place: TensorKey) -> str | None:
    """Find elements of the whole that no rank holds."""
    reference = evidence.oracle.reference(place.quantity, place.step, 0).get(place.name)
    if reference is None:
        return None
    pieces = pieces_of(evidence, place)
    if are_consecutive(piece.shard for piece in pieces):
        return None
    is_held = torch.zeros(reference.shape, dtype=torch.bool)
    for piece in pieces:
        piece.shard.of(is_held).fill_(True)
    num_missing = int((~is_held).sum())
    if not num_missing:
        return None
    first = tuple((~is_held).nonzero()[0].tolist())
    return f"no rank holds {num_missing} of {is_held.numel()} elements, the first at {first}"
