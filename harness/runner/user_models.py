"""What must be known of a user's model before it is judged, found in a process of its own; mistakes get a sentence.

The model's code runs in that process, in the oracle's and in ranks, never in the process that judges.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardproof.engine.capability import Capability
from shardproof.engine.loading import LoadError, one_line
from shardproof.harness.cases.batch import Batch, arguments_of, converted, tensors_of
from shardproof.harness.cases.user_model import UserModel, UserOptimizer, definition, matching_units
from shardproof.harness.errors import UsageError
from shardproof.harness.runner.model_survey import facts_of, survey
from shardproof.harness.torch_compat.dtypes import cast, cast_module
from shardproof.harness.verdicts.vacuity import ZERO_BESIDE
from shardproof.harness.worlds.processes.fresh_process import NoAnswerError, ask

_LONGEST_ANSWER = 2**24
_METHODS = ("build", "batch", "loss")
_PLACES = ((0, 0), (0, 1), (1, 0), (1, 1))  # steps and ranks whose gradients are looked at
_SIZES = (3, 3, 4)  # steps, microbatches and ranks whose batches are looked at
_HINT = "docs/check-your-model.md"


def absolute(spec: str) -> str:
    """Return a name whose file, if it is one, is found from any folder."""
    location, _, attribute = spec.rpartition(":")
    return f"{Path(location).resolve()}:{attribute}" if location.endswith(".py") else spec


def read_model(spec: str, *, limit_s: float) -> tuple[UserModel, UserOptimizer | None]:
    """Return the model that ``spec`` names, and its optimizer if it has one of its own.

    Raises UsageError, with the cause, for a model that cannot be judged.
    """
    spec = absolute(spec)
    try:
        answer = json.loads(ask(limit_s, _LONGEST_ANSWER, _answer, spec))
        if "problem" in answer:
            raise _refusal(spec, str(answer["problem"]))
        _pass_s[spec] = float(answer["pass_s"])
        return _read(answer, spec)
    except NoAnswerError as error:
        raise _refusal(spec, f"a process that {error}; try a smaller configuration, or --deadline") from None
    except (ValueError, TypeError, KeyError) as error:
        raise _refusal(spec, f"an answer that cannot be read: {error!r}") from error


_pass_s: dict[str, float] = {}  # no part of a model: an equal one may take longer


@cache
def known_model(spec: str, limit_s: float) -> tuple[UserModel, UserOptimizer | None]:
    """Return what `read_model` does, read once per process: the command and the suite ask for the same model."""
    return read_model(spec, limit_s=limit_s)


def pass_seconds(spec: str) -> float:
    """Return how long one forward and backward of a model took when it was read; 0 if it was not."""
    return _pass_s.get(absolute(spec), 0.0)


# Any, here and below: JSON.
def _read(answer: Any, spec: str) -> tuple[UserModel, UserOptimizer | None]:
    model = UserModel(
        spec=spec,
        name=str(answer["name"]),
        digest=str(answer["digest"]),
        units=tuple(answer["units"]),
        idle=tuple(answer["idle"]),
        demands=frozenset(Capability[name] for name in answer["demands"]),
        facts=facts_of(answer["facts"]),
    )
    optimizer = UserOptimizer(spec=spec, digest=answer["digest"]) if answer["has_optimizer"] else None
    return model, optimizer


def _refusal(spec: str, got: str) -> UsageError:
    return UsageError(f"model {spec}", expected="build(), batch() and loss() of a model", got=got, hint=_HINT)


def _answer(spec: str) -> bytes:
    try:
        plain = _facts(spec)
    except (LoadError, ValueError) as error:
        plain = {"problem": str(error)}
    return json.dumps(plain).encode()


def _facts(spec: str) -> dict[str, Any]:
    defined = _called("making it", lambda: definition(spec))
    missing = [name for name in _METHODS if not callable(getattr(defined, name, None))]
    if missing:
        raise ValueError(f"{spec.rpartition(':')[2]} without {', '.join(f'{name}()' for name in missing)}")
    source = inspect.getsourcefile(inspect.getmodule(defined.build) or type(defined))
    digest = hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""
    problem = UserModel(spec=spec, name=spec.rpartition(":")[2], digest=digest, units=())
    model = _built_alike(problem)
    units = matching_units(model, getattr(defined, "units", ()))
    _check_batches(problem)
    _check_shapes(problem, model)
    places = list(_gradients(problem, model))
    if places[0] == places[1]:
        raise ValueError(
            "the gradients of two ranks are equal although their data differ, so that a missing reduction could not "
            "show: does loss() depend on the batch?"
        )
    seldom = {name for found in places for name, size in found.items() if size is None}
    return {
        "name": problem.name,
        "digest": digest,
        "units": units,
        **_unused(places),
        **_called("a training step", lambda: survey(problem, units, seldom)),
        "has_optimizer": callable(getattr(defined, "optimizer", None)),
    }


def _called(what: str, function: Any) -> Any:
    """Call the user's code; an exception of any kind becomes a ValueError that names the call."""
    try:
        return function()
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} raised {type(error).__name__}: {one_line(error)}") from error


def _built_alike(problem: UserModel) -> nn.Module:
    """Build the model twice; raises ValueError unless both have parameters, and the same."""
    model: nn.Module
    again: nn.Module
    model, again = (_called("build()", problem.build) for _ in range(2))
    parameters, others = dict(model.named_parameters()), dict(again.named_parameters())
    if not parameters:
        raise ValueError("build() returned a model without parameters")
    for name, parameter in parameters.items():
        if name not in others or not torch.equal(parameter, others[name]):
            raise ValueError(
                f"build() returned other values of {name!r} the second time: every rank and the reference must build "
                "the same model; draw from torch's default generator, which is seeded"
            )
    return model


def _check_batches(problem: UserModel) -> None:
    """Raise ValueError where ranks, steps or microbatches are given equal data: a missing reduction would not show."""
    first = _batch(problem)
    if not list(tensors_of(first)):
        raise ValueError("batch() returned no tensor")
    others: Mapping[str, Mapping[str, int]] = {
        "ranks": {"rank": 1},
        "steps": {"step": 1},
        "microbatches": {"microbatch": 1},
    }
    for what, place in others.items():
        if _are_equal(first, _batch(problem, **place)):
            raise ValueError(
                f"batch() returned equal data for two {what}, so that a missing reduction could not show; draw from "
                "the generator that it is given"
            )


def _check_shapes(problem: UserModel, model: nn.Module) -> None:
    """Raise ValueError where batch(), or forward with a batch of other shapes than before, fails at some place."""
    seen: set[tuple[torch.Size, ...]] = set()
    for step, microbatch, rank in product(*map(range, _SIZES)):
        where = f"step {step}, microbatch {microbatch}, rank {rank}"
        batch: Batch = _called(
            f"batch() of {where}",
            lambda s=step, m=microbatch, r=rank: problem.batch(step=s, microbatch=m, rank=r),
        )
        shapes = tuple(tensor.shape for tensor in tensors_of(batch))
        if shapes not in seen:
            args, kwargs = arguments_of(batch.inputs)
            what = f"the model's forward with the batch of {where}, of shapes {', '.join(str(list(s)) for s in shapes)}"
            with torch.no_grad():
                _called(what, lambda a=args, k=kwargs: model(*a, **k))
        seen.add(shapes)


def _batch(problem: UserModel, step: int = 0, microbatch: int = 0, rank: int = 0) -> Batch:
    batch: Batch = _called("batch()", lambda: problem.batch(step=step, microbatch=microbatch, rank=rank))
    return batch


def _are_equal(one: Batch, other: Batch) -> bool:
    pairs = list(zip(tensors_of(one), tensors_of(other), strict=False))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def _unused(places: Sequence[Mapping[str, float | None]]) -> dict[str, list[str]]:
    """Name the parameters that no loss reaches, but for rounding, and what that demands of an engine.

    ``places`` holds the largest gradient of each parameter in some steps and on some ranks; None: it had none.
    """
    largest = {name: max(found[name] or 0.0 for found in places) for name in places[0]}
    zero = ZERO_BESIDE * max(largest.values())
    if not zero:
        raise ValueError("no parameter has a gradient: the loss depends on none of them")
    unused = [frozenset(name for name, size in found.items() if size is None) for found in places]
    demands = [Capability.UNUSED] if any(unused) else []
    demands += [Capability.RANK_DEPENDENT] if len(set(unused)) > 1 else []
    return {
        "idle": [name for name, size in largest.items() if size <= zero],
        "demands": [capability.name for capability in demands],
    }


def _gradients(problem: UserModel, model: nn.Module) -> Iterator[dict[str, float | None]]:
    """Yield the largest gradient of each parameter that trains, for some steps and ranks; makes the model float64."""
    cast_module(model, torch.float64)
    for step, rank in _PLACES:
        batch = converted(_batch(problem, step=step, rank=rank), lambda tensor: cast(tensor, torch.float64))
        args, kwargs = arguments_of(batch.inputs)
        model.zero_grad()
        output = _called("the model's forward in float64", lambda a=args, k=kwargs: model(*a, **k))
        loss = _called("loss()", lambda o=output, b=batch: problem.loss_sum(o, b))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(f"loss() returned {_described(loss)}, not one number that depends on the model")
        if not bool(loss.isfinite()):
            raise ValueError(f"loss() is {loss.item()} in step {step} on rank {rank}, before any training")
        _called("backward in float64", loss.backward)
        yield {name: _largest(p) for name, p in model.named_parameters()}


def _largest(parameter: nn.Parameter) -> float | None:
    if not parameter.requires_grad or not parameter.numel():
        return 0.0
    return None if parameter.grad is None else float(parameter.grad.abs().max())


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}{'' if value.requires_grad else ' without a gradient'}"
    return f"a {type(value).__name__}"
