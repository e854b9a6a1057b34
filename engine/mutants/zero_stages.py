"""Mutants of ZeRO: they keep what belongs to other ranks, or share nothing, or old values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.reference_zero import PreparedZero2, Zero2Engine
from shardproof.engine.adapters.torch_ddp import PreparedDdp
from shardproof.engine.adapters.torch_zero1 import PreparedZero1, ZeroRedundancyEngine
from shardproof.engine.contract import OptimizerFactory, Plan, PreparedModel, Shard
from shardproof.engine.mutants.mutant import Trace, mutant


@mutant(after="cloneofsimo/min-fsdp#1", trace=Trace.STATE)
class KeepsTheStateOfAllRanks(ZeroRedundancyEngine):
    """Every rank keeps the optimizer state of all parameters, and reports only its own."""

    class Prepared(PreparedZero1):
        def optimizer(self, factory: OptimizerFactory) -> None:
            self._optimizer = factory(self.named.parameters())

        def step(self) -> None:
            PreparedDdp.step(self)

        def local_optimizer_state(self) -> Mapping[str, Shard]:
            names = [*self.owned_parameters()][dist.get_rank() :: dist.get_world_size()]
            whole = PreparedDdp.local_optimizer_state(self)
            return {key: shard for key, shard in whole.items() if key.partition("/")[0] in names}


@mutant(after="deepspeedai/DeepSpeedExamples#336", trace=Trace.STATE)
class KeepsWholeGradientsBesideItsShares(Zero2Engine):
    """Every rank keeps whole gradients until they are cleared, and reports its pieces of the reduced ones."""

    class Prepared(PreparedZero2):
        def backward(self, loss: torch.Tensor) -> None:
            with self.engine.no_sync():
                super().backward(loss)
            self._whole = [p.grad for p in self.named.parameters()]
            self.engine.reduce()

        def step(self) -> None:
            self._whole.clear()
            super().step()


@mutant(after="NVIDIA-NeMo/RL#561")
class SharesNothing(Zero2Engine):
    """Every rank updates its own pieces, and receives none of the others."""

    class Prepared(PreparedZero2):
        def step(self) -> None:
            self.built_optimizer().step()


@mutant(after="NVIDIA/Megatron-LM#950")
class SharesBeforeTheUpdate(Zero2Engine):
    """Pieces are shared before the optimizer has updated them."""

    class Prepared(PreparedZero2):
        def step(self) -> None:
            self.engine.share()
            self.built_optimizer().step()


@mutant(after="deepspeedai/DeepSpeed#156", trace=Trace.COMMUNICATION)
class ReducesWholeGradientsFirst(Zero2Engine):
    """Gradients are all-reduced before each rank receives its piece of them."""

    class Prepared(PreparedZero2):
        def backward(self, loss: torch.Tensor) -> None:
            with self.engine.no_sync():
                super().backward(loss)
            for parameter in self.named.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            self.engine.reduce()


@mutant(after="deepspeedai/DeepSpeed#8224")
class CountsOneUseInLowPrecision(Zero2Engine):
    """A low-precision parameter whose module runs several times has the mean of the gradients, not the sum."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for module in model.modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad and p.dtype.itemsize == 2]
            if own:
                _average_over_uses(module, own)
        return prepared


def _average_over_uses(module: nn.Module, parameters: list[nn.Parameter]) -> None:
    uses: list[None] = []
    module.register_forward_hook(lambda *_: uses.append(None))
    for parameter in parameters:
        parameter.register_hook(lambda gradient: gradient / max(1, len(uses)))  # type: ignore[no-untyped-call]  # torch's
    parameters[-1].register_post_accumulate_grad_hook(lambda _: uses.clear())  # type: ignore[no-untyped-call]  # torch's
