"""The absolute error between two tensors that may contain infinities, as attention masks do."""

from __future__ import annotations

import math

import torch

from shardproof.harness.torch_compat.dtypes import widened

_PIECE = 2**16  # elements


def deviation(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the absolute error of each element in float64; for complex numbers, their distance.

    Zero where both are equal, infinities included. Infinite where one of them is NaN, or only one is finite.
    """
    one, other = widened(got), widened(expected)
    error = one - other
    error = error.abs() if error.is_complex() else error.abs_()
    # The common case: every tensor of every rank is compared, and the largest error includes NaN.
    if not error.numel() or math.isfinite(error.max().item()):
        return error
    return torch.where(one == other, 0.0, torch.where(torch.isfinite(error), error, math.inf))


def largest_deviation(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest element of `deviation`; large tensors are compared in pieces that fit into the cache."""
    if 0 < got.numel() <= _PIECE and got.shape == expected.shape:
        return deviation(got, expected).max().item()
    pairs = zip(torch.split(got.flatten(), _PIECE), torch.split(expected.flatten(), _PIECE), strict=True)
    return max((deviation(*pair).max().item() for pair in pairs if pair[0].numel()), default=0.0)


def largest(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value; zero if there is none."""
    if tensor.numel() and tensor.is_floating_point() and math.isfinite(most := _extreme(tensor)):
        return most
    finite = widened(tensor[tensor.isfinite()])
    return finite.abs().max().item() if finite.numel() else 0.0


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite."""
    if tensor.numel() and tensor.is_floating_point():
        return math.isfinite(_extreme(tensor))
    return bool(tensor.isfinite().all())


def _extreme(tensor: torch.Tensor) -> float:
    """Return the largest absolute value in one pass over a tensor; NaN if an element is NaN."""
    least, most = (extreme.item() for extreme in tensor.aminmax())
    return max(abs(least), abs(most))
