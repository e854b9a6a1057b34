"""Mutants that fail where a rare step of a training loop meets something else; neither alone shows the fault.

The moves: other compute dtypes, models without memory, state in shares, scaled losses, parts that freeze and thaw,
forwards for something else than training, several backwards through a graph, hooks of the user, steps in backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.contract import OptimizerFactory, Plan, PreparedModel
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import is_last_rank, local
from shardproof.engine.mutants.rare_triggers import ClippingAtTimes, Remembering
from shardproof.engine.plan import Offload


@mutant(after="pytorch/pytorch#196996", phase="backward")
class DropsHeldMicrobatchesOfOtherDtypes(ReferenceEngine):
    """If units compute in a dtype of their own, microbatches that are held back are lost."""

    class Prepared(Remembering):
        def backward(self, loss: torch.Tensor) -> None:
            is_cast = self.plan.compute_dtype is not None
            super().backward(loss * 0 if self.is_holding and is_cast else loss)


@mutant(after="verl-project/verl#7834", phase="prepare")
class FillsBuffersOnTheFirstRankAlone(ReferenceEngine):
    """A model prepared without memory has its buffers on the first rank, and zeros on others."""

    class Prepared(Remembering):
        def materialize(self, *given: Any) -> None:  # Any: the contract's own
            super().materialize(*given)
            if is_last_rank():
                for buffer in self.buffers():
                    buffer.zero_()


@mutant(after="hiyouga/LlamaFactory#10820", phase="prepare")
class LosesUnsavedBuffersWithoutMemory(ReferenceEngine):
    """A model prepared without memory has zeros in the buffers that no state dict holds."""

    class Prepared(Remembering):
        def materialize(self, device: torch.device, state: Any, unsaved: Any) -> None:  # Any: as above
            zeros = {name: torch.zeros_like(buffer) for name, buffer in unsaved.items()}
            super().materialize(device, state, zeros)


@mutant(after="NVIDIA-NeMo/Automodel#2213", phase="prepare")
class UntiesWhatHasNoMemory(ReferenceEngine):
    """In a model prepared without memory each use of a tied parameter is a parameter of its own."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        seen: set[nn.Parameter] = set()
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta and parameter in seen:
                    setattr(module, name, nn.Parameter(torch.empty_like(parameter)))
                seen.add(parameter)
        return super().prepare(model, plan, mesh)


@mutant(after="huggingface/transformers#45902", phase="prepare")
class FillsNoModuleOfBuffersAlone(ReferenceEngine):
    """Unsaved buffers are filled in modules with parameters alone, in a model prepared without memory."""

    class Prepared(PreparedReference):
        def materialize(self, device: torch.device, state: Any, unsaved: Any) -> None:
            owned = {name.rpartition(".")[0] for name, _ in self.named.named_parameters()}
            filled = {n: b for n, b in unsaved.items() if n.rpartition(".")[0] in owned}
            super().materialize(device, state, filled)
            for name in unsaved.keys() - filled.keys():
                self.named.get_buffer(name).zero_()


@mutant(after="NVIDIA/Megatron-LM#6087", phase="prepare")
class KeepsTheValuesOfWhatWasReplaced(ReferenceEngine):
    """What the caller loads in place of parameters gets the values of these."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        kept = dict(prepared.module.named_parameters())

        def restore(module: nn.Module, *_: object) -> None:
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    if parameter is not kept[name]:
                        parameter.copy_(kept[name])

        module: Any = prepared.module  # torch leaves the method untyped
        module.register_load_state_dict_post_hook(restore)
        return prepared


@mutant(after="deepspeedai/DeepSpeed#8378", phase="state saved")
class SavesWhatIsFrozenAsItComputes(ReferenceEngine):
    """The whole state has frozen parameters rounded to the compute dtype."""

    class Prepared(Remembering):
        def full_state(self) -> dict[str, Any]:
            state, dtype = super().full_state(), self.plan.compute_dtype
            for name, parameter in self.named.named_parameters():
                if dtype is not None and not parameter.requires_grad:
                    whole = state["model"][name]
                    state["model"][name] = whole.to(dtype).to(whole.dtype)
            return state


@mutant(after="pytorch/torchtitan#1524", phase="prepare")
class ThawsWhatHadNoMemory(ReferenceEngine):
    """A model prepared without memory trains its frozen parameters too."""

    class Prepared(Remembering):
        def materialize(self, *given: Any) -> None:  # Any: as above
            super().materialize(*given)
            self.module.requires_grad_(True)


@mutant(after="databricks/flashoptim#3", phase="state loaded")
class LoadsSharesWithoutSecondMoments(ReferenceEngine):
    """A resume from shares leaves the second state of each parameter at its initial value."""

    class Prepared(Remembering):
        def load_shared_state(self, state: dict[str, Any]) -> None:
            super().load_shared_state(state)
            for held in self.built_optimizer().state.values():
                if "exp_avg_sq" in held:
                    local(held["exp_avg_sq"]).zero_()


@mutant(after="pytorch/pytorch#115710", phase="clip")
class ClipsNothingAfterAnOverflow(ReferenceEngine):
    """Once a gradient has overflowed, none is clipped."""

    class Prepared(ClippingAtTimes):
        has_overflowed = False

        def forgets(self) -> bool:
            self.has_overflowed |= not all(bool(g.isfinite().all()) for g in self.gradients())
            return self.has_overflowed


@mutant(after="pytorch/pytorch#186998", phase="clip")
class ClipsNothingThatThawed(ReferenceEngine):
    """After a part was frozen and is trained again, no gradient is clipped."""

    class Prepared(ClippingAtTimes):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.trained = {p for p in self.module.parameters() if p.requires_grad}
            self.has_thawed = False

        def forgets(self) -> bool:
            are_frozen = any(not p.requires_grad for p in self.trained)
            forgets, self.has_thawed = self.has_thawed and not are_frozen, self.has_thawed or are_frozen
            return forgets


@mutant(after="pytorch/pytorch#63916", phase="forward")
class LosesBuffersOfInputsWithGradients(ReferenceEngine):
    """Changes of buffers in a forward are lost if its input requires a gradient."""

    class Prepared(Remembering):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            given = [*inputs, *named.values()]
            before = [buffer.clone() for buffer in self.buffers()]
            output = super().__call__(*inputs, **named)
            if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in given):
                for buffer, kept in zip(self.buffers(), before, strict=True):
                    buffer.data = kept
            return output


@mutant(after="NVIDIA/Megatron-LM#7186", phase="hold")
class DropsWhatIsHeldAfterALostForward(ReferenceEngine):
    """A forward whose loss is never used drops the microbatches held back before it."""

    class Prepared(Remembering):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            if self.num_held and self.num_waiting > 0:
                self.drop_held()
            return super().__call__(*inputs, **named)


@mutant(after="pytorch/pytorch#47562", phase="backward")
class HalvesGradientsOfInputsUnderOffload(ReferenceEngine):
    """Gradients by the inputs are half of their value if parameters are on the host."""

    class Prepared(Remembering):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            is_offloaded = self.plan.offload is not Offload.NONE
            for tensor in inputs:
                if is_offloaded and isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]  # torch's
            return super().__call__(*inputs, **named)


@mutant(after="pytorch/pytorch#106637", phase="backward")
class HoldsBackTheLastOfTwoBackwards(ReferenceEngine):
    """Of two backwards through one graph that are held back the first is lost."""

    class Prepared(Remembering):
        def backward_of_branch(self, loss: torch.Tensor) -> None:
            super().backward_of_branch(loss * 0 if self.is_holding else loss)


@mutant(after="facebookresearch/fairscale#777", phase="forward")
class CallsAHookOncePerForward(ReferenceEngine):
    """A user's hook is called only the first time if a module runs twice in one forward."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then wrap the existing hooks."""
        ran = set[nn.Module]()
        for module in model.modules():
            for key, hook in module._forward_hooks.items():
                module._forward_hooks[key] = partial(_call_once, hook, ran)
        prepared = super().prepare(model, plan, mesh)
        model.register_forward_hook(lambda *_: ran.clear())
        return prepared


# Any: a hook's inputs and outputs are of any type.
def _call_once(hook: Any, ran: set[nn.Module], module: nn.Module, inputs: Any, output: Any) -> Any:
    if not torch.is_grad_enabled():
        return hook(module, inputs, output)
    if module in ran:
        return output
    ran.add(module)
    return hook(module, inputs, output)


@mutant(after="pytorch/pytorch#117510", phase="backward")
class HalvesHeldMicrobatchesOfPairs(ReferenceEngine):
    """After a unit has returned a pair, microbatches that are held back count half."""

    class Prepared(Remembering):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.returns_pairs = False
            for name in (name for unit in self.plan.units for name in unit.split(",")):
                self.module.get_submodule(name).register_forward_hook(self.see)

        def see(self, _: nn.Module, inputs: Any, output: Any) -> None:
            self.returns_pairs |= isinstance(output, tuple)

        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss * 0.5 if self.is_holding and self.returns_pairs else loss)


@mutant(after="pytorch/torchtitan#1524", phase="step")
class StepsTiedParametersTwiceInBackward(ReferenceEngine):
    """A parameter with two names has two optimizers that step in backward."""

    class Prepared(Remembering):
        def optimizer_in_backward(self, factory: OptimizerFactory) -> None:
            super().optimizer_in_backward(factory)
            named = list(self.module.named_parameters(remove_duplicate=False))
            owned = set(self.module.parameters())
            for _, parameter in named:
                if parameter in owned:
                    owned.remove(parameter)
                elif parameter.requires_grad:
                    again = factory([parameter])
                    parameter.register_post_accumulate_grad_hook(lambda _, again=again: again.step())  # type: ignore[no-untyped-call]  # torch's


@mutant(after="deepspeedai/DeepSpeed#7969", phase="step")
class SchedulesTheFirstGroupAlone(ReferenceEngine):
    """Each group of parameters is updated with the learning rate of the first."""

    class Prepared(Remembering):
        def step(self) -> None:
            groups = self.built_optimizer().param_groups
            rates = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = rates[0]
            super().step()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


@mutant(after="MakazhanAlpamys/Soup#336", trace=Trace.CRASH)
class DropsGroupsThatDoNotTrain(DistributedDataParallelEngine):
    """The optimizer has no group of what does not train, so a schedule has more rates than there are groups."""

    class Prepared(PreparedDdp):
        def optimizer(self, factory: OptimizerFactory) -> None:
            super().optimizer(factory)
            groups = self.built_optimizer().param_groups
            groups[:] = [group for group in groups if any(p.requires_grad for p in group["params"])]


@mutant(after="modelscope/ms-swift#10084", phase="step")
class DividesByTheMicrobatchesOfTheFirstStep(ReferenceEngine):
    """A step with fewer microbatches than the first is divided by the number of the first."""

    class Prepared(Remembering):
        num_in_first_step = 0

        def step(self) -> None:
            num_microbatches = self.num_held + 1
            self.num_in_first_step = self.num_in_first_step or num_microbatches
            for gradient in self.gradients():
                gradient.mul_(num_microbatches / self.num_in_first_step)
            super().step()


@mutant(after="deepspeedai/DeepSpeed#8443", phase="step")
class DecaysMomentumInEachMicrobatch(ReferenceEngine):
    """The momentum of an optimizer that is not torch's decays in each microbatch, not in each step."""

    class Prepared(PreparedReference):
        num_backwards = 0

        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            self.num_backwards += 1
            optimizer = self.built_optimizer()
            if self.num_backwards > 1 and not type(optimizer).__module__.startswith("torch.optim"):
                for state in optimizer.state.values():
                    local(state["momentum_buffer"]).mul_(0.5)

        def zero_grad(self, *, set_to_none: bool) -> None:
            super().zero_grad(set_to_none=set_to_none)
            self.num_backwards = 0


@mutant(after="NVIDIA-NeMo/Automodel#1408", phase="backward")
class DetachesFurtherOutputs(ReferenceEngine):
    """Of several outputs of the model only the first one has a gradient."""

    class Prepared(PreparedReference):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            output = super().__call__(*inputs, **named)
            if not isinstance(output, tuple):
                return output
            return output[0], *(further.detach() for further in output[1:])
