"""The forward calls of a unit whose backward is still to come, and the hooks that tell when each begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

from engine.reference.nested import map_tensors, tensors_in
from engine.reference.torch_internals import inside_backward

__all__ = ["PendingBackwards"]


class PendingBackwards:
    """Counts calls: those whose inputs will tell of the end of their backward, and the others.

    ``on_begin`` is called, as a hook, before backward enters the modules, once or more for each call; ``on_end``
    when it has computed the gradients of all inputs.
    """

    def __init__(self, *, on_begin: Callable[..., None], on_end: Callable[[], None]) -> None:
        self.num_watched = 0
        self._num_others = 0
        self._is_counted = False  # the call under way
        self._on_begin = on_begin
        self._on_end = on_end

    def clear(self) -> None:
        """Expect no backward any more."""
        self.num_watched = self._num_others = 0

    def end_one(self) -> int:
        """Take note that the backward of a watched call has ended; gives how many calls are still to come."""
        self.num_watched = max(0, self.num_watched - 1)
        return self.num_watched + self._num_others

    # Any: whatever a forward takes.
    def watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give the inputs as the modules shall see them, so that the end of backward shows."""
        self._is_counted = False
        if not torch.is_grad_enabled():
            return args, kwargs
        if inside_backward() and self.num_watched + self._num_others:
            self._is_counted = True  # a checkpoint that keeps the first forward's graph
            return args, kwargs
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        if not inputs:
            return args, kwargs
        watched = iter(_Watched.apply(self._on_end, *inputs))
        self.num_watched += 1
        self._is_counted = True

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            return next(watched) if tensor.requires_grad else tensor

        return map_tensors(replace, args), map_tensors(replace, kwargs)

    # Any: as above, and whatever it gives.
    def watch_outputs(self, inputs: Any, output: Any) -> bool:
        """Hook the outputs; says whether there is any that backward may come from."""
        if not torch.is_grad_enabled():
            return False
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        for tensor in outputs:
            tensor.register_hook(self._on_begin)
        for base in _own_bases(outputs, inputs):
            # An in-place change of a view drops the hooks of the view, but goes through its base.
            base.register_prehook(self._on_begin)
        if outputs and not self._is_counted:
            self._num_others += 1
        return bool(outputs)


class _Watched(torch.autograd.Function):
    """The identity on a unit's inputs; its backward is the last thing that the unit's backward does."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, on_end: Callable[[], None], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.on_end = on_end  # type: ignore[attr-defined]  # how autograd functions keep what is no tensor
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.on_end()  # type: ignore[attr-defined]
        return (None, *gradients)


# Any: whatever a forward takes.
def _own_bases(outputs: Iterable[torch.Tensor], inputs: Any) -> list[Node]:
    """Give the autograd nodes of the tensors that outputs are views of, if the module made them itself."""
    bases = [t._base for t in outputs if t._base is not None]
    if not bases:
        return []
    given = {id(t if t._base is None else t._base) for t in tensors_in(inputs)}
    return [base.grad_fn for base in bases if base.grad_fn is not None and id(base) not in given]
