"""Diagnosis of a wrong tensor: the named defects that reproduce it, else a pattern in the difference.

Diagnosis never decides whether a tensor is wrong; ``harness.laws.parity`` has already decided that.
"""

from __future__ import annotations

import math

import torch

from shardproof.engine.contract import NoGradient, Shard
from shardproof.harness.laws.hypotheses import hypotheses, scaled_update, share_of
from shardproof.harness.laws.law import Evidence
from shardproof.harness.laws.structure import RankShard
from shardproof.harness.laws.suspect import Suspect, factor_between
from shardproof.harness.laws.tolerance import allowed_error
from shardproof.harness.laws.weighted_sum import weighted_sum
from shardproof.harness.laws.wrong_updates import wrong_update
from shardproof.harness.oracle.absolute_error import deviation
from shardproof.harness.oracle.oracle_observation import Quantity, TensorKey
from shardproof.harness.torch_compat.dtypes import widened

NOT_FINITE = "NaN or infinity"
UNSTRUCTURED = "unstructured difference"

# Of a few ranks, microbatches or elements several defects make the same.
_MOST_NAMED = 3
# Rows are searched among all rows of the whole tensor: the maximum number of differences computed for it.
_MOST_DIFFERENCES = 2**24


def looks_like(evidence: Evidence, place: TensorKey, piece: RankShard) -> str:
    """Characterise a wrong shard by the defects that reproduce it, the most specific first."""
    rank = evidence.data_rank(piece.rank)
    full = evidence.oracle.reference(place.quantity, place.step, rank)[place.name]
    if full is None:
        return "a gradient where the reference has none"
    suspect = _suspect(evidence, place, piece, full)
    if not torch.isfinite(suspect.got[suspect.is_beyond]).all():
        return NOT_FINITE
    if _rests(suspect):
        return _moved(suspect)
    fitting = dict.fromkeys(h.text for h in hypotheses(suspect) if suspect.fits(h.tensor))
    if fitting:
        return ", or ".join([*fitting][:_MOST_NAMED])
    if not torch.isfinite(suspect.expected).all():
        return UNSTRUCTURED  # infinities allow no arithmetic
    return (
        _in_part(suspect)
        or _constant_factor(suspect)
        or _scalar_factor(suspect)
        or weighted_sum(suspect)
        or _permuted(suspect)
        or wrong_update(suspect)
        or _scaled_update(suspect)
        or _rounded_in_reduction(suspect)
        or _forward(suspect)
        or UNSTRUCTURED
    )


def _suspect(evidence: Evidence, place: TensorKey, piece: RankShard, full: torch.Tensor) -> Suspect:
    shard: Shard = piece.shard
    got, expected = widened(shard.tensor), widened(shard.of(full))
    own = next((o.initial for o in evidence.ranks if o.rank == piece.rank), {})
    return Suspect(
        evidence=evidence,
        place=place,
        rank=evidence.data_rank(piece.rank),
        shard=shard,
        own=own,
        got=got,
        expected=expected,
        error=deviation(got, expected),
        allowed=allowed_error(evidence.oracle, place),
    )


def _rests(suspect: Suspect) -> bool:
    """Whether a parameter has no gradient in the reference, and stays as it was."""
    if suspect.place.quantity is not Quantity.PARAMETER:
        return False
    if suspect.at.gradients.get(suspect.place.name, suspect.got) is not None:
        return False
    before = suspect.earlier(suspect.place.step - 1)
    return before is not None and torch.equal(before, suspect.expected)


def _moved(suspect: Suspect) -> str:
    """Describe the update of a parameter without a gradient."""
    if any(o.no_gradient is NoGradient.ZEROS for o in suspect.evidence.ranks):
        return "moved, although no rank used it: weight decay or momentum, on a gradient of zeros"
    text = "moved, although it has no gradient in this step"
    return f"{text}: by weight decay, as on a gradient of zeros" if _constant_factor(suspect) else text


def _in_part(suspect: Suspect) -> str | None:
    """Name the rows, or elements of a flat piece, that a defect explains while the rest is right."""
    wrong = suspect.is_beyond
    if not 1 < int(wrong.sum()) < wrong.numel():
        return None
    told = next((h.text for h in hypotheses(suspect) if suspect.fits(h.tensor, in_part=True)), None)
    return None if told is None else f"{_where(suspect)}, {told}"


def _where(suspect: Suspect) -> str:
    """Name the wrong elements as one block of rows; count them where they are none."""
    wrong = suspect.is_beyond
    rows = (wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong).nonzero().flatten().tolist()
    if len(rows) != rows[-1] - rows[0] + 1 or not wrong[rows].all():
        return f"{int(wrong.sum())} of {wrong.numel()} elements"
    where = range(suspect.shard.offsets[0] + rows[0], suspect.shard.offsets[0] + rows[-1] + 1)
    what = "elements of the flattened tensor" if suspect.shard.is_flat else "rows"
    return f"{what} {where.start}..{where.stop - 1}{share_of(suspect, where)}"


def _constant_factor(suspect: Suspect) -> str | None:
    """Find f with got = f x the reference; one element alone would fit any f."""
    factor = factor_between(suspect.got, suspect.expected)
    if factor is None or not suspect.fits(suspect.expected * factor):
        return None
    text = f"a constant factor {factor:.6g} of the reference"
    norm, clip = suspect.at.norm, suspect.clip
    if clip is None or norm is None or suspect.place.quantity is not Quantity.GRADIENT:
        return text
    clipped_by = clip.factor(float(norm)) * factor.real
    if not 0 < clipped_by < 1:
        return text
    return f"{text}, as if clipped by a norm of {clip.max_norm / clipped_by:.6g} instead of {float(norm):.6g}"


def _scaled_update(suspect: Suspect) -> str | None:
    scaled = scaled_update(suspect)
    return None if scaled is None or not suspect.fits(scaled.tensor) else scaled.text


def _scalar_factor(suspect: Suspect) -> str | None:
    """Find a factor of one element among those that a program is likely to make: any other would fit by chance."""
    world_size = suspect.oracle.world_size
    for size in (2, world_size, math.sqrt(world_size)):
        if size == 1:
            continue
        spelt = f"sqrt({world_size})" if size != int(size) else f"{size:g}"
        if suspect.fits(suspect.expected * size):
            return f"{spelt} x the reference"
        if suspect.fits(suspect.expected / size):
            return "half the reference" if size == 2 else f"the reference / {spelt}"
    return None


def _permuted(suspect: Suspect) -> str | None:
    """Recognise rows of the whole reference in other places, else the shard's own elements in another order."""
    got, whole = suspect.got, suspect.whole
    if got.dim() == 0 or int(suspect.is_beyond.sum()) < 2 or whole is None or got.is_complex():
        return None
    return _moved_rows(suspect, whole) or _moved_elements(suspect)


def _moved_rows(suspect: Suspect, whole: torch.Tensor) -> str | None:
    got = suspect.got
    rows = whole.reshape(-1) if suspect.shard.is_flat else whole
    theirs, mine = rows.reshape(len(rows), -1), got.reshape(len(got), -1)
    if theirs.shape[1:] != mine.shape[1:] or len(mine) * theirs.numel() > _MOST_DIFFERENCES:
        return None
    found = torch.cdist(mine, theirs, p=math.inf).argmin(1)
    if not suspect.fits(theirs[found].reshape(got.shape)):
        return None
    what = "elements of the flattened tensor" if suspect.shard.is_flat or got.dim() == 1 else "rows"
    first, start = int(found[0]), suspect.shard.offsets[0]
    if torch.equal(found, torch.arange(first, first + len(found))):
        source = range(first, first + len(found))
        return (
            f"{what} {start}..{start + len(found) - 1} hold those of the reference at "
            f"{source.start}..{source.stop - 1}{share_of(suspect, source)}"
        )
    return f"permuted: {what} of the reference in another order"


def _moved_elements(suspect: Suspect) -> str | None:
    got, expected = suspect.got.flatten(), suspect.expected.flatten()
    order = torch.empty_like(got, dtype=torch.long)
    order[got.argsort()] = expected.argsort()
    if not suspect.fits(expected[order].reshape(suspect.got.shape)):
        return None
    return "permuted: elements of the reference in another order"


def _rounded_in_reduction(suspect: Suspect) -> str | None:
    """Recognise rounding: values that a shorter dtype holds exactly, or errors of its rounding's size."""
    if suspect.got.count_nonzero() < 2 or suspect.got.is_complex():
        return None
    pieces = suspect.contributions if suspect.place.quantity is Quantity.GRADIENT else None
    is_gradient = pieces is not None
    scale = suspect.expected.abs()
    if pieces is not None:
        scale = pieces.abs().sum((0, 1)) / suspect.oracle.divisor
    wide = (torch.float32,) if suspect.shard.tensor.dtype == torch.float64 else ()
    for dtype in (torch.bfloat16, torch.float16, *wide):
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


def _forward(suspect: Suspect) -> str | None:
    """Name the microbatches in which forward went wrong, of losses that nothing explains."""
    if suspect.place.quantity is not Quantity.LOSS:
        return None
    wrong = suspect.is_beyond.flatten(1).any(1)
    which = wrong.nonzero().flatten().tolist()
    noun = "microbatch" if len(which) == 1 else "microbatches"
    where = "in each microbatch" if wrong.all() else f"in {noun} {', '.join(map(str, which))} alone"
    return f"another loss {where}: forward had other inputs, buffers, draws or gathered parameters"


def _is_exact_in(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    return torch.equal(tensor.to(dtype).double(), tensor)
