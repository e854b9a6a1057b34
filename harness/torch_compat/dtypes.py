"""Tensors in other dtypes, complex ones in the counterpart of the same precision; and sparse ones as plain ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn


def cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a tensor of floats in ``dtype``, one of complex numbers in that of pairs of them; integers stay.

    With None everything stays.
    """
    if dtype is None:
        return tensor
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def cast_module(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Do as ``Module.to(dtype)`` does, in place, but keep imaginary parts, which that leaves out."""
    if dtype is None:
        return module
    # As torch's methods do it.
    apply: Callable[[Callable[[torch.Tensor], torch.Tensor]], nn.Module] = module._apply
    return apply(partial(cast, dtype=dtype))


def cast_parameters(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Cast the parameters in place, and leave buffers as they are: what computes in other bits is the weights."""
    for parameter in module.parameters():
        parameter.data = cast(parameter.data, dtype)
    return module


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor as a plain one, and any other as it is."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype round, as integers do not."""
    return dtype.is_floating_point or dtype.is_complex


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of any numbers in float64, or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
