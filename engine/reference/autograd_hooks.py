"""Hooks on a forward's inputs and outputs that report when its backward begins and ends; code without autograd."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

from shardproof.engine.reference.torch_private import inside_backward, inside_transform, outside_transforms

# Any: a module may take and return anything.


def without_autograd() -> AbstractContextManager[object]:
    """Return a context without autograd, inference mode and transforms; it switches off only the modes that are on."""
    if torch.is_inference_mode_enabled() or inside_transform():
        outside = ExitStack()
        outside.enter_context(outside_transforms())
        outside.enter_context(torch.inference_mode(False))
        outside.enter_context(torch.no_grad())
        return outside
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor inside ``value``, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with every tensor changed, in the order of ``tensors_in``.

    A container in which nothing changes is returned itself, so that a module may write to it for its caller.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        parts = [map_tensors(change, item) for item in value]
        return value if _same(parts, value) else _sequence_like(value, parts)
    if isinstance(value, Mapping):
        items = {key: map_tensors(change, item) for key, item in value.items()}
        return value if _same(items.values(), value.values()) else _mapping_like(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: map_tensors(change, getattr(value, name)) for name in names}
        is_same = _same(fields.values(), [getattr(value, name) for name in names])
        return value if is_same else _dataclass_like(value, fields)
    return value


def _same(changed: Iterable[Any], given: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(changed, given, strict=True))


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    rebuilt: Any = copy.copy(value)  # keeps a subclass's attributes besides its items
    for key, item in items.items():
        rebuilt[key] = item
    return rebuilt


def _sequence_like(value: Any, parts: list[Any]) -> Any:
    if type(value) is list:
        return parts
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _dataclass_like(value: Any, fields: dict[str, Any]) -> Any:
    rebuilt = copy.copy(value)
    for name, field in fields.items():
        # Not dataclasses.replace, which rejects fields that __init__ does not take; frozen dataclasses reject setattr.
        object.__setattr__(rebuilt, name, field)
    return rebuilt


@dataclasses.dataclass(eq=False)
class WatchedForward:
    """One forward through all modules of a ``fully_shard`` call: counts its calls, and the ends of their backwards."""

    num_calls: int = 0  # those whose inputs will show the end of their backward
    num_others: int = 0
    num_ended: int = 0  # in one backward or, if the graph is retained, in several

    @property
    def num_pending(self) -> int:
        """How many calls the backward that runs has still to end of those whose end it will show."""
        return -self.num_ended % self.num_calls

    @property
    def is_over(self) -> bool:
        """Whether a backward is through with all of its calls."""
        return not self.num_others and not self.num_pending


class PendingBackwards:
    """Counts the calls whose inputs will show the end of their backward, and the other calls.

    A hook calls ``on_begin`` before backward enters the modules, once or more for each call. ``on_end`` is called
    when backward has computed the gradients of all inputs, with the forward that contains the call.
    """

    def __init__(self, *, on_begin: Callable[..., None], on_end: Callable[[WatchedForward], None]) -> None:
        self.num_watched = 0
        self._num_ended = self._num_ended_before = 0  # watched calls: in this backward, and the previous one
        self._forward = WatchedForward()  # the current forward
        self._num_others = 0
        self._is_counted = False  # for the current call
        self._on_begin = on_begin
        self._on_end = on_end

    def clear(self) -> None:
        """Expect no further backward."""
        self.num_watched = self._num_others = 0
        self._num_ended_before, self._num_ended = self._num_ended, 0

    def begin_forward(self) -> None:
        """Count the calls that follow as those of another forward."""
        self._forward = WatchedForward()

    def end_one(self, forward: WatchedForward) -> int:
        """Record that the backward of a watched call has ended; return the number of calls still to come.

        It includes the calls of the same forward, even if no further backward was expected. A retained graph is
        expected to end as many calls as in the previous backward. Calls that do not show their end come last.
        """
        forward.num_ended += 1
        self._num_ended += 1
        is_again = forward.num_ended > forward.num_calls and not self.num_watched
        num_retained = self._num_ended_before - self._num_ended if is_again else 0
        self.num_watched = max(0, self.num_watched - 1)
        num_pending = self.num_watched + self._num_others
        return max(num_pending, forward.num_pending, forward.num_others, num_retained)

    # Any: the arguments of a forward.
    def watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs for the modules, hooked to detect the end of backward."""
        self._is_counted = False
        if not torch.is_grad_enabled():
            return args, kwargs
        if inside_backward() and self.num_watched + self._num_others:
            self._is_counted = True  # a checkpoint that keeps the first forward's graph
            return args, kwargs
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        if not inputs:
            return args, kwargs
        watched = iter(_watched(partial(self._on_end, self._forward), inputs))
        self.num_watched += 1
        self._forward.num_calls += 1
        self._is_counted = True

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            return next(watched) if tensor.requires_grad else tensor

        return map_tensors(replace, args), map_tensors(replace, kwargs)

    # Any: as above, and the result of a forward.
    def watch_outputs(self, inputs: Any, output: Any) -> tuple[Any, bool]:
        """Return the output, hooked, and whether backward can start from any part of it."""
        if not torch.is_grad_enabled():
            return output, False
        if inside_transform():
            # A tensor of the transform does not tell that what it wraps requires a gradient.
            outputs = [t for t in tensors_in(output) if t.dtype.is_floating_point or t.dtype.is_complex]
            watched = dict(zip(map(id, outputs), _watched(self._on_begin, outputs), strict=True))
            output = map_tensors(lambda t: watched.get(id(t), t), output)
        else:
            outputs = [t for t in tensors_in(output) if t.requires_grad]
            for tensor in outputs:
                tensor.register_hook(self._on_begin)
        for base in _own_bases(outputs, inputs):
            # An in-place change of a view drops the view's hooks, but its backward goes through the base.
            base.register_prehook(self._on_begin)
        if outputs and not self._is_counted:
            self._num_others += 1
            self._forward.num_others += 1
        return output, bool(outputs)


def _watched(on_backward: Callable[..., None], tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the tensors, with a call of ``on_backward`` when backward passes by all of them."""
    function = _WatchedInTransform if inside_transform() else _Watched
    return tuple(function.apply(on_backward, *tensors))


class _Watched(torch.autograd.Function):
    """The identity; on a unit's inputs its backward runs last in the unit's backward."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, on_end: Callable[[], None], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.on_end = on_end  # type: ignore[attr-defined]  # autograd functions keep non-tensors as attributes
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def jvp(ctx: FunctionCtx, _: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pass tangents on, as views, because forward returns its inputs."""
        return tuple(tangent.view_as(tangent) for tangent in tangents)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.on_end()  # type: ignore[attr-defined]
        return (None, *gradients)


class _WatchedInTransform(_Watched):
    """The form that functorch asks for; outside of its transforms it is slower."""

    @staticmethod
    def forward(on_end: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return inputs

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.on_end = inputs[0]  # type: ignore[attr-defined]  # as above
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(
        info: object, dims: tuple[Any, ...], on_end: Callable[[], None], *inputs: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
        """Watch the tensors of the whole batch: their backward runs once."""
        return _watched(on_end, inputs), dims[1:]


# Any: the arguments of a forward.
def _own_bases(outputs: Iterable[torch.Tensor], inputs: Any) -> list[Node]:
    """Return the autograd nodes of the outputs' base tensors, if the module made them itself."""
    bases = [t._base for t in outputs if t._base is not None]
    if not bases:
        return []
    given = {id(t if t._base is None else t._base) for t in tensors_in(inputs)}
    return [base.grad_fn for base in bases if base.grad_fn is not None and id(base) not in given]
