"""Adapters of Megatron-FSDP, which requires CUDA: worlds of a CPU use a stand-in for it."""

from __future__ import annotations

import logging
import warnings
from abc import ABC
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof.engine.contract import (
    Capability,
    Copies,
    Cut,
    Engine,
    OptimizerFactory,
    Plan,
    PreparedModel,
)
from shardproof.engine.pieces import Piece, PreparedPieces

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex", category=UserWarning)
    import megatron_fsdp
    import megatron_fsdp.experimental


class PreparedMegatron(PreparedPieces):
    """Sums gradients: its mean needs a reduction that CPU backends do not have."""

    cut = Cut.CHUNKS
    copies = Copies.MASTERS

    def __init__(self, module: Any, model: nn.Module, num_ranks: int) -> None:
        super().__init__(module, named=model)
        self._root = module
        self._num_ranks = num_ranks

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Build it over the pieces, and let the engine wrap its step."""
        self._optimizer = megatron_fsdp.fully_shard_optimizer(
            factory(self._root.parameters()), preproc_state_dict_for_dcp_ckpt=False
        )

    def backward(self, loss: torch.Tensor) -> None:
        """Scale the loss so that the sum over ranks is the mean."""
        (loss / self._num_ranks).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def pieces(self) -> Iterator[Piece]:
        """Read the engine's buffers."""
        buffers = self._root.param_and_grad_buffer
        owners = dict(buffers.optimizer_named_parameters)
        for group in buffers.parameter_groups:
            buffer = group.main_weight_buffer or group.model_weight_buffer
            for index, original in enumerate(group.params):
                name = buffers.param_to_name[original]
                start, _ = buffer._get_item_slice_in_shard(index)
                owner = owners[name]
                yield Piece(name=name, owner=owner, shape=tuple(owner.shape), start=start)


class PreparedExperimental(PreparedPieces):
    """Parameters of a unit are cut at their rows."""

    cut = Cut.CHUNKS

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Build it over the pieces, and let the engine refresh its compute weights after each step."""
        optimizer = factory(self.module.parameters())
        megatron_fsdp.experimental.fully_shard_optimizer(optimizer)
        self._optimizer = optimizer

    def pieces(self) -> Iterator[Piece]:
        """Read the engine's units."""
        for path, module in self.module.named_modules():
            for group in getattr(module, "_parameter_groups", ()):
                for index, (name, owner) in enumerate(
                    zip(group.parameter_names, group.sharded_parameters, strict=True)
                ):
                    owned = group.main_weight._get_owned_range(index)
                    yield Piece(
                        name=f"{path}.{name}".lstrip("."),
                        owner=owner,
                        shape=tuple(owner.shape),
                        start=0 if owned is None else owned.tensor_relative_offset,
                    )


class _MegatronEngine(Engine, ABC):
    capabilities = frozenset({Capability.SHARD, Capability.UNITS})
    insists_on_cuda = True
    package = "megatron-fsdp"


class MegatronFsdpEngine(_MegatronEngine):
    """The adapter of ``fully_shard_model``."""

    name = "megatron.fsdp"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Make units of all modules of the classes of the plan's units."""
        plan.refuse_beyond(self.capabilities)
        _expect_warnings()
        device = next(model.parameters()).device
        sharded = megatron_fsdp.fully_shard_model(
            model,
            device_mesh=init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("fsdp", "tp")),
            dp_shard_dim="fsdp",
            tp_dim="tp",
            fsdp_unit_modules=_classes(model, plan),
            device=device,
            preproc_state_dict_for_dcp_ckpt=False,
            calculate_per_token_loss=True,
        )
        return PreparedMegatron(sharded, model, dist.get_world_size())


class ExperimentalMegatronFsdpEngine(_MegatronEngine):
    """The adapter of ``experimental.fully_shard``."""

    name = "megatron.fsdp.experimental"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard every unit of the plan, then the root."""
        plan.refuse_beyond(self.capabilities)
        _expect_warnings()
        flat = [megatron_fsdp.experimental.Flat()]
        for module in (*map(model.get_submodule, plan.units), model):
            megatron_fsdp.experimental.fully_shard(
                module, mesh, megatron_fsdp.experimental.Placements([0], flat, flat, flat)
            )
        return PreparedExperimental(model)


def _classes(model: nn.Module, plan: Plan) -> list[type[nn.Module]]:
    """Return the classes of the plan's units; without units the model is the only one, because the engine needs one."""
    found = {type(model.get_submodule(unit)) for unit in plan.units} or {type(model)}
    return sorted(found, key=lambda kind: kind.__qualname__)


def _expect_warnings() -> None:
    """Ignore warnings of these engines, permanently: ranks that are threads share the warning filters."""
    # They call collectives that torch 2.13 renamed (pytorch#186123).
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated")
    # Its device is the CPU, not the current accelerator.
    logging.getLogger("megatron_fsdp.megatron_fsdp").setLevel(logging.ERROR)
    # Inputs of a model need no gradient.
    warnings.filterwarnings("ignore", category=UserWarning, message="Full backward hook is firing")
