"""What can be said of a wrong update whose gradient was right: of state that was lost, or gradients that were not used.

No tensor of the oracle shows what an optimizer makes of other state. But the loop notes what differed when state was
saved and loaded, and the optimizer's own state at the end shows a factor of the gradients that it used.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.harness.cases.training import AS_HANDED_OUT, AS_HELD, HANDED_OUT, TAKEN
from shardproof.harness.laws.hypotheses import Suspect, factor_between
from shardproof.harness.laws.structure import pieces_of
from shardproof.harness.laws.tolerance import allowed_error
from shardproof.harness.oracle.absolute_error import deviation, largest
from shardproof.harness.oracle.oracle_observation import Quantity, TensorKey
from shardproof.harness.torch_compat.dtypes import widened

__all__ = ["wrong_update"]

_SUMS = ("exp_avg", "momentum_buffer")  # state that is a weighted sum of gradients
_NEARLY = 0.05  # later gradients are those of other parameters
_RIGHT = {HANDED_OUT: AS_HELD, TAKEN: AS_HANDED_OUT}


def wrong_update(suspect: Suspect) -> str | None:
    """Describe a wrong parameter after a right gradient; None if nothing is known of it."""
    if suspect.place.quantity is not Quantity.PARAMETER or not _had_right_gradient(suspect):
        return None
    training = suspect.evidence.training
    loads = {0} if training.origin is not None else set()
    loads |= set() if training.resume is None else {training.resume.after_steps}
    if suspect.place.step in loads:
        return next(
            _noted(suspect),
            "a wrong first update after loading, from a right gradient: the optimizer's state or settings differ",
        )
    return _factor_of_gradients(suspect)


def _had_right_gradient(suspect: Suspect) -> bool:
    gradient = TensorKey(quantity=Quantity.GRADIENT, step=suspect.place.step, name=suspect.place.name)
    reference = suspect.at.gradients.get(gradient.name)
    if reference is None:
        return False
    allowed = allowed_error(suspect.oracle, gradient)
    pieces = [piece.shard for piece in pieces_of(suspect.evidence, gradient)]
    return bool(pieces) and all(largest(deviation(s.tensor, s.of(reference))) <= allowed for s in pieces)


def _noted(suspect: Suspect) -> Iterator[str]:
    """Yield what the loop noted of the state that was saved or loaded."""
    for rank in suspect.evidence.ranks:
        for fact in rank.steps[suspect.place.step].facts:
            if fact.value != _RIGHT.get(fact.subject, fact.value):
                yield f"a wrong first update after loading, from a right gradient: in {fact.subject}, {fact.value}"


def _factor_of_gradients(suspect: Suspect) -> str | None:
    """Find by which simple factor the optimizer's state is that of other gradients than were read."""
    counts = range(2, 1 + max(suspect.oracle.world_size, suspect.evidence.training.schedule.microbatches))
    factors = {f"{n}": float(n) for n in counts} | {f"1/{n}": 1 / n for n in counts}
    last = len(suspect.oracle.steps) - 1
    for key in _SUMS:
        name = f"{suspect.place.name}/{key}"
        expected = suspect.oracle.optimizer_state.get(name)
        place = TensorKey(quantity=Quantity.OPTIMIZER_STATE, step=last, name=name)
        for piece in pieces_of(suspect.evidence, place) if expected is not None else ():
            assert expected is not None  # or there would be no piece
            wanted, got = widened(piece.shard.of(expected)), widened(piece.shard.tensor)
            factor = factor_between(got, wanted)
            for spelt, simple in factors.items():
                if factor is not None and abs(factor.real / simple - 1) < _NEARLY:
                    return (
                        f"updated by {spelt} x the gradient that was read, which is right: {key!r} is "
                        f"{factor.real:.3g} x the reference after the last step"
                    )
    return None
