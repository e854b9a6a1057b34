"""What can be said of a wrong update whose gradient was right: of state that was lost, or gradients that were not used.

The loop notes what differed when state was saved and loaded; replays show what an optimizer makes of other state.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardproof.harness.cases.training import AS_HANDED_OUT, AS_HELD, HANDED_OUT, TAKEN
from shardproof.harness.laws.replayed_updates import replays
from shardproof.harness.laws.structure import pieces_of
from shardproof.harness.laws.suspect import Suspect
from shardproof.harness.laws.tolerance import allowed_error
from shardproof.harness.oracle.absolute_error import deviation, largest
from shardproof.harness.oracle.oracle_observation import Quantity, TensorKey

__all__ = ["wrong_update"]

_RIGHT = {HANDED_OUT: AS_HELD, TAKEN: AS_HANDED_OUT}


def wrong_update(suspect: Suspect) -> str | None:
    """Describe a wrong parameter after a right gradient; None if nothing is known of it."""
    if suspect.place.quantity is not Quantity.PARAMETER or not _had_right_gradient(suspect):
        return None
    training = suspect.evidence.training
    loads = {0} if training.origin is not None else set()
    loads |= set() if training.resume is None else {training.resume.after_steps}
    if suspect.place.step in loads:
        noted = next(_noted(suspect), None)
        if noted is not None:
            return noted
    found = dict.fromkeys(replay.text for replay in replays(suspect) if suspect.fits(replay.tensor))
    if not found and suspect.place.step in loads:
        return "a wrong first update after loading, from a right gradient: the optimizer's state or settings differ"
    return ", or ".join(found) or None


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
