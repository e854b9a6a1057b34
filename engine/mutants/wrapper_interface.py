"""Mutants of the wrapper that ignore replicas or other axes, or go on silently where nothing is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.engine.adapters.reference_wrapper import ReferenceWrapperEngine
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.reference import FullyShardedDataParallel
from shardproof.engine.reference.fsdp1.flat import FlatPiece
from shardproof.engine.reference.fsdp1.full_params import layout_of
from shardproof.engine.reference.parameter import FSDPParam


@mutant(after="pytorch/pytorch#154888", trace=Trace.STATE)
class StartsEachReplicaOnItsOwn(ReferenceWrapperEngine):
    """sync_module_states does not reach other replicas."""

    class Wrapper(FullyShardedDataParallel):
        def _all_groups(self) -> tuple[dist.ProcessGroup, ...]:
            return (self.process_group,)


@mutant(after="NVIDIA/Megatron-LM#3023", phase="reduce")
class SumsWhatIsWrapped(ReferenceWrapperEngine):
    """Gradients of a module in the wrapper are summed over ranks, not averaged."""

    class Wrapper(FullyShardedDataParallel):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            for group in self.groups:
                group.divide_factor = 1.0


@mutant(after="pytorch/pytorch#73784", phase="hold")
class ReplacesGradientsOnTheHost(ReferenceWrapperEngine):
    """With offload, what a microbatch reduces replaces what earlier ones did."""

    class Wrapper(FullyShardedDataParallel):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            for group in self.groups if options["cpu_offload"].offload_params else ():
                layout: Any = group.layout  # to replace its method
                layout.write_gradients = partial(_replace, layout.write_gradients)


def _replace(write: Callable[..., None], parameters: Sequence[FSDPParam], reduced: torch.Tensor) -> None:
    for parameter in parameters:
        parameter.sharded_param.grad = None
    write(parameters, reduced)


def _first(piece: FlatPiece, value: torch.Tensor) -> torch.Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole[tuple(slice(size) for size in piece.shape)]


@mutant(after="ROCm/Megatron-LM#63", trace=Trace.STATE)
class LoadsTheFirstPieceEverywhere(ReferenceWrapperEngine):
    """Every rank of a tensor-parallel axis loads the part of the first one."""

    class Wrapper(FullyShardedDataParallel):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            for group in self.groups:
                for piece in layout_of(group).parameters:
                    piece.own_part = partial(_first, piece)  # type: ignore[method-assign]  # of this one


def _forget(*_: object) -> None:
    pass


def _ignoring_options(call: Callable[[], None], **_: object) -> None:
    call()


@mutant(after="huggingface/peft#3080", phase="forward")
class ShowsShardsInForward(ReferenceWrapperEngine):
    """While a module computes with whole parameters, it lists this rank's shards."""

    class Wrapper(FullyShardedDataParallel):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            for piece in self._pieces():
                list_own = partial(piece.leave_forward, lists_whole=False)
                piece.enter_forward = list_own  # type: ignore[method-assign]  # of this one


@mutant(after="pytorch/pytorch#99779", phase="forward")
class ShowsShardsInASecondForward(ReferenceWrapperEngine):
    """A module that a forward finds whole from an earlier one lists this rank's shards."""

    class Wrapper(FullyShardedDataParallel):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            for piece in self._pieces():
                piece.enter_forward = _forget  # type: ignore[method-assign]  # of this one


@mutant(after="pytorch/pytorch#99779", phase="forward")
class ShowsShardsOfWhatItKeeps(ReferenceWrapperEngine):
    """Modules whose parameters stay whole from forward to backward list this rank's shards meanwhile."""

    class Wrapper(FullyShardedDataParallel):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            for piece in self._pieces():
                list_own = partial(_ignoring_options, partial(piece.leave_forward, lists_whole=False))
                piece.leave_forward = list_own  # type: ignore[method-assign]  # of this one


@mutant(after="pytorch/pytorch#99779", phase="forward")
class ComputesWithUnseenShards(ReferenceWrapperEngine):
    """A model that reads the parameters of units inside gets this rank's shards of those that are freed."""

    class Wrapper(FullyShardedDataParallel):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            for piece in self._pieces():
                piece.enter_outer_forward = _forget  # type: ignore[method-assign]  # of this one


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


@mutant(after="fla-org/flame#20", trace=Trace.SILENCE)
class ClipsNothingWhileAccumulating(ReferenceWrapperEngine):
    """Clipping while gradients accumulate returns a norm of zero, and does nothing."""

    class Wrapper(FullyShardedDataParallel):
        def clip_grad_norm_(self, *args: Any) -> torch.Tensor:
            is_held = any(
                p.has_unsharded_grad for w in self.fsdp_modules(self) for g in w.groups for p in g.parameters
            )
            return torch.zeros(()) if is_held else super().clip_grad_norm_(*args)


@mutant(after="pytorch/pytorch#98300", trace=Trace.SILENCE)
class AcceptsReplacedParameters(ReferenceWrapperEngine):
    """Backward computes with the parameters of forward although the caller has assigned others."""

    class Wrapper(FullyShardedDataParallel):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            for group in self.groups:
                group.check_assigned = _forget  # type: ignore[method-assign]  # of this one


@mutant(after="pytorch/pytorch#98300", trace=Trace.SILENCE)
class DropsWhatIsAssignedBesideFlatParameters(ReferenceWrapperEngine):
    """A parameter that is assigned where a flat one contains the original is dropped by the next forward."""

    class Wrapper(FullyShardedDataParallel):
        def _begin_training(self, *args: Any) -> None:
            for piece in self._pieces() if self.is_flat else ():
                piece.to_sharded()
            super()._begin_training(*args)


@mutant(after="pytorch/pytorch#90871", trace=Trace.SILENCE)
class AcceptsMixedTrees(ReferenceWrapperEngine):
    """Wrappers of one tree may differ in an option of the whole tree."""

    class Wrapper(FullyShardedDataParallel):
        def _check_homogeneous(self) -> None:
            """Check nothing."""
