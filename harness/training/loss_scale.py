"""Loss scaling: drives a gradient scaler around an engine, as users' training loops do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from shardproof.engine.contract import PreparedModel
from shardproof.engine.shard import Shard
from shardproof.harness.cases.training import LossScaling

_TOLD_TO_FUSED = ("grad_scale", "found_inf")  # attributes of a torch optimizer, of one step


class ScaledSteps:
    """The engine's scaler and an object that it uses as the optimizer: the engine's parameters, and its step."""

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
        self._scaler.unscale_(self)  # type: ignore[arg-type]  # it reads groups and state, and steps

    def unscaled(self, gradients: dict[str, Shard | None]) -> dict[str, Shard | None]:
        """Return what was read of gradients that are not divided yet, divided by the scale."""
        return {
            name: shard and replace(shard, tensor=shard.tensor / self.scale)
            for name, shard in gradients.items()
        }

    def update(self) -> None:
        """Step unless a gradient has overflowed, and adapt the factor."""
        self._scaler.step(self)  # type: ignore[arg-type]  # as above
        self._scaler.update()

    # Any: as in torch's optimizers.
    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self._prepared.owned_parameters().values())}]

    @property
    def state(self) -> Any:
        """The state of the engine's optimizer, which a scaler of its own may read."""
        return self._prepared.built_optimizer().state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the optimizer's kernel unscales gradients, and skips a step, as torch's fused ones do."""
        return getattr(self._prepared.built_optimizer(), "_step_supports_amp_scaling", False)

    def step(self) -> None:
        """Step the engine; called by the scaler, which has set what a fused kernel reads."""
        optimizer: Any = self._prepared.built_optimizer()
        told = {name: vars(self)[name] for name in _TOLD_TO_FUSED if name in vars(self)}
        for name, value in told.items():
            setattr(optimizer, name, value)
        self._prepared.step()
        for name in told:
            delattr(optimizer, name)


def overflowing(output: torch.Tensor) -> None:
    """Make the gradient of the output's first column infinite, and with it one row of the last layer's gradients."""

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(gradient.shape[-1], device=gradient.device)
        return gradient.masked_fill(columns == 0, math.inf)

    output.register_hook(overflow)  # type: ignore[no-untyped-call]  # of torch's
