"""Loss scaling: drives a gradient scaler around an engine, as users' training loops do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from shardproof.engine.contract import PreparedModel
from shardproof.engine.shard import Shard
from shardproof.harness.cases.training import LossScaling


class ScaledSteps:
    """The engine's scaler around its optimizer, whose step is the engine's."""

    def __init__(
        self, prepared: PreparedModel, scaling: LossScaling, before: ScaledSteps | None = None
    ) -> None:
        self._prepared = prepared
        self._scaler = prepared.grad_scaler(
            init_scale=scaling.init_scale, growth_interval=scaling.growth_interval
        )
        if before is not None:
            self._scaler.load_state_dict(before._scaler.state_dict())

    @property
    def scale(self) -> float:
        return float(self._scaler.get_scale())

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self) -> None:
        """Divide the gradients by the scale, and check whether they are finite."""
        self._scaler.unscale_(self._prepared.built_optimizer())

    def unscaled(self, gradients: dict[str, Shard | None]) -> dict[str, Shard | None]:
        """Return what was read of gradients that are not divided yet, divided by the scale."""
        return {
            name: shard and replace(shard, tensor=shard.tensor / self.scale)
            for name, shard in gradients.items()
        }

    def update(self) -> None:
        """Step unless a gradient has overflowed, and adapt the factor."""
        with _steps_the_engine(self._prepared) as optimizer:
            self._scaler.step(optimizer)
        self._scaler.update()


@contextmanager
def _steps_the_engine(prepared: PreparedModel) -> Iterator[torch.optim.Optimizer]:
    """Replace the optimizer's step, which a scaler calls, by the engine's, which calls the optimizer's own."""
    optimizer = prepared.built_optimizer()
    own = vars(optimizer).get("step")  # such as a schedule's, which counts steps

    def restore() -> None:
        vars(optimizer).pop("step", None)
        if own is not None:
            vars(optimizer)["step"] = own

    def step() -> None:
        restore()
        prepared.step()

    vars(optimizer)["step"] = step
    try:
        yield optimizer
    finally:
        restore()


def overflowing(output: torch.Tensor) -> None:
    """Make the gradient of the output's first column infinite, and with it one row of the last layer's gradients."""

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(gradient.shape[-1], device=gradient.device)
        return gradient.masked_fill(columns == 0, math.inf)

    output.register_hook(overflow)  # type: ignore[no-untyped-call]  # of torch's
