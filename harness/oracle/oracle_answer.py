"""Requests an oracle from a process of its own: the model's code runs there, and the answer is a file of tensors."""

from __future__ import annotations

import json
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from shardproof.harness.cases.training import Training
from shardproof.harness.cases.user_model import is_communicating
from shardproof.harness.errors import EngineError, HarnessBug, MachineError, ShardproofError, UsageError
from shardproof.harness.oracle.kept_oracle import KeptOracle
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.oracle.oracle_observation import (
    FirstStep,
    OracleObservation,
    OracleStep,
    PieceSizes,
    Quantity,
    TensorKey,
)
from shardproof.harness.records.tensor_file import TensorWriter, dtype_name, dtype_of, read_tree
from shardproof.harness.torch_compat.accelerators import use_only
from shardproof.harness.worlds.machine import machine_fault
from shardproof.harness.worlds.processes.fresh_process import NoAnswerError, ask
from shardproof.harness.worlds.threads.together import together

_LONGEST = 2**20  # bytes, of an error message
_ERRORS: Mapping[str, type[ShardproofError]] = {
    e.__name__: e for e in (UsageError, EngineError, MachineError, HarnessBug)
}


def ask_oracle(
    training: Training,
    world_size: int,
    *,
    limit_s: float,
    store: KeptOracle | None = None,
    folder: Path | None = None,
    explains: bool = False,
    device: str = "cpu",
) -> OracleObservation:
    """Compute the oracle of a training in another process, or use the stored one unless it must ``explain`` a failure.

    Its tensors are in an unlinked file on the disk of ``folder``. Raises ShardproofError if the model raises, or after
    ``limit_s`` seconds.
    """
    if store and not explains and store.is_whole():
        return _read(store.path, training)
    with tempfile.TemporaryDirectory(prefix="oracle-", dir=folder) as scratch:
        path = Path(scratch) / "tensors"
        try:
            answer = ask(limit_s, _LONGEST, _answer, training, world_size, path, explains, device)
        except NoAnswerError as error:
            raise _failure(training, f"the process that computes it {error}") from None
        if answer:
            raise _raised(answer, training)
        oracle = _read(path, training)
        if store:
            store.write(path)
        return oracle


def _read(path: Path, training: Training) -> OracleObservation:
    try:
        return _observation(read_tree(path, is_mapped=True), training)
    except Exception as error:  # the errors of a file that is not an oracle
        raise _failure(training, f"an answer that cannot be read: {error!r}") from error


def _raised(answer: bytes, training: Training) -> ShardproofError:
    try:
        kind, fields, text = json.loads(answer)
        if kind not in _ERRORS:
            return _failure(training, str(text))
        what, expected, got, hint = map(str, fields)
        return _ERRORS[kind](what, expected=expected, got=got, hint=hint)
    except ValueError as error:
        return _failure(training, f"an answer that cannot be read: {error!r}")


def _failure(training: Training, got: str) -> HarnessBug:
    return HarnessBug(
        f"the oracle of {training.problem.name}",
        expected="the training on one process",
        got=got,
        hint="the model on one process, without an engine",
    )


def _answer(training: Training, world_size: int, path: Path, explains: bool, device: str) -> bytes:
    """Write the oracle to a file; returns an exception of the model as JSON."""
    use_only(device)
    torch.compiler.set_stance("force_eager")  # the reference is computed by the model's own code
    warnings.simplefilter("ignore")  # those of the model were printed when it was studied
    try:
        if is_communicating(training.problem):
            # Libraries may remember whether there were ranks when they were first asked.
            together(world_size, lambda rank: training.problem.build())
        with TensorWriter(path) as writer:
            writer.finish(
                _plain(run_oracle(training, world_size, writer.keep, explains=explains, device=device))
            )
    except Exception as raised:
        error = machine_fault(raised) or raised
        fields = [str(arg) for arg in error.args] if isinstance(error, ShardproofError) else []
        text = "".join(traceback.format_exception(error))[-_LONGEST // 2 :]
        return json.dumps([type(error).__name__, fields, text]).encode()
    return b""


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
                "sizes": {n: [s.total, s.absolute, *s.of_ranks] for n, s in step.sizes.items()},
                "norm": step.norm,
                "lagging": step.lagging,
                "lagging_losses": step.lagging_losses,
            }
            for step in oracle.steps
        ],
        "optimizer_state": oracle.optimizer_state,
        "buffers": list(oracle.buffers),
        "noise": [[*_spelled(place), value] for place, value in oracle.noise.items()],
        "scales": [[*_spelled(place), value] for place, value in oracle.scales.items()],
        "constants": sorted(oracle.constants),
        "dtypes": [[*_spelled(place), dtype_name(dtype)] for place, dtype in oracle.dtypes.items()],
        "is_exact": oracle.is_exact,
        "draws": oracle.draws,
        "is_widened": oracle.is_widened,
        "is_trained_before": oracle.is_trained_before,
        "untrained": sorted(oracle.untrained),
        "state_before": oracle.state_before,
        "buffers_before": list(oracle.buffers_before),
        "explains": oracle.explains,
        "still": oracle.still,
        "still_noise": [[*_spelled(place), value] for place, value in oracle.still_noise.items()],
        "first": oracle.first and {f.name: getattr(oracle.first, f.name) for f in fields(FirstStep)},
    }


def _observation(plain: dict[str, Any], training: Training) -> OracleObservation:
    return OracleObservation(
        world_size=plain["world_size"],
        plan=training.plan,
        initial=plain["initial"],
        steps=tuple(OracleStep(**{**step, "sizes": _sizes(step["sizes"])}) for step in plain["steps"]),
        optimizer_state=plain["optimizer_state"],
        buffers=tuple(plain["buffers"]),
        noise={_place(*spelled): value for *spelled, value in plain["noise"]},
        scales={_place(*spelled): value for *spelled, value in plain["scales"]},
        constants=frozenset(plain["constants"]),
        dtypes={_place(*spelled): dtype_of(name) for *spelled, name in plain["dtypes"]},
        is_exact=plain["is_exact"],
        draws=plain["draws"],
        is_widened=plain["is_widened"],
        is_trained_before=plain["is_trained_before"],
        untrained=frozenset(plain["untrained"]),
        state_before=plain["state_before"],
        buffers_before=tuple(plain["buffers_before"]),
        explains=plain["explains"],
        still=plain["still"],
        still_noise={_place(*spelled): value for *spelled, value in plain["still_noise"]},
        first=plain["first"] and FirstStep(**plain["first"]),
    )


def _sizes(plain: dict[str, list[float]]) -> dict[str, PieceSizes]:
    return {
        name: PieceSizes(total=total, absolute=absolute, of_ranks=tuple(of_ranks))
        for name, (total, absolute, *of_ranks) in plain.items()
    }


def _spelled(place: TensorKey) -> tuple[str, int, str]:
    return (place.quantity.name, place.step, place.name)


def _place(quantity: str, step: int, name: str) -> TensorKey:
    return TensorKey(quantity=Quantity[quantity], step=step, name=name)
