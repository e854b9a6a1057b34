"""The plain loop, with notes on the form of tensors where the loop sees them; it does not note values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.engine.contract import Capability
from shardproof.harness.cases.script import Actor, EachMicrobatch

# Subjects of the notes.
OUTPUT_DTYPE = "the dtype of the output"
FORWARD = "the layout of parameters in forward"
LAYOUTS = "the layout of parameters and gradients after backward"
PINNED = "the memory of parameters after backward"
HOMES = "where parameters and gradients are after backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotesForms:
    """Forward and backward of each microbatch, with notes of dtype, layout and device of the loop's tensors.

    A note of several tensors lists every form found, so that a deviating tensor shows.
    """

    demands: ClassVar[frozenset[Capability]] = frozenset()

    def play(self, actor: Actor) -> None:
        model = actor.part("")
        for microbatch in range(actor.num_microbatches):
            with actor.synchronisation(microbatch):
                with _watching(model) as seen:
                    output = actor.forward(microbatch, *actor.batch(microbatch).inputs)
                actor.backward(microbatch, actor.loss(microbatch, output))
            actor.note(OUTPUT_DTYPE, output.dtype)
            actor.note(FORWARD, _joined(seen))
        held = [
            _local(tensor)
            for p in model.parameters()
            for tensor in (p.detach(), p.grad)
            if tensor is not None
        ]
        actor.note(LAYOUTS, _joined(map(_layout, held)))
        shards = [_local(p.detach()) for p in model.parameters()]
        actor.note(PINNED, _joined("pinned" if shard.is_pinned() else "pageable" for shard in shards))
        actor.note(HOMES, _joined(tensor.device.type for tensor in held))


def dtypes_of(unit: str) -> str:
    """Return the subject of the notes about a unit's dtypes."""
    return f"the dtypes of inputs, parameters and output of {unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotesUnitDtypes:
    """Forward and backward of each microbatch, noting the dtypes in which each unit is called, computes and returns."""

    units: tuple[str, ...]
    demands: ClassVar[frozenset[Capability]] = frozenset()

    def play(self, actor: Actor) -> None:
        for unit in self.units:
            self._watch(actor, unit)
        EachMicrobatch().play(actor)

    def _watch(self, actor: Actor, unit: str) -> None:
        module, noted = actor.part(unit), list[str]()

        # Any: a module takes any inputs. Both hooks run after the engine's own, which were registered before.
        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            noted.append(_dtypes(inputs))
            noted.append(_dtypes(module.parameters()))

        def leave(_: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> None:
            actor.note(dtypes_of(unit), ", ".join((*noted, _dtypes([output]))))
            for handle in handles:
                handle.remove()

        handles = (module.register_forward_pre_hook(enter), module.register_forward_hook(leave))


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[str]]:
    """Collect the layouts of each module's own parameters at the start of its forward."""
    seen: list[str] = []

    # Any: a module takes any inputs.
    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.extend(_layout(_local(p.detach())) for p in module.parameters(recurse=False))

    handles = [module.register_forward_pre_hook(look) for module in model.modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layout(tensor: torch.Tensor) -> str:
    return "contiguous" if tensor.is_contiguous() else "strided"


def _dtypes(tensors: Iterable[torch.Tensor]) -> str:
    return _joined(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


def _joined(forms: Iterable[str]) -> str:
    return " and ".join(sorted(set(forms)))
