"""What a wrong tensor looks like: named defects, each recomputed from the oracle's pieces and compared.

Diagnosis never decides whether a tensor is wrong; ``harness.parity`` has decided that before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.contract import Shard
from harness.deviation import deviation, largest
from harness.oracle import OracleObservation, Place, Quantity
from harness.tolerance import allowed_error
from harness.torch_compat.dtypes import widened

__all__ = ["NOT_FINITE", "UNSTRUCTURED", "looks_like"]

NOT_FINITE = "NaN or infinity"
UNSTRUCTURED = "unstructured difference"

# A hypothesis must fit this many times better than the error it explains, else any small defect would fit
# its neighbour.
_MUST_EXPLAIN = 8.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Suspect:
    """A wrong shard with all that hypotheses are made from; ``contributions`` are [microbatches, ranks, ...]."""

    oracle: OracleObservation
    place: Place
    rank: int
    shard: Shard
    got: torch.Tensor
    expected: torch.Tensor
    error: torch.Tensor
    allowed: float

    @property
    def contributions(self) -> torch.Tensor | None:
        pieces = self.oracle.steps[self.place.step].contributions.get(self.place.name)
        return None if pieces is None else self.shard.of(pieces)

    @property
    def is_beyond(self) -> torch.Tensor:
        return self.error > self.allowed

    def earlier(self, step: int) -> torch.Tensor | None:
        """Give this quantity's reference after an earlier step, -1 being the initial value."""
        quantity = Quantity.INITIAL if step < 0 and self._is_parameter else self.place.quantity
        if step < 0 and quantity is not Quantity.INITIAL:
            return None
        full = self.oracle.reference(quantity, step, self.rank).get(self.place.name)
        return None if full is None else self.shard.of(full)

    @property
    def _is_parameter(self) -> bool:
        return self.place.quantity is Quantity.PARAMETER

    def fits(self, hypothesis: torch.Tensor) -> bool:
        """Say whether ``got`` is the hypothesis up to its noise, and is so because of what the defect changes."""
        if not self.got.numel():
            return False
        growth = max(1.0, largest(hypothesis) / max(largest(self.expected), torch.finfo(torch.float64).tiny))
        rounding = 16 * torch.finfo(torch.float32).eps * largest(hypothesis)
        slack = max(2 * self.allowed * min(growth, 1e3), rounding)
        distance = deviation(self.got, hypothesis).max().item()
        return distance <= slack and distance * _MUST_EXPLAIN <= self.error.max().item()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Hypothesis:
    """A defect in words, and the tensor that it would make."""

    text: str
    tensor: torch.Tensor


def looks_like(oracle: OracleObservation, place: Place, rank: int, shard: Shard) -> str:
    """Characterise a wrong shard by the first defect that reproduces it, the most specific first."""
    full = oracle.reference(place.quantity, place.step, rank)[place.name]
    if full is None:
        return "a gradient where the reference has none"
    got, expected = widened(shard.tensor), widened(shard.of(full))
    suspect = _Suspect(
        oracle=oracle,
        place=place,
        rank=rank,
        shard=shard,
        got=got,
        expected=expected,
        error=deviation(got, expected),
        allowed=allowed_error(oracle, place),
    )
    if not torch.isfinite(suspect.got[suspect.is_beyond]).all():
        return NOT_FINITE
    for hypothesis in _hypotheses(suspect):
        if suspect.fits(hypothesis.tensor):
            return hypothesis.text
    if not torch.isfinite(suspect.expected).all():
        return UNSTRUCTURED  # there is no reckoning with infinities
    return (
        _unchanged_rows(suspect)
        or _constant_factor(suspect)
        or _rounded_in_reduction(suspect)
        or UNSTRUCTURED
    )


def _hypotheses(suspect: _Suspect) -> Iterator[_Hypothesis]:
    yield _Hypothesis(text="zero", tensor=torch.zeros_like(suspect.got))
    if suspect.expected.is_complex():
        yield _Hypothesis(text="the complex conjugate", tensor=suspect.expected.conj().resolve_conj())
        real = suspect.expected.real.to(suspect.expected.dtype)
        yield _Hypothesis(text="the real parts alone", tensor=real)
    match suspect.place.quantity:
        case Quantity.GRADIENT:
            yield from _of_gradient(suspect)
        case Quantity.PARAMETER:
            yield from _of_parameter(suspect)
        case Quantity.LOSS:
            yield from _of_loss(suspect)
        case Quantity.NORM:
            yield from _of_norm(suspect)
        case Quantity.INITIAL | Quantity.OPTIMIZER_STATE | Quantity.BUFFER:
            return


def _of_gradient(suspect: _Suspect) -> Iterator[_Hypothesis]:
    pieces = suspect.contributions
    if pieces is None:
        return
    if suspect.oracle.world_size > 1:
        yield from _of_synchronisation(suspect, pieces.sum(0))
    yield from _of_division(suspect)
    yield from _of_microbatches(pieces.sum(1) / suspect.oracle.divisor)
    before = suspect.earlier(suspect.place.step - 1)
    if before is not None:
        yield _Hypothesis(text="the previous step's value (stale)", tensor=before)
        text = "the previous step's value added: gradients not cleared"
        yield _Hypothesis(text=text, tensor=before + suspect.expected)


def _of_division(suspect: _Suspect) -> Iterator[_Hypothesis]:
    """Yield the sum over ranks divided by something else; dividing by one leaves nothing to get wrong."""
    oracle, expected = suspect.oracle, suspect.expected
    world_size, divisor, factor = oracle.world_size, oracle.divisor, oracle.plan.divide_factor
    if divisor != 1:
        instead = "averaged" if factor is None else f"divided by the factor {factor:g}"
        text = f"exactly {divisor:g} x the reference: summed over the ranks, not {instead}"
        yield _Hypothesis(text=text, tensor=expected * divisor)
        by = "the world size" if factor is None else f"the factor {factor:g}"
        either = f", or by the {world_size} ranks instead" if divisor**2 == world_size else ""
        text = f"the reference / {divisor:g}: divided by {by} twice{either}"
        yield _Hypothesis(text=text, tensor=expected / divisor)
    if divisor != world_size:
        text = f"averaged over the {world_size} ranks: the factor {divisor:g} is ignored"
        yield _Hypothesis(text=text, tensor=expected * divisor / world_size)
        text = f"averaged over the {world_size} ranks, and divided by the factor {divisor:g} as well"
        yield _Hypothesis(text=text, tensor=expected / world_size)


def _of_synchronisation(suspect: _Suspect, of_ranks: torch.Tensor) -> Iterator[_Hypothesis]:
    world_size, rank, divisor = len(of_ranks), suspect.rank, suspect.oracle.divisor
    own = of_ranks[rank]
    yield _Hypothesis(text="only this rank's own gradient: not synchronised", tensor=own)
    by = "world size" if suspect.oracle.plan.divide_factor is None else f"{divisor:g}"
    text = f"only this rank's own gradient / {by}: averaged, never added"
    yield _Hypothesis(text=text, tensor=own / divisor)
    for size in range(2, world_size):
        if world_size % size:
            continue
        stride = world_size // size
        block = range(rank // size * size, rank // size * size + size)
        for group in (list(block), list(range(rank % stride, world_size, stride))):
            text = f"synchronised within ranks {group} only: one mesh axis is missing"
            total = of_ranks[group].sum(0)
            yield _Hypothesis(text=text, tensor=total / size)
            yield _Hypothesis(text=f"{text}, yet divided as for all ranks", tensor=total / divisor)
    for absent in range(world_size):
        text = f"without the contribution of rank {absent}"
        yield _Hypothesis(text=text, tensor=(of_ranks.sum(0) - of_ranks[absent]) / divisor)


def _of_microbatches(of_microbatches: torch.Tensor) -> Iterator[_Hypothesis]:
    """Yield wrong accumulations of the microbatches' reduced gradients."""
    count = len(of_microbatches)
    if count == 1:
        return
    yield _Hypothesis(text="only the last microbatch", tensor=of_microbatches[-1])
    yield _Hypothesis(text="only the first microbatch", tensor=of_microbatches[0])
    mean = of_microbatches.mean(0)
    yield _Hypothesis(text="averaged over the microbatches, not summed", tensor=mean)
    doubled, cumulative = torch.zeros_like(mean), torch.zeros_like(mean)
    for index, piece in enumerate(of_microbatches):
        doubled = 2 * doubled + piece
        cumulative = cumulative + (count - index) * piece
    text = "each earlier microbatch counted again"
    yield _Hypothesis(text=f"{text} (doubled per microbatch)", tensor=doubled)
    yield _Hypothesis(text=f"{text} (running sums added)", tensor=cumulative)


def _of_parameter(suspect: _Suspect) -> Iterator[_Hypothesis]:
    step = suspect.place.step
    initial = suspect.earlier(-1)
    if initial is not None:
        text = "unchanged since initialisation" + _share(suspect)
        yield _Hypothesis(text=text, tensor=initial)
    before = suspect.earlier(step - 1)
    if before is not None and step > 0:
        yield _Hypothesis(text="the previous step's value (stale)", tensor=before)
    if before is not None:
        for factor in (suspect.oracle.world_size, 1 / suspect.oracle.world_size):
            text = f"updated by {factor:g} x the reference's update"
            yield _Hypothesis(text=text, tensor=before + factor * (suspect.expected - before))


def _of_loss(suspect: _Suspect) -> Iterator[_Hypothesis]:
    losses = suspect.oracle.steps[suspect.place.step].losses
    for other in range(suspect.oracle.world_size):
        if other != suspect.rank:
            yield _Hypothesis(text=f"the loss of rank {other}'s data", tensor=losses[:, other : other + 1])


def _of_norm(suspect: _Suspect) -> Iterator[_Hypothesis]:
    for step in reversed(range(suspect.place.step)):
        before = suspect.earlier(step)
        if before is not None:
            yield _Hypothesis(text=f"the norm of step {step} (stale)", tensor=before)


def _unchanged_rows(suspect: _Suspect) -> str | None:
    """Name the rows, or elements of a flat piece, that kept an earlier value: the wrong ones and one block."""
    if suspect.place.quantity is not Quantity.PARAMETER or suspect.got.dim() == 0:
        return None
    is_wrong = suspect.is_beyond.flatten(1).any(1) if suspect.got.dim() > 1 else suspect.is_beyond
    rows = is_wrong.nonzero().flatten().tolist()
    if not rows or rows != list(range(rows[0], rows[-1] + 1)):
        return None
    block = slice(rows[0], rows[-1] + 1)
    offset = suspect.shard.offsets[0]
    where = range(offset + block.start, offset + block.stop)
    what = "elements of the flattened parameter" if suspect.shard.is_flat else "rows"
    for text, step in (("unchanged", -1), ("unchanged since the previous step", suspect.place.step - 1)):
        kept = suspect.earlier(step)
        if kept is not None and bool(((suspect.got - kept)[block].abs() <= suspect.allowed).all()):
            return f"{what} {where.start}..{where.stop - 1}{_share_of(suspect, where)}, {text}"
    return None


def _share(suspect: _Suspect) -> str:
    shard = suspect.shard
    if shard.is_whole or not shard.offsets:
        return ""
    rows = range(shard.offsets[0], shard.offsets[0] + shard.tensor.shape[0])
    owner = _share_of(suspect, rows)
    return f": rows {rows.start}..{rows.stop - 1}{owner}" if owner else ""


def _share_of(suspect: _Suspect, rows: range) -> str:
    """Say whose share the rows are by torch.chunk's rule, if they are exactly one rank's."""
    if suspect.shard.is_flat or suspect.oracle.world_size == 1:
        return ""
    num_rows = suspect.shard.global_shape[0]
    chunk = -(-num_rows // suspect.oracle.world_size)
    rank = rows.start // chunk
    if (rank * chunk, min(num_rows, rank * chunk + chunk)) != (rows.start, rows.stop):
        return ""
    return f", the share of rank {rank}"


def _constant_factor(suspect: _Suspect) -> str | None:
    """Find f with got = f x the reference; one element alone would fit any f."""
    square = suspect.expected.abs().square().sum().item()
    if suspect.expected.count_nonzero() < 2 or square == 0:
        return None
    factor = (suspect.got * suspect.expected.conj()).sum().item() / square
    if not suspect.fits(suspect.expected * factor):
        return None
    return f"a constant factor {factor:.6g} of the reference"


def _rounded_in_reduction(suspect: _Suspect) -> str | None:
    """Recognise rounding: values that a shorter dtype holds exactly, or errors of the size that it makes."""
    if suspect.got.count_nonzero() < 2 or suspect.got.is_complex():
        return None
    pieces = suspect.contributions if suspect.place.quantity is Quantity.GRADIENT else None
    is_gradient = pieces is not None
    scale = suspect.expected.abs()
    if pieces is not None:
        scale = pieces.abs().sum((0, 1)) / suspect.oracle.divisor
    for dtype in (torch.bfloat16, torch.float16):
        name, eps = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps
        if bool((suspect.error > 2 * eps * scale + suspect.allowed).any()):
            continue
        if _is_exact_in(dtype, suspect.got) and not _is_exact_in(dtype, suspect.expected):
            return f"rounded to {name}"
        # Several reductions added in float32 are no longer exact in the short dtype; their error has its size.
        relative = (suspect.error / scale.clamp(min=torch.finfo(torch.float64).tiny)).median().item()
        if is_gradient and relative > eps / 64:
            return f"an error of the size that rounding to {name} makes in the reduction"
    return None


def _is_exact_in(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    return torch.equal(tensor.to(dtype).double(), tensor)
