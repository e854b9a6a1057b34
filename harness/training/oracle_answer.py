"""Asking for an oracle in a process of its own: the model's code runs there, and tensors come back as data."""

from __future__ import annotations

import io
import traceback
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from shardproof.harness.cases.training import Training
from shardproof.harness.errors import EngineError, HarnessBug, ShardproofError, UsageError
from shardproof.harness.records.observation import dtype_name, dtype_of, read_tree, write_tree
from shardproof.harness.training.kept_oracle import KeptOracle
from shardproof.harness.training.oracle import (
    FirstStep,
    OracleObservation,
    OracleStep,
    Quantity,
    TensorKey,
    run_oracle,
)
from shardproof.harness.worlds.processes.fresh_process import NoAnswerError, ask

__all__ = ["ask_oracle"]

_LONGEST = 2**33  # bytes: of each parameter there are its gradients of every rank, microbatch and step
_ERRORS: Mapping[str, type[ShardproofError]] = {e.__name__: e for e in (UsageError, EngineError, HarnessBug)}


def ask_oracle(
    training: Training, world_size: int, *, limit_s: float, kept: KeptOracle | None = None
) -> OracleObservation:
    """Compute the oracle of a training aside, or take the one that is kept.

    Raises ShardproofError if the model raises, or after ``limit_s`` seconds.
    """
    found = kept.read() if kept else None
    try:
        answer = found or ask(limit_s, _LONGEST, _answer, training, world_size)
    except NoAnswerError as error:
        raise _failure(training, f"the process that computes it {error}") from None
    try:
        plain = read_tree(io.BytesIO(answer))
        if "error" not in plain:
            if kept and not found:
                kept.write(answer)
            return _observation(plain, training)
    except Exception as error:  # torch raises a different type for each way in which bytes can be no tensors
        raise _failure(training, f"an answer that cannot be read: {error!r}") from error
    kind, fields, text = plain["error"]
    if kind in _ERRORS:
        what, expected, got, hint = fields
        raise _ERRORS[kind](what, expected=expected, got=got, hint=hint)
    raise _failure(training, text)


def _failure(training: Training, got: str) -> HarnessBug:
    return HarnessBug(
        f"the oracle of {training.problem.name}",
        expected="the training on one process",
        got=got,
        hint="the model on one process, without an engine",
    )


def _answer(training: Training, world_size: int) -> bytes:
    buffer = io.BytesIO()
    torch.compiler.set_stance("force_eager")  # the reference is what the model's own code says
    try:
        write_tree(_plain(run_oracle(training, world_size)), buffer)
    except Exception as error:
        fields = [str(arg) for arg in error.args] if isinstance(error, ShardproofError) else []
        text = "".join(traceback.format_exception(error))
        buffer = io.BytesIO()
        write_tree({"error": [type(error).__name__, fields, text]}, buffer)
    return buffer.getvalue()


# Any, from here on: trees of plain values and tensors.
def _plain(oracle: OracleObservation) -> dict[str, Any]:
    return {
        "world_size": oracle.world_size,
        "initial": oracle.initial,
        "steps": [
            {
                "losses": step.losses,
                "contributions": step.contributions,
                "gradients": step.gradients,
                "parameters": step.parameters,
                "norm": step.norm,
                "lagging": step.lagging,
                "lagging_losses": step.lagging_losses,
            }
            for step in oracle.steps
        ],
        "optimizer_state": oracle.optimizer_state,
        "buffers": list(oracle.buffers),
        "noise": [[*_spelled(place), value] for place, value in oracle.noise.items()],
        "constants": sorted(oracle.constants),
        "dtypes": [[*_spelled(place), dtype_name(dtype)] for place, dtype in oracle.dtypes.items()],
        "is_exact": oracle.is_exact,
        "draws": oracle.draws,
        "is_widened": oracle.is_widened,
        "untrained": sorted(oracle.untrained),
        "state_before": oracle.state_before,
        "first": oracle.first and {f.name: getattr(oracle.first, f.name) for f in fields(FirstStep)},
    }


def _observation(plain: dict[str, Any], training: Training) -> OracleObservation:
    return OracleObservation(
        world_size=plain["world_size"],
        plan=training.plan,
        initial=plain["initial"],
        steps=tuple(OracleStep(**step) for step in plain["steps"]),
        optimizer_state=plain["optimizer_state"],
        buffers=tuple(plain["buffers"]),
        noise={_place(*spelled): value for *spelled, value in plain["noise"]},
        constants=frozenset(plain["constants"]),
        dtypes={_place(*spelled): dtype_of(name) for *spelled, name in plain["dtypes"]},
        is_exact=plain["is_exact"],
        draws=plain["draws"],
        is_widened=plain["is_widened"],
        untrained=frozenset(plain["untrained"]),
        state_before=plain["state_before"],
        first=plain["first"] and FirstStep(**plain["first"]),
    )


def _spelled(place: TensorKey) -> tuple[str, int, str]:
    return (place.quantity.name, place.step, place.name)


def _place(quantity: str, step: int, name: str) -> TensorKey:
    return TensorKey(quantity=Quantity[quantity], step=step, name=name)
