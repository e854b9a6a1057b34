"""Where a training first went wrong: the earliest value of ranks that the oracle's, at the same place, is not.

Values are read and compared one by one. This explains a failure; no verdict depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from shardproof.engine.contract import Shard
from shardproof.harness.laws.law import Evidence
from shardproof.harness.laws.suspect import MUST_EXPLAIN, factor_between
from shardproof.harness.laws.tolerance import FLOOR_ROUNDINGS, MULTIPLE, allowed_error
from shardproof.harness.oracle.absolute_error import deviation, largest
from shardproof.harness.oracle.oracle_observation import NORM, Quantity, TensorKey
from shardproof.harness.oracle.oracle_probes import ProbeReference
from shardproof.harness.torch_compat.dtypes import is_rounded, widened
from shardproof.harness.tracing.probe_point import ComputeTurn, ProbeFile, ProbePoint, Stored, ValueKind

_GRADIENTS = frozenset({ValueKind.OUTPUT_GRADIENT, ValueKind.INPUT_GRADIENT, ValueKind.LOCAL_GRADIENT})
# Values of the rank in the order of a step; those of modules come before all but the first three.
STAGES = (
    ValueKind.INITIAL,
    ValueKind.LOADED,
    ValueKind.LOADED_STATE,
    None,
    ValueKind.REDUCED,
    ValueKind.UNSCALED,
    ValueKind.NORM,
    ValueKind.CLIPPED,
    ValueKind.UPDATED,
    ValueKind.STATE,
)
_QUANTITIES: Mapping[ValueKind, Quantity] = {
    ValueKind.INITIAL: Quantity.INITIAL,
    ValueKind.REDUCED: Quantity.GRADIENT,
    ValueKind.UNSCALED: Quantity.GRADIENT,
    ValueKind.CLIPPED: Quantity.GRADIENT,
    ValueKind.NORM: Quantity.NORM,
    ValueKind.UPDATED: Quantity.PARAMETER,
    ValueKind.LOSS: Quantity.LOSS,
}
_STAGE_OF_MODULES = STAGES.index(None)
_Replicas = dict[tuple[object, ...], tuple[int, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrongValue:
    """A wrong value of one rank, with the right one; ``diverges_from`` is a rank with another copy of a replica."""

    rank: int
    stored: Stored
    got: torch.Tensor
    expected: torch.Tensor
    allowed: float
    diverges_from: int | None = None

    @property
    def point(self) -> ProbePoint:
        """The place of the value."""
        return self.stored.point

    @property
    def is_wrong(self) -> torch.Tensor:
        """The elements that noise does not explain."""
        return ~(deviation(self.got, self.expected) <= self.allowed)

    @property
    def ratio(self) -> float:
        """Error over what noise explains."""
        return largest(deviation(self.got, self.expected)) / max(
            self.allowed, torch.finfo(torch.float64).tiny
        )

    def is_like(self, other: torch.Tensor) -> bool:
        """Whether another value explains the wrong elements."""
        mask = self.is_wrong
        if other.shape != self.got.shape or not bool(mask.any()):
            return False
        error = deviation(self.got, self.expected)[mask].max().item()
        distance = deviation(self.got, other)[mask].max().item()
        rounding = 16 * torch.finfo(torch.float32).eps * largest(other)
        return distance <= max(2 * self.allowed, rounding) and distance * MUST_EXPLAIN <= error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probed:
    """A training whose values were looked at, on ranks and in the oracle."""

    evidence: Evidence
    files: Mapping[int, ProbeFile]
    reference: ProbeReference
    known: dict[tuple[int, int, float], bool] = field(default_factory=dict)  # see `_is_convention`

    def first_wrong(self) -> tuple[WrongValue, ...]:
        """Return the earliest wrong values: one place in a module, or all wrong tensors of one stage of a step."""
        found: tuple[WrongValue, ...] = ()
        best: tuple[int, ...] | None = None
        replicas: _Replicas = {}
        for rank, file in self.files.items():
            first: tuple[int, ...] | None = None
            for position, stored in enumerate(file):
                key = _order(stored.point, position)
                is_after = first is not None and (key[:2] != first[:2] or key[1] == _STAGE_OF_MODULES)
                if is_after and stored.global_shape is None:
                    break
                if is_after:  # other ranks' copies are compared with it
                    self._diverging(rank, stored, replicas)
                    continue
                wrong = self._wrong(rank, stored) or self._diverging(rank, stored, replicas)
                if wrong is None:
                    continue
                first = key if first is None else first
                ours = key if key[1] == _STAGE_OF_MODULES else key[:2]
                if best is None or ours < best:
                    best, found = ours, (wrong,)
                elif ours == best:
                    found = (*found, wrong)
        return found

    def _wrong(self, rank: int, stored: Stored) -> WrongValue | None:
        """Compare a value with every right one that may stand at its place."""
        point = stored.point
        wholes = [self.reference[each] for each in self.places(point)]
        # Where a gradient overflows on purpose, it has no right value.
        is_lost = point.kind in _GRADIENTS and self.evidence.training.schedule.is_skipped(point.step)
        # Ranks that compute parts of a microbatch have its whole loss.
        is_part = point.kind is not ValueKind.LOSS or self.evidence.training.plan.pipeline_stages > 1
        if not wholes or is_lost or (point.rank >= 0 and self.is_cut and is_part):
            return None
        raw = widened(self.files[rank].tensor(stored))
        got = raw / stored.factor
        if not _fits(stored, wholes[0]):
            return None
        allowed = [self._allowed(stored, each) for each in self.places(point)]
        expected = [widened(_region(stored, whole)) for whole in wholes]
        pairs = list(zip(expected, allowed, strict=True))
        # The gradients that a loop takes itself, without backward, are of losses without the scale.
        tried = [got, raw] if point.kind in _GRADIENTS and stored.factor != 1 else [got]
        if any(bool((deviation(each, value) <= most).all()) for each in tried for value, most in pairs):
            return None
        value, most = pairs[0]
        found = WrongValue(rank=rank, stored=stored, got=got, expected=value, allowed=most)
        if point.kind in _GRADIENTS and (self._is_convention(found) or self._is_reduced(found)):
            return None
        return found

    def _alike(self, found: WrongValue) -> Iterator[WrongValue]:
        """Yield the values of the same name in this step: of all ranks and microbatches."""
        at = found.point
        for rank, file in self.files.items():
            for stored in file:
                point = stored.point
                is_same = (point.kind, point.step, point.module, point.name) == (
                    at.kind,
                    at.step,
                    at.module,
                    at.name,
                )
                if is_same and point in self.reference and _fits(stored, self.reference[point]):
                    got, right = widened(file.tensor(stored)) / stored.factor, widened(self.reference[point])
                    yield WrongValue(rank=rank, stored=stored, got=got, expected=right, allowed=found.allowed)

    def _is_reduced(self, found: WrongValue) -> bool:
        """Whether our hook came too late: all ranks have one value, or the reduction's result is right."""
        if found.point.kind is not ValueKind.LOCAL_GRADIENT or self.evidence.data_size < 2:
            return False
        place = replace(found.point, kind=ValueKind.REDUCED, microbatch=-1)
        results = [(rank, file.of_other_rank(place)) for rank, file in self.files.items()]
        if all(result is not None and self._wrong(rank, result) is None for rank, result in results):
            return True
        values = [
            file.tensor(stored)
            for file in self.files.values()
            if (stored := file.of_other_rank(found.point)) is not None
        ]
        return len(values) == len(self.files) and all(torch.equal(values[0], each) for each in values)

    def places(self, point: ProbePoint) -> list[ProbePoint]:
        """Return the places of the oracle that a value may be compared with."""
        if point.kind is ValueKind.LOADED:
            point = replace(
                point, kind=ValueKind.UPDATED if point.step else ValueKind.INITIAL, step=point.step - 1
            )
        elif point.kind is ValueKind.LOADED_STATE:
            point = replace(point, kind=ValueKind.STATE, step=point.step - 1)
        elif point.kind is ValueKind.UNSCALED:
            point = replace(point, kind=ValueKind.REDUCED)
        is_again = point.turn is ComputeTurn.RECOMPUTE or (
            point.turn is ComputeTurn.BACKWARD and point.kind not in _GRADIENTS
        )
        if not is_again:
            return [point] if point in self.reference else []
        if point.turn is ComputeTurn.RECOMPUTE and point in self.reference:
            return [point]
        found = []
        for turn in (ComputeTurn.FORWARD, ComputeTurn.RECOMPUTE):  # modules are computed again in any order
            place = replace(point, turn=turn, call=0)
            while place in self.reference:
                found.append(place)
                place = replace(place, call=place.call + 1)
        return found

    def _allowed(self, stored: Stored, place: ProbePoint) -> float:
        """Return the error that re-ordered sums explain."""
        oracle, dtype = self.evidence.oracle, getattr(torch, stored.dtype)
        is_as_built = place.kind is ValueKind.INITIAL and not oracle.is_trained_before
        if oracle.is_exact or is_as_built or not is_rounded(dtype):
            return 0.0
        plan = self.evidence.training.plan
        rounded = [dtype, *(d for d in (plan.compute_dtype, plan.reduction_dtype) if d is not None)]
        eps = max(
            torch.finfo(d).eps for d in (rounded if place.kind is not ValueKind.NORM else [torch.float32])
        )
        floor = FLOOR_ROUNDINGS * eps * largest(self.reference[place])
        of_verdict = self._allowed_by_verdict(place)
        return max(MULTIPLE * max(self.reference.noise(place), floor), of_verdict)

    def _allowed_by_verdict(self, place: ProbePoint) -> float:
        quantity, oracle = _QUANTITIES.get(place.kind), self.evidence.oracle
        if quantity is None:
            return 0.0
        key = TensorKey(
            quantity=quantity, step=place.step, name=place.name if quantity is not Quantity.NORM else NORM
        )
        if key not in oracle.noise or key not in oracle.scales:
            return 0.0
        is_before_clipping = place.kind is ValueKind.REDUCED and oracle.steps[place.step].norm is not None
        factor = oracle.clipping_factor(place.step, place.name) if is_before_clipping else 1.0
        return allowed_error(oracle, key) / (factor or 1.0)

    def _is_convention(self, found: WrongValue) -> bool:
        """Whether an engine computes gradients with a factor that it takes out again when it reduces them."""
        factor = factor_between(found.got, found.expected)
        is_factor = factor is not None and abs(factor) > torch.finfo(torch.float32).eps
        if factor is None or not is_factor or not found.is_like(found.expected * factor):
            return False
        if not all(other.is_like(other.expected * factor) for other in self._alike(found)):
            return False
        key = (found.rank, found.point.step, round(factor.real, 6))
        if key not in self.known:
            self.known[key] = True  # a gradient that is reduced is never asked for
            self.known[key] = not any(
                wrong.is_like(wrong.expected * factor)
                for stored in self.files[found.rank]
                if stored.point.kind is ValueKind.REDUCED and stored.point.step == found.point.step
                if (wrong := self._wrong(found.rank, stored)) is not None
            )
        return self.known[key]

    @property
    def is_cut(self) -> bool:
        """Whether ranks compute parts of one microbatch, which no rank's modules see whole."""
        plan = self.evidence.training.plan
        return plan.cut_axis is not None or plan.pipeline_stages > 1

    def last_use(self, wrong: WrongValue) -> ComputeTurn | None:
        """Return where a value was seen before; None if not since the model was prepared, or loaded a state."""
        point = wrong.point
        last: ComputeTurn | None = None
        for stored in self.files[wrong.rank]:
            seen = stored.point
            if seen == point:
                break
            if (seen.kind, seen.module, seen.name) == (point.kind, point.module, point.name):
                last = seen.turn
            elif seen.kind is ValueKind.LOADED:
                last = None
        return last

    def has_scaled_state(self, wrong: WrongValue) -> bool:
        """Whether a rank's optimizer has seen gradients of another size: some state is the right one with a factor."""
        for stored in self.files[wrong.rank]:
            if stored.point.kind is ValueKind.STATE and stored.point.step == wrong.point.step:
                state = self._wrong(wrong.rank, stored)
                factor = None if state is None else factor_between(state.got, state.expected)
                if state is not None and factor is not None and state.is_like(state.expected * factor):
                    return True
        return False

    def is_lost_in_a_load(self, point: ProbePoint) -> bool:
        """Whether a load gave a parameter no optimizer state on any rank, although it had some, as others have."""
        loaded = [
            seen.point
            for file in self.files.values()
            for seen in file
            if seen.point.kind is ValueKind.LOADED_STATE and seen.point.step <= point.step
        ]
        step = max((each.step for each in loaded), default=0)
        name = point.name.partition("/")[0]
        saved = (
            each for each in self.reference.points if (each.kind, each.step) == (ValueKind.STATE, step - 1)
        )
        has = any(each.step == step and each.name.partition("/")[0] == name for each in loaded)
        return bool(loaded) and not has and any(each.name.partition("/")[0] == name for each in saved)

    def _diverging(self, rank: int, stored: Stored, replicas: _Replicas) -> WrongValue | None:
        """Compare a shard, bit by bit, with another rank's copy of it."""
        places = self.places(stored.point)
        if stored.global_shape is None or not places or not _fits(stored, self.reference[places[0]]):
            return None
        tensor = self.files[rank].tensor(stored)
        key = (stored.point, stored.offsets, stored.shape, stored.is_flat)
        other, held = replicas.setdefault(key, (rank, tensor))
        if other == rank or torch.equal(held, tensor):
            return None
        got, expected = widened(tensor), widened(held)
        return WrongValue(
            rank=rank, stored=stored, got=got, expected=expected, allowed=0.0, diverges_from=other
        )

    @property
    def hidden(self) -> tuple[str, ...]:
        """The modules inside which nothing was seen."""
        return tuple(sorted({name for file in self.files.values() for name in file.more["hidden"]}))


def shard_of_stored(stored: Stored, tensor: torch.Tensor) -> Shard:
    """Return a stored value as the shard that the rank showed."""
    return Shard(
        tensor=tensor,
        offsets=stored.offsets or (),
        global_shape=stored.global_shape or (),
        is_flat=stored.is_flat,
    )


def _order(point: ProbePoint, position: int) -> tuple[int, ...]:
    stage = STAGES.index(point.kind) if point.kind in STAGES else _STAGE_OF_MODULES
    return (point.step, stage, point.microbatch, position)


def _fits(stored: Stored, whole: torch.Tensor) -> bool:
    """Whether a value has the form of the right one, or of a part of it."""
    if stored.global_shape is None:
        return stored.shape == tuple(whole.shape)
    meta = torch.empty(stored.shape, device="meta")
    return stored.global_shape == tuple(whole.shape) and shard_of_stored(stored, meta).is_inside


def _region(stored: Stored, whole: torch.Tensor) -> torch.Tensor:
    if stored.global_shape is None:
        return whole
    return shard_of_stored(stored, torch.empty(stored.shape, device="meta")).of(whole)
