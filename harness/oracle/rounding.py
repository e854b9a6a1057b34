"""Rounding as another order of the same sums would cause it, operator by operator, and detection of coarse rounding.

[Note: rounded anew] Float64 is no reference if an operator has no float64 kernel or the model itself uses fewer bits.
Then the reference computes in the model's own dtypes. Its noise is measured by perturbing each operator's result: every
element of float32 or more by up to one rounding, one in 64 elements of fewer bits by one step. A sum in another order
changes a float32 result about as much, and flips the last bit of a bfloat16 far more rarely. Whole numbers are not
perturbed: counts, masks and one-hot rows are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from shardproof.harness.torch_compat.private_names import optional
from shardproof.harness.torch_compat.tensor_trees import tensors_in

# Without it the noise of such a model would be only that of its reduction.
_Mode: Any = optional("torch.utils._python_dispatch:TorchDispatchMode") or object
_ONE_IN = 64
_MORE_THAN_HALF = (
    0.75  # the largest step relative to a number: it moves each number by at least half of its own step
)


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a dtype is a float of fewer bits than float32."""
    return dtype.is_floating_point and torch.finfo(dtype).bits < 32


def rounding_anew(seed: int) -> AbstractContextManager[object]:
    """Return a context in which each operator's result is rounded once more, differently for each seed."""
    return nullcontext() if _Mode is object else _RoundsAnew(seed)


def noticing_narrow(notify: Callable[[], None]) -> AbstractContextManager[object]:
    """Return a context in which ``notify`` is called for each operator whose result has fewer bits than float32."""
    return nullcontext() if _Mode is object else _NoticesNarrow(notify)


# Any, from here on: as torch calls a mode.
class _NoticesNarrow(_Mode):  # type: ignore[misc]  # a class of Any
    def __init__(self, notify: Callable[[], None]) -> None:
        super().__init__()
        self._notify = notify

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(is_narrow(tensor.dtype) for tensor in tensors_in(result)):
            self._notify()
        return result


class _RoundsAnew(_Mode):  # type: ignore[misc]  # as above
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        for argument, value in zip(schema.arguments, _in_order(schema, args, kwargs), strict=True):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tensors_in(value):
                    tensor.copy_(self._rounded(tensor))
        if any(returned.alias_info is not None for returned in schema.returns):
            return result  # a view, or an output that was written above
        return self._all_rounded(result)

    def _all_rounded(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return self._rounded(result)
        return type(result)(map(self._all_rounded, result)) if isinstance(result, tuple | list) else result

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dtype.is_floating_point or tensor.layout is not torch.strided or not tensor.numel():
            return tensor
        eps = torch.finfo(tensor.dtype).eps
        drawn = torch.rand(tensor.shape, generator=self._of(tensor.device), device=tensor.device)
        if is_narrow(tensor.dtype):
            steps = (drawn < 0.5 / _ONE_IN).float() - (drawn > 1 - 0.5 / _ONE_IN).float()
            moved = (tensor.float() * (1 + _MORE_THAN_HALF * eps * steps)).to(tensor.dtype)
        else:
            moved = tensor * (1 + eps * (2 * drawn.to(tensor.dtype) - 1))
        return torch.empty_like(tensor).copy_(torch.where(tensor == tensor.trunc(), tensor, moved))

    def _of(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _in_order(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for position, argument in enumerate(schema.arguments):
        yield args[position] if position < len(args) else kwargs.get(argument.name)
