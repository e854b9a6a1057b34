"""Rounding as another order of the same sums would cause it, operator by operator, and detection of coarse rounding.

[Note: rounded anew] Float64 is no reference if an operator has no float64 kernel or the model itself uses fewer bits.
Then the reference computes in the model's own dtypes. Its noise is measured by perturbing each operator's result: every
element of float32 or more by up to one rounding, one in 64 elements of fewer bits by one step, and each single number,
on which all elements of others may depend. A sum in another order changes a float32 result about as much, and flips the
last bit of a bfloat16 far more rarely. Whole numbers are not perturbed: counts, masks and one-hot rows are exact in any
order.
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
_BLOCK = 65_521  # a prime: rows of a tensor do not all get the same numbers
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


class _Dice:
    """The random numbers of one run on one device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device
        # Drawn once: an operator takes them from a random place on. Twice, so that it need not turn them round.
        block = torch.rand(_BLOCK, generator=self._generator, device=device, dtype=torch.float64)
        self._block = (2 * block - 1).repeat(2)

    def places(self, numel: int) -> torch.Tensor:
        """Return the places of one element in ``_ONE_IN``, on average; always that of a single number, as a norm is."""
        lucky = torch.rand((), generator=self._generator, device=self._device)
        count = int(numel / _ONE_IN + float(lucky)) if numel > 1 else 1
        return torch.randint(numel, (count,), generator=self._generator, device=self._device)

    def signs(self, count: int) -> torch.Tensor:
        return torch.randint(2, (count,), generator=self._generator, device=self._device) * 2.0 - 1.0

    def between(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return numbers between -1 and 1."""
        start = int(torch.randint(_BLOCK, (), generator=self._generator, device=self._device))
        block = self._block[start : start + min(numel, _BLOCK)].to(dtype)
        return block.repeat(-(-numel // _BLOCK))[:numel] if numel > _BLOCK else block


class _RoundsAnew(_Mode):  # type: ignore[misc]  # as above
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._dice: dict[torch.device, _Dice] = {}

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
        if tensor.device not in self._dice:
            self._dice[tensor.device] = _Dice(self._seed, tensor.device)
        dice, flat = self._dice[tensor.device], tensor.reshape(-1).clone()
        (_step_some if is_narrow(tensor.dtype) else _round_all)(flat, dice)
        return torch.empty_like(tensor).copy_(flat.view(tensor.shape))


def _step_some(flat: torch.Tensor, dice: _Dice) -> None:
    """Move some elements by one step of their dtype, in place."""
    places = dice.places(flat.numel())
    before = flat[places]
    change = _MORE_THAN_HALF * torch.finfo(flat.dtype).eps * dice.signs(len(places))
    flat[places] = torch.where(
        before == before.trunc(), before, (before.float() * (1 + change)).to(flat.dtype)
    )


def _round_all(flat: torch.Tensor, dice: _Dice) -> None:
    """Move each element by up to one rounding, in place."""
    change = torch.finfo(flat.dtype).eps * dice.between(flat.numel(), flat.dtype)
    flat.mul_(torch.where(flat == flat.trunc(), 0.0, change).add_(1.0))


def _in_order(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for position, argument in enumerate(schema.arguments):
        yield args[position] if position < len(args) else kwargs.get(argument.name)
