"""The wrapper's interface on one rank, for the bodies of cases."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from shardproof import Capability, InterfaceBench
from shardproof.suites.expect import Claims, expects_of
from shardproof.suites.tower import LR, UNITS, copies, tower, trained_alone
from shardproof.suites.wrapper.wrapping import Wrapping, original

STEP = "parameters after one step"


class Bench(Claims):
    """One rank with an engine's own interface; ``api`` is the engine's ``FullyShardedDataParallel``."""

    def __init__(self, bench: InterfaceBench) -> None:
        super().__init__(bench)
        self.names = bench.prepared.wrapper()
        self.api = self.names.FullyShardedDataParallel

    # Any: engines have no common base class, and cases test the options.
    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """Wrap a module on the rank's device, by default with parameters under their own names."""
        return self.api(module, **{"device_id": self.device, "use_orig_params": True, **options})

    def wrapped(self, model: nn.Module, units: tuple[str, ...] = UNITS, **options: Any) -> Any:
        """Wrap the units and the model."""
        chosen = {model.get_submodule(name) for name in units}
        # A policy refuses a model that has wrapped units already.
        policy = self.names.CustomPolicy(lambda module: module in chosen) if chosen else None
        return self.wrap(model, auto_wrap_policy=policy, **options)

    def wrapped_by(self, wrapping: Wrapping, model: nn.Module) -> Any:
        """Wrap a model in one of several ways."""
        options: dict[str, Any] = {
            "sharding_strategy": wrapping.strategy,
            "use_orig_params": wrapping.form.use_orig_params,
        }
        if wrapping.strategy is ShardingStrategy.HYBRID_SHARD:
            options["device_mesh"] = self.mesh(1 if self.size % 2 else self.size // 2)
        elif wrapping.by_mesh:
            options["device_mesh"] = self.mesh()
        return self.wrapped(model, wrapping.units, **options)

    def step_of(self, ranks: range, **options: Any) -> Any:
        """Wrap a tower, take one step, and claim that it equals that of one process with the rows of these ranks."""
        root = self.wrap(tower(), **options)
        optimizer = torch.optim.SGD(root.parameters(), lr=LR)
        self.train(root)
        optimizer.step()
        # Losses are weighted for a mean over all ranks; the mean over some of them is larger by that factor.
        expected = trained_alone(ranks, lr=LR * self.size / len(ranks))
        self.same(STEP, self.summoned(root), expected)
        return root

    def summoned(self, root: Any) -> dict[str, torch.Tensor]:
        """Copy whole parameters, by name."""
        with self.api.summon_full_params(root, writeback=False):
            return copies(root.named_parameters())

    def units_of(self, root: nn.Module) -> list[str]:
        """List the wrapped modules by the model's own names; sorted."""
        units = {id(unit) for unit in self.api.fsdp_modules(root)}
        return sorted(original(name) for name, module in root.named_modules() if id(module) in units)

    def summed(self, numbers: list[int]) -> list[int]:
        """Add up each of these numbers over all ranks."""
        totals = torch.tensor(numbers, device=self.device)
        distributed.all_reduce(totals)
        return [int(total) for total in totals]

    def sizes_of(self, saved: dict[str, Any], names: list[str], *, is_sharded: bool) -> dict[str, int]:
        """Count the elements of saved tensors: this rank's, or those of all ranks if they are sharded."""
        held = {name: v.to_local() if isinstance(v, DTensor) else v for name, v in saved.items()}
        counts = [held[name].numel() if name in held else 0 for name in names]
        return dict(zip(names, self.summed(counts) if is_sharded else counts, strict=True))


expects = partial(expects_of, Capability.WRAPPER, Bench)
