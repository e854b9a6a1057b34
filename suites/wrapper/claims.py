"""Claims of an exercise: what was got beside what is right, noted on each rank for a law to judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shardproof import InterfaceBench

__all__ = ["RIGHT", "Claims"]

RIGHT = "as it should be"
# How an interface says no. Anything else that is raised is an accident.
_REFUSALS = (AssertionError, NotImplementedError, RuntimeError, ValueError)
_LONGEST = 400  # a note is read by a person


class Claims:
    """Notes of each subject that it is right, or what was got instead."""

    def __init__(self, bench: InterfaceBench) -> None:
        self._note = bench.note

    # Any: values of the interface under test, plain or nested.
    def same(self, subject: str, got: Any, expected: Any) -> None:
        """Claim that two values are equal: tensors in shape, dtype and every bit, mappings in their order too."""
        self._tell(subject, next(_differences(got, expected, 0.0, ""), None))

    def near(self, subject: str, got: Any, expected: Any, *, tolerance: float) -> None:
        """Claim as `same`, but that floats may differ by that share of the largest of their tensor."""
        self._tell(subject, next(_differences(got, expected, tolerance, ""), None))

    def refuses(self, subject: str, call: Callable[[], object], *errors: type[Exception]) -> None:
        """Claim that a call raises one of these errors; by default any by which an interface says no."""
        try:
            result = call()
        except Exception as error:  # told in the note: the other ranks must go on and tell theirs
            is_refusal = isinstance(error, errors or _REFUSALS)
            self._tell(subject, None if is_refusal else f"{type(error).__name__}: {error}")
        else:
            self._tell(subject, f"accepted, with {result!r}")

    def _tell(self, subject: str, difference: str | None) -> None:
        self._note(subject, RIGHT if difference is None else difference.strip()[:_LONGEST])


def _differences(got: Any, expected: Any, tolerance: float, where: str) -> Iterator[str]:
    """Say where two values differ, and how."""
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
    """Name the first key that is missing, that is one too many, or that is in another place."""
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
