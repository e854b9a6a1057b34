"""Lightning Fabric on a CPU: DDPStrategy, and FSDP2 in ModelParallelStrategy; its FSDPStrategy refuses a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning_fabric
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardproof.engine.adapters import composable_capabilities, torch_ddp
from shardproof.engine.adapters.composable import members
from shardproof.engine.contract import (
    Capability,
    Copies,
    Engine,
    OptimizerFactory,
    Plan,
    PreparedModel,
    Reshard,
)

_NAME = "checkpoint"  # a file or a folder, depending on the strategy


class PreparedFabric(PreparedModel):
    """Fabric runs backward, steps and clipping."""

    def __init__(self, fabric: Fabric, model: nn.Module) -> None:
        super().__init__(fabric.setup_module(model), named=model)
        self._fabric = fabric
        if isinstance(fabric.strategy, DDPStrategy):
            self.copies = Copies.BUCKETS

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Build it over the parameters that `setup_module` left, and pass it to Fabric."""
        super().optimizer(lambda parameters: self._fabric.setup_optimizers(factory(parameters)))

    def backward(self, loss: torch.Tensor) -> None:
        self._fabric.backward(loss)

    def accumulating(self) -> AbstractContextManager[None]:
        """Use Fabric's own context."""
        context: AbstractContextManager[None] = self._fabric.no_backward_sync(self.module)
        return context

    @property
    def stateful_module(self) -> nn.Module:
        """Return the model inside Fabric's wrapper, which torch's functions do not support."""
        return self.named

    def save_checkpoint(self, folder: Path) -> None:
        self._fabric.save(folder / _NAME, self._state())

    def load_checkpoint(self, folder: Path) -> None:
        """Let Fabric load into model and optimizer."""
        self._fabric.load(folder / _NAME, self._state())

    def _state(self) -> dict[str, Any]:  # Any: as Fabric takes it
        return {"model": self.module, "optimizer": self.built_optimizer()}

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        """Use Fabric's own; with loss scaling a gradient may overflow, and the scaler then skips the step."""
        norm = self._fabric.clip_gradients(
            self.module,
            self.built_optimizer(),
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=False,
        )
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


class FabricDdpEngine(Engine):
    """DDPStrategy."""

    name = "lightning.ddp"
    package = "lightning-fabric"
    known_as = "torch.ddp"
    needs_processes = True  # it reads its rank from the environment
    capabilities = torch_ddp.WRAPPED

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Let Fabric use the existing process group."""
        plan.refuse_beyond(self.capabilities)
        fabric = Fabric(accelerator="cpu", devices=mesh.size(), strategy=self.strategy(plan, mesh))
        fabric.launch()
        return PreparedFabric(fabric, model)

    def version(self) -> str:
        """Return the release of the module, which pytorch-lightning brings too."""
        return f"{self.package} {lightning_fabric.__version__}"

    def strategy(self, plan: Plan, mesh: DeviceMesh) -> Strategy:
        """Pass on the options of DDP."""
        return DDPStrategy(
            process_group_backend="gloo",
            find_unused_parameters=bool(plan.demands & {Capability.UNUSED, Capability.RANK_DEPENDENT}),
            bucket_cap_mb=None if plan.bucket_bytes is None else plan.bucket_bytes / 2**20,
            forward_sync_buffers=Capability.OWN_BUFFERS not in plan.demands,
        )


class FabricFsdp2Engine(FabricDdpEngine):
    """ModelParallelStrategy, whose user shards the model."""

    name = "lightning.fsdp2"
    known_as = "torch.fsdp2"
    capabilities = composable_capabilities.WRAPPED | {
        Capability.UNITS,
        Capability.JOINT_UNITS,
        Capability.PARTS,
        Capability.GRADIENT_HOOKS,
    }

    def strategy(self, plan: Plan, mesh: DeviceMesh) -> Strategy:
        """Shard every unit of the plan, then the root."""
        reshard = {Reshard.NATIVE: None, Reshard.AFTER_FORWARD: True, Reshard.KEEP: False}[plan.reshard]

        def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            for unit in (*plan.units, ""):
                fully_shard(
                    [*members(model, unit)], mesh=mesh["data_parallel"], reshard_after_forward=reshard
                )
            return model

        return ModelParallelStrategy(shard, mesh.size(), 1, process_group_backend="gloo")
