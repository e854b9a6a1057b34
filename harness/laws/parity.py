"""The law that an engine trains as the oracle does: every quantity, every tensor, every rank, shard by shard.

Nothing is gathered: a rank's shard is compared with the same region of the oracle's whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from shardproof.engine.shard import Shard
from shardproof.harness.laws.diagnosis import UNSTRUCTURED, looks_like
from shardproof.harness.laws.law import Evidence, Ruling
from shardproof.harness.laws.structure import (
    RankShard,
    are_consecutive,
    interval_of,
    layout_fault,
    num_declared_zeros,
    observed,
    pieces_of,
    structural_faults,
)
from shardproof.harness.laws.tolerance import allowed_error
from shardproof.harness.oracle.absolute_error import deviation
from shardproof.harness.oracle.oracle_observation import INITIAL_STEP, Quantity, TensorKey
from shardproof.harness.records.record import LawRecord, TensorRecord
from shardproof.harness.torch_compat.dtypes import widened

_MAX_DETAILS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """A fault in words, and its worst tensor if values are wrong."""

    text: str
    worst: TensorRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """One fault of one tensor; ``severity`` orders findings of one moment.

    ``tell`` describes it. That may take seconds for a large tensor, and only the first findings are described.
    """

    severity: float
    tell: Callable[[], _Told]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Comparison:
    """One piece and its region of the reference; errors are those of `harness.oracle.absolute_error`."""

    piece: RankShard
    expected: torch.Tensor
    error: torch.Tensor
    allowed: float

    @property
    def worst_error(self) -> float:
        return self.error.max().item() if self.error.numel() else 0.0

    @property
    def ratio(self) -> float:
        """Error over the allowed error; above 1 is wrong."""
        if self.worst_error <= self.allowed:
            return self.worst_error / self.allowed if self.allowed else 0.0
        return self.worst_error / self.allowed if self.allowed else math.inf

    @property
    def share(self) -> float:
        return (self.error > self.allowed).double().mean().item()

    @property
    def worst_index(self) -> tuple[int, ...]:
        """The local index of the worst element."""
        flat = self.error.argmax()
        return tuple(int(i) for i in torch.unravel_index(flat, self.error.shape))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Closest:
    """A comparison with its tensor."""

    place: TensorKey
    comparison: _Comparison


def _nearness(found: _Closest) -> tuple[float, bool]:
    return found.comparison.ratio, found.comparison.allowed > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchesOracle:
    """Every rank's parameters, losses, gradients, optimizer state and buffers are the oracle's.

    The headline is the first wrong quantity in order of time, with its worst tensor, because later ones may be its
    consequence; a norm that nothing explains gives way to a gradient of its step that a defect explains. When the law
    holds, the worst tensor is the one that came closest to breaking it.
    """

    name: str = "matches the oracle"

    def judge(self, evidence: Evidence) -> Ruling:
        findings: list[_Finding] = []
        nearest: _Closest | None = None
        num_checked = 0
        for moment in _moments(evidence):
            num_checked += len(moment)
            here: list[_Finding] = []
            for place in moment:
                comparisons = _comparisons(evidence, place)
                here += _findings(evidence, place, comparisons)
                found = [_Closest(place=place, comparison=c) for c in comparisons]
                nearest = max([nearest, *found] if nearest else found, key=_nearness, default=None)
            findings += sorted(here, key=lambda f: -f.severity)
            fault = layout_fault(evidence, moment)
            if fault is not None and not here:  # wrong values are more informative
                findings.append(
                    _Finding(severity=math.inf, tell=partial(_Told, text=f"{_when(moment[0])}: {fault}"))
                )
        if findings:
            return _broken(self.name, findings)
        how = "bitwise" if evidence.oracle.is_exact else "within the noise of re-ordered sums"
        text = f"{num_checked} tensors agree on {evidence.world_size} ranks, {how}"
        num_zeros = num_declared_zeros(evidence)
        if num_zeros:
            text += f"; {num_zeros} gradients are zeros instead of None, as the engine declares"
        worst = None if nearest is None else _record(nearest.place, nearest.comparison, "within noise")
        return Ruling(record=LawRecord(law=self.name, held=True, summary=text), worst=worst)


def _broken(law: str, findings: list[_Finding]) -> Ruling:
    told = [finding.tell() for finding in findings[: _MAX_DETAILS + 1]]
    headline = _most_telling(told)
    others = [other for other in told if other is not headline]
    details = [other.text for other in others]
    if len(findings) > _MAX_DETAILS + 1:
        details.append(f"and {len(findings) - _MAX_DETAILS - 1} more")
    record = LawRecord(law=law, held=False, summary=headline.text, details=tuple(details))
    return Ruling(record=record, worst=headline.worst)


def _most_telling(told: list[_Told]) -> _Told:
    """Return the first finding; of a norm that nothing explains, the first of its step that a defect explains."""
    first = told[0].worst
    if first is None or first.quantity != Quantity.NORM or first.looks_like != UNSTRUCTURED:
        return told[0]
    for other in told:
        worst = other.worst
        if worst is not None and worst.step == first.step and worst.looks_like != UNSTRUCTURED:
            return other
    return told[0]


def _moments(evidence: Evidence) -> Iterator[tuple[TensorKey, ...]]:
    """Yield the compared tensors, in the order in which training makes them.

    Gradients of what never has one come first: if there are some, the model was prepared wrongly. Idle parameters whose
    gradient is rounding alone are not among them.
    """
    steps = evidence.oracle.steps
    last = len(steps) - 1
    idle = {
        name for name in evidence.training.problem.idle if all(s.gradients.get(name) is None for s in steps)
    }
    yield _places(evidence, Quantity.INITIAL, INITIAL_STEP)
    for step in range(last + 1):
        gradients = _places(evidence, Quantity.GRADIENT, step)
        yield tuple(place for place in gradients if place.name in idle)
        for quantity in (Quantity.LOSS, Quantity.NORM):
            yield _places(evidence, quantity, step)
        yield tuple(place for place in gradients if place.name not in idle)
        yield _places(evidence, Quantity.PARAMETER, step)
    yield _places(evidence, Quantity.OPTIMIZER_STATE, last)
    yield _places(evidence, Quantity.BUFFER, last)


def _places(evidence: Evidence, quantity: Quantity, step: int) -> tuple[TensorKey, ...]:
    """List the oracle's names, then those that only some rank has; no state of a parameter without elements."""
    names = dict.fromkeys(evidence.oracle.reference(quantity, step, rank=0))
    for observation in evidence.ranks:
        names.update(dict.fromkeys(observed(evidence, observation, quantity, step)))
    if quantity is Quantity.OPTIMIZER_STATE:
        empty = {name for name, initial in evidence.oracle.initial.items() if not initial.numel()}
        names = {name: None for name in names if name.rpartition("/")[0] not in empty}
    return tuple(TensorKey(quantity=quantity, step=step, name=name) for name in names)


def _comparisons(evidence: Evidence, place: TensorKey) -> list[_Comparison]:
    # Empty shards cannot be wrong, and have no worst element.
    pieces = [piece for piece in pieces_of(evidence, place) if piece.shard.tensor.numel()]
    if not pieces:
        return []
    oracle = evidence.oracle
    still, allowed = oracle.still_of(place), allowed_error(oracle, place)
    compared = [_compare(evidence, place, piece, allowed) for piece in pieces]
    if still is None:
        return compared
    apart = allowed_error(oracle, place, max(oracle.noise[place], oracle.still_noise[place]))
    return [part for whole in compared for part in _apart(whole, still, apart)]


def _apart(whole: _Comparison, still: torch.Tensor, allowed: float) -> Iterator[_Comparison]:
    """Split a comparison into those of the elements with a gradient and of the others; see [Note: still elements]."""
    mask = whole.piece.shard.of(still)
    yield replace(whole, error=whole.error.masked_fill(mask, 0.0))
    yield replace(whole, error=whole.error.masked_fill(~mask, 0.0), allowed=allowed)


def _compare(evidence: Evidence, place: TensorKey, piece: RankShard, allowed: float) -> _Comparison:
    full = evidence.oracle.reference(place.quantity, place.step, evidence.data_rank(piece.rank))[place.name]
    if full is None:
        raise ValueError(f"{_where(place)}: expected a reference tensor, got None")
    expected = widened(piece.shard.of(full))
    error = deviation(piece.shard.tensor, expected)
    return _Comparison(piece=piece, expected=expected, error=error, allowed=allowed)


def _findings(evidence: Evidence, place: TensorKey, comparisons: list[_Comparison]) -> Iterator[_Finding]:
    where = _where(place)
    faults = structural_faults(evidence, place)
    if faults:
        more = f" (and {len(faults) - 1} more ranks)" if len(faults) > 1 else ""
        yield _Finding(severity=math.inf, tell=partial(_Told, text=f"{where}: {faults[0]}{more}"))
    wrong = [c for c in comparisons if not c.ratio <= 1]  # NaN is wrong too
    if wrong:
        worst = max(wrong, key=lambda c: c.worst_error)
        yield _Finding(severity=worst.ratio, tell=partial(_wrong_value, evidence, place, worst, len(wrong)))
    if place.quantity not in {Quantity.LOSS, Quantity.BUFFER}:  # these may differ between ranks by nature
        divergence = _divergence(comparisons)
        if divergence is not None:
            # Least severe, because wrong values are more informative.
            yield _Finding(severity=0.0, tell=partial(_Told, text=f"{where}: {divergence}"))


def _where(place: TensorKey) -> str:
    return f"{_when(place)} {place.name!r}"


def _when(place: TensorKey) -> str:
    when = "before training" if place.step == INITIAL_STEP else f"step {place.step}"
    return f"{when}, {place.quantity}"


def _wrong_value(evidence: Evidence, place: TensorKey, worst: _Comparison, num_ranks: int) -> _Told:
    shard = worst.piece.shard
    record = _record(place, worst, looks_like(evidence, place, worst.piece))
    form = "flat shard" if shard.is_flat else "shard"
    text = (
        f"{_where(place)} on rank {record.rank} ({form} at {list(shard.offsets)}; wrong on {num_ranks} of "
        f"{evidence.world_size} ranks): {record.looks_like}; at {list(record.index)} got {record.got:.9g}, "
        f"expected {record.expected:.9g}, error {record.error:.3g}, allowed {record.allowed:.3g}, "
        f"{record.share:.1%} of the shard beyond"
    )
    return _Told(text=text, worst=record)


def _record(place: TensorKey, comparison: _Comparison, characterised: str) -> TensorRecord:
    shard, index = comparison.piece.shard, comparison.worst_index
    got, expected = _parts(shard.tensor[index].item(), comparison.expected[index].item())
    return TensorRecord(
        quantity=str(place.quantity),
        name=place.name,
        step=place.step,
        rank=comparison.piece.rank,
        index=shard.index_of(index),
        got=got,
        expected=expected,
        error=comparison.worst_error,
        allowed=comparison.allowed,
        ratio=comparison.ratio,
        share=comparison.share,
        looks_like=characterised,
    )


def _parts(got: complex, expected: complex) -> tuple[float, float]:
    """Return both unchanged; of complex numbers the part, real or imaginary, that differs more."""
    pairs = ((got.real, expected.real), (got.imag, expected.imag))
    return max(pairs, key=lambda pair: abs(pair[0] - pair[1]))


def _replicas_are_equal(shards: list[Shard]) -> bool:
    """Compare the shards that hold one interval."""
    firsts: dict[tuple[int, int, int], torch.Tensor] = {}
    pairs = ((firsts.setdefault(interval_of(shard), shard.tensor), shard.tensor) for shard in shards)
    return all(one is other or torch.equal(one.flatten(), other.flatten()) for one, other in pairs)


def _divergence(comparisons: list[_Comparison]) -> str | None:
    """Find two ranks with different values of one element: replicas must agree bit by bit."""
    if not comparisons:
        return None
    shards = [comparison.piece.shard for comparison in comparisons]
    if are_consecutive(shards) and _replicas_are_equal(shards):
        return None
    first = shards[0]
    holder = torch.full(first.global_shape, -1)
    held = torch.zeros(first.global_shape, dtype=first.tensor.dtype)
    for comparison in comparisons:
        shard, rank = comparison.piece.shard, comparison.piece.rank
        holder_here, held_here = shard.of(holder), shard.of(held)
        differs = (holder_here >= 0) & (held_here != shard.tensor)
        if bool(differs.any()):
            local = tuple(differs.nonzero()[0].tolist())
            other = int(holder_here[local])
            return (
                f"replicas diverge: at {list(shard.index_of(local))} rank {other} holds "
                f"{held_here[local].item():.9g} and rank {rank} holds {shard.tensor[local].item():.9g}"
            )
        holder_here.fill_(rank)
        held_here.copy_(shard.tensor)
    return None
