"""Training loops: orders of microbatches, deferred reductions, nested inputs, evaluations between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch

from shardproof.engine.contract import Capability
from shardproof.harness.cases.script import Actor, train_microbatch


class Holding(Enum):
    """What the loop defers until the last microbatch."""

    GRADIENTS = "the whole reduction"
    REPLICAS = "the reduction across replicas alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingBack:
    """A plain loop in which ``units`` defer their reductions until the last microbatch; ``""`` is the root.

    Each unit is set by its own handle; with ``keeps`` they also keep gathered parameters meanwhile.
    """

    units: tuple[str, ...]
    holding: Holding = Holding.GRADIENTS
    keeps: bool = False

    @property
    def demands(self) -> frozenset[Capability]:
        is_whole = self.holding is Holding.GRADIENTS
        used = {Capability.UNIT_SYNC if is_whole else Capability.REPLICA_SYNC}
        return frozenset(used | ({Capability.KEEP_AFTER_BACKWARD} if self.keeps else set()))

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches):
            is_last = microbatch == actor.num_microbatches - 1
            for name in self.units:
                unit = actor.units()[name]
                if self.holding is Holding.GRADIENTS:
                    unit.set_gradient_sync(is_on=is_last)
                else:
                    unit.set_replica_sync(is_on=is_last)
                if self.keeps:
                    unit.set_reshard_after_backward(is_on=is_last)
            train_microbatch(actor, microbatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved:
    """Forwards run ``ahead`` microbatches before backwards, as on a stage of a pipeline.

    One ahead is one-forward-one-backward; as many ahead as there are microbatches runs all forwards first. The script
    marks which backward ends the step.
    """

    ahead: int
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.INTERLEAVE, Capability.UNIT_SYNC})

    def play(self, actor: Actor) -> None:
        num, losses = actor.num_microbatches, dict[int, torch.Tensor]()
        for microbatch in range(num):
            for ahead in range(len(losses), min(microbatch + self.ahead + 1, num)):
                output = actor.forward(ahead, *actor.batch(ahead).inputs)
                losses[ahead] = actor.loss(ahead, output)
            actor.units()[""].set_last_backward(is_last=microbatch == num - 1)
            with actor.synchronisation(microbatch):
                actor.backward(microbatch, losses[microbatch])


@dataclass(frozen=True, slots=True, kw_only=True)
class SumOfForwards:
    """All microbatches go forward; then the sum of their losses goes backward once, as the last microbatch's."""

    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.SUM_OF_FORWARDS})

    def play(self, actor: Actor) -> None:
        losses = []
        for microbatch in range(actor.num_microbatches):
            output = actor.forward(microbatch, *actor.batch(microbatch).inputs)
            losses.append(actor.loss(microbatch, output))
        actor.backward(actor.num_microbatches - 1, torch.stack(losses).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchByBranch:
    """The model returns several outputs; each has its own loss and backward, in the order of ``branches``.

    All of them go through the graph of one forward, and the script marks which backward ends the step. Outputs split
    the columns of the target in order.
    """

    branches: tuple[int, ...]
    demands: ClassVar[frozenset[Capability]] = frozenset({Capability.UNIT_SYNC})

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches):
            batch = actor.batch(microbatch)
            outputs = actor.forward(microbatch, *batch.inputs)
            targets = torch.split(batch.target, [output.shape[1] for output in outputs], dim=1)
            losses = [
                actor.loss(microbatch, output, target)
                for output, target in zip(outputs, targets, strict=True)
            ]
            *earlier, last = self.branches
            actor.units()[""].set_last_backward(is_last=False)
            for branch in earlier:
                actor.backward_of_branch(microbatch, losses[branch])
            actor.units()[""].set_last_backward(is_last=microbatch == actor.num_microbatches - 1)
            actor.backward(microbatch, losses[last])


@dataclass(frozen=True, slots=True, kw_only=True)
class NestInputs:
    """Forward is called with one tensor and a tuple of the others, or with the value that ``packs`` makes of the two.

    They come from the host, as from a loader. Packed values come from the device, because torch's engines move tensors
    inside tuples, lists and dicts, and no engine promises more.
    """

    packs: Callable[[torch.Tensor, tuple[torch.Tensor, ...]], object] | None = None
    demands: ClassVar[frozenset[Capability]] = frozenset()

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches):
            with actor.synchronisation(microbatch):
                first, *others = actor.batch(microbatch).inputs
                if self.packs is None:
                    given: tuple[object, ...] = (first.cpu(), tuple(tensor.cpu() for tensor in others))
                else:
                    given = (self.packs(first, tuple(others)),)
                output = actor.forward(microbatch, *given)
                actor.backward(microbatch, actor.loss(microbatch, output))


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsOn:
    """A plain loop that keeps each output, a slice of each input, and the outputs of ``units``, captured by hooks."""

    units: tuple[str, ...]
    demands: ClassVar[frozenset[Capability]] = frozenset()

    def play(self, actor: Actor) -> None:
        kept: list[torch.Tensor] = []
        for microbatch in range(actor.num_microbatches):
            inputs = actor.batch(microbatch).inputs
            with actor.synchronisation(microbatch):
                output, activations = self._forward(actor, microbatch)
                slices = [tensor[:1] for tensor in inputs]
                actor.hold("an activation", *activations)
                actor.hold("a slice of an input", *slices)
                actor.backward(microbatch, actor.loss(microbatch, output))
            kept += [output.detach(), *activations, *slices]

    # Any: a model takes and returns any values.
    def _forward(self, actor: Actor, microbatch: int) -> tuple[Any, list[torch.Tensor]]:
        taken: list[torch.Tensor] = []

        def take(_: torch.nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> None:
            taken.append(output.detach())

        handles = [actor.part(unit).register_forward_hook(take) for unit in self.units]
        output = actor.forward(microbatch, *actor.batch(microbatch).inputs)
        for handle in handles:
            handle.remove()
        return output, taken
