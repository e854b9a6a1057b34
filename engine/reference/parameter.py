"""One managed parameter: what the optimizer owns of it, and the plain tensor that forward computes with."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["WRITE_MARK", "ManagedParameter", "Site", "WriteMark", "is_promise", "promise"]

_MARK = "_is_sharded_elsewhere"
WRITE_MARK = "_write_mark"
"""The attribute of a sharded parameter that holds its ``WriteMark``."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place where a parameter is registered; a shared parameter has several."""

    module: nn.Module
    name: str

    def holds(self) -> nn.Parameter | None:
        """Give what is registered here now."""
        return self.module._parameters.get(self.name)

    def put(self, parameter: nn.Parameter) -> None:
        """Register ``parameter`` here; past a plain setattr, which costs more than the rest of a switch."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = parameter
        else:
            setattr(self.module, self.name, parameter)


class WriteMark:
    """Whom to tell that a parameter was written to, held weakly; a copy or a pickle of it tells nobody."""

    def __init__(self, on_write: Callable[[], None] | None = None) -> None:
        self._on_write = None if on_write is None else weakref.WeakMethod(on_write)

    def __reduce__(self) -> tuple[type[WriteMark], tuple[()]]:
        return (WriteMark, ())

    def tell(self) -> None:
        """Say that the parameter was written to."""
        on_write = None if self._on_write is None else self._on_write()
        if on_write is not None:
            on_write()


def promise(parameter: torch.Tensor) -> torch.Tensor:
    """Make a gradient of zeros, in the memory of one, that stands for what is accumulated elsewhere."""
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def is_promise(gradient: torch.Tensor) -> bool:
    """Whether a gradient was made by `promise`: nothing can be added to its memory."""
    return gradient.dim() > 0 and not any(gradient.stride())


class ManagedParameter(ABC):
    """A parameter in its two forms: this rank's part of it, and the whole of it while it is gathered.

    ``unsharded`` is made once per home in memory and keeps its identity, because autograd saves it in forward and
    reads it in backward: only the memory beneath it comes and goes.
    """

    def __init__(self, *, origin: nn.Parameter, sites: tuple[Site, ...], shape: torch.Size) -> None:
        self.sites = sites
        self.shape = shape
        self.name = sites[0].name
        # The mark is the parameter's own: an id could be another object's by now.
        self.is_tied_elsewhere = getattr(origin, _MARK, False)
        setattr(origin, _MARK, True)
        self.unsharded: nn.Parameter | None = None
        self._held: torch.Tensor | None = None

    @property
    @abstractmethod
    def local(self) -> torch.Tensor:
        """This rank's part."""

    @property
    @abstractmethod
    def owned(self) -> nn.Parameter:
        """What the optimizer updates: the part as a parameter, or a parameter that it lies in."""

    @abstractmethod
    def watch_writes(self, on_write: Callable[[], None]) -> None:
        """Have ``on_write`` called when one of torch's optimizers has stepped over this parameter."""

    @abstractmethod
    def current(self) -> torch.Tensor:
        """Give this rank's part as the modules hold it, replaced or not."""

    @abstractmethod
    def register_unsharded(self) -> None:
        """Let modules see the whole parameter."""

    @abstractmethod
    def register_sharded(self) -> None:
        """Let modules see this rank's part."""

    @abstractmethod
    def accept_gradient(self, local: torch.Tensor) -> None:
        """Add a reduced gradient (this rank's part) to that of what the optimizer owns."""

    @abstractmethod
    def _whole(self, memory: torch.Tensor) -> torch.Tensor:
        """View 1-D memory in natural order as the whole parameter."""

    def dress(self, memory: torch.Tensor, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Make the unsharded parameter over ``memory`` (1-D); ``on_gradient`` runs when its gradient is whole."""
        if self.unsharded is not None and self.unsharded.grad is not None:
            self._held = self.take_gradient(None)  # what waits to be reduced outlives a cast
        self.unsharded = nn.Parameter(self._whole(memory), requires_grad=self.owned.requires_grad)
        self._on_gradient = on_gradient
        self._is_hooked = False
        self._hook()

    def follow_requires_grad(self) -> None:
        """Freeze or thaw the whole parameter as the optimizer's is by now."""
        assert self.unsharded is not None
        if self.unsharded.requires_grad != self.owned.requires_grad:
            self.unsharded.requires_grad_(self.owned.requires_grad)
            self._hook()

    @property
    def has_gradient(self) -> bool:
        """Whether an unsharded gradient waits to be reduced."""
        return self._held is not None or (self.unsharded is not None and self.unsharded.grad is not None)

    def hold_gradient(self, dtype: torch.dtype | None) -> None:
        """Keep the unsharded gradient for a later reduction, summed in ``dtype`` where that is another one."""
        gradient = None if self.unsharded is None else self.unsharded.grad
        if gradient is None or dtype in {None, gradient.dtype}:
            return  # autograd itself goes on summing into .grad
        self._held = self.take_gradient(dtype).to(dtype)

    def take_gradient(self, dtype: torch.dtype | None) -> torch.Tensor:
        """Hand over what was held plus the fresh gradient: plain, of shape ``shape``; zeros if none.

        ``dtype`` is that of a reduction over tensor-parallel ranks, should one be needed.
        """
        held, self._held = self._held, None
        fresh = None
        if self.unsharded is not None:
            fresh, self.unsharded.grad = self.unsharded.grad, None
        if fresh is not None:
            fresh = self._plain(fresh, dtype)
            return fresh if held is None else held.add_(fresh)
        if held is not None:
            return held
        assert self.unsharded is not None
        return torch.zeros(self.shape, dtype=dtype or self.unsharded.dtype, device=self.unsharded.device)

    def drop_gradient(self) -> None:
        """Forget unsharded gradients: those of an iteration that failed."""
        self._held = None
        if self.unsharded is not None:
            self.unsharded.grad = None

    def _hook(self) -> None:
        if self.unsharded is not None and self.unsharded.requires_grad and not self._is_hooked:
            # Weak: the collector does not see a cycle that leads through autograd's hooks.
            arrive = weakref.WeakMethod(self._on_gradient)

            def on_gradient(unsharded: torch.Tensor) -> None:
                method = arrive()
                if method is not None:
                    method(unsharded)

            self.unsharded.register_post_accumulate_grad_hook(on_gradient)
            self._is_hooked = True

    def _plain(self, gradient: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Give a whole gradient as a plain tensor."""
        return gradient
