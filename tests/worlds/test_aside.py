"""A process aside answers in bytes within a deadline, and never stays behind."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardproof import Clip, Schedule, Training
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_BUFFERS, MLP_EVEN, ModelProblem
from shardproof.fixtures.random_draws import DROPPED
from shardproof.harness.errors import HarnessBug, ShardproofError, UsageError
from shardproof.harness.oracle import oracle_answer
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.oracle.oracle_answer import ask_oracle
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.worlds.processes.fresh_process import NoAnswerError, ask
from shardproof.harness.worlds.processes.lineage import has_ended
from tests.shell import ROOT

TRAINING = Training(problem=MLP_EVEN, optimizer=ADAMW, schedule=Schedule(steps=2))
LIMIT_S = 60.0


class Named(nn.Linear):
    """A layer whose parameter has the name of a leaf in files."""

    def __init__(self, _: torch.Generator) -> None:
        super().__init__(16, 8, bias=False)
        self.tensor = self.weight
        del self.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.tensor.T


def _raises(_: torch.Generator) -> nn.Module:
    raise ZeroDivisionError("no such model")


def _refuses(_: torch.Generator) -> nn.Module:
    raise UsageError("the model", expected="one", got="none", hint="another")


def _sleeps(_: torch.Generator) -> nn.Module:
    time.sleep(1e6)
    return nn.Identity()


def _exits(_: torch.Generator) -> nn.Module:
    os._exit(7)


def _write_pid_and_sleep(path: Path) -> bytes:
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    time.sleep(1e6)
    return b""


def _zeros(num_bytes: int) -> bytes:
    return bytes(num_bytes)


def _assert_equal(found: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
    elif isinstance(expected, Mapping):
        assert isinstance(found, Mapping)
        assert list(found) == list(expected)
        for key, value in expected.items():
            _assert_equal(found[key], value)
    else:
        assert found == expected


@pytest.mark.parametrize("problem", [MLP_EVEN, MLP_BUFFERS], ids=lambda p: p.name)
@pytest.mark.parametrize("explains", [True, False])
def test_an_oracle_comes_back_as_it_was(problem: ModelProblem, explains: bool) -> None:
    clipped = replace(TRAINING.schedule, clip=Clip(max_norm=0.1))
    training = replace(TRAINING, problem=problem, schedule=clipped)
    found = ask_oracle(training, 3, limit_s=LIMIT_S, explains=explains)
    expected = run_oracle(training, 3, explains=explains)
    for name in (
        "world_size",
        "plan",
        "initial",
        "optimizer_state",
        "noise",
        "constants",
        "dtypes",
        "is_exact",
        "explains",
        "state_before",
    ):
        _assert_equal(getattr(found, name), getattr(expected, name))
    for ours, theirs in zip(found.buffers, expected.buffers, strict=True):
        _assert_equal(ours, theirs)
    for mine, yours in zip(found.steps, expected.steps, strict=True):
        for name in ("losses", "contributions", "sizes", "gradients", "parameters", "norm", "lagging"):
            _assert_equal(getattr(mine, name), getattr(yours, name))


def test_a_parameter_may_be_called_tensor() -> None:
    training = replace(TRAINING, problem=replace(MLP_EVEN, model=Named, units=()))
    assert list(ask_oracle(training, 2, limit_s=LIMIT_S).initial) == ["tensor"]


@pytest.mark.parametrize(
    ("model", "limit_s", "why"),
    [
        (_raises, LIMIT_S, r"the oracle of mlp_even: .*ZeroDivisionError: no such model"),
        (_sleeps, 2.0, r"the oracle of mlp_even: .* took longer than 2 s"),
        (_exits, LIMIT_S, r"the oracle of mlp_even: .* ended without an answer, with exit status 7"),
    ],
)
def test_a_model_that_breaks_is_named(
    model: Callable[[torch.Generator], nn.Module], limit_s: float, why: str
) -> None:
    training = replace(TRAINING, problem=replace(MLP_EVEN, model=model))
    with pytest.raises(HarnessBug, match=f"(?s){why}"):
        ask_oracle(training, 2, limit_s=limit_s)


def test_an_error_of_ours_keeps_its_kind() -> None:
    training = replace(TRAINING, problem=replace(MLP_EVEN, model=_refuses))
    with pytest.raises(UsageError, match="the model: expected one, got none; try another"):
        ask_oracle(training, 2, limit_s=LIMIT_S)


def test_an_answer_that_is_too_long_is_refused() -> None:
    assert ask(LIMIT_S, 10**7, _zeros, 3 * 10**6) == bytes(3 * 10**6)
    with pytest.raises(NoAnswerError, match="answered with 11 bytes, and 10 are the most"):
        ask(LIMIT_S, 10, _zeros, 11)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_process_ends_with_the_one_that_asks(how: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    body = (
        "import sys, pathlib\n"
        "from shardproof.harness.worlds.processes.fresh_process import ask\n"
        "from tests.worlds.test_aside import _write_pid_and_sleep\n"
        "ask(1e6, 10, _write_pid_and_sleep, pathlib.Path(sys.argv[1]))\n"
    )
    asking = subprocess.Popen(
        [sys.executable, "-c", body, str(file)], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        _wait_until(file.exists)
        asking.send_signal(how)
        asking.wait(30)
        pid = int(file.read_text())
        _wait_until(lambda: has_ended(pid))
    finally:
        asking.kill()
        asking.wait()


def _wait_until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("answer") / "tensors"
    assert oracle_answer._answer(TRAINING, 2, path, False, "cpu") == b""
    return path.read_bytes()


def _answering(written: bytes) -> Callable[..., bytes]:
    # Any: as `ask` is called.
    def answered(*args: Any) -> bytes:
        next(arg for arg in args if isinstance(arg, Path)).write_bytes(written)
        return b""

    return answered


@settings(max_examples=100, derandomize=True, deadline=None)
@given(data=st.data())
def test_a_mutated_answer_is_an_error_of_ours(answer: bytes, data: st.DataObject) -> None:
    mutated = bytearray(answer)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        mutated[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle_answer, "ask", _answering(bytes(mutated)))
        with contextlib.suppress(ShardproofError):
            ask_oracle(TRAINING, 2, limit_s=LIMIT_S)


def test_bytes_of_a_pickle_run_no_code(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (exec, (f"open({str(tmp_path / 'I_WAS_RUN')!r}, 'w')",))

    buffer = io.BytesIO()
    torch.save({"tree": Trap(), "data": torch.zeros(1)}, buffer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle_answer, "ask", _answering(buffer.getvalue()))
        with pytest.raises(HarnessBug, match="an answer that cannot be read"):
            ask_oracle(TRAINING, 2, limit_s=LIMIT_S)
    assert not (tmp_path / "I_WAS_RUN").exists()


def test_every_field_of_an_oracle_comes_back() -> None:
    # The caller knows the plan, and the device is that of the ranks.
    names = {field.name for field in fields(OracleObservation)} - {"plan", "device"}
    assert set(oracle_answer._plain(run_oracle(TRAINING, 2))) == names
    drawing = Training(problem=DROPPED, optimizer=ADAMW, schedule=Schedule(steps=1))
    assert ask_oracle(drawing, 2, limit_s=LIMIT_S).draws
