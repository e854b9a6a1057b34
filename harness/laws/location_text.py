"""One sentence of where a training first went wrong: phase, unit, explanation, and the collective that brought it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import prod

import torch

from shardproof.engine.contract import Layout
from shardproof.harness.cases.training import AS_HELD, HANDED_OUT
from shardproof.harness.cases.units import groups_of
from shardproof.harness.laws.diagnosis import NOT_FINITE, UNSTRUCTURED, looks_like
from shardproof.harness.laws.law import Evidence
from shardproof.harness.laws.location import Probed, WrongValue, shard_of_stored
from shardproof.harness.laws.structure import RankShard
from shardproof.harness.laws.suspect import factor_between
from shardproof.harness.oracle.oracle_observation import NORM, Quantity, TensorKey
from shardproof.harness.records.observation import Observation
from shardproof.harness.records.record import FaultPhase, Located
from shardproof.harness.tracing.ledger import Entry, Ledger, Op, Phase
from shardproof.harness.tracing.probe_point import ComputeTurn, ProbePoint, ValueKind

_OR = ", or "  # between explanations that all fit
_MOST_ASKED = 3  # other wrong tensors, to choose between explanations
_GATHERS = frozenset({Op.ALL_GATHER, Op.BROADCAST, Op.SCATTER, Op.RECV})
_REDUCTIONS = frozenset({Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.REDUCE, Op.ALL_TO_ALL})
_MOST_PADDED = 2  # times the bytes of a unit
_OF_GRADIENTS = frozenset({ValueKind.REDUCED, ValueKind.UNSCALED, ValueKind.CLIPPED})
_PHASES: Mapping[ValueKind, FaultPhase] = {
    ValueKind.INITIAL: FaultPhase.PREPARE,
    ValueKind.LOADED: FaultPhase.STATE_LOADED,
    ValueKind.LOADED_STATE: FaultPhase.STATE_LOADED,
    ValueKind.UNSCALED: FaultPhase.SCALE,
    ValueKind.NORM: FaultPhase.CLIP,
    ValueKind.CLIPPED: FaultPhase.CLIP,
    ValueKind.UPDATED: FaultPhase.STEP,
    ValueKind.STATE: FaultPhase.STEP,
    ValueKind.OUTPUT_GRADIENT: FaultPhase.BACKWARD,
    ValueKind.INPUT_GRADIENT: FaultPhase.BACKWARD,
    ValueKind.LOCAL_GRADIENT: FaultPhase.BACKWARD,
    ValueKind.LOSS: FaultPhase.FORWARD,
}
_TURNS: Mapping[ComputeTurn, FaultPhase] = {
    ComputeTurn.FORWARD: FaultPhase.FORWARD,
    ComputeTurn.RECOMPUTE: FaultPhase.RECOMPUTE,
    ComputeTurn.BACKWARD: FaultPhase.BACKWARD,
}
_WEIGHTS = re.compile(r" counts (\S+) times")
# Words of the diagnosis of a gradient that say it was wrongly kept between backwards.
_HELD = ("microbatch", "not cleared", "previous step's value")


def located(probed: Probed, ledgers: Mapping[int, Ledger]) -> Located:
    """Describe where a training first went wrong, or that it did not."""
    found = probed.first_wrong()
    unseen = _unseen(probed)
    if not found:
        return _handed_out(probed.evidence, unseen)
    worst = max(found, key=lambda wrong: wrong.ratio)
    told = _explained_with_others(probed, worst, found)
    phase = _phase(probed, worst, told)
    has_call = told != "zero" and "not synchronised" not in told
    entry = _collective(probed.evidence, worst, ledgers.get(worst.rank, ()), phase) if has_call else None
    unit = _unit(probed.evidence, found)
    point = worst.point
    right = _right(probed, found, phase)
    place = Located(
        sentence="",
        phase=phase,
        step=point.step,
        microbatch=point.microbatch,
        ranks=tuple(sorted({wrong.rank for wrong in found})),
        unit=unit,
        module=point.module,
        call=point.call,
        value=_value(point),
        looks_like=told,
        right=right,
        collective="" if entry is None else _named(entry, point),
        unseen=unseen,
    )
    return replace(place, sentence=_sentence(place, point, len(found), probed.evidence.world_size))


def _handed_out(evidence: Evidence, unseen: str) -> Located:
    """Describe a training of which no probed value is wrong: at most a state that it handed out was."""
    for step in range(min(len(rank.steps) for rank in evidence.ranks)):
        ranks = tuple(rank.rank for rank in evidence.ranks if _was_handed_out_wrong((rank,), step))
        if ranks:
            what = "a whole state was handed out that is not what the ranks hold"
            return Located(
                sentence=f"{FaultPhase.STATE_SAVED}: step {step}: {what}",
                phase=FaultPhase.STATE_SAVED,
                step=step,
                ranks=ranks,
                unseen=unseen,
            )
    text = "the training was run once more with probes, and no probed value was wrong"
    return Located(sentence=f"{text}{f' ({unseen})' if unseen else ''}", unseen=unseen)


def _sentence(place: Located, point: ProbePoint, num_wrong: int, world_size: int) -> str:
    ranks = f"rank{'s' if len(place.ranks) > 1 else ''} {', '.join(map(str, place.ranks))}"
    ranks = f"all {world_size} ranks" if len(place.ranks) == world_size > 1 else ranks
    when = "before training" if place.step < 0 else f"step {place.step}"
    where = [when, f"microbatch {place.microbatch}" if place.microbatch >= 0 else "", ranks]
    others = num_wrong // max(len(place.ranks), 1) - 1
    more = f" and {others} more" if others > 0 else ""
    looks = f": {place.looks_like}" if place.looks_like else ""
    are = "are" if more else "is"
    parts = [f"{', '.join(filter(None, where))}: {place.value}{more} {are} wrong{looks}"]
    parts += [place.right, place.collective]
    return f"{place.phase}: {'; '.join(filter(None, parts))}"


def _value(point: ProbePoint) -> str:
    if point.module is None:
        return f"the {point.kind}" + ("" if point.name in {"loss", NORM} else f" of {point.name!r}")
    module = f"{point.module!r}" if point.module else "the model"
    call = f", call {point.call}" if point.call else ""
    turn = {
        ComputeTurn.FORWARD: "in forward",
        ComputeTurn.RECOMPUTE: "as it is recomputed",
        ComputeTurn.BACKWARD: "in backward",
    }[point.turn]
    if point.kind in {ValueKind.PARAMETER, ValueKind.BUFFER}:
        return f"the {point.kind} {point.name!r} as {module} has it {turn}{call}"
    number = "" if point.name == "0" else f" {point.name}"
    return f"the {point.kind}{number} of {module}{'' if point.turn is ComputeTurn.BACKWARD else ' ' + turn}{call}"


def _explained_with_others(probed: Probed, worst: WrongValue, found: tuple[WrongValue, ...]) -> str:
    """Name the value that stands in the place of the right one: of several that may, those that explain others too."""
    told = _explained(probed, worst).split(_OR)
    others = (wrong for wrong in found if wrong.rank == worst.rank and wrong is not worst)
    for other in islice(others, _MOST_ASKED):
        if len(told) > 1:
            also = _explained(probed, other).split(_OR)
            told = [text for text in told if text in also] or told
    return _OR.join(told)


def _explained(probed: Probed, wrong: WrongValue) -> str:
    """Name the value that stands in the place of the right one."""
    if wrong.diverges_from is not None:
        return f"within noise, but rank {wrong.diverges_from} holds other bits"
    point = wrong.point
    if not torch.isfinite(wrong.got[wrong.is_wrong]).all():
        return NOT_FINITE
    if wrong.stored.offsets is not None and point.kind in {
        ValueKind.INITIAL,
        ValueKind.NORM,
        ValueKind.UPDATED,
        *_OF_GRADIENTS,
    }:
        told = looks_like(*_question(probed.evidence, wrong))
        return "" if told == UNSTRUCTURED else told
    for text, value in _candidates(probed, wrong):
        if wrong.is_like(value):
            return f"{text}{_rows(wrong)}"
    factor = factor_between(wrong.got, wrong.expected)
    if factor is not None and wrong.is_like(wrong.expected * factor):
        return f"{factor.real:.6g} x the right one"
    return ""


def _question(evidence: Evidence, wrong: WrongValue) -> tuple[Evidence, TensorKey, RankShard]:
    """Ask the diagnosis of the verdict; gradients before clipping are compared with unclipped ones."""
    point = wrong.point
    quantity = {
        ValueKind.INITIAL: Quantity.INITIAL,
        ValueKind.NORM: Quantity.NORM,
        ValueKind.UPDATED: Quantity.PARAMETER,
    }.get(point.kind, Quantity.GRADIENT)
    if point.kind in {ValueKind.REDUCED, ValueKind.UNSCALED} and evidence.training.schedule.clip is not None:
        oracle, schedule = evidence.oracle, replace(evidence.training.schedule, clip=None)
        at = oracle.steps[point.step]
        unclipped = {n: p.sum((0, 1)) / oracle.divisor for n, p in at.contributions.items()}
        steps = list(oracle.steps)
        steps[point.step] = replace(at, gradients={**at.gradients, **unclipped}, norm=None)
        evidence = replace(
            evidence,
            oracle=replace(oracle, steps=tuple(steps)),
            training=replace(evidence.training, schedule=schedule),
        )
    key = TensorKey(quantity=quantity, step=point.step, name=point.name)
    return evidence, key, RankShard(rank=wrong.rank, shard=shard_of_stored(wrong.stored, wrong.got))


def _counts_all_less(told: str) -> bool:
    """Whether each microbatch counts less than once, as where each was clipped."""
    weights = [float(weight) for weight in _WEIGHTS.findall(told)]
    return bool(weights) and "rank" not in told and all(0 < weight < 1 for weight in weights)


def _candidates(probed: Probed, wrong: WrongValue) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield values that an engine may have put in the place of the right one."""
    (point, *_) = probed.places(wrong.point)
    for step in range(point.step - 1, -2, -1):
        yield from _known(probed, wrong, replace(point, step=step), f"that of step {step} (stale)")
    if point.module is not None:
        for rank in range(probed.evidence.data_size):
            yield from _known(probed, wrong, replace(point, rank=rank), f"that of rank {rank}")
        for microbatch in range(probed.evidence.training.schedule.microbatches):
            other = replace(point, microbatch=microbatch)
            yield from _known(probed, wrong, other, f"that of microbatch {microbatch}")
    yield "zero", torch.zeros_like(wrong.expected)


def _known(
    probed: Probed, wrong: WrongValue, place: ProbePoint, text: str
) -> Iterator[tuple[str, torch.Tensor]]:
    if place in probed.reference and place not in probed.places(wrong.point):
        whole = probed.reference[place].to(wrong.expected.dtype)
        stored = wrong.stored
        yield text, whole if stored.global_shape is None else shard_of_stored(stored, wrong.got).of(whole)


def _rows(wrong: WrongValue) -> str:
    """Name the rows that are wrong, if others are right."""
    mask = wrong.is_wrong
    if mask.dim() == 0 or bool(mask.flatten(1).any(1).all() if mask.dim() > 1 else mask.all()):
        return ""
    rows = (mask.flatten(1).any(1) if mask.dim() > 1 else mask).nonzero().flatten().tolist()
    return f", in rows {rows[0]}..{rows[-1]}"


def _phase(probed: Probed, wrong: WrongValue, told: str) -> FaultPhase:
    point, training = wrong.point, probed.evidence.training
    if point.kind is ValueKind.REDUCED:
        if any(word in told.partition(_OR)[0] for word in _HELD):
            is_clipped = training.plan.clip_in_step is not None and _counts_all_less(told)
            return FaultPhase.CLIP if is_clipped else FaultPhase.HOLD
        is_hybrid = training.plan.layout is Layout.HYBRID
        is_partial = "synchronised" in told or wrong.diverges_from is not None
        return FaultPhase.REPLICATE if is_hybrid and is_partial else FaultPhase.REDUCE
    if point.kind in {ValueKind.LOADED, ValueKind.LOADED_STATE} and _was_handed_out_wrong(
        probed.evidence.ranks, point.step
    ):
        return FaultPhase.STATE_SAVED
    if point.kind is ValueKind.BUFFER:  # its last use changed it, and something lost that
        last, is_loaded = probed.last_use(wrong), point.step > 0 or training.origin is not None
        if last is not None:
            return _TURNS[last]
        return FaultPhase.STATE_LOADED if is_loaded else FaultPhase.PREPARE
    if point.kind is ValueKind.PARAMETER:
        is_divided = not all(s.is_whole for rank in probed.evidence.ranks for s in rank.initial.values())
        is_new = not is_divided and point.microbatch > 0 and "stale" not in told
        return FaultPhase.STEP if is_new else FaultPhase.GATHER  # what a microbatch changed was right before
    after = training.resume.after_steps if training.resume is not None else 0
    is_first_update = point.step == after and (training.resume or training.origin) is not None
    if point.kind in {ValueKind.UPDATED, ValueKind.STATE} and (
        is_first_update or probed.is_lost_in_a_load(point)
    ):
        return FaultPhase.STATE_LOADED  # state that is not shown, or settings
    if point.kind in {ValueKind.UPDATED, ValueKind.STATE} and training.plan.clip_in_step is not None:
        return FaultPhase.CLIP if probed.has_scaled_state(wrong) else FaultPhase.STEP
    if point.kind in _PHASES:
        is_scaled = point.kind is ValueKind.OUTPUT_GRADIENT and training.schedule.scaling is not None
        return FaultPhase.SCALE if is_scaled and " x the right one" in told else _PHASES[point.kind]
    return _TURNS[point.turn]


def _was_handed_out_wrong(ranks: Sequence[Observation], step: int) -> bool:
    facts = (fact for rank in ranks for fact in rank.steps[step].facts)
    return any(fact.subject == HANDED_OUT and fact.value != AS_HELD for fact in facts)


def _unit(evidence: Evidence, found: tuple[WrongValue, ...]) -> str | None:
    """Return the unit that contains all wrong values; None if several do, or the plan names none."""
    units = {_unit_of(evidence, wrong.point) for wrong in found}
    return units.pop() if len(units) == 1 else None


def _unit_of(evidence: Evidence, point: ProbePoint) -> str | None:
    if not evidence.training.plan.units:
        return None
    name = point.name.partition("/")[0] if point.module is None else point.module
    holding = [
        (len(part), unit)
        for unit in evidence.training.plan.units
        for part in unit.split(",")
        if name == part or name.startswith(f"{part}.")
    ]
    return max(holding)[1] if holding else ""


def _right(probed: Probed, found: tuple[WrongValue, ...], phase: FaultPhase) -> str:
    """List what was compared and right just before; nothing that was not seen is called right."""
    wrong = found[0]
    point = wrong.point
    before = [s.point for s in probed.files[wrong.rank] if s.point.step <= point.step]
    if point.module is not None and point.kind is not ValueKind.PARAMETER:
        mine = [
            p.kind
            for p in before[: before.index(point)]
            if (p.step, p.microbatch, p.module) == (point.step, point.microbatch, point.module)
            and probed.places(p)
        ]
        told = [
            f"{kind}s" for kind in (ValueKind.INPUT, ValueKind.PARAMETER, ValueKind.OUTPUT) if kind in mine
        ]
        told += (
            ["gradient of its output"]
            if ValueKind.OUTPUT_GRADIENT in mine and point.kind is not ValueKind.OUTPUT_GRADIENT
            else []
        )
        return f"its {' and '.join(told)} were right" if told else ""
    if phase is FaultPhase.GATHER:
        return f"the ranks' shards were right {'as prepared' if point.step <= 0 else f'after step {point.step - 1}'}"
    names = {each.point.name for each in found}
    local = {p.name for p in before if p.kind is ValueKind.LOCAL_GRADIENT and p.step == point.step}
    if point.kind is ValueKind.REDUCED:
        return "each rank's own gradients were right" if names <= local else ""
    if point.kind in {ValueKind.UPDATED, ValueKind.STATE, ValueKind.CLIPPED, ValueKind.NORM}:
        has = any(p.kind is ValueKind.REDUCED and p.step == point.step for p in before)
        return "the reduced gradients were right" if has else ""
    return ""


def _collective(evidence: Evidence, wrong: WrongValue, ledger: Ledger, phase: FaultPhase) -> Entry | None:
    """Return the call that brought a wrong value: of its kind, and about as large as the unit that it belongs to."""
    point = wrong.point
    if phase is FaultPhase.GATHER:
        ops, calls = _GATHERS, [e for e in ledger if e.seq < wrong.stored.num_calls]
    elif phase in {FaultPhase.REDUCE, FaultPhase.REPLICATE}:
        ops, calls = _REDUCTIONS, [e for e in ledger if e.step == point.step]
    else:
        return None
    calls = [e for e in calls if e.op in ops and e.phase not in {Phase.OBSERVE, Phase.MODEL}]
    if phase is FaultPhase.REPLICATE:
        calls = [e for e in calls if e.op is Op.ALL_REDUCE] or calls
    name = point.name if point.module is None else f"{point.module}.{point.name}".removeprefix(".")
    sizes = [group.num_bytes for group in groups_of(evidence.training) if name in group.names]
    num_bytes = sizes[0] if sizes else prod(wrong.stored.shape)
    fitting = [e for e in calls if num_bytes <= e.num_bytes <= _MOST_PADDED * num_bytes]
    of_unit = [e for e in fitting if e.unit == _unit_of(evidence, point)]
    # Of several that may have brought the value none is named.
    return of_unit[-1] if of_unit else fitting[0] if len(fitting) == 1 else None


def _named(entry: Entry, point: ProbePoint) -> str:
    verb = "gathered" if entry.op in _GATHERS else "reduced"
    when = "" if entry.step == point.step else f", in step {entry.step}"
    during = f"{when}, in the phase {entry.phase}"
    return f"{verb} by {entry.op} #{entry.group_seq} of group {list(entry.group)} (issued at {entry.site}{during})"


def _unseen(probed: Probed) -> str:
    parts = []
    if probed.hidden:
        parts.append(f"nothing inside compiled modules: {', '.join(map(repr, probed.hidden))}")
    if probed.is_cut:
        parts.append("nothing of single modules, of which each rank computes a part")
    called = {p.module for file in probed.files.values() for p in (s.point for s in file) if p.module}
    silent = [
        name.rpartition(".")[0]
        for name in probed.evidence.oracle.initial
        if name.rpartition(".")[0] and name.rpartition(".")[0] not in called
    ]
    if silent and not parts:
        parts.append(
            f"nothing of modules that run outside a call: {', '.join(map(repr, dict.fromkeys(silent)))}"
        )
    if any(file.more["is_full"] for file in probed.files.values()):
        parts.append("nothing after the file of values was full")
    return f"unseen: {'; '.join(parts)}" if parts else ""
