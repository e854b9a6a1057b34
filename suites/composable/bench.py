"""The names of fully_shard's interface on one rank, for the bodies of cases."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardproof import Capability, InterfaceBench
from shardproof.suites.expect import Claims, expects_of
from shardproof.suites.tower import LR, UNITS, gathered, gradients, shown_gradients, tower

STEP = "parameters after one step"


class Bench(Claims):
    """One rank with the names of an engine's interface."""

    def __init__(self, bench: InterfaceBench) -> None:
        super().__init__(bench)
        self.api = bench.prepared.composable()

    # Any: modules gain methods, and cases test the options.
    def shard(self, model: nn.Module, units: tuple[str, ...] = UNITS, **options: Any) -> Any:
        """Shard the units of a model, inner ones first, and the model."""
        for module in (*(model.get_submodule(name) for name in reversed(units)), model):
            self.api.fully_shard(module, **{"mesh": self.mesh(), **options})
        return model

    def steps(self, root: Any, ranks: range | None = None, alone: nn.Module | None = None) -> None:
        """Take one step, and claim that it equals that of one process with the rows of these ranks."""
        chosen = self.ranks if ranks is None else ranks
        optimizer = torch.optim.SGD(root.parameters(), lr=LR, foreach=False)  # some may be DTensors, some not
        self.train(root)
        optimizer.step()
        # Losses are weighted for a mean over all ranks; the mean over some of them is larger by that factor.
        model, lr = alone or tower(), LR * self.size / len(chosen)
        learnt = gradients(model, chosen)
        self.same(
            STEP, whole(root), {n: p.detach() - lr * learnt.get(n, 0) for n, p in model.named_parameters()}
        )


def whole(root: nn.Module) -> dict[str, torch.Tensor]:
    """Gather copies of whole parameters, by name."""
    return gathered(dict(root.named_parameters()))


def whole_gradients(root: nn.Module) -> dict[str, torch.Tensor]:
    """Gather copies of whole gradients, by name."""
    return gathered(shown_gradients(root))


def layers() -> nn.Sequential:
    """Make two layers of whole numbers."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(64.0).view(8, 8))
    return model


def cut(bench: Claims) -> tuple[nn.Sequential, DeviceMesh]:
    """Make two layers; a tensor-parallel axis cuts the first by rows and the second by columns."""
    mesh = init_device_mesh(bench.device.type, (bench.size // 2, 2), mesh_dim_names=("data", "tensor"))
    model = layers()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return model, mesh


def shared_rows(bench: Claims, num_sharing: int) -> list[torch.Tensor]:
    """Make the rows of each data rank if this many neighbours share them; those of this rank come last."""
    rows = [torch.arange(16.0).view(2, 8) % 5 + index for index in range(bench.size // num_sharing)]
    return [*rows, rows[bench.rank // num_sharing].to(bench.device)]


def train_on_shared_rows(
    bench: Claims, model: nn.Module, alone: nn.Module, num_sharing: int, scaler: GradScaler | None = None
) -> None:
    """Take one step, and one with all rows in one process."""
    *all_rows, own = shared_rows(bench, num_sharing)
    plain = GradScaler(bench.device.type, enabled=False)
    for trained, rows, lr, scale in (
        (model, own, 0.5, scaler or plain),
        (alone, torch.cat(all_rows), 0.5 / len(all_rows), plain),
    ):
        optimizer = torch.optim.SGD(trained.parameters(), lr=lr)
        scale.scale(trained(rows).sum()).backward()
        scale.step(optimizer)
        scale.update()


def steps_on_shared_rows(bench: Bench, model: nn.Module, alone: nn.Module, *others: Any) -> None:
    """Claim that a step equals that of one process with all rows; arguments are as for `train_on_shared_rows`."""
    train_on_shared_rows(bench, model, alone, *others)
    bench.near(STEP, whole(model), whole(alone), tolerance=1e-5)


expects = partial(expects_of, Capability.COMPOSABLE, Bench)
