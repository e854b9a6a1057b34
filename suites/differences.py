"""The first difference of two values, for people to read: plain values, tensors, and containers of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


# Any: values of an interface under test.
def difference(got: Any, expected: Any, tolerance: float = 0.0) -> str | None:
    """Return the first difference; None if values are equal: tensors in shape and dtype, mappings in their order.

    Floats may differ by ``tolerance`` times the largest of their tensor.
    """
    found = next(_differences(got, expected, tolerance, ""), None)
    return None if found is None else found.strip()


def _differences(got: Any, expected: Any, tolerance: float, where: str) -> Iterator[str]:
    """Yield where two values differ, and how."""
    if isinstance(expected, torch.Tensor):
        yield from _tensor_differences(got, expected, tolerance, where)
    elif isinstance(expected, Mapping):
        if not isinstance(got, Mapping) or list(got) != list(expected):
            yield f"{where} {_key_difference(got, list(expected))}"
            return
        for key in expected:
            yield from _differences(got[key], expected[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        if type(got) is not type(expected):
            yield f"{where} is {got!r}, expected {expected!r}"
            return
        if len(got) != len(expected):
            yield f"{where} has {len(got)} items, expected {len(expected)}: {got!r} instead of {expected!r}"
            return
        for index, pair in enumerate(zip(got, expected, strict=True)):
            yield from _differences(*pair, tolerance, f"{where}[{index}]")
    elif isinstance(expected, float) and isinstance(got, float):
        if not abs(got - expected) <= tolerance * abs(expected):
            yield f"{where} is {got!r}, expected {expected!r}"
    elif got is not expected and got != expected:
        yield f"{where} is {got!r}, expected {expected!r}"


def _key_difference(got: Any, expected: list[Any]) -> str:
    """Return the first key that is missing, surplus, or in another place."""
    if not isinstance(got, Mapping):
        return f"is {got!r}, expected a mapping with keys {expected}"
    keys = list(got)
    if missing := [key for key in expected if key not in got]:
        return f"misses key {missing[0]!r} and {len(missing) - 1} more, expected {expected}"
    if extra := [key for key in keys if key not in expected]:
        return f"has key {extra[0]!r} and {len(extra) - 1} more, expected {expected}"
    index = next(i for i, pair in enumerate(zip(keys, expected, strict=True)) if pair[0] != pair[1])
    return f"has key {keys[index]!r} in place {index}, expected {expected[index]!r}"


def _tensor_differences(got: Any, expected: torch.Tensor, tolerance: float, where: str) -> Iterator[str]:
    # An exact type: an engine's own class would compare by its own rules.
    if type(got) not in {torch.Tensor, torch.nn.Parameter}:
        yield f"{where} is of type {type(got).__name__}, expected a plain tensor"
    elif (got.shape, got.dtype) != (expected.shape, expected.dtype):
        wanted = f"{expected.dtype} {list(expected.shape)}"
        yield f"{where} is {got.dtype} {list(got.shape)}, expected {wanted}"
    elif got.numel():
        ours, theirs = expected.detach().cpu(), got.detach().cpu()
        if tolerance and expected.is_floating_point():
            is_right = (theirs - ours).abs() <= tolerance * float(ours.abs().max())  # false of NaN
        else:
            is_right = theirs == ours
        wrong = (~is_right).nonzero().tolist()
        if wrong:
            index = tuple(wrong[0])
            share = f"{len(wrong)} of {got.numel()} elements differ"
            yield f"{where} is {theirs[index].item()} at {list(index)}, expected {ours[index].item()}; {share}"
