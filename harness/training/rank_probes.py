"""The probes of one rank: values of its modules as they compute, and its shards between them, written to a file."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from shardproof.engine.contract import PreparedModel, Shard
from shardproof.harness.records.observation import Shards
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.module_probes import ModuleProbes, Moment, Names, names_in
from shardproof.harness.tracing.probe_point import ProbePoint, ProbeWriter, ValueKind
from shardproof.harness.training.reads import read_gradients, read_shards
from shardproof.harness.worlds.rank import RankContext


class RankProbes:
    """Writes the values of one rank."""

    def __init__(self, context: RankContext, path: Path, rank: int, *, sees_backward: bool) -> None:
        self.factor = 1.0  # of the loss scale in this step
        self._recorder = context.recorder
        self._rank, self._sees_backward = rank, sees_backward
        self._names: Names = {}
        self._modules: ModuleProbes | None = None
        self._writer = ProbeWriter(path)
        self._hooks = ExitStack()

    def name(self, model: nn.Module) -> None:
        """Note the names of a model that no engine has prepared yet."""
        self._names = names_in(model)

    def follow(self, prepared: PreparedModel) -> None:
        """Hook the model that trains from now on."""
        self._hooks.close()
        self._modules = ModuleProbes(self._names, self._moment, self._see, sees_backward=self._sees_backward)
        self._hooks.enter_context(self._modules.watching(prepared.named, prepared.original_name))

    def leave(self) -> None:
        """Look away from the model until another is followed."""
        self._hooks.close()
        self._modules = None

    def loss(self, loss: torch.Tensor) -> None:
        """Write the loss of a microbatch."""
        if self._modules is not None:
            self._modules.see(ValueKind.LOSS, None, "loss", loss.detach(), self._modules.turn())

    def gradients(self, kind: ValueKind, step: int, prepared: PreparedModel) -> None:
        """Write this rank's shards of the gradients."""
        if self._modules is not None:
            self._modules.flush()
        held = read_shards(prepared, "local_parameters")
        zeros = {n: replace(shard, tensor=torch.zeros_like(shard.tensor)) for n, shard in held.items()}
        found = {n: shard for n, shard in read_gradients(prepared).items() if shard is not None}
        self.shards(kind, step, {**zeros, **found})  # None is compared as zeros

    def state(self, kind: ValueKind, step: int, prepared: PreparedModel) -> None:
        """Write this rank's shards of the optimizer state."""
        self.shards(kind, step, read_shards(prepared, "local_optimizer_state"))

    def norm(self, step: int, norm: float) -> None:
        """Write the norm that clipping returned."""
        whole = Shard(tensor=torch.tensor(norm, dtype=torch.float64), offsets=(), global_shape=())
        self.shards(ValueKind.NORM, step, {"norm": whole})

    def shards(self, kind: ValueKind, step: int, shards: Shards) -> None:
        """Write shards of tensors that all ranks share."""
        factor = self.factor if kind is ValueKind.REDUCED else 1.0
        for name, shard in shards.items():
            self._writer.write(
                ProbePoint(kind=kind, step=step, name=name),
                shard.tensor,
                offsets=shard.offsets,
                global_shape=shard.global_shape,
                is_flat=shard.is_flat,
                num_calls=self._recorder.num_issued,
                factor=factor,
            )

    def close(self) -> None:
        """Remove the hooks, and complete the file."""
        self._hooks.close()
        modules = [] if self._modules is None else self._modules.hidden
        self._writer.close(hidden=modules)

    def _moment(self) -> Moment:
        phase, step, microbatch, _ = self._recorder.place
        return Moment(step=step, microbatch=microbatch, is_backward=phase is Phase.BACKWARD)

    def _see(self, point: ProbePoint, tensor: torch.Tensor) -> None:
        is_gradient = point.kind in {
            ValueKind.OUTPUT_GRADIENT,
            ValueKind.INPUT_GRADIENT,
            ValueKind.LOCAL_GRADIENT,
        }
        self._writer.write(
            replace(point, rank=self._rank),
            tensor,
            num_calls=self._recorder.num_issued,
            factor=self.factor if is_gradient else 1.0,
        )
