"""Mutants of sparse gradients: reduced in the wrong place, by the wrong factor, or with lost rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.mutant import mutant
from shardproof.engine.mutants.patches import leave_out_of_ddp


@mutant(after="pytorch/pytorch#31413")
class KeepsItsOwnSparseGradients(DistributedDataParallelEngine):
    """The sum of sparse gradients is computed and never written back."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        leave_out_of_ddp(model, [name for name, _ in _sparse_parameters(model)])
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#61814")
class SumsSparseGradients(DistributedDataParallelEngine):
    """Sparse gradients are summed over ranks, while the others are averaged."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        _change(model, lambda gradient: gradient * mesh.size())
        return super().prepare(model, plan, mesh)


@mutant(after="dmlc/dgl#2596")
class CountsEachRowOnce(DistributedDataParallelEngine):
    """If a batch uses a row twice, only the gradient of the last use is kept."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        _change(model, _last_of_each_row)
        return super().prepare(model, plan, mesh)


def _last_of_each_row(gradient: torch.Tensor) -> torch.Tensor:
    rows, values = gradient._indices()[0], gradient._values()
    kept = list({int(row): place for place, row in enumerate(rows)}.values())
    return torch.sparse_coo_tensor(rows[kept].unsqueeze(0), values[kept], gradient.shape)


def _change(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change each rank's sparse gradient before it is reduced."""
    for _, parameter in _sparse_parameters(model):
        parameter.register_hook(change)  # type: ignore[no-untyped-call]  # torch's


def _sparse_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.sparse:
            yield from (
                (f"{name}.{of_table}", parameter) for of_table, parameter in module.named_parameters()
            )
