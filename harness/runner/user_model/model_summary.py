"""The summary of a user's model that a check prints before it judges an engine."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from math import prod

from shardproof.harness.cases.user_model import UserModel, UserOptimizer

_WIDTH = 100
_MOST_NAMES = 3


def model_summary(
    model: UserModel, optimizer: UserOptimizer | None, *, pass_s: float, limit_s: float, width: int = _WIDTH
) -> str:
    """Return the lines; ``pass_s`` is the time of forward and backward, ``limit_s`` the time limit of a world."""
    lines = model_lines(model, optimizer, pass_s)
    lines["cost"] += f"; a case that takes longer than {limit_s:.0f} s counts as hung"
    return "\n".join(
        textwrap.fill(text, width, initial_indent=f"  {word:<14}", subsequent_indent=" " * 16)
        for word, text in lines.items()
    )


def model_lines(model: UserModel, optimizer: UserOptimizer | None, pass_s: float) -> dict[str, str]:
    """Return what was found about a model, by the word under which it is shown."""
    what = "a step of each rank takes" if model.has_step else "forward and backward take"
    return {**dict(_lines(model, optimizer)), "cost": f"{what} {pass_s:.3g} s"}


def _lines(model: UserModel, optimizer: UserOptimizer | None) -> Iterator[tuple[str, str]]:
    sizes = [prod(t.shape) for t in model.outline if t.first == t.name and not t.is_buffer]
    units = (
        f"{_number(len(model.units), 'unit')} ({_some(model.units)}) and the rest"
        if model.units
        else "one unit"
    )
    parameters = _number(len(sizes), "parameter")
    yield "model", f"{_number(sum(sizes), 'element')} in {parameters}, which communicate as {units}"
    dtypes = "float64" if model.is_widened else "the model's own dtypes, with the noise of their rounding"
    communicates = model.facts.communicates
    is_together = communicates or model.has_step
    yield "reference", f"{'all ranks at once' if is_together else 'one process'}, in {dtypes}"
    if model.has_step:
        yield "loop", "step() of the model"
    if communicates:
        yield "communicates", f"{communicates}; what the model sends itself is not counted as the engine's"
    own = "optimizers()" if optimizer and optimizer.names else "optimizer()"
    yield "optimizer", f"{own} of the model" if optimizer else f"{model.default_optimizer}, the default"
    still = [name for name in model.idle if name not in model.facts.frozen]
    if model.facts.frozen:
        yield "frozen", _some(model.facts.frozen)
    if model.facts.written:
        written = f"{_some(model.facts.written)}: forward changes them, on each rank for itself, though they are frozen"
        yield "written", f"{written}; engines that shard them may lose what it writes"
    if "" in model.facts.evaluating:
        whole = "the whole model, as build() returned it; to train with dropout, call train() there"
        yield "evaluation", whole
    elif model.facts.evaluating:
        yield "evaluation", f"{_some(model.facts.evaluating)}, as build() returned them"
    if still:
        yield "need not move", f"{_some(still)}: no gradient, or zero but for rounding"
    if model.facts.outside:
        yield (
            "outside",
            f"{_some(model.facts.outside)}: called outside the forward of the unit, where engines that gather by unit "
            "do not have the parameters; choose other units",
        )
    if model.facts.hooked:
        why = "engines that put parameters of their own in place of the model's drop the hooks, as FSDP2 does"
        yield "hooked", f"{_some(model.facts.hooked)}: {why}; register them on the wrapped model (--wrap)"
    needs = sorted(model.demands, key=lambda demand: demand.name)
    if needs:
        yield "needs", f"an engine that {'; and '.join(f'{need.value} ({need.name})' for need in needs)}"


def _number(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
