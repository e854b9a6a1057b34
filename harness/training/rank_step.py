"""A user's own training step on an engine's rank; see [Note: own steps]."""

from __future__ import annotations

from typing import Any

import torch

from shardproof.engine.contract import PreparedModel, Shard
from shardproof.harness.cases.batch import ModelBatch
from shardproof.harness.cases.own_step import (
    ModelInStep,
    OptimizerInStep,
    SeveralOptimizers,
    losses_in,
    parts_of,
)
from shardproof.harness.cases.user_model import UserModel
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.training.engine_actor import EngineActor
from shardproof.harness.training.reads import read_gradients


class OwnStep:
    """One step of one rank; ``gradients`` are those that each parameter's last update found."""

    def __init__(self, prepared: PreparedModel, problem: UserModel, actor: EngineActor) -> None:
        self.gradients: dict[str, Shard | None] = dict.fromkeys(prepared.owned_parameters())
        self._prepared, self._problem, self._actor = prepared, problem, actor

    def play(self) -> None:
        """Run the user's step, and keep its losses."""
        prepared, batch = self._prepared, self._actor.batch(0)
        assert isinstance(batch, ModelBatch)
        model = ModelInStep(self._forward, prepared.backward, (prepared.module, prepared.named))
        optimizers = [
            OptimizerInStep(part, self._step, self._zero_grad)
            for part in parts_of(prepared.built_optimizer())
        ]
        self._actor.seed(0)
        losses = self._problem.own_step(model, batch.value, *optimizers)
        with self._actor.recorder.during(Phase.OBSERVE, step=self._actor.step):
            self._actor.log.losses += losses_in(losses)

    # Any: a model takes and returns any values.
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._actor.recorder.during(Phase.FORWARD, step=self._actor.step):
            return self._prepared(*args, **kwargs)

    def _step(self, part: torch.optim.Optimizer) -> None:
        with self._actor.recorder.during(Phase.OBSERVE, step=self._actor.step):
            found, given = read_gradients(self._prepared), self._given(part)
            self.gradients |= {name: found.get(name) for name in given or found}
        self._choose(part)
        with self._actor.recorder.during(Phase.STEP, step=self._actor.step):
            self._prepared.step()

    def _zero_grad(self, part: torch.optim.Optimizer, set_to_none: bool) -> None:
        self._choose(part)
        self._prepared.zero_grad(set_to_none=set_to_none)

    def _choose(self, part: torch.optim.Optimizer) -> None:
        """Let the engine's own methods step and clear one of several optimizers."""
        whole = self._prepared.built_optimizer()
        if isinstance(whole, SeveralOptimizers):
            whole.chosen = (part,)

    def _given(self, part: torch.optim.Optimizer) -> list[str]:
        """Name an optimizer's parameters; none if they are pieces of the engine's own."""
        given = {id(parameter) for group in part.param_groups for parameter in group["params"]}
        return [name for name, p in self._prepared.owned_parameters().items() if id(p) in given]
