"""The communication of a training, in closed form over its model, its units and the world size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from shardproof import HoldingBack, Plan, Training, groups_of

__all__ = [
    "ALIGNED_BYTES",
    "GRADIENT_BYTES",
    "NUM_GROUPS",
    "NUM_PARAMETERS",
    "NUM_UNHELD_GROUPS",
    "PADDED_BYTES",
]

_ALIGNMENT_BYTES = 16
_BYTES_PER_ELEMENT = 4  # every bundled problem is built in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """A named formula over the shapes of a training's parameters."""

    name: str
    formula: Callable[[Training, int], int]

    def __call__(self, training: Training, world_size: int) -> int:
        """Compute it."""
        return self.formula(training, world_size)


def _num_groups(training: Training, world_size: int) -> int:
    """Count the groups with parameters: units, several modules joined by commas being one, and the root."""
    return len(groups_of(training))


def _num_parameters(training: Training, world_size: int) -> int:
    return len(_shapes(training))


def _num_unheld(training: Training, world_size: int) -> int:
    """Count the groups whose reductions the script does not hold back."""
    assert isinstance(training.script, HoldingBack)
    return sum(group.unit not in training.script.units for group in groups_of(training))


def _gradient_bytes(training: Training, world_size: int) -> int:
    return sum(map(prod, _shapes(training))) * _BYTES_PER_ELEMENT


def _padded_bytes(training: Training, world_size: int) -> int:
    """Sum parameters whose first dim is rounded up to a multiple of the world size."""
    rows = (-(-shape[0] // world_size) * world_size * prod(shape[1:]) for shape in _shapes(training))
    return sum(rows) * _BYTES_PER_ELEMENT


def _aligned_bytes(training: Training, world_size: int) -> int:
    """Sum parameters aligned to a few bytes, each cut into equal pieces for the ranks."""
    multiples = (-(-prod(shape) // world_size) * world_size for shape in _shapes(training))
    return sum(numel * _BYTES_PER_ELEMENT + _ALIGNMENT_BYTES for numel in multiples)


def _shapes(training: Training) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of all parameters, as one group."""
    return groups_of(replace(training, plan=Plan()))[0].shapes


NUM_GROUPS = ClosedForm(name="communication groups with parameters", formula=_num_groups)
NUM_PARAMETERS = ClosedForm(name="parameters", formula=_num_parameters)
NUM_UNHELD_GROUPS = ClosedForm(name="groups that hold nothing back", formula=_num_unheld)
GRADIENT_BYTES = ClosedForm(name="bytes of all gradients", formula=_gradient_bytes)
ALIGNED_BYTES = ClosedForm(name="bytes of all gradients, each aligned and padded", formula=_aligned_bytes)
PADDED_BYTES = ClosedForm(name="bytes of all gradients, rows padded to the world", formula=_padded_bytes)
