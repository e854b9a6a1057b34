"""The bytes that a sharded layout explains on one rank between steps, in closed form. Pure.

[Note: what a layout explains] With S shard ranks, a rank holds at most ceil(n / S) rows of a parameter of n rows. An
engine that concatenates parameters aligns each to a few bytes and rounds a group up to a multiple of S. The larger of
the two counts. A rank holds its gradients in the same layout, in the wider of the parameters' dtype and the reduce
dtype. Optimizer state with the shape of a parameter has that layout too; all other state is whole. Buffers are whole.
So are parameters that the plan ignores, with their gradients and state. Engines that cut at chunks may hold more, as in
[Note: chunks].

With ZeRO-1 a rank holds whole parameters and gradients, with ZeRO-2 whole parameters: one copy of all shares, padding
included. A layout explains what buckets of communication hold only where the adapter says that they have gradients a
second time (``Copies.BUCKETS``). If the whole state of a parameter is on one rank, a rank holds at most its even share
plus the largest parameter without one share of it, because the next parameter always goes to the rank with the least.
Engines whose optimizer updates a copy of the parameters (``Copies.MASTERS``) hold one share more.

If the loop calls parts of the model directly, an engine may keep the buffer of one gather, as FSDP2 does: the root's
forward would free it, and may not follow. Between steps nothing else is explained: no gathered unit, no other buffer
and no copy in another dtype. The engines of torch and ours keep none of these after the optimizer step.

Between microbatches whose reduction is held back a rank holds whole gradients, and beside them shares that are zeros if
gradients are cleared to zeros or a probe reduces some. Before the first update it holds no more optimizer state than
the engine reports.

After a forward without a backward, as in an evaluation, the reshard policy explains gathered units. A step that ends
with such a forward is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from math import ceil, prod
from operator import mul

import torch
from torch import nn

from shardproof.engine.contract import (
    Accumulation,
    Capability,
    Copies,
    Cut,
    Layout,
    Placement,
    Plan,
    Reshard,
)
from shardproof.harness.cases.script import Probe
from shardproof.harness.cases.scripts.eventful import Eventful
from shardproof.harness.cases.training import Training
from shardproof.harness.cases.units import (
    FLAT_ALIGNMENT_BYTES,
    UnitParameters,
    chunked_buffer_numel,
    groups_in,
    identity_of,
    shares_of,
    skeleton_of,
)
from shardproof.harness.cases.user_model import attribute_bytes, frozen_parameters
from shardproof.harness.tracing.memory.memory_report import CensusTime

_MASTER_BYTES = 4  # copies that the optimizer updates are at least float32


class HeldGradients(Enum):
    """What a rank may hold of gradients at one moment."""

    SHARES = "what the layout gives it"
    WHOLE = "all of them, for their reduction is held back"
    WHOLE_AND_SHARES = "all of them, beside shares that are zeros"

    @classmethod
    def at(cls, moment: CensusTime, step: int, training: Training) -> HeldGradients:
        """Return what a rank may hold at a moment of a step."""
        is_held_back = training.plan.accumulation is Accumulation.LAST_MICROBATCH
        if moment is not CensusTime.BETWEEN or not is_held_back:
            return cls.SHARES
        # A probe's backward is of no microbatch: it may reduce zeros.
        is_probed = isinstance(training.script, Eventful) and training.script.has(*Probe)
        has_shares = is_probed or not training.schedule.clears_to_none(step - 1)
        return cls.WHOLE_AND_SHARES if has_shares else cls.WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The facts of a model that the closed form uses.

    These are its groups, the bytes that every rank holds whole, and the parameters that require no gradient.
    """

    groups: tuple[UnitParameters, ...]
    buffer_bytes: int
    ignored_bytes: int
    frozen: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, training: Training) -> Form:
        """Derive the form from a model that no engine has prepared yet."""
        dtype = training.convert
        ignored = (model.get_parameter(name) for name in training.plan.ignored)
        return cls(
            groups=groups_in(model, training.plan),
            buffer_bytes=sum(_num_bytes(buffer, dtype) for buffer in model.buffers())
            + attribute_bytes(training.problem),
            ignored_bytes=sum(_num_bytes(parameter, dtype) for parameter in ignored),
            frozen=frozenset(
                name
                for name in frozen_parameters(training.problem, model)
                if not name.startswith(_thawing(training))
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One whole tensor of optimizer state, and the name of its parameter."""

    parameter: str
    shape: tuple[int, ...]
    bytes_per_element: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Bytes by purpose."""

    parameters: int
    gradients: int
    state: int
    whole: int
    copies: int = 0
    buffer: int = 0

    @property
    def num_bytes(self) -> int:
        return self.parameters + self.gradients + self.state + self.whole + self.copies + self.buffer

    def __str__(self) -> str:
        parts = (
            f"{self.parameters} of parameters",
            f"{self.gradients} of gradients",
            f"{self.state} of optimizer state",
            *([f"{self.whole} of buffers and ignored parameters"] if self.whole else []),
            *([f"{self.copies} of copies"] if self.copies else []),
            *([f"{self.buffer} of gathers"] if self.buffer else []),
        )
        return f"{self.num_bytes} bytes ({', '.join(parts)})"


def explained(
    form: Form,
    training: Training,
    world_size: int,
    *,
    cut: Cut,
    state: int,
    copies: Copies = Copies.NONE,
    gradients: HeldGradients = HeldGradients.SHARES,
) -> Explained:
    """Add up what a rank may hold, with this many bytes of optimizer state; see [Note: what a layout explains]."""
    shares = shares_of(training.plan, world_size)
    # FSDP1 of torch 2.13 keeps such units whole from one microbatch to the next.
    keeps_units = gradients is not HeldGradients.SHARES and training.plan.reshard is Reshard.KEEP
    dtype, reduced = training.convert, training.plan.reduction_dtype
    widths = [dtype.itemsize if dtype else group.bytes_per_element for group in form.groups]
    numels = [_group_numel(group, training.plan, shares.state, cut) for group in form.groups]
    parts = list(zip(numels, widths, strict=True))
    of_gradients = [
        0 if form.frozen.issuperset(group.names) else max(width, reduced.itemsize if reduced else 0)
        for group, width in zip(form.groups, widths, strict=True)
    ]
    of_layout = shares.state // shares.gradients
    times = {
        HeldGradients.SHARES: of_layout,
        HeldGradients.WHOLE: shares.state,
        HeldGradients.WHOLE_AND_SHARES: shares.state + of_layout,
    }
    all_gradients = sum(map(mul, numels, of_gradients))
    twice = {
        Copies.NONE: 0,
        Copies.MASTERS: sum(numels) * max(*widths, _MASTER_BYTES),
        Copies.BUCKETS: all_gradients,
    }
    keeps_a_gather = Capability.PARTS in training.plan.needs
    spill = _spill(form, shares.state, cut)
    return Explained(
        parameters=sum(numel * width for numel, width in parts)
        * (shares.state // shares.parameters + (shares.state if keeps_units else 0)),
        gradients=all_gradients * times[gradients]
        + (spill * max(of_gradients) if shares.gradients > 1 else 0),
        state=state,
        whole=form.buffer_bytes + 2 * form.ignored_bytes,
        copies=twice[copies],
        buffer=max(numel * width for numel, width in parts) * shares.parameters if keeps_a_gather else 0,
    )


def explained_in_filling(form: Form, training: Training, world_size: int, *, cut: Cut) -> Explained:
    """Add up what a rank may hold while its model is filled: its share, and two gathers of the largest unit.

    A rank that receives a whole unit, or sends it, has it twice: as it came, and as its collective needs it. A replica
    may receive all units at once.
    """
    layout = explained(form, training, world_size, cut=cut, state=0)
    width = 0 if training.convert is None else training.convert.itemsize
    units = [sum(map(prod, group.shapes)) * max(width, group.bytes_per_element) for group in form.groups]
    at_once = sum(units) if training.plan.layout is Layout.REPLICATE else 0
    return replace(layout, gradients=0, buffer=max(at_once, 2 * max(units)))


def state_bytes(
    form: Form, training: Training, world_size: int, *, cut: Cut, state: Iterable[StateTensor]
) -> int:
    """Add up a rank's share of optimizer state; ``state`` are the whole tensors."""
    shares = shares_of(training.plan, world_size).state
    shapes = {name: shape for g in form.groups for name, shape in zip(g.names, g.shapes, strict=True)}
    idle = training.problem.idle
    in_groups = [
        sum(prod(shape) for name, shape in zip(group.names, group.shapes, strict=True) if name not in idle)
        for group in form.groups
    ]
    # In a concatenated group the parameters without state may be another rank's share, and the rest this one's.
    most = sum(
        min(_group_numel(group, training.plan, shares, cut), numel)
        for group, numel in zip(form.groups, in_groups, strict=True)
    )
    trained = sum(in_groups)
    share = Fraction(min(most + _spill(form, shares, cut), trained), max(trained, 1))
    total = Fraction(0)
    for tensor in state:
        num_bytes = prod(tensor.shape) * tensor.bytes_per_element
        # One rank may hold all of one parameter, so the share is that of all parameters together.
        is_shared = tensor.shape and shapes.get(tensor.parameter) == tensor.shape
        total += num_bytes * share if is_shared else num_bytes
    return ceil(total)


# Building a model takes longer than everything else in a verdict.
_known: dict[tuple[object, ...], Form] = {}


def form_of(training: Training) -> Form:
    """Build the problem's model once, and derive its form."""
    plan, thawing = training.plan, _thawing(training)
    key = (identity_of(training.problem), plan.units, plan.ignored, plan.roots, training.convert, thawing)
    if key not in _known:
        _known[key] = Form.of(skeleton_of(training.problem), training)
    return _known[key]


def _thawing(training: Training) -> tuple[str, ...]:
    """Return how names begin of parameters that the loop freezes and thaws."""
    freezes = training.script.freezes if isinstance(training.script, Eventful) else ()
    return tuple(f"{part}." for freeze in freezes for part in freeze.parts)


def share_numel(shape: tuple[int, ...], plan: Plan, shares: int, width: int = 4) -> int:
    """Return the most elements of a parameter that a rank may hold."""
    if not shape:
        return 1  # a single number cannot be cut
    dim = shape.index(max(shape)) if plan.placement is Placement.LARGEST else 0
    rows = -(-shape[dim] // shares) * prod(shape[:dim]) * prod(shape[dim + 1 :])
    flat = -(-(prod(shape) + (FLAT_ALIGNMENT_BYTES - 1) // width) // shares)
    return max(rows, flat)


def _group_numel(group: UnitParameters, plan: Plan, shares: int, cut: Cut) -> int:
    if cut is Cut.CHUNKS:
        return chunked_buffer_numel(group, shares)
    numels = (share_numel(shape, plan, shares, group.bytes_per_element) for shape in group.shapes)
    return sum(numels) + shares - 1


def _spill(form: Form, shares: int, cut: Cut) -> int:
    """Return what a rank may hold in addition to its even share if parameters are not cut."""
    largest = max(prod(shape) for group in form.groups for shape in group.shapes)
    return largest * (shares - 1) // shares if cut is Cut.PARAMETERS else 0


def _num_bytes(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    width = dtype.itemsize if dtype and tensor.is_floating_point() else tensor.element_size()
    return tensor.numel() * width
