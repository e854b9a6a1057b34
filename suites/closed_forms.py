"""Communication and memory of a training, in closed form over its groups, the ranks and its policy.

[Note: least and most] The *least* of a unit is the bytes of its parameters. The *most* adds the padding of engines, by
name: rows up to a multiple of the ranks, each parameter up to a multiple of a cache line, and for a flat tensor,
elements up to a multiple of the ranks. Nothing else is added anywhere.

[Note: gathered units] The root computes before the first unit and after the last, so it is gathered throughout a
forward and throughout a backward. If units are freed after forward, the unit that computes is gathered too. In
backward, where a gather should overlap with compute, so is the next one: an engine may gather it into parameters or
into a buffer. If units are kept, all are there when forward ends. If a rank keeps a part, the parts of all units that
ran are there, and while one is cut, the whole of it; so when the last one runs, the parts of all others are.

[Note: buffers] A gather's buffer is one unit's. In forward there are those of two consecutive units: the one that is
copied out, and either the previous one, whose copy may still be running, or the next one. With explicit prefetching
over a distance there are as many more. In backward there are at most the buffers of three consecutive units: the
gradients of the unit that computes, packed to be reduced, the gather of the next unit, and one idle buffer of the
previous unit, which may be reused; and the root's gather buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardproof import ROOT, HoldingBack, Layout, Plan, Training, UnitParameters, groups_of
from shardproof.harness.cases.units import FLAT_ALIGNMENT_BYTES

_LINE_BYTES = 64  # a cache line, the coarsest alignment of parameters in any of the engines
_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """A named formula over a training and the world size."""

    name: str
    formula: Callable[[Training, int], int]

    def __call__(self, training: Training, world_size: int) -> int:
        """Compute it."""
        return self.formula(training, world_size)


def all_parameters(training: Training, *, without: Iterable[str] = ()) -> UnitParameters:
    """Return the parameters of a training, but for some, as one group."""
    return groups_of(replace(training, plan=Plan()), without=without)[0]


# Communication


def _num_unheld(training: Training, world_size: int) -> int:
    """Count the groups whose reductions the script does not hold back."""
    assert isinstance(training.script, HoldingBack)
    return sum(group.unit not in training.script.units for group in groups_of(training))


def _aligned_bytes(training: Training, world_size: int) -> int:
    """Sum parameters aligned to a few bytes, each cut into equal pieces for the ranks."""
    group = all_parameters(training)
    multiples = (-(-prod(shape) // world_size) * world_size for shape in group.shapes)
    return sum(numel * group.bytes_per_element + FLAT_ALIGNMENT_BYTES for numel in multiples)


def _most_buckets(training: Training, world_size: int) -> int:
    """Count the buckets of one backward: each but the last is as large as asked."""
    size = training.plan.bucket_bytes
    assert size is not None
    return all_parameters(training).num_bytes // size + 1


# Units, several modules joined by commas being one, and the root.
NUM_GROUPS = ClosedForm(
    name="communication groups with parameters", formula=lambda training, _: len(groups_of(training))
)
NUM_PARAMETERS = ClosedForm(
    name="parameters", formula=lambda training, _: len(all_parameters(training).shapes)
)
NUM_UNHELD_GROUPS = ClosedForm(name="groups that hold nothing back", formula=_num_unheld)
GRADIENT_BYTES = ClosedForm(
    name="bytes of all gradients", formula=lambda training, _: all_parameters(training).num_bytes
)
MOST_BUCKETS = ClosedForm(name="bytes of all gradients by bucket, rounded up", formula=_most_buckets)
ALIGNED_BYTES = ClosedForm(name="bytes of all gradients, each aligned and padded", formula=_aligned_bytes)
PADDED_BYTES = ClosedForm(
    name="bytes of all gradients, rows padded to the world",
    formula=lambda training, world_size: all_parameters(training).padded_bytes(world_size),
)


# Memory


class _Sizes:
    """Least and most bytes of the root, and of the units in the order in which they run."""

    def __init__(self, training: Training, world_size: int) -> None:
        axes = training.plan.axes(world_size)
        self._num_shards = 1 if training.plan.layout is Layout.REPLICATE else axes[-1].size
        groups = groups_of(training)
        units = [group for group in groups if group.unit != ROOT]
        roots = [group for group in groups if group.unit == ROOT]
        self.least = [group.num_bytes for group in units]
        self.most = [self._most(group) for group in units]
        self.root_least = sum(group.num_bytes for group in roots)
        self.root_most = sum(map(self._most, roots))

    def _most(self, group: UnitParameters) -> int:
        """Add the padding between parameters; see [Note: least and most]."""
        ranks, width = self._num_shards, group.bytes_per_element
        rows = [(-(-shape[0] // ranks) * ranks, *shape[1:]) for shape in group.shapes]
        aligned = (-(-prod(shape) * width // _LINE_BYTES) * _LINE_BYTES for shape in rows)
        return sum(aligned) + (ranks - 1) * width


def _largest(sizes: Sequence[int], in_a_row: int) -> int:
    """Return the largest total of consecutive units."""
    return max(sum(sizes[start : start + in_a_row]) for start in range(len(sizes)))


def _parts_and_one(sizes: _Sizes) -> int:
    parts = [size // _PAIR for size in sizes.most]
    cutting = (size + sum(parts[: index + 1]) for index, size in enumerate(sizes.most))
    return sizes.root_most + sizes.root_most // _PAIR + max(cutting)


def _parts_and_last(sizes: _Sizes) -> int:
    parts = sum(size // _PAIR for size in sizes.least[:-1])
    return sizes.root_least + parts + sizes.least[-1]


def _of_sizes(name: str, formula: Callable[[_Sizes], int]) -> ClosedForm:
    return ClosedForm(name=name, formula=lambda training, world_size: formula(_Sizes(training, world_size)))


ONE_LEAST = _of_sizes("bytes of the largest unit", lambda s: max(s.least))
ROOT_AND_ONE_LEAST = _of_sizes(
    "bytes of the root and the largest unit", lambda s: s.root_least + max(s.least)
)
ROOT_AND_ONE_MOST = _of_sizes(
    "bytes of the root and the largest unit, padded", lambda s: s.root_most + max(s.most)
)
ROOT_AND_TWO_MOST = _of_sizes(
    "bytes of the root and two units in a row, padded",
    lambda s: s.root_most + _largest(s.most, 2),
)
ALL_LEAST = _of_sizes("bytes of all units", lambda s: s.root_least + sum(s.least))
ALL_MOST = _of_sizes("bytes of all units, padded", lambda s: s.root_most + sum(s.most))
ALL_TWICE = _of_sizes("twice the bytes of all units, padded", lambda s: 2 * (s.root_most + sum(s.most)))
ACCUMULATED_MOST = _of_sizes(
    "bytes of all units and of the largest once more, padded",
    lambda s: s.root_most + sum(s.most) + max(s.most),
)
PARTS_AND_LAST_LEAST = _of_sizes(
    "bytes of the root, of halves of the units before the last and of the last", _parts_and_last
)
PARTS_AND_ONE_MOST = _of_sizes(
    "bytes of the root, of halves of the units so far and of one unit, padded", _parts_and_one
)
BUFFERS_OF_TWO = _of_sizes("buffers of two units in a row", lambda s: _largest([s.root_most, *s.most], 2))
BUFFERS_OF_THREE = _of_sizes(
    "buffers of the root and of three units in a row",
    lambda s: s.root_most + _largest(s.most, 3),
)
