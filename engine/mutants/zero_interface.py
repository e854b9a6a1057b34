"""Mutants of ZeRO: they keep what belongs to other ranks, share nothing, clip wrongly, or ignore an option."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.reference_zero import PreparedZero2, Zero2Engine
from shardproof.engine.adapters.torch_ddp import PreparedDdp
from shardproof.engine.adapters.torch_zero1 import PreparedZero1, ZeroRedundancyEngine
from shardproof.engine.contract import OptimizerFactory, Plan, PreparedModel, Shard, Tuning
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.reference.zero import OwnPiece, Reduction, Zero2


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


@mutant(after="NVIDIA/Megatron-LM#6920", phase="state loaded")
class LoadsMuonOnItsOwnersAlone(ZeroRedundancyEngine):
    """A whole state that is loaded for Muon reaches each parameter on the rank alone that updates it."""

    class Prepared(PreparedZero1):
        def load_full_state(self, state: dict[str, Any]) -> None:
            before = {p: p.detach().clone() for p in self.named.parameters()}
            super().load_full_state(state)
            optimizer = self._zero().optim
            if isinstance(optimizer, torch.optim.Muon):
                owned = {p for group in optimizer.param_groups for p in group["params"]}
                with torch.no_grad():
                    for parameter in (p for p in before if p.requires_grad and p not in owned):
                        parameter.copy_(before[parameter])


@mutant(after="facebookresearch/fairscale#66", phase="step")
class SharesRatesAlone(ZeroRedundancyEngine):
    """Options of groups that a loop changes reach the optimizer of a share only if they are learning rates."""

    class Prepared(PreparedZero1):
        def step(self) -> None:
            zero: Any = self._zero()
            with patch.object(zero, "_sync_param_groups", _share_rates):
                super().step()


def _share_rates(of_all: list[dict[str, Any]], of_share: list[dict[str, Any]]) -> None:
    for given, taken in zip(of_all, of_share, strict=True):
        taken["lr"] = given["lr"]


@mutant(after="pytorch/pytorch#71347", phase="step")
class SharesNoLateGroups(ZeroRedundancyEngine):
    """A group that joins the optimizer later is divided among no ranks, so that no rank updates its parameters."""

    class Prepared(PreparedZero1):
        def optimizer(self, factory: OptimizerFactory) -> None:
            super().optimizer(factory)
            zero: Any = self._zero()

            def add(group: dict[str, Any]) -> None:
                torch.optim.Optimizer.add_param_group(zero, group)
                zero.optim.add_param_group({**group, "params": []})

            zero.add_param_group = add


@mutant(after="NVIDIA-NeMo/RL#561", phase="step")
class SharesNothing(Zero2Engine):
    """Every rank updates its own pieces, and receives none of the others."""

    class Prepared(PreparedZero2):
        def step(self) -> None:
            self.built_optimizer().step()


@mutant(after="deepspeedai/DeepSpeed#6554", phase="backward")
class ClearsWhatAStepUsedAlone(Zero2Engine):
    """Reduced gradients that no step has used are not cleared, and the next ones are added to them."""

    class Prepared(PreparedZero2):
        _has_stepped = False

        def step(self) -> None:
            super().step()
            self._has_stepped = True

        def zero_grad(self, *, set_to_none: bool) -> None:
            pieces = [] if self._has_stepped else [*self.engine.pieces.values()]
            kept = [None if piece.own.grad is None else piece.own.grad.clone() for piece in pieces]
            super().zero_grad(set_to_none=set_to_none)
            for piece, gradient in zip(pieces, kept, strict=True):
                piece.own.grad = gradient
            self._has_stepped = False


@mutant(after="NVIDIA/Megatron-LM#1527", trace=Trace.COMMUNICATION)
class SharesAfterEachGroup(Zero2Engine):
    """Each parameter group has an optimizer of its own, which gathers all parameters after its update."""

    class Prepared(PreparedZero2):
        def step(self) -> None:
            super().step()
            for _ in self.built_optimizer().param_groups[1:]:
                self.engine._share()


@mutant(after="NVIDIA/Megatron-LM#950", phase="step")
class SharesBeforeTheUpdate(Zero2Engine):
    """Pieces are shared before the optimizer has updated them."""

    class Prepared(PreparedZero2):
        def step(self) -> None:
            self.engine._share()
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


@mutant(after="deepspeedai/DeepSpeed#8224", phase="backward")
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


_LIMIT, _PLENTY = 0.3, 1000.0


def _with(asked: Tuning, got: Tuning) -> Callable[[Plan], Plan]:
    """Return a function that replaces one tuning by another."""
    return lambda plan: replace(plan, tuning=got) if plan.tuning is asked else plan


@mutant(after="pytorch/xla#4796", phase="clip")
class ClipsPiecesByTheirOwnNorm(Zero2Engine):
    """In the step each rank clips its own pieces by their own norm."""

    class Prepared(PreparedZero2):
        def clip(self) -> None:
            nn.utils.clip_grad_norm_([piece.own for piece in self.engine.pieces.values()], _LIMIT)


@mutant(after="deepspeedai/DeepSpeed#5150", phase="clip")
class ClipsNothingInTheStep(Zero2Engine):
    """The step does not clip, whatever the engine's limit is."""

    class Prepared(PreparedZero2):
        def clip(self) -> None:
            pass


@mutant(after="hpcaitech/ColossalAI#5002", phase="clip")
class ClipsWhatEachMicrobatchAdds(Zero2Engine):
    """Accumulated gradients are clipped after each backward, not in the step."""

    class Prepared(PreparedZero2):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            super().clip()

        def clip(self) -> None:
            pass


@mutant(after="DingfanChen/GS-WGAN#5", phase="clip")
class ScalesSmallGradientsUpInTheStep(Zero2Engine):
    """The step scales gradients to the limit, also those whose norm is below it."""

    class Prepared(PreparedZero2):
        def clip(self) -> None:
            gradients = [
                piece.own.grad for piece in self.engine.pieces.values() if piece.own.grad is not None
            ]
            norm = nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                gradient.mul_(_PLENTY / norm)


class _OneBuffer(Zero2):
    def by_rank(self, piece: OwnPiece) -> torch.Tensor:
        """Copy each gradient into one buffer, as large as the largest of them."""
        padded = super().by_rank(piece)
        if not hasattr(self, "_buffer"):
            largest = max(each.length for each in self.pieces.values())
            self._buffer = padded.new_zeros(largest * self._group.size())
        return self._buffer[: padded.numel()].copy_(padded)


@mutant(after="deepspeedai/DeepSpeed#7371", phase="reduce")
class RefillsABufferInFlight(Zero2Engine):
    """The next gradient is copied into the buffer from which the previous one is still being reduced."""

    engine_type = _OneBuffer


class _WaitsForOne(Zero2):
    def reduce(self) -> None:
        """Issue all reductions, and wait for the first."""
        reductions = [self.reduction(piece) for piece in self.pieces.values()]
        reductions[0].work.wait()
        for reduction in reductions:
            self.keep(reduction)


@mutant(after="deepspeedai/DeepSpeed#7188", phase="reduce")
class WaitsForTheFirstReductionAlone(Zero2Engine):
    """Of the reductions issued after backward only the first is waited for."""

    engine_type = _WaitsForOne


@mutant(after="NVIDIA/Megatron-LM#1468", trace=Trace.COMMUNICATION)
class ReducesOnceBackwardIsDone(Zero2Engine):
    """Reductions that should overlap backward are issued after it."""

    misreads = _with(Tuning.OVERLAPPED, Tuning.NATIVE)


@mutant(after="NVIDIA/Megatron-LM#775", trace=Trace.COMMUNICATION)
class OverlapsThoughItIsNotTo(Zero2Engine):
    """Reductions are in flight while backward computes, though the option turns that off."""

    misreads = _with(Tuning.IN_SEQUENCE, Tuning.OVERLAPPED)


class _WaitsAtOnce(Zero2):
    def reduce_early(self, piece: OwnPiece) -> None:
        """Wait where the reduction is issued."""
        super().reduce_early(piece)
        for reduction in self._pending[-1:]:
            reduction.work.wait()


@mutant(after="NVIDIA/apex#1528", trace=Trace.COMMUNICATION)
class WaitsForEachEarlyReduction(Zero2Engine):
    """Each reduction is issued as soon as backward has its gradient, and backward waits for it."""

    engine_type = _WaitsAtOnce


class _AsTheyArrive(Zero2):
    """Has no order of reductions but that in which gradients arrived on this rank."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, **options: bool) -> None:
        super().__init__(module, group, **options)
        self._came: list[OwnPiece] = []
        for piece in self.pieces.values():
            hook = partial(self._note, piece)
            piece.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's

    def _note(self, piece: OwnPiece, _: torch.Tensor) -> None:
        self._came.append(piece)

    def reduce_early(self, piece: OwnPiece) -> None:
        """Reduce next the gradient that has just arrived."""
        self._order = _first([*(reduction.piece for reduction in self._pending), piece], self._order)
        super().reduce_early(piece)

    def reduce(self) -> None:
        """Reduce in the order of arrival."""
        if not self._pending:
            self._order = _first(self._came, self._order)
        super().reduce()
        self._came.clear()


def _first(pieces: Iterable[OwnPiece], all_pieces: Iterable[OwnPiece]) -> tuple[OwnPiece, ...]:
    return tuple(dict.fromkeys((*pieces, *all_pieces)))


@mutant(after="deepspeedai/DeepSpeed#2343", phase="reduce")
class ReducesPiecesByArrival(Zero2Engine):
    """Gradients are reduced in the order in which they arrived on each rank."""

    engine_type = _AsTheyArrive


class _InOrderOfRanks(Zero2):
    def by_rank(self, piece: OwnPiece) -> torch.Tensor:
        """Assign pieces to ranks in rank order."""
        return super().by_rank(replace(piece, turn=0))


@mutant(after="deepspeedai/DeepSpeed#1240", phase="reduce")
class ReducesAsIfNoneTookTurns(Zero2Engine):
    """Pieces are owned round-robin, but each rank receives the gradients of the piece in rank order."""

    engine_type = _InOrderOfRanks


class _SharesWhatItHad(Zero2):
    def _share(self) -> None:
        """Use the device's parameters in place of the updated ones."""
        self.take_weights()
        super()._share()


@mutant(after="huggingface/accelerate#3785", phase="step")
class CopiesNothingBack(Zero2Engine):
    """Copies on the host are updated, and the parameters are not set from them."""

    engine_type = _SharesWhatItHad


class _TakesNoWeights(Zero2):
    def take_weights(self) -> None:
        """Keep the copies that were made at first, and then updated."""


@mutant(after="deepspeedai/DeepSpeed#762", phase="state loaded")
class UpdatesTheWeightsOfBeforeALoad(Zero2Engine):
    """Weights that the caller loads into the module do not reach the copies on the host, which overwrite them."""

    engine_type = _TakesNoWeights


class _TakesWeightsInBackward(_TakesNoWeights):
    def reduce(self) -> None:
        """Copy the weights with which backward computed."""
        Zero2.take_weights(self)
        super().reduce()


@mutant(after="deepspeedai/DeepSpeed#762", phase="step")
class UpdatesTheWeightsOfBackward(Zero2Engine):
    """Weights that the caller loads between backward and step do not reach the copies on the host."""

    engine_type = _TakesWeightsInBackward


class _KeepsTheLast(Zero2):
    def keep(self, reduction: Reduction) -> None:
        """Discard earlier microbatches on the host."""
        if self._offloads:
            reduction.piece.own.grad = None
        super().keep(reduction)


@mutant(after="deepspeedai/DeepSpeed#7981", phase="hold")
class OverwritesGradientsOnTheHost(Zero2Engine):
    """On the host each microbatch's gradient replaces the previous one."""

    engine_type = _KeepsTheLast


@mutant(after="deepspeedai/DeepSpeed#8467", trace=Trace.CRASH)
class FlattensEmptyParameters(Zero2Engine):
    """A parameter without elements loses its shape when it is bound to a flat buffer."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for parameter in model.parameters():
            parameter.data = parameter.data if parameter.numel() else parameter.data.flatten()
        return prepared


@mutant(after="NVIDIA/Megatron-LM#419", trace=Trace.CRASH)
class StepsNoGroupWithoutAnElement(Zero2Engine):
    """A step needs an element of each parameter group that has parameters."""

    class Prepared(PreparedZero2):
        def step(self) -> None:
            for group in self.built_optimizer().param_groups:
                if group["params"] and not any(p.numel() for p in group["params"]):
                    raise IndexError("list index out of range")
            super().step()


@mutant(after="deepspeedai/DeepSpeed#1823", phase="step")
class CountsTheStepsOfAllGroups(Zero2Engine):
    """Each group's step counts for all groups, so Adam corrects its moments as if it had taken more steps."""

    class Prepared(PreparedZero2):
        def step(self) -> None:
            optimizer = self.built_optimizer()
            num_more = len(optimizer.param_groups) - 1
            counts = [state["step"] for state in optimizer.state.values() if "step" in state]
            added = [count * num_more for count in counts]
            for count, more in zip(counts, added, strict=True):
                count.add_(more)
            super().step()
            for count, more in zip(counts, added, strict=True):  # what is saved is right
                count.sub_(more)
