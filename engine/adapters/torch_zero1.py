"""torch.distributed.optim.ZeroRedundancyOptimizer over DistributedDataParallel: ZeRO-1 as torch ships it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.consolidation import consolidated_state
from shardproof.engine.contract import Capability, Copies, Cut, OptimizerFactory, Shard, shard_of

with warnings.catch_warnings():
    # torch 2.13 deprecates a decorator that its own optimizers use.
    warnings.filterwarnings("ignore", message=r".torch\.jit\.", category=DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class PreparedZero1(PreparedDdp):
    """Keeps each parameter's state on one rank, which updates the parameter and broadcasts it in `step`."""

    cut = Cut.PARAMETERS
    copies = Copies.NONE  # gradients are views of buckets

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Build it over the trained parameters that the factory chooses, because it creates state for others too."""
        parameters = list(self.named.parameters())
        groups = [
            {**group, "params": [p for p in group["params"] if p.requires_grad]}
            for group in factory(parameters).param_groups
        ]

        # Any: groups of parameters, as torch's optimizers take them.
        def make(share: list[dict[str, Any]]) -> torch.optim.Optimizer:
            """Build the optimizer of this rank's share; the factory chooses among all parameters."""
            built = factory(parameters)
            built.param_groups.clear()
            for group in share:
                built.add_param_group(group)
            own = {p for group in share for p in group["params"]}
            for other in built.state.keys() - own:  # some make their state at once
                del built.state[other]
            return built

        process_group: Any = self.module.process_group
        # Annotated as a class; torch calls it with groups and with defaults, which are empty here.
        maker: Any = make
        self._optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=maker, process_group=process_group)

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        """Read the state of this rank's parameters from its inner optimizer."""
        state = self._zero().optim.state
        return {
            f"{name}/{key}": shard_of(value)
            for name, p in self.named.named_parameters()
            for key, value in state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def full_state(self) -> dict[str, Any]:
        """Gather the optimizer's state; the model is whole."""
        zero = self._zero()
        state = consolidated_state(zero, zero.process_group)
        return {"model": self.named.state_dict(), "optimizer": state}

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Load the whole state on every rank; each keeps its share."""
        self.named.load_state_dict(state["model"])
        self._zero().load_state_dict(state["optimizer"])

    def _zero(self) -> ZeroRedundancyOptimizer:
        zero = self.built_optimizer()
        assert isinstance(zero, ZeroRedundancyOptimizer)
        return zero


class ZeroRedundancyEngine(DistributedDataParallelEngine):
    """All-reduces gradients by DDP, as views of its buckets."""

    name = "torch.zero1"
    # It accepts parameters of one dtype only.
    capabilities = DistributedDataParallelEngine.capabilities - {
        Capability.SEVERAL_OPTIMIZERS,
        Capability.COMPLEX,
        Capability.MIXED_DTYPES,
        Capability.PIPELINE,
        Capability.REPLICATE,
    } | {Capability.ZERO1}
    prepared_type = PreparedZero1
    options: ClassVar[Mapping[str, Any]] = {"gradient_as_bucket_view": True}  # else they take memory twice
