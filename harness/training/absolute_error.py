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
    if bool(error.isfinite().all()):  # almost always, and every tensor of every rank is compared
        return error
    return torch.where(one == other, 0.0, torch.where(torch.isfinite(error), error, math.inf))


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value among those that are finite; zero where there are none."""
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0
