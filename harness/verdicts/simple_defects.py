"""Whether simple defects would show: their effect on each tensor, by the oracle, compared with its allowed error.

[Note: simple defects] Noise must be small compared with the smallest defect that a case claims to detect. Four defects
represent all: a gradient that is half as large, a gradient without the share of one rank, a gradient that was reduced
in bfloat16, and a parameter that is never updated. Each has a closed form, so no further training is needed. A defect
shows if its effect on a tensor is larger than the allowed error in at least one step.

[Note: rounding of one side] Autocast does not affect float64, so the rounding of a model that uses it lies between the
oracle and each float32 run. It is not noise, because two runs with the same sums round alike. It is not a fault either,
because the engine may round. Such a model keeps its large allowed error. In addition its first gradients are compared
with those of the same arithmetic, `OracleObservation.first`, where only the reduction may differ. If they agree up to
the noise of these, the reduction was right. Otherwise it may have been in bfloat16, or the engine may round elsewhere:
the run proves nothing. Only this comparison reads the engine's tensors, and it can make a run vacuous, not passed.

A plan that computes in fewer bits has the same noise on purpose, and so has a model whose parameters have few bits. Its
first gradients, and its parameters after the first update, show each simple defect if they agree with the same
arithmetic up to a few roundings of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from shardproof.harness.cases.user_model import UserModel, still_parameters
from shardproof.harness.laws.law import Evidence
from shardproof.harness.laws.structure import pieces_of
from shardproof.harness.laws.tolerance import allowed_error, error_of_noise
from shardproof.harness.oracle.absolute_error import deviation, largest
from shardproof.harness.oracle.oracle_observation import OracleObservation, Quantity, TensorKey
from shardproof.harness.oracle.reduction_orders import is_of_full_precision, reduces_fully
from shardproof.harness.oracle.rounding import is_narrow
from shardproof.harness.records.record import VisibleError
from shardproof.harness.torch_compat.dtypes import widened

# Where the reference rounds as engines do, a gradient that is no larger than so many times its noise is zero.
ZERO_BESIDE_NOISE = 4.0
LARGER_STEPS = "try a larger learning rate, or an optimizer with larger first steps"
_LESS_NOISE = "try float32 throughout, more rows in a batch, or a larger eps of the optimizer"
# The largest element of a tensor moves by up to half a rounding; if there are few elements, it may move by less.
_SHARE_OF_A_ROUNDING = 0.25
# Kernels of one operator may differ by a few roundings, and so may the results computed from theirs.
_KERNEL_ROUNDINGS = 4.0
_MOST = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effect:
    """The effect of one defect on one tensor in one step, and the error that is allowed there."""

    place: TensorKey
    allowed: float
    effect: float

    @property
    def ratio(self) -> float:
        """Allowed error over effect: above 1 the defect is hidden."""
        return self.allowed / self.effect if self.effect else math.inf

    def __str__(self) -> str:
        where = f"{self.place.quantity} {self.place.name!r} in step {self.place.step}"
        return f"{where} may be off by {self.allowed:.3g}, {self.ratio:.3g} x what"


def hidden_because(evidence: Evidence) -> str | None:
    """Return which defect would not show, with the worst tensor and the ratio; None if all would."""
    if evidence.oracle.is_exact:
        return None
    coarse = _coarse_dtype(evidence)
    if coarse is not None and _coarse_first_step_agrees(evidence, coarse):
        return None
    if _asks_for_the_start(evidence):
        return _hidden_updates(evidence)
    return (
        _hidden_factor(evidence)
        or _hidden_rank(evidence)
        or _hidden_updates(evidence)
        or _hidden_rounding(evidence)
    )


def _asks_for_the_start(evidence: Evidence) -> bool:
    """Whether the steps of a previous world have added their noise: other cases of the model cover the rest."""
    return evidence.oracle.is_trained_before and isinstance(evidence.training.problem, UserModel)


_MOST_VISIBLE = 2  # tensors of a kind


def least_visible(evidence: Evidence) -> tuple[VisibleError, ...]:
    """Return the gradients and updates in which errors show least; none if the case does not claim to detect them."""
    oracle = evidence.oracle
    if _computes_coarsely(evidence) or _asks_for_the_start(evidence) or not oracle.steps:
        return ()
    found: list[VisibleError] = []
    unclaimed = oracle.untrained | still_parameters(evidence.training.problem)
    for quantity, effects in (("gradient", _halved), ("update", _unmoved)):
        of_kind = []
        for name in _trained(evidence):
            if effects is _unmoved and (name in unclaimed or not claims_updates(evidence)):
                continue
            # Halving a gradient changes it by half.
            whole = 0.5 if effects is _halved else 1.0
            share = min((effect.ratio * whole for effect in effects(oracle, name)), default=math.inf)
            of_kind.append(VisibleError(quantity=quantity, name=name, share=share))
        found += sorted(of_kind, key=lambda error: -error.share)[:_MOST_VISIBLE]
    return tuple(found)


def _hidden_factor(evidence: Evidence) -> str | None:
    oracle = evidence.oracle
    worst = _worst(_halved(oracle, name) for name in _trained(evidence))
    return (
        None
        if worst is None
        else f"{worst} halving it would change: a wrong factor would pass; {_LESS_NOISE}"
    )


def _halved(oracle: OracleObservation, name: str) -> Iterator[_Effect]:
    for place, gradient in _gradients(oracle, name):
        yield _Effect(place=place, allowed=allowed_error(oracle, place), effect=largest(gradient) / 2)


def _hidden_rank(evidence: Evidence) -> str | None:
    """Find a rank whose share is hidden in all gradients; a single tensor need not depend on each rank.

    A reduction in few bits may lose a small share, as the plan allows: then no share is required to show.
    """
    oracle = evidence.oracle
    if not _reduces_fully(evidence):
        return None
    worst = _worst(_without(oracle, rank) for rank in range(oracle.world_size))
    return (
        None
        if worst is None
        else f"{worst} the share of one rank changes: a missing rank would pass; {_LESS_NOISE}"
    )


def _without(oracle: OracleObservation, rank: int) -> Iterator[_Effect]:
    for name in oracle.initial:
        for place, _ in _gradients(oracle, name):
            share = oracle.steps[place.step].sizes[name].of_ranks[rank] / oracle.divisor
            effect = share * oracle.clipping_factor(place.step, name)
            if effect:
                yield _Effect(place=place, allowed=allowed_error(oracle, place), effect=effect)


def claims_updates(evidence: Evidence) -> bool:
    """Whether a case has to show that each parameter is updated.

    Clipped gradients may be too small to move a parameter of few bits; other cases of a user's model do not clip.
    """
    return evidence.training.schedule.clip is None or not isinstance(evidence.training.problem, UserModel)


def _hidden_updates(evidence: Evidence) -> str | None:
    oracle = evidence.oracle
    if not claims_updates(evidence):
        return None
    unclaimed = oracle.untrained | still_parameters(evidence.training.problem)
    worst = _worst(_unmoved(oracle, name) for name in _trained(evidence) if name not in unclaimed)
    return (
        None if worst is None else f"{worst} training changes: a frozen parameter would pass; {LARGER_STEPS}"
    )


def _unmoved(oracle: OracleObservation, name: str) -> Iterator[_Effect]:
    for step, seen in enumerate(oracle.steps):
        place = TensorKey(quantity=Quantity.PARAMETER, step=step, name=name)
        moved = seen.parameters[name] - oracle.initial[name]
        if (still := oracle.still_of(place)) is not None:
            moved = moved[~still]
        yield _Effect(place=place, allowed=allowed_error(oracle, place), effect=largest(moved))


def _hidden_rounding(evidence: Evidence) -> str | None:
    """Require reductions in bfloat16 to show only if the plan computes and reduces in more bits, between ranks."""
    oracle = evidence.oracle
    if not _reduces_fully(evidence):
        return None
    worst = _worst(_rounded(oracle, name) for name in _trained(evidence) if not _is_narrow(oracle, name))
    if worst is None or _first_gradients_agree(evidence):
        return None
    text = f"{worst} a reduction in bfloat16 changes: it would pass, as would rounding of the model's own"
    return f"{text}; {_LESS_NOISE}"


def _rounded(oracle: OracleObservation, name: str) -> Iterator[_Effect]:
    rounding = _SHARE_OF_A_ROUNDING * torch.finfo(torch.bfloat16).eps
    for place, _ in _gradients(oracle, name):
        effect = rounding * oracle.scales[place]
        yield _Effect(place=place, allowed=allowed_error(oracle, place), effect=effect)


def _first_gradients_agree(evidence: Evidence) -> bool:
    """Whether the engine's first gradients are sums of those of the same arithmetic; see the second note above."""
    first = evidence.oracle.first
    if first is None:
        return False
    rounding = _SHARE_OF_A_ROUNDING * torch.finfo(torch.bfloat16).eps
    for name, expected in first.gradients.items():
        if _is_narrow(evidence.oracle, name):
            continue
        place = TensorKey(quantity=Quantity.GRADIENT, step=0, name=name)
        allowed = error_of_noise(evidence.oracle, place, first.noise[name])
        if allowed > rounding * evidence.oracle.scales[place]:
            return False
        if not _is_near(evidence, place, expected, allowed):
            return False
    return True


def _coarse_first_step_agrees(evidence: Evidence, dtype: torch.dtype) -> bool:
    """Whether the first gradients and update match the same arithmetic so closely that each defect would show."""
    oracle, first = evidence.oracle, evidence.oracle.first
    if first is None:
        return False
    rounding = _KERNEL_ROUNDINGS * torch.finfo(dtype).eps
    for name in _trained(evidence):
        gradient = first.gradients.get(name)
        if gradient is None:
            return False
        place = TensorKey(quantity=Quantity.GRADIENT, step=0, name=name)
        allowed = rounding * oracle.scales[place]
        share = allowed / largest(gradient) if gradient.any() else math.inf
        is_claimed = claims_updates(evidence) and name not in still_parameters(evidence.training.problem)
        if share >= 0.5 or not _is_near(evidence, place, gradient, allowed):
            return False
        if is_claimed and not _moves_alike(evidence, name, first.parameters[name]):
            return False
    return True


def _moves_alike(evidence: Evidence, name: str, expected: torch.Tensor) -> bool:
    """Whether most elements that move in the first step move as expected, to half of their movement.

    Not all: an optimizer that divides a gradient by its size takes whole steps by what is only rounding, as all still
    elements do. A movement of less than two steps of the parameter's dtype may be lost in it, and counts where no
    element moves further, as weights of ones do not.
    """
    oracle = evidence.oracle
    dtype = oracle.dtype(Quantity.PARAMETER, name)
    least = 2 * torch.finfo(dtype).eps
    place = TensorKey(quantity=Quantity.PARAMETER, step=0, name=name)
    still = oracle.still_of(place)
    if not ((expected - oracle.initial[name]).abs() > least * expected.abs()).any():
        expected, least = widened(expected.to(dtype)), 0.0
    all_alike = all_moved = 0
    for piece in pieces_of(evidence, place):
        got, right, before = (
            widened(whole)
            for whole in (piece.shard.tensor, *map(piece.shard.of, (expected, oracle.initial[name])))
        )
        movement = (right - before).abs()
        is_moved = movement > least * right.abs()
        if still is not None:
            is_moved &= ~piece.shard.of(still)
        num_moved = int(is_moved.sum())
        num_alike = int(((got - right).abs() < movement / 2)[is_moved].sum())
        if num_alike < _MOST * num_moved - 1:  # on one rank
            return False
        all_moved, all_alike = all_moved + num_moved, all_alike + num_alike
    return all_alike > _MOST * all_moved


def _is_near(evidence: Evidence, place: TensorKey, expected: torch.Tensor, allowed: float) -> bool:
    for piece in pieces_of(evidence, place):
        error = deviation(piece.shard.tensor, piece.shard.of(expected))
        if error.numel() and not error.max().item() <= allowed:
            return False
    return True


def _computes_coarsely(evidence: Evidence) -> bool:
    """Whether the plan computes in fewer bits than it reduces in, so that all noise is that of computing."""
    plan = evidence.oracle.plan
    return plan.compute_dtype is not None and reduces_fully(plan, evidence.training.convert)


def _coarse_dtype(evidence: Evidence) -> torch.dtype | None:
    """Return the dtype of few bits that the plan computes in, or that most of the model's noise is of."""
    oracle = evidence.oracle
    if _computes_coarsely(evidence):
        return oracle.plan.compute_dtype
    if oracle.is_widened or oracle.plan.compute_dtype is not None:
        return None
    dtypes = (oracle.dtype(Quantity.PARAMETER, name) for name in _trained(evidence))
    return max(filter(is_narrow, dtypes), key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _is_narrow(oracle: OracleObservation, name: str) -> bool:
    """Whether a parameter has fewer bits than float32 itself, and so has its gradient."""
    return is_narrow(oracle.dtype(Quantity.PARAMETER, name))


def _reduces_fully(evidence: Evidence) -> bool:
    """Whether several ranks add up their gradients in at least float32."""
    oracle = evidence.oracle
    return oracle.world_size > 1 and is_of_full_precision(oracle.plan, evidence.training.convert)


def _trained(evidence: Evidence) -> list[str]:
    """Return the parameters that the case claims to train, without empty ones."""
    oracle, idle = evidence.oracle, evidence.training.problem.idle
    beside = {*idle, *unreached(evidence)}
    return [n for n, initial in oracle.initial.items() if n not in beside and initial.numel()]


def unreached(evidence: Evidence) -> tuple[str, ...]:
    """Name a user's parameters that no loss of this training reached, such as those of experts without a token.

    Nothing is claimed of them. Other problems say themselves what is idle.
    """
    problem = evidence.training.problem
    if not isinstance(problem, UserModel):
        return ()
    names = (n for n, initial in evidence.oracle.initial.items() if initial.numel() and n not in problem.idle)
    return tuple(name for name in names if not largest_gradient(evidence, name))


def largest_gradient(evidence: Evidence, name: str) -> float:
    """Return the largest element of a parameter's gradients over all steps; 0 if it has only rounding."""
    gradients = [seen.gradients.get(name) for seen in evidence.oracle.steps]
    sizes = [0.0 if g is None else largest(g) for g in gradients]
    return max(
        (size for step, size in enumerate(sizes) if size > _rounding(evidence, name, step)), default=0.0
    )


def _rounding(evidence: Evidence, name: str, step: int) -> float:
    """Return the size below which a gradient is rounding, if the reference rounds too; 0 for one in float64."""
    place = TensorKey(quantity=Quantity.GRADIENT, step=step, name=name)
    return 0.0 if evidence.oracle.is_widened else ZERO_BESIDE_NOISE * evidence.oracle.noise.get(place, 0.0)


def _gradients(oracle: OracleObservation, name: str) -> Iterator[tuple[TensorKey, torch.Tensor]]:
    """Yield the gradients of a parameter that some loss reached."""
    for step, seen in enumerate(oracle.steps):
        gradient = seen.gradients.get(name)
        if gradient is not None and name in seen.sizes and bool(gradient.any()):
            yield TensorKey(quantity=Quantity.GRADIENT, step=step, name=name), gradient


def _worst(found: Iterable[Iterator[_Effect]]) -> _Effect | None:
    """Return the most hidden of the defects that no step shows, at the step that comes closest to showing it."""
    hidden = [effect for effects in found if (effect := _clearest(effects)) is not None and effect.ratio > 1]
    return max(hidden, key=lambda effect: effect.ratio, default=None)


def _clearest(effects: Iterator[_Effect]) -> _Effect | None:
    best: _Effect | None = None
    for effect in effects:
        if effect.ratio <= 1:
            return effect  # one step that shows the defect is enough
        if best is None or effect.ratio < best.ratio:
            best = effect
    return best
