"""The results of an oracle: the right tensors of a training, and how far rounding may move each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from shardproof.engine.contract import Plan
from shardproof.harness.oracle.absolute_error import largest
from shardproof.harness.torch_compat.dtypes import widened

Tensors = Mapping[str, torch.Tensor]

INITIAL_STEP = -1  # the step of observations before the first step
LOSSES = "loss"  # the name under which a step's losses are one tensor [losses of the script, ranks with data]
NORM = "norm"  # the name under which the norm that clipping returns is a scalar tensor


class Quantity(StrEnum):
    """The kinds of compared tensors; within a step in this order."""

    INITIAL = "initial parameter"
    LOSS = "loss"
    GRADIENT = "gradient"
    NORM = "gradient norm"
    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer state"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKey:
    """One tensor of a training: its quantity, the step after which it is read, and its name."""

    quantity: Quantity
    step: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OracleStep:
    """One optimizer step of the oracle.

    ``losses`` is [losses of the script, ranks with data]. ``contributions[name][m, r]`` is the gradient of rank r's
    loss of microbatch m as that rank computes it, before any averaging: summed over both and divided by the plan's
    divisor they are the step's gradient. ``sizes`` are their sizes. ``gradients`` are those that the optimizer finds,
    clipped if the plan clips, None where there is none. ``norm`` is the norm of all gradients before clipping.
    ``lagging`` are the gradients, unclipped, of this step's data with the parameters of the previous step, and
    ``lagging_losses`` its losses: empty and None for the first step. Contributions and lagging values only explain a
    failure; see `OracleObservation.explains`.
    """

    losses: torch.Tensor
    contributions: Tensors
    gradients: Mapping[str, torch.Tensor | None]
    parameters: Tensors
    sizes: Mapping[str, PieceSizes] = field(default_factory=dict)
    norm: torch.Tensor | None = None
    lagging: Tensors = field(default_factory=dict)
    lagging_losses: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FirstStep:
    """The first step from pieces of the ranks' own dtype, rows in their order: rounded as the model rounds.

    Pieces are added exactly. ``noise`` is the deviation of gradients when pieces are added in other orders.
    """

    gradients: Tensors
    parameters: Tensors
    noise: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OracleObservation:
    """The results of a correct engine, in float64 or in the model's own dtypes, and the deviation that float32 allows.

    ``buffers`` has one entry per rank: those after all of that rank's forwards. ``noise`` is, per tensor, the largest
    absolute deviation from the float64 value over float32 runs with other orders of summation, and ``scales`` is the
    largest value rounded on the way: the result itself may have cancelled to nearly zero. ``constants`` are the buffers
    that training did not change in a single bit, on all ranks in all runs. ``dtypes`` are those of the float32 runs,
    with ``INITIAL_STEP`` for every place. ``is_exact`` means that the problem claims to be exact, the world is a power
    of two, and no float32 run deviated in a single bit. ``draws`` means that forward or the loss draws random numbers;
    ``device`` is that of the ranks to compare with. ``untrained`` are the parameters that the optimizer did not
    receive. ``state_before`` is the optimizer state before the last step, and
    ``buffers_before`` each rank's buffers then. ``first`` is None unless the model rounds far
    more than its dtype does; see [Note: rounding of one side]. ``is_trained_before`` means that ``initial`` are the
    parameters after the steps of a previous world. ``explains`` means that the values that only explain a failure are
    present: contributions, lagging values, and ``state_before``. ``still`` masks the elements of parameters that have
    no gradient, whose noise is ``still_noise``; see [Note: still elements].
    """

    world_size: int
    plan: Plan
    initial: Tensors
    steps: tuple[OracleStep, ...]
    optimizer_state: Tensors
    buffers: tuple[Tensors, ...]
    noise: Mapping[TensorKey, float]
    scales: Mapping[TensorKey, float]
    constants: frozenset[str]
    dtypes: Mapping[TensorKey, torch.dtype]
    is_exact: bool
    draws: bool = False
    device: str = "cpu"
    first: FirstStep | None = None
    is_widened: bool = True
    is_trained_before: bool = False
    untrained: frozenset[str] = frozenset()
    state_before: Tensors = field(default_factory=dict)
    buffers_before: tuple[Tensors, ...] = ()
    explains: bool = True
    still: Tensors = field(default_factory=dict)
    still_noise: Mapping[TensorKey, float] = field(default_factory=dict)

    def still_of(self, place: TensorKey) -> torch.Tensor | None:
        """Return the mask of still elements of a tensor; None if it has none."""
        if place.quantity not in {Quantity.GRADIENT, Quantity.PARAMETER, Quantity.OPTIMIZER_STATE}:
            return None
        is_state = place.quantity is Quantity.OPTIMIZER_STATE
        mask = self.still.get(place.name.rpartition("/")[0] if is_state else place.name)
        # State such as a count of steps has a shape of its own.
        whole = self.optimizer_state.get(place.name) if is_state else mask
        return mask if mask is not None and whole is not None and whole.shape == mask.shape else None

    @property
    def divisor(self) -> float:
        """The divisor of sums of gradients over ranks."""
        return self.plan.divisor(self.world_size)

    def reference(self, quantity: Quantity, step: int, rank: int) -> Mapping[str, torch.Tensor | None]:
        """Return the full tensors of one quantity after ``step``; ``rank`` matters only for buffers."""
        match quantity:
            case Quantity.INITIAL:
                return self.initial
            case Quantity.LOSS:
                return {LOSSES: self.steps[step].losses}
            case Quantity.GRADIENT:
                return self.steps[step].gradients
            case Quantity.NORM:
                norm = self.steps[step].norm
                return {} if norm is None else {NORM: norm}
            case Quantity.PARAMETER:
                return self.steps[step].parameters
            case Quantity.OPTIMIZER_STATE:
                return self.optimizer_state
            case Quantity.BUFFER:
                return self.buffers[rank]

    def clipping_factor(self, step: int, name: str) -> float:
        """Return the factor by which clipping reduced a gradient, and all values that were rounded before."""
        at = self.steps[step]
        gradient = at.gradients[name]
        if at.norm is None or gradient is None:
            return 1.0
        whole = at.sizes[name].total / self.divisor
        return largest(gradient) / whole if whole else 1.0

    def dtype(self, quantity: Quantity, name: str) -> torch.dtype:
        """Return the dtype that an engine's tensor must have."""
        return self.dtypes[TensorKey(quantity=quantity, step=INITIAL_STEP, name=name)]


def constants_of(built: Tensors, of_ranks: Sequence[Tensors]) -> frozenset[str]:
    """Return the names of the buffers that have on all ranks the values with which they were built."""
    return frozenset(
        name
        for name, value in built.items()
        if all(name in buffers and torch.equal(buffers[name], value) for buffers in of_ranks)
    )


_PIECE = 2**16  # elements; fits into the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSizes:
    """The largest absolute values of sums of pieces, before any division.

    ``total`` is that of the sum over microbatches and ranks, ``absolute`` that of the sum of absolute values, and
    ``of_ranks`` has one for the sum over the microbatches of each rank.
    """

    total: float
    absolute: float
    of_ranks: tuple[float, ...]


def sizes_of(pieces: Sequence[Sequence[torch.Tensor]]) -> PieceSizes:
    """Measure ``pieces`` [microbatches][ranks] of one parameter."""
    total, absolute, of_ranks = 0.0, 0.0, [0.0] * len(pieces[0])
    for block in _blocks(pieces):  # [microbatches, ranks, elements]
        sums = block.sum(0)
        total = max(total, largest(sums.sum(0)))
        absolute = max(absolute, largest(block.abs().sum((0, 1))))
        of_ranks = [max(most, largest(own)) for most, own in zip(of_ranks, sums, strict=True)]
    return PieceSizes(total=total, absolute=absolute, of_ranks=tuple(of_ranks))


def _blocks(pieces: Sequence[Sequence[torch.Tensor]]) -> Iterator[torch.Tensor]:
    flat = [[piece.reshape(-1) for piece in of_ranks] for of_ranks in pieces]
    for start in range(0, flat[0][0].numel(), _PIECE):
        of_microbatches = [[widened(one[start : start + _PIECE]) for one in ranks] for ranks in flat]
        yield torch.stack([torch.stack(ranks) for ranks in of_microbatches])
