"""How many bytes a sharded layout explains on one rank between steps, in closed form. Pure.

[Note: what a layout explains] Over S ranks a rank holds, of each parameter of n rows, at most ceil(n / S) rows. An
engine that lays parameters one after the other aligns each to a few bytes and rounds a group up to a multiple of S.
The larger of the two counts. A rank holds its gradients in the same form, in the wider one of the parameters' dtype and
that of the reduction. Of the optimizer state it holds what has the shape of a parameter in that form too, and all else
whole. Buffers are whole. So are parameters that the plan ignores, with their gradients and state. Engines that cut at
chunks may hold more, as in [Note: chunks].

ZeRO-1 holds parameters and gradients whole, ZeRO-2 parameters alone: as much as all shares together, padding
included, and once. What else a bucket for communication holds is explained by no layout. Where each parameter has its
state on one rank, a rank holds at most its even share and, beside that, all but a share of the largest parameter: no
rank is given more by a rule that gives the next parameter to the rank that has least. Engines whose optimizer updates a
copy of the parameters (``Masters.SHARE``) hold a share more.

Where the loop calls parts of the model by themselves, an engine may keep the buffer of one gather: the root's forward
lets go of it, and may not follow. FSDP2 does so. Nothing else is explained between steps: no gathered unit, no other
buffer and no copy in another dtype. The engines of torch and ours keep none of these after the optimizer step.

After a forward without a backward, as in an evaluation, the reshard policy explains gathered units. A loop that ends a
step so is not counted in that step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod
from operator import mul

import torch
from torch import nn

from shardproof.engine.contract import Capability, Cut, Masters, Placement, Plan
from shardproof.harness.cases.training import Training
from shardproof.harness.cases.units import (
    UnitParameters,
    chunked_buffer_numel,
    groups_in,
    identity_of,
    shares_of,
    skeleton_of,
)

__all__ = ["Explained", "Form", "StateTensor", "explained", "form_of", "state_bytes"]

# Engines that lay parameters one after the other let each begin at a multiple of so many bytes.
_ALIGNMENT_BYTES = 16
_MASTER_BYTES = 4  # copies that are updated are of float32 at least


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What the closed form needs of a model: its groups, and the bytes that every rank holds whole."""

    groups: tuple[UnitParameters, ...]
    buffer_bytes: int
    ignored_bytes: int

    @classmethod
    def of(cls, model: nn.Module, training: Training) -> Form:
        """Read it off a model that no engine has prepared yet."""
        dtype = training.convert
        ignored = (model.get_parameter(name) for name in training.plan.ignored)
        return cls(
            groups=groups_in(model, training.plan),
            buffer_bytes=sum(_num_bytes(buffer, dtype) for buffer in model.buffers()),
            ignored_bytes=sum(_num_bytes(parameter, dtype) for parameter in ignored),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """One whole tensor of optimizer state, and the name of its parameter."""

    parameter: str
    shape: tuple[int, ...]
    bytes_per_element: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Bytes by what they are for."""

    parameters: int
    gradients: int
    state: int
    whole: int
    masters: int = 0
    buffer: int = 0

    @property
    def num_bytes(self) -> int:
        return self.parameters + self.gradients + self.state + self.whole + self.masters + self.buffer

    def __str__(self) -> str:
        parts = (
            f"{self.parameters} of parameters",
            f"{self.gradients} of gradients",
            f"{self.state} of optimizer state",
            *([f"{self.whole} of buffers and ignored parameters"] if self.whole else []),
            *([f"{self.masters} of a copy to update"] if self.masters else []),
            *([f"{self.buffer} of one gather"] if self.buffer else []),
        )
        return f"{self.num_bytes} bytes ({', '.join(parts)})"


def explained(
    form: Form,
    training: Training,
    world_size: int,
    *,
    cut: Cut,
    state: int,
    masters: Masters = Masters.NONE,
) -> Explained:
    """Add up what a rank may hold, beside so many bytes of optimizer state; see [Note: what a layout explains]."""
    shares = shares_of(training.plan, world_size)
    dtype, reduced = training.convert, training.plan.reduction_dtype
    widths = [dtype.itemsize if dtype else group.bytes_per_element for group in form.groups]
    numels = [_group_numel(group, training.plan, shares.state, cut) for group in form.groups]
    parts = list(zip(numels, widths, strict=True))
    of_gradients = [max(width, reduced.itemsize if reduced else 0) for width in widths]
    keeps_a_gather = Capability.PARTS in training.plan.needs
    spill = _spill(form, shares.state, cut)
    return Explained(
        parameters=sum(numel * width for numel, width in parts) * (shares.state // shares.parameters),
        gradients=sum(map(mul, numels, of_gradients)) * (shares.state // shares.gradients)
        + (spill * max(of_gradients) if shares.gradients > 1 else 0),
        state=state,
        whole=form.buffer_bytes + 2 * form.ignored_bytes,
        masters=sum(numels) * max(*widths, _MASTER_BYTES) if masters is Masters.SHARE else 0,
        buffer=max(numel * width for numel, width in parts) * shares.parameters if keeps_a_gather else 0,
    )


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
    # Where a group lies one parameter after the other, those without state may be another rank's, the rest this one's.
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


# Building a model takes longer than all the rest of judging.
_known: dict[tuple[object, ...], Form] = {}


def form_of(training: Training) -> Form:
    """Build the problem's model once, and read its form."""
    plan = training.plan
    key = (identity_of(training.problem), plan.units, plan.ignored, plan.roots, training.convert)
    if key not in _known:
        _known[key] = Form.of(skeleton_of(training.problem), training)
    return _known[key]


def share_numel(shape: tuple[int, ...], plan: Plan, shares: int, width: int = 4) -> int:
    """Return the most elements of a parameter that a rank may hold."""
    if not shape:
        return 1  # a single number cannot be cut
    dim = shape.index(max(shape)) if plan.placement is Placement.LARGEST else 0
    rows = -(-shape[dim] // shares) * prod(shape[:dim]) * prod(shape[dim + 1 :])
    flat = -(-(prod(shape) + (_ALIGNMENT_BYTES - 1) // width) // shares)
    return max(rows, flat)


def _group_numel(group: UnitParameters, plan: Plan, shares: int, cut: Cut) -> int:
    if cut is Cut.CHUNKS:
        return chunked_buffer_numel(group, shares)
    numels = (share_numel(shape, plan, shares, group.bytes_per_element) for shape in group.shapes)
    return sum(numels) + shares - 1


def _spill(form: Form, shares: int, cut: Cut) -> int:
    """Return what a rank may hold beside its even share where parameters are not cut."""
    largest = max(prod(shape) for group in form.groups for shape in group.shapes)
    return largest * (shares - 1) // shares if cut is Cut.PARAMETERS else 0


def _num_bytes(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    width = dtype.itemsize if dtype and tensor.is_floating_point() else tensor.element_size()
    return tensor.numel() * width
