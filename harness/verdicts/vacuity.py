"""Whether a case could have shown anything: judged from the oracle and the inputs, never from the engine.

An engine that leaves its gradients empty or its parameters unmoved fails parity; it must not be able to make
the case vacuous. So nothing here reads an observed tensor: only the digests of what the ranks were given. The one
exception is a model that rounds by itself, in `harness.verdicts.simple_defects`.
"""

from __future__ import annotations

import math
from collections import Counter

import torch

from shardproof.harness.cases.training import LoopOrder
from shardproof.harness.cases.user_model import UserModel, still_parameters
from shardproof.harness.laws.law import Evidence
from shardproof.harness.laws.tolerance import MULTIPLE
from shardproof.harness.oracle.absolute_error import is_finite
from shardproof.harness.oracle.oracle_observation import Quantity
from shardproof.harness.oracle.still_elements import ZERO_BESIDE
from shardproof.harness.verdicts.simple_defects import (
    LARGER_STEPS,
    claims_updates,
    hidden_because,
    largest_gradient,
    unreached,
)

# A movement or gradient smaller than this many roundings of float32 could not be distinguished from noise.
_TOO_SMALL = 2 * MULTIPLE * torch.finfo(torch.float32).eps
_SMALLER_STEPS = "try a smaller learning rate, or smaller initial values"
_MORE_DATA = "try more rows in a batch, so that each part of the model gets some"


def incomparable_because(evidence: Evidence) -> str | None:
    """Return why the oracle is no reference for the ranks at all: it diverged, or see [Note: equal draws]."""
    plan = evidence.training.plan
    apart = {
        f"draw on {evidence.oracle.device}": evidence.oracle.device != "cpu",
        "are stages of a pipeline": plan.pipeline_stages > 1,
        "share cut tensors": plan.cut_axis is not None,
    }
    why = next((what for what, is_so in apart.items() if is_so), None)
    if why is None or not evidence.oracle.draws:
        return _diverged(evidence)
    return f"forward draws random numbers, and ranks that {why} draw others than the oracle"


def vacuous_because(evidence: Evidence) -> str | None:
    """Return why nothing could have gone wrong in this training; None if something could."""
    if evidence.training.schedule.order is LoopOrder.ZERO_THEN_STEP:
        return "gradients are cleared before the optimizer step, so no gradient ever reaches a parameter"
    if not evidence.oracle.steps:
        return "the training has no steps"
    return (
        _equal_inputs(evidence)
        or _idle_ranks(evidence)
        or _independent_parameters(evidence)
        or (_still_parameters(evidence) if claims_updates(evidence) else None)
        or hidden_because(evidence)
    )


def _diverged(evidence: Evidence) -> str | None:
    """Find a reference, or its noise, that is NaN: comparisons with it would always hold, or show nothing.

    A buffer may contain intended infinities, as masks do.
    """
    oracle = evidence.oracle
    for place in (p for p in oracle.noise if p.quantity is not Quantity.BUFFER):
        reference = oracle.reference(place.quantity, place.step, rank=0)[place.name]
        if reference is not None and not is_finite(reference):
            what = f"{place.quantity} {place.name!r}"
            return (
                f"the oracle itself diverged: {what} is not finite after step {place.step}; {_SMALLER_STEPS}"
            )
    wild = next((p for p, noise in oracle.noise.items() if not math.isfinite(noise)), None)
    return (
        None
        if wild is None
        else f"the noise of {wild.quantity} {wild.name!r} in step {wild.step} is not finite"
    )


def _equal_inputs(evidence: Evidence) -> str | None:
    # Ranks of one tensor-parallel group or pipeline get the same data on purpose.
    of_rank = {evidence.data_rank(o.rank): o.input_digest for o in evidence.ranks}
    digest, count = Counter(of_rank.values()).most_common(1)[0]
    if count == 1:
        return None
    ranks = [o.rank for o in evidence.ranks if o.input_digest == digest]
    return f"ranks {ranks} had equal inputs, so a missing reduction between them cannot show"


def _idle_ranks(evidence: Evidence) -> str | None:
    """Find a step whose gradient would be the same without some rank.

    A step may have no gradient on any rank, as where all of a batch is masked, but not every step.
    """
    everyone = range(evidence.data_size)
    idle = {
        step: [rank for rank in everyone if not any(sizes.of_ranks[rank] for sizes in seen.sizes.values())]
        for step, seen in enumerate(evidence.oracle.steps)
        if not evidence.training.schedule.is_skipped(step)
    }
    has_gradients = any(len(ranks) < len(everyone) for ranks in idle.values())
    for step, ranks in idle.items():
        if ranks and not (has_gradients and len(ranks) == len(everyone)):
            return f"every gradient of rank {ranks[0]} is zero in step {step}; {_MORE_DATA}"
    return None


def _independent_parameters(evidence: Evidence) -> str | None:
    idle = evidence.training.problem.idle
    # Parameters of a user's model were checked before training: a scale of 1e-6 hides the parameters behind it.
    is_declared = not isinstance(evidence.training.problem, UserModel)
    sizes = {name: largest_gradient(evidence, name) for name in evidence.oracle.initial}
    zero = ZERO_BESIDE * max(sizes.values(), default=0.0)
    beside = unreached(evidence)
    for name, initial in evidence.oracle.initial.items():
        is_used = sizes[name] > zero
        if is_used and name in idle and is_declared:
            return f"{name!r} is idle by the problem's word, yet the loss depends on it"
        if not is_used and name not in idle and name not in beside and initial.numel():
            return f"the loss does not depend on {name!r}: its gradient is zero in every step; {_MORE_DATA}"
    return None


def _still_parameters(evidence: Evidence) -> str | None:
    problem = evidence.training.problem
    beside = {*evidence.oracle.untrained, *unreached(evidence)}
    unclaimed = {*problem.idle, *beside, *still_parameters(problem)}
    for name, initial in evidence.oracle.initial.items():
        if not initial.numel() or name in unclaimed:
            continue
        moved = (evidence.oracle.steps[-1].parameters[name] - initial).abs().max()
        if moved <= _TOO_SMALL * initial.abs().max():
            return f"parameter {name!r} hardly moves: a frozen one would look the same; {LARGER_STEPS}"
    return None
