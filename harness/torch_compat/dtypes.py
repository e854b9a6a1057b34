"""Casts of tensors to other dtypes, complex ones to the complex dtype of that precision, sparse to dense; and bytes."""

from __future__ import annotations

from collections.abc import Callable, Set
from ctypes import string_at
from functools import partial

import torch
from torch import nn


def cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a float tensor in ``dtype``, a complex one in the complex dtype of that precision; integers are unchanged.

    With None nothing changes.
    """
    if dtype is None:
        return tensor
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def cast_module(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Like ``Module.to(dtype)``, in place, but without dropping imaginary parts."""
    if dtype is None:
        return module
    # as torch's own methods do
    apply: Callable[[Callable[[torch.Tensor], torch.Tensor]], nn.Module] = module._apply
    return apply(partial(cast, dtype=dtype))


def cast_parameters(
    module: nn.Module, dtype: torch.dtype | None, *, uncast: Set[nn.Parameter] = frozenset()
) -> nn.Module:
    """Cast the parameters in place but ``uncast``, and no buffers: only the weights compute in other precision."""
    for parameter in module.parameters():
        if parameter not in uncast:
            parameter.data = cast(parameter.data, dtype)
    return module


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor as a dense one, and any other unchanged."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether a dtype rounds; integers do not."""
    return dtype.is_floating_point or dtype.is_complex


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a numeric tensor in float64, or in complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


# Attributes of this type cannot be set, so what is read through it is torch's own.
_TENSOR: type[torch.Tensor] = torch.Tensor.__base__  # type: ignore[assignment]  # its own name is private


def num_bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a strided tensor's elements."""
    return _TENSOR.numel(tensor) * _TENSOR.element_size(tensor)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached, contiguous tensor on the CPU with these values."""
    plain = _TENSOR.contiguous(_TENSOR.cpu(_TENSOR.detach(tensor)))
    return _TENSOR.resolve_neg(_TENSOR.resolve_conj(plain))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Copy the bytes of a tensor's elements, in order."""
    plain = on_host(tensor)
    return string_at(_TENSOR.data_ptr(plain), num_bytes_of(plain))
