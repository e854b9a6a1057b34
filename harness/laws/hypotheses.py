"""Named defects of a wrong tensor: each has a description and the tensor that it would make of the oracle's pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardproof.engine.contract import Capability
from shardproof.harness.cases.training import Clip, apart
from shardproof.harness.laws.suspect import Hypothesis, Suspect, factor_between
from shardproof.harness.laws.wrong_norms import of_norm, partial_norms
from shardproof.harness.oracle.absolute_error import largest
from shardproof.harness.oracle.oracle_observation import Quantity
from shardproof.harness.torch_compat.dtypes import widened

_LAGGING = "computed with last step's parameters"


def hypotheses(suspect: Suspect) -> Iterator[Hypothesis]:
    """Yield the defects that could have produced a tensor of this quantity, the most specific first."""
    yield Hypothesis(text="zero", tensor=torch.zeros_like(suspect.got))
    if suspect.expected.is_complex():
        yield Hypothesis(text="the complex conjugate", tensor=suspect.expected.conj().resolve_conj())
        real = suspect.expected.real.to(suspect.expected.dtype)
        yield Hypothesis(text="the real parts alone", tensor=real)
    match suspect.place.quantity:
        case Quantity.GRADIENT:
            yield from _of_gradient(suspect)
        case Quantity.PARAMETER:
            yield from _of_parameter(suspect)
        case Quantity.LOSS:
            yield from _of_loss(suspect)
        case Quantity.NORM:
            yield from of_norm(suspect)
        case Quantity.OPTIMIZER_STATE:
            yield from _of_state(suspect)
        case Quantity.BUFFER:
            yield from _of_buffer(suspect)
        case Quantity.INITIAL if Capability.START_FROM_FIRST in suspect.evidence.training.plan.demands:
            yield Hypothesis(text="what this rank had, not the first one's", tensor=apart(suspect.expected))


def _of_state(suspect: Suspect) -> Iterator[Hypothesis]:
    """Yield the state of the step before, and for a counter of steps how many it lacks."""
    name = suspect.place.name
    before = suspect.oracle.state_before.get(name)
    if before is not None:
        yield Hypothesis(text="the state of the step before (stale)", tensor=suspect.shard.of(before))
    if name.endswith("/step") and suspect.expected.numel() == 1:
        missing = round(float((suspect.expected - suspect.got).nan_to_num()))
        text = f"counts {abs(missing)} updates {'fewer' if missing > 0 else 'more'} than were made"
        yield Hypothesis(text=text, tensor=suspect.expected - missing)


def _of_buffer(suspect: Suspect) -> Iterator[Hypothesis]:
    """Yield the buffers of other ranks, and this rank's after forwards that began with those."""
    oracle, name = suspect.oracle, suspect.place.name
    for other, buffers in enumerate(oracle.buffers):
        if other != suspect.rank and name in buffers:
            yield Hypothesis(text=f"that of rank {other}", tensor=widened(suspect.shard.of(buffers[name])))
    before = [suspect.shard.of(b[name]) for b in oracle.buffers_before if name in b]
    if len(before) != oracle.world_size:
        return
    mine = widened(before[suspect.rank])
    yield Hypothesis(text="unchanged by the last step", tensor=mine)
    for other, value in enumerate(before):
        apart = widened(value) - mine
        factor = factor_between(suspect.got - suspect.expected, apart)
        if other != suspect.rank and factor is not None and 0 < factor.real <= 1:
            text = f"that of this rank, had forward begun with the buffer of rank {other}: broadcast before forward"
            yield Hypothesis(text=text, tensor=suspect.expected + factor.real * apart)


def share_of(suspect: Suspect, rows: range) -> str:
    """Name the rank whose share by torch.chunk's rule these rows are; empty if they are not exactly one rank's."""
    if suspect.shard.is_flat or suspect.oracle.world_size == 1:
        return ""
    num_rows = suspect.shard.global_shape[0]
    chunk = -(-num_rows // suspect.oracle.world_size)
    rank = rows.start // chunk
    if (rank * chunk, min(num_rows, rank * chunk + chunk)) != (rows.start, rows.stop):
        return ""
    return f", the share of rank {rank}"


def _of_gradient(suspect: Suspect) -> Iterator[Hypothesis]:
    pieces = suspect.contributions
    if pieces is None:
        return
    divisor, of_ranks = suspect.oracle.divisor, pieces.sum(0)
    if _are_alike(of_ranks):  # a rank's own gradient is then that of all
        yield from _of_division(suspect)
    if suspect.oracle.world_size > 1:
        yield from _of_synchronisation(suspect, of_ranks)
    yield from _of_division(suspect)
    yield from _of_microbatches(pieces.sum(1) / divisor)
    if len(pieces) > 1 and not pieces.is_complex():
        for dtype in (torch.bfloat16, torch.float16):
            text = f"microbatches added up in {str(dtype).removeprefix('torch.')}"
            yield Hypothesis(text=text, tensor=_added_in(dtype, pieces).sum(0) / divisor)
    before = suspect.earlier(suspect.place.step - 1)
    if before is not None:
        yield Hypothesis(text="the previous step's value (stale)", tensor=before)
        text = "the previous step's value added: gradients not cleared"
        yield Hypothesis(text=text, tensor=before + suspect.expected)
    lagging = suspect.at.lagging.get(suspect.place.name)
    if lagging is not None:
        yield Hypothesis(text=_LAGGING, tensor=suspect.shard.of(lagging))
    if suspect.clip is not None:
        yield from _of_clipping(suspect, suspect.clip, pieces.sum((0, 1)) / divisor)


def _added_in(dtype: torch.dtype, pieces: torch.Tensor) -> torch.Tensor:
    """Add up microbatches as ranks do that hold gradients of few bits back, and return each rank's sum."""
    total = torch.zeros_like(pieces[0])
    for piece in pieces:
        total = (total + piece.to(dtype)).to(dtype).to(total.dtype)
    return total


def _are_alike(of_ranks: torch.Tensor) -> bool:
    """Return whether all ranks have one gradient, as of the scale of a loss over all of their rows."""
    apart = largest(of_ranks - of_ranks[:1])
    return len(of_ranks) > 1 and apart <= torch.finfo(torch.float32).eps * largest(of_ranks)


def _of_division(suspect: Suspect) -> Iterator[Hypothesis]:
    """Yield multiples of the reference, each with all that would make it."""
    reasons: dict[float, list[str]] = {}
    for factor, reason in _factors(suspect):
        reasons.setdefault(factor, []).append(reason)
    for factor, told in reasons.items():
        times = f"exactly {factor:g} x the reference" if factor > 1 else f"the reference / {1 / factor:g}"
        if factor != 1:
            yield Hypothesis(text=f"{times}: {', or '.join(told)}", tensor=suspect.expected * factor)


def _factors(suspect: Suspect) -> Iterator[tuple[float, str]]:
    oracle, schedule = suspect.oracle, suspect.evidence.training.schedule
    world_size, divisor, factor = oracle.world_size, oracle.divisor, oracle.plan.divide_factor
    instead = "averaged" if factor is None else f"divided by the factor {factor:g}"
    yield divisor, f"summed over the ranks, not {instead}"
    yield 1 / divisor, f"divided by {'the world size' if factor is None else f'the factor {factor:g}'} twice"
    if divisor != world_size:
        yield divisor / world_size, f"averaged over the {world_size} ranks: the factor {divisor:g} is ignored"
    if factor is not None and divisor not in {1, world_size}:
        yield (
            1 / world_size,
            f"averaged over the {world_size} ranks, and divided by the factor {divisor:g} too",
        )
    yield 2, "added once more"
    yield schedule.microbatches, "multiplied by the number of microbatches"
    yield 1 / schedule.microbatches, "averaged over the microbatches, not summed"
    if schedule.scaling is not None:
        step = suspect.place.step
        scale = schedule.loss_scale(step)
        yield scale, "still scaled"
        yield 1 / scale, "unscaled twice"
        yield scale / schedule.loss_scale(step + 1), "unscaled by the loss scale of the step after it"
        yield (
            scale / schedule.loss_scale(max(0, step - 1)),
            "unscaled by the loss scale of the step before it",
        )


def _of_synchronisation(suspect: Suspect, of_ranks: torch.Tensor) -> Iterator[Hypothesis]:
    world_size, rank, divisor = len(of_ranks), suspect.rank, suspect.oracle.divisor
    own = of_ranks[rank]
    yield Hypothesis(text="only this rank's own gradient: not synchronised", tensor=own)
    by = "world size" if suspect.oracle.plan.divide_factor is None else f"{divisor:g}"
    text = f"only this rank's own gradient / {by}: averaged, never added"
    yield Hypothesis(text=text, tensor=own / divisor)
    for size in range(2, world_size):
        if world_size % size:
            continue
        stride = world_size // size
        block = range(rank // size * size, rank // size * size + size)
        for group in (list(block), list(range(rank % stride, world_size, stride))):
            text = f"synchronised within ranks {group} only: one mesh axis is missing"
            total = of_ranks[group].sum(0)
            yield Hypothesis(text=text, tensor=total / size)
            yield Hypothesis(text=f"{text}, yet divided as for all ranks", tensor=total / divisor)
    total = of_ranks.sum(0)
    for other in range(world_size):
        text = f"without the contribution of rank {other}"
        yield Hypothesis(text=text, tensor=(total - of_ranks[other]) / divisor)
    for other in range(world_size):
        text = f"the contribution of rank {other} added once more"
        yield Hypothesis(text=text, tensor=(total + of_ranks[other]) / divisor)


def _of_microbatches(of_microbatches: torch.Tensor) -> Iterator[Hypothesis]:
    """Yield wrong accumulations of the microbatches' reduced gradients."""
    count = len(of_microbatches)
    if count == 1:
        return
    yield Hypothesis(text="only the last microbatch", tensor=of_microbatches[-1])
    yield Hypothesis(text="only the first microbatch", tensor=of_microbatches[0])
    total = of_microbatches.sum(0)
    doubled, cumulative = torch.zeros_like(total), torch.zeros_like(total)
    for index, piece in enumerate(of_microbatches):
        doubled = 2 * doubled + piece
        cumulative = cumulative + (count - index) * piece
    text = "each earlier microbatch counted again"
    yield Hypothesis(text=f"{text} (doubled per microbatch)", tensor=doubled)
    yield Hypothesis(text=f"{text} (running sums added)", tensor=cumulative)
    for index, piece in enumerate(of_microbatches):
        yield Hypothesis(text=f"without microbatch {index}", tensor=total - piece)
        yield Hypothesis(text=f"microbatch {index} added once more", tensor=total + piece)


def _of_clipping(suspect: Suspect, clip: Clip, unclipped: torch.Tensor) -> Iterator[Hypothesis]:
    yield Hypothesis(text="the value before clipping", tensor=unclipped)
    for whose, norm in partial_norms(suspect, clip.norm_type):
        tensor = unclipped * clip.factor(norm)
        yield Hypothesis(text=f"clipped by the norm of {whose}", tensor=tensor)


def _of_parameter(suspect: Suspect) -> Iterator[Hypothesis]:
    step = suspect.place.step
    initial = suspect.earlier(-1)
    if initial is not None:
        yield Hypothesis(text="unchanged since initialisation" + _share(suspect), tensor=initial)
    before = suspect.earlier(step - 1)
    if before is None:
        return
    if step > 0:
        yield Hypothesis(text="the previous step's value (stale)", tensor=before)
    text = "updated by 2 x the reference's update: added once more"
    yield Hypothesis(text=text, tensor=before + 2 * (suspect.expected - before))


def scaled_update(suspect: Suspect) -> Hypothesis | None:
    """Return the reference's update times the factor that fits best; None if it is not of a parameter, or none fits."""
    before = suspect.earlier(suspect.place.step - 1)
    if suspect.place.quantity is not Quantity.PARAMETER or before is None:
        return None
    update = suspect.expected - before
    factor = factor_between(suspect.got - before, update)
    if factor is None:
        return None
    text = f"updated by {factor.real:.6g} x the reference's update"
    return Hypothesis(text=text, tensor=before + factor.real * update)


def _of_loss(suspect: Suspect) -> Iterator[Hypothesis]:
    losses, world_size = suspect.at.losses, suspect.oracle.world_size
    for other in range(world_size):
        if other != suspect.rank:
            yield Hypothesis(text=f"the loss of rank {other}'s data", tensor=losses[:, other : other + 1])
    if world_size > 1:
        yield Hypothesis(text="the mean over the ranks", tensor=losses.mean(1, keepdim=True))
        yield Hypothesis(text="the sum over the ranks", tensor=losses.sum(1, keepdim=True))
    if suspect.at.lagging_losses is not None:
        yield Hypothesis(text=_LAGGING, tensor=suspect.shard.of(suspect.at.lagging_losses))
    before = suspect.earlier(suspect.place.step - 1)
    if before is not None and before.shape == suspect.got.shape:
        yield Hypothesis(text="the previous step's value (stale)", tensor=before)
    for count, noun in ((world_size, "number of ranks"), (len(losses), "number of microbatches")):
        if count > 1:
            yield Hypothesis(
                text=f"exactly {count} x the reference, the {noun}", tensor=suspect.expected * count
            )
            yield Hypothesis(
                text=f"the reference / {count}: divided by the {noun}", tensor=suspect.expected / count
            )


def _share(suspect: Suspect) -> str:
    """Name the owner of a shard of which all is wrong."""
    shard = suspect.shard
    if shard.is_whole or not shard.offsets or not suspect.is_beyond.all():
        return ""
    rows = range(shard.offsets[0], shard.offsets[0] + shard.tensor.shape[0])
    owner = share_of(suspect, rows)
    return f": rows {rows.start}..{rows.stop - 1}{owner}" if owner else ""
