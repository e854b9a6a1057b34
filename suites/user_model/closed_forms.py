"""The communication of a user's model, in closed form over its study."""

from __future__ import annotations

from collections.abc import Callable

from shardproof import Training, UnitParameters, UserModel, groups_of
from shardproof.harness.cases.units import FLAT_ALIGNMENT_BYTES
from shardproof.suites.closed_forms import ClosedForm

Groups = tuple[UnitParameters, ...]


def _form(
    name: str, groups: Callable[[Training], Groups], formula: Callable[[Groups, int], int]
) -> ClosedForm:
    return ClosedForm(name=name, formula=lambda training, size: formula(groups(training), size))


def _trained(training: Training) -> Groups:
    assert isinstance(training.problem, UserModel)
    return groups_of(training, without=training.problem.facts.frozen)


def _used(training: Training) -> Groups:
    assert isinstance(training.problem, UserModel)
    facts = training.problem.facts
    return groups_of(training, without=(*facts.frozen, *facts.seldom))


def _count(groups: Groups, size: int) -> int:
    return len(groups)


def _bytes(groups: Groups, size: int) -> int:
    return sum(group.num_bytes for group in groups)


def _padded(groups: Groups, size: int) -> int:
    """Pad rows to the world, and align each parameter: engines do one of the two."""
    return sum(group.padded_bytes(size) + len(group.names) * FLAT_ALIGNMENT_BYTES for group in groups)


def _aligned(groups: Groups, size: int) -> int:
    return _padded(groups, 1)


NUM_GATHERED = _form("units with parameters, and the root", groups_of, _count)
NUM_REDUCED = _form("units with parameters that train", _trained, _count)
NUM_REDUCED_LEAST = _form("units with gradients in every pass", _used, _count)
GATHERED = _form("bytes of all parameters", groups_of, _bytes)
GATHERED_PADDED = _form("those with padding", groups_of, _padded)
REDUCED_ALIGNED = _form("those of all gradients, aligned", _trained, _aligned)
REDUCED_PADDED = _form("those of all gradients, padded", _trained, _padded)
REDUCED_LEAST = _form("bytes of the gradients that every pass has", _used, _bytes)
