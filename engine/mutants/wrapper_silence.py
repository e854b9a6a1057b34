"""Mutants of wrappers that go on without a word where there is nothing right to go on with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from shardproof.engine.adapters.reference_wrapper import ReferenceWrapperEngine
from shardproof.engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine
from shardproof.engine.contract import WrapperNames
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.reference import FullyShardedDataParallel
from shardproof.engine.reference.fsdp1.full_params import layout_of


def _forget(*_: object) -> None:
    pass


@mutant(after="pytorch/pytorch#98419")
class StepsNotInBackward(FullyShardedDataParallelEngine):
    """Optimizers that are to step in backward never step."""

    names: ClassVar[WrapperNames] = replace(NAMES, optimizer_in_backward=_forget)


@mutant(after="huggingface/peft#3080")
class ShowsShardsInForward(ReferenceWrapperEngine):
    """While a module computes with whole parameters, it lists this rank's shards."""

    class Wrapper(FullyShardedDataParallel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            for group in self.groups:
                layout_of(group).leave_forward()
            return super().forward(*args, **kwargs)


@mutant(after="pytorch/pytorch#90546", trace=Trace.STATE)
class ShowsZerosWhileAccumulating(ReferenceWrapperEngine):
    """Gradients that accumulate on each rank read as zeros."""

    class Wrapper(FullyShardedDataParallel):
        @contextmanager
        def no_sync(self) -> Iterator[None]:
            with super().no_sync():
                yield
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad = torch.zeros_like(parameter)


@mutant(after="pytorch/pytorch#98300", trace=Trace.SILENCE)
class AcceptsReplacedParameters(ReferenceWrapperEngine):
    """Backward computes with the parameters of forward although the caller has assigned others."""

    class Wrapper(FullyShardedDataParallel):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            for group in self.groups:
                group.check_unchanged = _forget  # type: ignore[method-assign]  # of this one


@mutant(after="pytorch/pytorch#90871", trace=Trace.SILENCE)
class AcceptsMixedTrees(ReferenceWrapperEngine):
    """Wrappers of one tree may differ in an option of the whole tree."""

    class Wrapper(FullyShardedDataParallel):
        def _check_homogeneous(self) -> None:
            """Check nothing."""
