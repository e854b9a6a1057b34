"""What cases of the interface of fully_shard work with on one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof import Capability, InterfaceBench
from shardproof.suites.expect import Claims, expects_of
from shardproof.suites.wrapper.model import LR, UNITS, gradients, tower

STEP = "parameters after one step"


class Bench(Claims):
    """One rank with the names of an engine's interface."""

    def __init__(self, given: InterfaceBench) -> None:
        super().__init__(given)
        self.door = given.prepared.composable()

    # Any: modules gain methods, and options are what is put to the test.
    def shard(self, model: nn.Module, units: tuple[str, ...] = UNITS, **options: Any) -> Any:
        """Shard the units of a model, inner ones first, and the model."""
        for module in (*(model.get_submodule(name) for name in reversed(units)), model):
            self.door.fully_shard(module, **{"mesh": self.mesh(), **options})
        return model

    def steps(self, root: Any, ranks: range | None = None, alone: nn.Module | None = None) -> None:
        """Take one step, and claim that it is that of one process with the rows of these ranks."""
        chosen = self.ranks if ranks is None else ranks
        optimizer = torch.optim.SGD(root.parameters(), lr=LR, foreach=False)  # some may be DTensors, some not
        self.train(root)
        optimizer.step()
        # Losses are weighed for a mean over all ranks; the mean over some of them is that much larger.
        model, lr = alone or tower(), LR * self.size / len(chosen)
        learnt = gradients(model, chosen)
        self.same(
            STEP, whole(root), {n: p.detach() - lr * learnt.get(n, 0) for n, p in model.named_parameters()}
        )


def whole(root: nn.Module) -> dict[str, torch.Tensor]:
    """Gather copies of whole parameters, by name."""
    parameters = {name: p.detach() for name, p in root.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in parameters.items()}


expects = partial(expects_of, Capability.COMPOSABLE, Bench)
