"""Laws over shards: how much a rank holds, on which dim and device shards lie, and whether every row is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch

from shardproof.engine.contract import Cut, Placement, Shard
from shardproof.harness.cases.units import FLAT_ALIGNMENT_BYTES, chunked_numel, groups_of, num_shares_of
from shardproof.harness.laws.law import Evidence, Ruling, rule
from shardproof.harness.records.observation import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsItsShare:
    """After each step every rank holds no more of each parameter than the plan's layout says.

    Replicated, or ignored by the plan: the whole. Sharded over S ranks: at most ceil(n / S) of the n slices along some
    dim. For flat pieces only the sum is bounded, since one flattened group may put a whole parameter on one rank. Over
    all parameters of which a rank shows flat pieces it holds at most the sum of ceil((n + a) / S), where a is what
    aligning a parameter can add to the n elements. This suffices for any grouping of them. Numbers cannot show this: an
    engine that ignores the request to shard still trains the same model. Of a tensor that a tensor-parallel axis has
    cut, the whole is what the ranks with the same part of it hold together.

    [Note: chunks] An engine that declares to cut at chunks (``Cut.CHUNKS``) may hold more on one rank if the others
    hold less: no element lies on two ranks of one replica, and each lies on one. The engine does not choose the chunk:
    it is at most the least common multiple c of the numels of the rows of a group. A parameter is followed by a gap
    smaller than c and than itself, and a rank's stretch is the rest over S, rounded up to a multiple of c.
    """

    name: str = "holds its share"

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at every parameter on every rank after every step."""
        return rule(self.name, [*_beyond(evidence)], held=_held(evidence))


def _held(evidence: Evidence) -> str:
    num_shares, ranks = _num_shares(evidence), f"on {evidence.world_size} ranks"
    if num_shares == 1:
        return f"every parameter whole, {ranks}"
    if _is_in_chunks(evidence):
        # Uneven shares are allowed, but reported.
        held = [_num_flat(seen.parameters) for o in evidence.ranks for seen in o.steps]
        sizes = f"of {min(held)} to {max(held)} elements"
        return f"each element once in {num_shares} shares of whole chunks, {sizes}, {ranks}"
    of_what = "all parameters together" if _has_flat_pieces(evidence) else "each parameter"
    return f"at most 1/{num_shares} of {of_what}, rounded up, {ranks}"


def _num_shares(evidence: Evidence) -> int:
    return num_shares_of(evidence.training.plan, evidence.world_size)


def _has_flat_pieces(evidence: Evidence) -> bool:
    return any(s.is_flat for o in evidence.ranks for seen in o.steps for s in seen.parameters.values())


def _beyond(evidence: Evidence) -> Iterator[str]:
    num_shares, training = _num_shares(evidence), evidence.training
    replicated = (group.names for group in groups_of(training) if group.unit in training.plan.replicated)
    whole = {*training.plan.ignored, *chain.from_iterable(replicated)}
    # Problems are built in float32, and a conversion keeps the gaps between parameters.
    built = None if training.convert is None else torch.float32
    most_in_chunks = _chunked_numel(evidence) if _is_in_chunks(evidence) else 0
    for observation in evidence.ranks:
        chunked = most_in_chunks if observation.cut is Cut.CHUNKS else None
        for step, seen in enumerate(observation.steps):
            where = f"step {step}, rank {observation.rank}"
            for name, shard in seen.parameters.items():
                shares = 1 if name in whole else num_shares
                shape = _shape_of(name, step, observation, evidence)
                if not _is_share(shard, shape, shares):
                    yield (
                        f"{where}, parameter {name}: expected 1/{shares} of "
                        f"{list(shape)}, got {list(shard.tensor.shape)}"
                    )
            if (
                num_shares > 1
                and (excess := _excess(seen.parameters, num_shares, chunked, built)) is not None
            ):
                yield f"{where}: {excess}"
    if _is_in_chunks(evidence):
        yield from _astray(evidence)


def _shape_of(name: str, step: int, observation: Observation, evidence: Evidence) -> tuple[int, ...]:
    """Return the shape of what the data-parallel engine shards: the tensor, or the part of it on a tensor rank."""
    plan, num_shares = evidence.training.plan, _num_shares(evidence)
    whole = observation.steps[step].parameters[name].global_shape
    if plan.tensor_parallel == 1:
        return whole

    def group(rank: int) -> tuple[int, int]:
        return plan.data_rank(rank, evidence.world_size) // num_shares, rank % plan.tensor_parallel

    peers = (o for o in evidence.ranks if group(o.rank) == group(observation.rank))
    pieces = [p for o in peers if (p := o.steps[step].parameters[name]).tensor.numel()]
    if not pieces:  # of a tensor without elements
        return whole
    return tuple(
        max(p.offsets[dim] + p.tensor.shape[dim] for p in pieces) - min(p.offsets[dim] for p in pieces)
        for dim in range(len(whole))
    )


def _is_share(shard: Shard, whole: tuple[int, ...], num_shares: int) -> bool:
    local = tuple(shard.tensor.shape)
    # A single number has no slices: its share is rounded up to it.
    if num_shares == 1 or not whole:
        return shard.is_whole if shard.is_flat else local == whole
    if shard.is_flat:
        return True  # bounded in sum
    return any(
        mine <= -(-size // num_shares) and local[:dim] == whole[:dim] and local[dim + 1 :] == whole[dim + 1 :]
        for dim, (mine, size) in enumerate(zip(local, whole, strict=True))
    )


def _excess(
    parameters: Mapping[str, Shard], num_shares: int, chunked: int | None, built: torch.dtype | None
) -> str | None:
    flat = [shard for shard in parameters.values() if shard.is_flat]
    most = (
        sum(-(-_aligned_numel(shard, built) // num_shares) for shard in flat) if chunked is None else chunked
    )
    held = _num_flat(parameters)
    if held <= most:
        return None
    numel = sum(prod(shard.global_shape) for shard in flat)
    return f"expected at most {most} elements, 1/{num_shares} of the {numel} of all flattened parameters, got {held}"


def _aligned_numel(shard: Shard, built: torch.dtype | None) -> int:
    return prod(shard.global_shape) + (FLAT_ALIGNMENT_BYTES - 1) // (built or shard.tensor.dtype).itemsize


def _num_flat(parameters: Mapping[str, Shard]) -> int:
    return sum(shard.tensor.numel() for shard in parameters.values() if shard.is_flat)


def _is_in_chunks(evidence: Evidence) -> bool:
    says_so = any(observation.cut is Cut.CHUNKS for observation in evidence.ranks)
    return says_so and _num_shares(evidence) > 1 and _has_flat_pieces(evidence)


def _chunked_numel(evidence: Evidence) -> int:
    return chunked_numel(groups_of(evidence.training), _num_shares(evidence))


def _astray(evidence: Evidence) -> Iterator[str]:
    """Yield the parameters that the ranks of a replica hold twice, or not completely."""
    num_shares = _num_shares(evidence)
    for first in range(0, evidence.world_size, num_shares):
        replica = [o for o in evidence.ranks if first <= o.rank < first + num_shares]
        for step, seen in enumerate(replica[0].steps):
            for name in seen.parameters:
                pieces = [o.steps[step].parameters[name] for o in replica]
                if any(p.is_flat for p in pieces) and (text := _overlap_or_gap(pieces)) is not None:
                    yield f"step {step}, ranks {first} to {first + num_shares - 1}, parameter {name}: {text}"


def _overlap_or_gap(pieces: Sequence[Shard]) -> str | None:
    if not all(piece.is_flat for piece in pieces):
        return "expected flat pieces on all ranks, got others on some"
    end = 0
    for piece in sorted((p for p in pieces if p.tensor.numel()), key=lambda p: p.offsets):
        (start,) = piece.offsets
        if start < end:
            return f"expected each element on one rank, got those from {start} on held twice"
        if start > end:
            return f"expected each element on one rank, got {end} to {start - 1} held by no rank"
        end += piece.tensor.numel()
    numel = prod(pieces[0].global_shape)
    return None if end == numel else f"expected all {numel} elements on some rank, got the first {end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiesOnTheDimAskedFor:
    """Every shard of every parameter and gradient is whole in all dims but that of the plan's placement.

    Numbers cannot show this: an engine that shards another dim still trains the same model.
    """

    name: str = "lies on the dim asked for"

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at every rank, before training and after every step."""
        placement = evidence.training.plan.placement
        broken = [
            f"{where}: expected shards of {list(shard.global_shape)} along dim {_dim(shard, placement)}, "
            f"got {'a flat one' if shard.is_flat else list(shard.tensor.shape)}"
            for where, shard in _shards(evidence)
            if shard.is_flat or not _lies_along(shard, _dim(shard, placement))
        ]
        return rule(self.name, broken, held=f"{placement.value} on {evidence.world_size} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLiesWithItsParameter:
    """Optimizer state with a parameter's shape is sharded as the parameter is: the same piece, on every rank."""

    name: str = "optimizer state lies with its parameter"

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at every rank's state at the end."""
        broken = []
        num_seen = 0
        for observation in evidence.ranks:
            for name, state in observation.optimizer_state.items():
                parameter = observation.steps[-1].parameters.get(name.partition("/")[0])
                if parameter is None or state.global_shape != parameter.global_shape:
                    continue
                num_seen += 1
                if (state.offsets, state.tensor.shape) != (parameter.offsets, parameter.tensor.shape):
                    broken.append(
                        f"rank {observation.rank}, {name}: expected {list(parameter.tensor.shape)} at "
                        f"{list(parameter.offsets)}, got {list(state.tensor.shape)} at {list(state.offsets)}"
                    )
        if not num_seen:
            broken.append(
                "expected optimizer state of some parameter's shape, got none: nothing was observed"
            )
        return rule(self.name, broken, held=f"{num_seen} tensors on {evidence.world_size} ranks")


def _shards(evidence: Evidence) -> Iterator[tuple[str, Shard]]:
    for observation in evidence.ranks:
        groups: list[tuple[str, Mapping[str, Shard | None]]] = [("before training", observation.initial)]
        for step, seen in enumerate(observation.steps):
            groups += [
                (f"step {step}, gradient", seen.gradients),
                (f"step {step}, parameter", seen.parameters),
            ]
        for where, shards in groups:
            yield from (
                (f"rank {observation.rank}, {where} {name!r}", shard)
                for name, shard in shards.items()
                if shard is not None
            )


def _dim(shard: Shard, placement: Placement) -> int:
    shape = shard.global_shape
    return 0 if placement is Placement.FIRST else shape.index(max(shape))


def _lies_along(shard: Shard, dim: int) -> bool:
    local = tuple(shard.tensor.shape)
    others = [d for d in range(len(local)) if d != dim]
    return all((shard.offsets[d], local[d]) == (0, shard.global_shape[d]) for d in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryRowMoves:
    """After the last step every row of the parameter that a rank holds differs from its initial value."""

    parameter: str

    @property
    def name(self) -> str:
        return f"every row of {self.parameter} moves"

    def judge(self, evidence: Evidence) -> Ruling:
        broken, num_rows = [], 0
        for observation in evidence.ranks:
            still, held = self._still_rows(observation)
            num_rows += held
            if still:
                broken.append(f"rank {observation.rank}: row(s) {still} keep their initial values")
        if not num_rows:
            broken.append(f"expected rows of {self.parameter!r}, no rank holds any")
        return rule(self.name, broken, held=f"{num_rows} rows on {evidence.world_size} ranks")

    def _still_rows(self, observation: Observation) -> tuple[list[int], int]:
        """Return the places of rows that did not move, and the number of rows this rank holds at least partly."""
        before = observation.initial.get(self.parameter)
        after = observation.steps[-1].parameters.get(self.parameter)
        if before is None or after is None or not before.tensor.numel():
            return [], 0
        moved = (before.tensor != after.tensor).flatten()
        rows = _rows_of_elements(before)
        held = set(rows.tolist())
        return sorted(held - set(rows[moved].tolist())), len(held)


def _rows_of_elements(shard: Shard) -> torch.Tensor:
    """Return the row in the whole tensor of each element of a piece: int64[numel]."""
    if shard.is_flat:
        row_size = math.prod(shard.global_shape[1:])
        return torch.arange(shard.offsets[0], shard.offsets[0] + shard.tensor.numel()) // row_size
    num_rows = shard.tensor.shape[0]
    own = torch.arange(shard.offsets[0], shard.offsets[0] + num_rows)
    return own.repeat_interleave(shard.tensor.numel() // num_rows)
