"""How far one tensor lies from another, where infinities may be meant: masks of attention are full of them."""

from __future__ import annotations

import math

import torch

from shardproof.harness.torch_compat.dtypes import widened

__all__ = ["deviation", "largest"]


def deviation(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the absolute error of each element in float64; that of complex numbers is their distance.

    Zero where both are the same, infinities included; infinite where one of them is no number, or only one is finite.
    """
    one, other = widened(got), widened(expected)
    error = (one - other).abs()
    # Almost always, and every tensor of every rank is compared: the largest tells of all of them, NaN included.
    if not error.numel() or math.isfinite(error.max().item()):
        return error
    return torch.where(one == other, 0.0, torch.where(torch.isfinite(error), error, math.inf))


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value among those that are finite; zero where there are none."""
    if tensor.numel() and tensor.is_floating_point() and math.isfinite(most := tensor.abs().max().item()):
        return most
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0
