"""What a user's model is asked before it is judged: sizes, calls of its units, time of a pass, dtypes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from shardproof.engine.loading import one_line
from shardproof.harness.cases.batch import Batch, arguments_of, converted
from shardproof.harness.cases.user_model import ModelFacts, UserModel
from shardproof.harness.torch_compat.dtypes import cast, cast_module


def survey(problem: UserModel, units: tuple[str, ...], seldom: Iterable[str]) -> dict[str, Any]:
    """Return the facts of a model as plain values, and the seconds that forward and backward take.

    ``seldom`` names the parameters that had no gradient in some pass.
    """
    model, batch = problem.build(), problem.batch(step=0, microbatch=0, rank=0)
    calls: Counter[str] = Counter()
    for unit in units:
        model.get_submodule(unit).register_forward_pre_hook(partial(_count, calls, unit))
    started = time.monotonic()
    _train(problem, model, batch)
    pass_s = time.monotonic() - started
    facts = ModelFacts(
        frozen=tuple(name for name, parameter in model.named_parameters() if not parameter.requires_grad),
        seldom=tuple(seldom),
        uncounted=_uncounted(model, units, calls),
        not_in_bfloat16=_not_in_bfloat16(problem, model, batch),
    )
    return {"facts": asdict(facts), "pass_s": pass_s}


# Any: what a module is called with.
def _count(calls: Counter[str], unit: str, module: nn.Module, inputs: Any) -> None:
    calls[unit] += 1


def _train(problem: UserModel, model: nn.Module, batch: Batch) -> None:
    args, kwargs = arguments_of(batch.inputs)
    problem.loss_sum(model(*args, **kwargs), batch).backward()  # type: ignore[no-untyped-call]  # of torch's


def _uncounted(model: nn.Module, units: Iterable[str], calls: Counter[str]) -> str:
    """Return why the number of collectives has no closed form."""
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    if len(dtypes) > 1:
        return f"its parameters have several dtypes: {', '.join(sorted(dtypes))}"
    odd = next((unit for unit in units if calls[unit] != 1), None)
    return "" if odd is None else f"its unit {odd!r} is called {calls[odd]} times in one forward"


def _not_in_bfloat16(problem: UserModel, model: nn.Module, batch: Batch) -> str:
    if {parameter.dtype for parameter in model.parameters()} != {torch.float32}:
        return "its parameters are not of float32"
    try:
        given = converted(batch, partial(cast, dtype=torch.bfloat16))
        _train(problem, cast_module(model, torch.bfloat16), given)
    except Exception as error:  # code of the user's may raise anything
        return f"it raises {type(error).__name__} in bfloat16: {one_line(error)[:120]}"
    return ""
