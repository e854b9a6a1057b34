"""Mutants that fail where two ordinary things meet, each by its own mechanism; neither alone shows the fault.

The last two fail always: they are for rows that no mutant of a pair is known to die of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardproof.engine import reference
from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.reference_wrapper import ReferenceWrapperEngine
from shardproof.engine.adapters.reference_zero import Zero2Engine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import dividing_losses, is_last_rank, local, unchanged
from shardproof.engine.plan import Offload, Wire
from shardproof.engine.reference.fsdp_state import state_of


class Remembering(PreparedReference):
    """Records what the loop did since gradients were cleared; a base class."""

    def __init__(self, *args: Any) -> None:  # Any: the reference engine's own
        super().__init__(*args)
        self.num_held = self.num_waiting = self.most_waiting = self.num_rows = 0
        self.is_holding = self.has_evaluated = self.has_failed = self.has_resumed = self.is_zeroed = False
        self.by_keyword = self.is_mapping = False

    def __call__(
        self, *inputs: Any, **named: Any
    ) -> Any:  # Any: a model's inputs and outputs are of any type
        self.by_keyword |= bool(named)
        tensors = (given for given in (*inputs, *named.values()) if isinstance(given, torch.Tensor))
        self.num_rows = next((len(tensor) for tensor in tensors if tensor.dim()), 1)
        output = super().__call__(*inputs, **named)
        self.has_evaluated |= not torch.is_grad_enabled()
        self.is_mapping |= isinstance(output, dict)
        self.num_waiting += torch.is_grad_enabled()
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        return output

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        self.num_waiting -= 1

    def backward_of_branch(self, loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self.num_held += 1
        self.is_holding = True
        with self.holding():
            yield
        self.is_holding = False

    def holding(self) -> AbstractContextManager[None]:
        return super().accumulating()

    def recover(self) -> None:
        self.has_failed = True
        self.num_waiting = 0
        super().recover()

    def load_full_state(self, state: dict[str, Any]) -> None:
        super().load_full_state(state)
        self.has_resumed = True

    def zero_grad(self, *, set_to_none: bool) -> None:
        super().zero_grad(set_to_none=set_to_none)
        self.num_held = self.most_waiting = self.num_waiting = 0
        self.has_evaluated = self.has_failed = self.by_keyword = self.is_mapping = False
        self.is_zeroed = not set_to_none

    def drop_held(self) -> None:
        for module in self.module.modules():
            unit = state_of(module)
            for group in () if unit is None else unit.param_groups:
                group.drop_gradients()

    def buffers(self) -> list[torch.Tensor]:
        return list(self.module.buffers())

    def gradients(self) -> list[torch.Tensor]:
        return [local(p.grad) for p in self.owned_parameters().values() if p.grad is not None]


class ClippingAtTimes(Remembering):
    """Returns the norm, and scales gradients only under a condition; a base class."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        with unchanged(self.gradients()) if self.forgets() else nullcontext():
            return super().clip_grad_norm_(max_norm, norm_type)

    def forgets(self) -> bool:
        raise NotImplementedError


@mutant(after="deepspeedai/DeepSpeed#7718", phase="clip")
class ClipsNothingAfterHoldingBack(ReferenceEngine):
    """Gradients of a step in which microbatches were held back are not clipped."""

    class Prepared(ClippingAtTimes):
        def forgets(self) -> bool:
            return self.num_held > 0


@mutant(after="deepspeedai/DeepSpeed#5150", phase="clip")
class ClipsNothingAfterAnEvaluation(ReferenceEngine):
    """Gradients of a step with an evaluation between two backwards are not clipped."""

    class Prepared(ClippingAtTimes):
        def forgets(self) -> bool:
            return self.has_evaluated and self.most_waiting > 0


@mutant(after="deepspeedai/DeepSpeed#5150", phase="clip")
class ClipsNothingAfterForwardsThatWaited(ReferenceEngine):
    """Gradients of a step in which two forwards preceded their backwards are not clipped."""

    class Prepared(ClippingAtTimes):
        def forgets(self) -> bool:
            return self.most_waiting > 1


@mutant(after="databricks/flashoptim#3", phase="clip")
class ClipsTheModelOfBefore(ReferenceEngine):
    """After a resume clipping does not change the gradients."""

    class Prepared(ClippingAtTimes):
        def forgets(self) -> bool:
            return self.has_resumed


@mutant(after="deepspeedai/DeepSpeed#5150", phase="clip")
class ClipsACopyOfOffloadedGradients(ReferenceEngine):
    """Clipping of gradients on the host changes a copy."""

    class Prepared(ClippingAtTimes):
        def forgets(self) -> bool:
            return self.plan.offload is not Offload.NONE


@mutant(after="deepspeedai/DeepSpeed#5150", phase="clip")
class ClipsNothingAfterAFailure(ReferenceEngine):
    """Gradients of a step in which a forward raised are not clipped."""

    class Prepared(ClippingAtTimes):
        def forgets(self) -> bool:
            return self.has_failed


@mutant(after="facebookresearch/fairscale#617", phase="clip")
class CountsTiedParametersTwice(ReferenceEngine):
    """The norm counts a parameter once for each of its names, and clipping scales it as often."""

    class Prepared(Remembering):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            named = self.module.named_parameters(remove_duplicate=False)
            return float(reference.clip_grad_norm_([p for _, p in named], max_norm, norm_type))


@mutant(after="facebookresearch/fairscale#605", phase="clip")
class StopsClippingAtAMissingGradient(ReferenceEngine):
    """Parameters after the first one without a gradient are not clipped."""

    class Prepared(Remembering):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            owned = list(self.owned_parameters().values())
            first = next((i for i, p in enumerate(owned) if p.grad is None and p.numel()), len(owned))
            after = [local(p.grad) for p in owned[first:] if p.grad is not None]
            with unchanged(after):
                return super().clip_grad_norm_(max_norm, norm_type)


@mutant(after="pytorch/pytorch#160279", phase="clip")
class ClipsInFloat32(ReferenceEngine):
    """The factor of clipping is rounded to float32, whatever dtype the gradients have."""

    class Prepared(Remembering):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            gradients = self.gradients()
            with unchanged(gradients):
                norm = super().clip_grad_norm_(max_norm, norm_type)
            factor = torch.tensor(min(1.0, max_norm / (norm + 1e-6)), dtype=torch.float32)
            for gradient in gradients:
                gradient.mul_(factor.item())
            return norm


@mutant(after="NVIDIA/Megatron-LM#7186", phase="backward")
class DropsHeldMicrobatchesAfterZeros(ReferenceEngine):
    """If gradients were cleared to zeros, microbatches that are held back are lost."""

    class Prepared(Remembering):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss * 0 if self.is_holding and self.is_zeroed else loss)


@mutant(after="NVIDIA/Megatron-LM#7186", phase="hold")
class EvaluationDropsWhatIsHeld(ReferenceEngine):
    """An evaluation drops the gradients that are held back."""

    class Prepared(Remembering):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            output = super().__call__(*inputs, **named)
            if self.num_held and not torch.is_grad_enabled():
                self.drop_held()
            return output


@mutant(after="NVIDIA/Megatron-LM#7186", phase="hold")
class DropsWhatIsHeldWithoutRows(ReferenceEngine):
    """A last microbatch without rows makes its rank drop the gradients that it held back."""

    class Prepared(Remembering):
        def backward(self, loss: torch.Tensor) -> None:
            if self.num_held and not self.is_holding and not self.num_rows:
                self.drop_held()
            super().backward(loss)


@mutant(after="NVIDIA/Megatron-LM#7166", phase="step")
class ReducesWhatTheLastMicrobatchUsed(ReferenceEngine):
    """Parameters that only microbatches before the last used have no gradient if these are held back."""

    class Prepared(Remembering):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.ran: set[nn.Module] = set()
            for module in self.module.modules():
                module.register_forward_pre_hook(lambda module, _: self.ran.add(module))

        def __call__(self, *inputs: Any, **named: Any) -> Any:
            self.ran.clear()
            return super().__call__(*inputs, **named)

        def step(self) -> None:
            side = getattr(self.module, "side", None)
            if self.num_held and side is not None and side not in self.ran:
                for parameter in side.parameters():
                    parameter.grad = None
            super().step()


@mutant(after="NVIDIA/Megatron-LM#3023", phase="backward")
class DividesHeldGradientsAgain(ReferenceEngine):
    """A divide factor divides microbatches that are held back once more."""

    class Prepared(Remembering):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss / (self.plan.divide_factor or 1.0) if self.is_holding else loss)


@mutant(after="ServiceNow/Fast-LLM#550", trace=Trace.COMMUNICATION)
class HoldsNothingBackAfterAFailure(ReferenceEngine):
    """In a step in which a forward raised every microbatch is reduced."""

    class Prepared(Remembering):
        def holding(self) -> AbstractContextManager[None]:
            return nullcontext() if self.has_failed else super().holding()


@mutant(after="NVIDIA/cosmos-framework#161", trace=Trace.COMMUNICATION)
class HoldsNothingBackOfMappings(ReferenceEngine):
    """A model that returned a mapping is reduced after every later microbatch."""

    class Prepared(Remembering):
        def holding(self) -> AbstractContextManager[None]:
            return nullcontext() if self.is_mapping else super().holding()

        def zero_grad(self, *, set_to_none: bool) -> None:
            was_mapping = self.is_mapping
            super().zero_grad(set_to_none=set_to_none)
            self.is_mapping = was_mapping


@mutant(after="NVIDIA/cosmos-framework#161", trace=Trace.COMMUNICATION)
class HoldsNothingBackByKeyword(ReferenceEngine):
    """After a forward with keyword arguments every microbatch of the step is reduced."""

    class Prepared(Remembering):
        def holding(self) -> AbstractContextManager[None]:
            return nullcontext() if self.by_keyword else super().holding()


@mutant(after="databricks/flashoptim#3", phase="state loaded")
class ResumesWithoutSecondMoments(ReferenceEngine):
    """A resume restores the first state of each parameter, and leaves the second at its initial value."""

    class Prepared(Remembering):
        def load_full_state(self, state: dict[str, Any]) -> None:
            super().load_full_state(state)
            for held in self.built_optimizer().state.values():
                if "exp_avg_sq" in held:
                    local(held["exp_avg_sq"]).zero_()


@mutant(after="pytorch/pytorch#136228", phase="state loaded")
class ResumesWithoutTheLastUnevenRow(ReferenceEngine):
    """A resume does not restore the last row of a parameter whose rows do not divide."""

    class Prepared(Remembering):
        def load_full_state(self, state: dict[str, Any]) -> None:
            last = [
                local(p)[-1:]
                for p in self.owned_parameters().values()
                if p.dim() and p.shape[0] > 1 and p.shape[0] % 2 and local(p).numel()
            ]
            with unchanged(last if is_last_rank() else []):
                super().load_full_state(state)


@mutant(after="pytorch/torchtitan#1483", phase="state loaded")
class ResumesAlongTheFirstDim(ReferenceEngine):
    """A resume does not restore parameters that are not cut along the first dim."""

    class Prepared(Remembering):
        def load_full_state(self, state: dict[str, Any]) -> None:
            others = [
                local(p)
                for p in self.owned_parameters().values()
                if isinstance(p, DTensor) and any(getattr(x, "dim", 0) != 0 for x in p.placements)
            ]
            with unchanged(others):
                super().load_full_state(state)


@mutant(after="huggingface/accelerate#3898", phase="state loaded")
class ResumesWithoutBuffers(ReferenceEngine):
    """A resume leaves the buffers at their initial values."""

    class Prepared(Remembering):
        def load_full_state(self, state: dict[str, Any]) -> None:
            with unchanged(self.buffers()):
                super().load_full_state(state)


@mutant(after="pytorch/pytorch#149205", phase="forward")
class EvaluatesHalfOfWhatItResumed(ReferenceEngine):
    """Evaluations after a resume use half of each parameter."""

    class Prepared(Remembering):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            output = super().__call__(*inputs, **named)
            if not self.has_resumed or torch.is_grad_enabled():
                return output
            return output * 0.5 if isinstance(output, torch.Tensor) else output


@mutant(after="EvolvingLMMs-Lab/lmms-engine#185", phase="forward")
class RecoversTheBuffersToo(ReferenceEngine):
    """If a forward raised, the buffer changes of all forwards of the step are undone."""

    class Prepared(Remembering):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            self.before = [buffer.clone() for buffer in self.buffers()]
            return super().__call__(*inputs, **named)

        def recover(self) -> None:
            super().recover()
            for buffer, before in zip(self.buffers(), self.before, strict=True):
                buffer.copy_(before)


@mutant(after="pytorch/pytorch#63916", phase="forward")
class LosesBuffersOfInference(ReferenceEngine):
    """Changes of buffers in a forward in inference mode are lost."""

    class Prepared(Remembering):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            if not torch.is_inference_mode_enabled():
                return super().__call__(*inputs, **named)
            with unchanged(self.buffers()):
                return super().__call__(*inputs, **named)


@mutant(after="pytorch/pytorch#63916", phase="recompute")
class LosesBuffersOfRecomputation(ReferenceEngine):
    """Changes of buffers in a recomputed forward are lost."""

    class Prepared(Remembering):
        def backward(self, loss: torch.Tensor) -> None:
            with unchanged(self.buffers()):
                super().backward(loss)


@mutant(after="pytorch/pytorch#90838", phase="forward")
class ConvertsParametersAlone(ReferenceEngine):
    """A conversion leaves the buffers in their dtype."""

    class Prepared(Remembering):
        def convert(self, dtype: torch.dtype) -> None:
            kept = {
                (module, name): buffer
                for module in self.module.modules()
                for name, buffer in module.named_buffers(recurse=False)
            }
            super().convert(dtype)
            for (module, name), buffer in kept.items():
                setattr(module, name, buffer)


@mutant(after="pytorch/pytorch#167178", phase="reduce")
class IgnoresTheFactorOfSums(ReferenceEngine):
    """If only sums are communicated, the divide factor is ignored."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, without the factor."""
        factor = None if plan.wire is Wire.SUM else plan.divide_factor
        return super().prepare(model, replace(plan, divide_factor=factor), mesh)


@mutant(after="facebookresearch/fairscale#605", phase="step")
class FreezesWholeJointUnits(ReferenceEngine):
    """A unit of several modules is not updated if the last of them is frozen."""

    class Prepared(Remembering):
        def step(self) -> None:
            for unit in (unit.split(",") for unit in self.plan.units if "," in unit):
                if not any(p.requires_grad for p in self.module.get_submodule(unit[-1]).parameters()):
                    for name in unit:
                        for parameter in self.module.get_submodule(name).parameters():
                            parameter.grad = None
            super().step()


@mutant(after="NVIDIA/Megatron-LM#3023", phase="backward")
class HalvesTheLastRank(ReferenceEngine):
    """The losses of the last rank count half, under every plan."""

    class Prepared(PreparedReference):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss / 2 if is_last_rank() else loss)

        def backward_of_branch(self, loss: torch.Tensor) -> None:
            (loss / 2 if is_last_rank() else loss).backward(retain_graph=True)  # type: ignore[no-untyped-call]  # torch's


def _halving_losses_of_the_last_rank(prepared: PreparedModel) -> PreparedModel:
    return dividing_losses(prepared, 2 if is_last_rank() else 1)


@mutant(after="NVIDIA/Megatron-LM#3023", phase="backward")
class HalvesTheLastRankOfWrappers(ReferenceWrapperEngine):
    """The losses of the last rank count half, under any option of the wrapper."""

    spoil = _halving_losses_of_the_last_rank


@mutant(after="NVIDIA/Megatron-LM#3023", phase="backward")
class HalvesTheLastRankOfShares(Zero2Engine):
    """The losses of the last rank count half, under any option of an engine that shards optimizer state."""

    spoil = _halving_losses_of_the_last_rank
