"""Probes at the boundaries of modules: copies what a call of a module sees and makes, in forward and in backward.

Nothing is changed: hooks copy, and gradients are seen by hooks of tensors, which add no node to the graph.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.harness.torch_compat.tensor_trees import tensors_in
from shardproof.harness.tracing.probe_point import ComputeTurn, ProbePoint, ValueKind, sampled

# Parts of names that torch's wrappers add.
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where a rank is in its loop."""

    step: int
    microbatch: int
    is_backward: bool


Names = Mapping[
    str, Mapping[str, str]
]  # of each module: its own parameters, and the whole name of each; "" if shared


def names_in(model: nn.Module) -> Names:
    """Return the parameters that each module owns; a parameter of several modules has no whole name."""
    times = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {
        name: {
            own: (f"{name}.{own}" if name else own) if times[id(p)] == 1 else ""
            for own, p in module.named_parameters(recurse=False)
        }
        for name, module in model.named_modules()
    }


class ModuleProbes:
    """Hooks on all modules of one rank's model."""

    def __init__(
        self,
        names: Names,
        moment: Callable[[], Moment],
        see: Callable[[ProbePoint, torch.Tensor], None],
        *,
        sees_backward: bool,
    ) -> None:
        self._names, self._moment, self._see = names, moment, see
        self._sees_backward = sees_backward  # parameters in backward, which an engine may have gathered again
        self._calls: Counter[ProbePoint] = Counter()
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}
        self._local: dict[str, torch.Tensor] = {}
        self._hooked_shapes: dict[str, tuple[int, ...]] = {}  # of the parameters whose gradients are seen
        self._at: Moment | None = None
        self.hidden: list[str] = []  # compiled modules, inside which nothing is seen

    @contextmanager
    def watching(self, model: nn.Module, original: Callable[[str], str] = str) -> Iterator[None]:
        """Hook the modules that have a name of the original model, the innermost of those that share one."""
        found: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            if _is_compiled(module):  # hooks inside would be compiled too
                self.hidden.append(name)
            plain = ".".join(part for part in original(name).split(".") if part not in _WRAPPERS)
            if plain in self._names and not any(
                name != h and f"{name}.".startswith(f"{h}.") for h in self.hidden
            ):
                found[plain] = module
        handles = []
        for name, module in found.items():
            hooks = _ModuleHooks(self, name)
            handles.append(module.register_forward_pre_hook(hooks.enter, with_kwargs=True))
            handles.append(module.register_forward_hook(hooks.leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def turn(self) -> ComputeTurn:
        """Return whether a call of a module is the first or a recomputation."""
        return ComputeTurn.RECOMPUTE if self._now().is_backward else ComputeTurn.FORWARD

    def see(
        self, kind: ValueKind, module: str | None, name: str, tensor: torch.Tensor, turn: ComputeTurn
    ) -> None:
        """Copy a value, unless its form says nothing or its memory is not there."""
        if isinstance(tensor, DTensor) or tensor.layout is not torch.strided or not _is_there(tensor):
            return
        now = self._now()
        point = ProbePoint(
            kind=kind, step=now.step, microbatch=now.microbatch, module=module, name=name, turn=turn
        )
        call = self._calls[point]
        self._calls[point] += 1
        with torch.no_grad():
            self._see(replace(point, call=call), sampled(tensor.detach()))

    def see_all(self, kind: ValueKind, module: str, values: Any, turn: ComputeTurn) -> None:
        """Copy the tensors among inputs or outputs, and hook their gradients."""
        gradient = ValueKind.INPUT_GRADIENT if kind is ValueKind.INPUT else ValueKind.OUTPUT_GRADIENT
        for place, tensor in enumerate(tensors_in(values)):
            self.see(kind, module, str(place), tensor, turn)
            # Engines pass the inputs of inner modules on as tensors of their own, which have a part of the gradient.
            is_seen = kind is ValueKind.OUTPUT or not module
            if is_seen and tensor.requires_grad and self._is_new(tensor):
                hook = _GradientHook(self, gradient, module, str(place))
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch

    def see_parameters(self, module: nn.Module, name: str, turn: ComputeTurn) -> None:
        """Copy a module's own parameters; in forward, hook their gradients."""
        for own, whole in self._names[name].items():
            parameter = getattr(module, own, None)
            if not isinstance(parameter, torch.Tensor):
                continue
            self.see(ValueKind.PARAMETER, name, own, parameter, turn)
            is_hooked = whole and parameter.requires_grad and turn is not ComputeTurn.BACKWARD
            if is_hooked and not isinstance(parameter, DTensor) and self._is_new(parameter):
                self._hooked_shapes[whole] = tuple(parameter.shape)
                parameter.register_hook(_LocalHook(self, whole))  # type: ignore[no-untyped-call]  # as above

    def see_backward(self, module: nn.Module, name: str, output: Any) -> None:
        """Copy a module's parameters once more when its backward begins, after the engine's own hooks."""
        node = next((t.grad_fn for t in tensors_in(output) if t.grad_fn is not None), None)
        if node is not None and self._sees_backward and self._names[name]:
            node.register_prehook(lambda *_: self.see_parameters(module, name, ComputeTurn.BACKWARD))

    def add_local(self, name: str, gradient: torch.Tensor) -> None:
        """Add to the gradient of a parameter by this microbatch; it is complete when backward has ended."""
        if not self._now().is_backward:
            return  # of another rank, which has the same parameters in an oracle
        with torch.no_grad():
            found = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            self._local[name] = self._local[name] + found if name in self._local else found.clone()

    def flush(self) -> None:
        """Take what backward has left on the parameters."""
        local, self._local = self._local, {}
        at = self._at
        if local:  # what backward did not reach has a gradient of zeros
            zeros = ((n, torch.zeros(shape)) for n, shape in self._hooked_shapes.items() if n not in local)
            local |= dict(zeros)
        for name, gradient in local.items():
            if at is not None and not isinstance(gradient, DTensor):
                point = ProbePoint(
                    kind=ValueKind.LOCAL_GRADIENT, step=at.step, microbatch=at.microbatch, name=name
                )
                self._see(point, sampled(gradient))

    def _now(self) -> Moment:
        now = self._moment()
        if self._at is not None and (now.step, now.microbatch) != (self._at.step, self._at.microbatch):
            self.flush()
            if now.step != self._at.step:
                self._hooked = {key: ref for key, ref in self._hooked.items() if ref() is not None}
        self._at = now
        return now

    def _is_new(self, tensor: torch.Tensor) -> bool:
        known = self._hooked.get(id(tensor))
        if known is not None and known() is tensor:
            return False
        self._hooked[id(tensor)] = weakref.ref(tensor)
        return True


class _ModuleHooks:
    """The hooks of one module."""

    def __init__(self, probes: ModuleProbes, name: str) -> None:
        self._probes, self._name = probes, name

    # Any, here and below: a module takes and returns any type.
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        turn = self._probes.turn()
        self._probes.see_parameters(module, self._name, turn)
        for own, buffer in module.named_buffers(recurse=False):
            self._probes.see(ValueKind.BUFFER, self._name, own, buffer, turn)
        self._probes.see_all(ValueKind.INPUT, self._name, [*args, *kwargs.values()], turn)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._probes.see_all(ValueKind.OUTPUT, self._name, output, self._probes.turn())
        self._probes.see_backward(module, self._name, output)


@dataclass(frozen=True, slots=True, eq=False)
class _GradientHook:
    probes: ModuleProbes
    kind: ValueKind
    module: str
    place: str

    def __call__(self, gradient: torch.Tensor) -> None:
        self.probes.see(self.kind, self.module, self.place, gradient, ComputeTurn.BACKWARD)


@dataclass(frozen=True, slots=True, eq=False)
class _LocalHook:
    probes: ModuleProbes
    name: str

    def __call__(self, gradient: torch.Tensor) -> None:
        self.probes.add_local(self.name, gradient)


def _is_compiled(module: nn.Module) -> bool:
    is_wrapped = type(module).__name__ == "OptimizedModule"
    return is_wrapped or getattr(module, "_compiled_call_impl", None) is not None


def _is_there(tensor: torch.Tensor) -> bool:
    """Whether the elements have memory, which engines free between uses."""
    if tensor.is_meta or not tensor.numel():
        return False
    last = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()
