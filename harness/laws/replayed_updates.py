"""Wrong updates after right gradients, explained by replays: what an optimizer makes of other state or options.

The reference's gradients of all steps are at hand, so the optimizer can be run again on one parameter, once for each
way in which an engine may use it wrongly. Optimizers of users are left out: their code runs in ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardproof.harness.cases.training import Training
from shardproof.harness.cases.user_model import StepSchedules, UserOptimizer
from shardproof.harness.laws.suspect import Hypothesis, Suspect

Change = Callable[["Replay"], None]
_WEIGHTS_LOST = "updated from what training had made of it: weights that were loaded since are lost"
_STATE_LOST = "updated as if the optimizer's state were lost"


@dataclass
class Replay:
    """One parameter and its optimizer before the suspected update, with the reference's gradient of that step.

    ``rates_before`` are the learning rates of the step before.
    """

    parameter: nn.Parameter
    optimizer: torch.optim.Optimizer
    gradient: torch.Tensor
    rates_before: list[float]

    @property
    def rates(self) -> list[float]:
        """The learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def update(self, gradient: torch.Tensor | None = None) -> None:
        """Step on a gradient, by default the reference's."""
        self.parameter.grad = self.gradient.clone() if gradient is None else gradient.clone()
        self.optimizer.step()


def replays(suspect: Suspect) -> Iterator[Hypothesis]:
    """Yield what wrong uses of the optimizer would have made of the parameter, if that differs from the right use."""
    training = suspect.evidence.training
    gradients = [step.gradients.get(suspect.place.name) for step in suspect.oracle.steps]
    initial, now = suspect.oracle.initial.get(suspect.place.name), gradients[suspect.place.step]
    if isinstance(training.optimizer, UserOptimizer) or initial is None or now is None:
        return
    earlier = gradients[: suspect.place.step]

    def result(change: Change) -> torch.Tensor:
        replay = _before(training, initial, earlier, now)
        change(replay)
        return replay.parameter.detach()

    plain = result(Replay.update)
    # A replay knows no more than training: it equals the reference unless the loop loaded or edited weights, or it
    # started from the state of another world, of which the replay has the weights alone.
    is_moved = training.origin is not None
    yield Hypothesis(text=_STATE_LOST if is_moved else _WEIGHTS_LOST, tensor=suspect.shard.of(plain))
    for text, change in _changes(suspect, now, earlier):
        tensor = result(change)
        if not torch.equal(tensor, plain):
            yield Hypothesis(text=text, tensor=suspect.shard.of(tensor))


def _before(
    training: Training, initial: torch.Tensor, earlier: list[torch.Tensor | None], now: torch.Tensor
) -> Replay:
    """Replay the steps before the suspected one."""
    parameter = nn.Parameter(initial.clone())
    schedules = StepSchedules(training.optimizer)
    replay = Replay(parameter, schedules.factory([parameter]), now, [])
    for gradient in earlier:
        replay.rates_before = replay.rates
        if gradient is not None:
            replay.update(gradient)
        schedules.step()
    return replay


def _changes(
    suspect: Suspect, now: torch.Tensor, earlier: list[torch.Tensor | None]
) -> Iterator[tuple[str, Change]]:
    training = suspect.evidence.training
    yield "updated twice by one gradient", _repeat
    yield "updated as if the optimizer had counted a step more", _count_a_step
    if earlier:
        yield _STATE_LOST, partial(_forget, training)
        yield "updated with the learning rate of the step before", _set_back
        if earlier[-1] is not None:
            yield "updated with the gradient of the step before", partial(Replay.update, gradient=earlier[-1])
    yield "updated without weight decay", _decay_nothing
    for key in ("lr", "weight_decay"):
        yield f"updated with the {key!r} of another parameter group", partial(_take_from_others, keys=(key,))
    yield (
        "updated with the options of another parameter group",
        partial(_take_from_others, keys=("lr", "weight_decay")),
    )
    for spelt, factor in _factors(suspect):
        text = f"updated by {spelt} x the gradient that was read, which is right"
        yield text, partial(Replay.update, gradient=now * factor)


def _factors(suspect: Suspect) -> Iterator[tuple[str, float]]:
    schedule = suspect.evidence.training.schedule
    for count in range(2, 1 + max(suspect.oracle.world_size, schedule.microbatches)):
        yield f"{count}", count
        yield f"1/{count}", 1 / count
    if suspect.place.step in schedule.short_steps:
        done, usual = schedule.microbatches_in(suspect.place.step), schedule.microbatches
        yield f"{done}/{usual}, as if by {usual} microbatches,", done / usual
    if schedule.scaling is not None:
        scale = schedule.loss_scale(suspect.place.step)
        yield "the loss scale", scale
        yield "1 / the loss scale", 1 / scale
    if suspect.clip is not None and (norm := suspect.at.norm) is not None and norm > suspect.clip.max_norm:
        unclipped = float(norm) / suspect.clip.max_norm
        yield f"{unclipped:.3g} (not clipped)", unclipped


def _repeat(replay: Replay) -> None:
    replay.update()
    replay.update()


def _count_a_step(replay: Replay) -> None:
    rates = replay.rates
    _set_rates(replay, [0.0] * len(rates))
    replay.update(torch.zeros_like(replay.gradient))
    _set_rates(replay, rates)
    replay.update()


def _set_rates(replay: Replay, rates: list[float]) -> None:
    for group, rate in zip(replay.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _forget(training: Training, replay: Replay) -> None:
    rates = replay.rates
    replay.optimizer = StepSchedules(training.optimizer).factory([replay.parameter])
    _set_rates(replay, rates)
    replay.update()


def _set_back(replay: Replay) -> None:
    """Undo the latest step of the learning rates' schedule."""
    _set_rates(replay, replay.rates_before)
    replay.update()


def _take_from_others(replay: Replay, keys: tuple[str, ...]) -> None:
    groups: list[dict[str, Any]] = replay.optimizer.param_groups  # Any: as torch types them
    others = [group for group in groups if not group["params"]]
    mine = [group for group in groups if group["params"]]
    if others:
        mine[0] |= {key: others[0][key] for key in keys if key in others[0]}
    replay.update()


def _decay_nothing(replay: Replay) -> None:
    for group in replay.optimizer.param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
    replay.update()
