"""The arguments of a user's own training step: a model and optimizers, on an engine's ranks and in the reference.

[Note: own steps] A class may define ``step(model, batch, *optimizers)`` in place of ``loss``. The step runs forward,
backward and updates as the user's loop does, and returns its losses. It may take several backwards, update several
optimizers, average weights, or accumulate by weights of its own. The reference runs it on all ranks at once, each with
a model of its own, and averages gradients over ranks at the end of each backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn


# Any, from here on: a user's model and step take and return any values.
class ModelInStep:
    """A model in a user's step: callable, with the attributes of the modules; the first that has one provides it."""

    def __init__(
        self,
        forward: Callable[..., Any],
        backward: Callable[[torch.Tensor], None],
        modules: Sequence[nn.Module],
    ) -> None:
        self._forward = forward
        self._modules = modules
        self.backward = backward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"the model of step() has no attribute {name!r}")


class OptimizerInStep:
    """An optimizer in a user's step, whose ``step`` and ``zero_grad`` an engine may own."""

    def __init__(
        self,
        part: torch.optim.Optimizer,
        step: Callable[[torch.optim.Optimizer], None],
        zero_grad: Callable[[torch.optim.Optimizer, bool], None],
    ) -> None:
        self._part, self._step, self._zero_grad = part, step, zero_grad

    def step(self) -> None:
        self._step(self._part)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._zero_grad(self._part, set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)


class SeveralOptimizers(torch.optim.Optimizer):
    """Several optimizers as one, with one state; ``chosen`` are those that step and clear, all unless set."""

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        self.chosen: Sequence[torch.optim.Optimizer] = self.parts
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            self.state.update(part.state)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # it returns no loss
        for part in self.chosen:
            part.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.chosen:
            part.zero_grad(set_to_none)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Replace state and groups, as loading does, in each part too."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that a user's step gets."""
    return optimizer.parts if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def losses_in(returned: Any) -> Iterator[float]:
    """Yield the numbers in the return value of a step: one, several, or none."""
    if isinstance(returned, Mapping):
        returned = tuple(returned.values())
    if isinstance(returned, tuple | list):
        for each in returned:
            yield from losses_in(each)
    elif isinstance(returned, torch.Tensor):
        yield float(returned.detach())
    elif returned is not None:
        yield float(returned)
