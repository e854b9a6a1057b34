"""The oracle with probes: what each rank's modules compute in float64, how far float32 deviates, and a file of both."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from shardproof.harness.cases.draws import drawing_in
from shardproof.harness.cases.training import Training
from shardproof.harness.errors import HarnessBug
from shardproof.harness.oracle.absolute_error import largest_deviation
from shardproof.harness.oracle.oracle_actor import Batches
from shardproof.harness.oracle.oracle_noise import noise_device
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.oracle.oracle_training import kept_nowhere, train
from shardproof.harness.oracle.reduction_orders import EXACT_ORDER, Summation, reference_order, reordering
from shardproof.harness.torch_compat.accelerators import use_only
from shardproof.harness.torch_compat.dispatch import drawing_apart
from shardproof.harness.tracing.module_probes import ModuleProbes, Moment, names_in
from shardproof.harness.tracing.probe_point import (
    ComputeTurn,
    ProbeFile,
    ProbePoint,
    ProbeWriter,
    Stored,
    ValueKind,
    read_at,
)
from shardproof.harness.worlds.processes.fresh_process import NoAnswerError, ask
from shardproof.harness.worlds.threads.together import Inside

_NUM_NOISE_RUNS = 2
_LONGEST = 2**20  # bytes, of an error message


class OracleProbes:
    """The probes of one training of the oracle; ``see`` receives each value."""

    def __init__(self) -> None:
        self._moments: dict[int, Moment] = {}
        self._modules: list[ModuleProbes] = []
        self._hooks = ExitStack()  # held, or the hooks would be removed

    def see(self, point: ProbePoint, tensor: torch.Tensor) -> None:
        """Receive a value."""
        raise NotImplementedError

    def follow(self, models: Sequence[nn.Module]) -> None:
        """Hook the models that compute in the place of the ranks."""
        for rank, model in enumerate(models):
            self.at(rank, step=-1, microbatch=-1)
            probes = ModuleProbes(
                names_in(model),
                partial(self._moments.__getitem__, rank),
                partial(self._of_rank, rank),
                sees_backward=False,
            )
            self._hooks.enter_context(probes.watching(model))
            self._modules.append(probes)

    def at(self, rank: int, *, step: int, microbatch: int, is_backward: bool = False) -> None:
        """Note what a rank does next."""
        self._moments[rank] = Moment(step=step, microbatch=microbatch, is_backward=is_backward)

    def loss(self, rank: int, loss: torch.Tensor) -> None:
        """See the loss of a microbatch."""
        self._modules[rank].see(ValueKind.LOSS, None, "loss", loss.detach(), ComputeTurn.FORWARD)

    def shared(self, kind: ValueKind, step: int, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """See tensors that all ranks share, once backward has ended."""
        for modules in self._modules:
            modules.flush()
        for name, tensor in tensors.items():
            if tensor is not None:
                self.see(ProbePoint(kind=kind, step=step, name=name), tensor.detach())

    def _of_rank(self, rank: int, point: ProbePoint, tensor: torch.Tensor) -> None:
        self.see(replace(point, rank=rank), tensor)


class _Writing(OracleProbes):
    """Write the exact values."""

    def __init__(self, writer: ProbeWriter) -> None:
        super().__init__()
        self._writer = writer

    def see(self, point: ProbePoint, tensor: torch.Tensor) -> None:
        self._writer.write(point, tensor)


class _Comparing(OracleProbes):
    """Compare the values of another run with the exact ones."""

    def __init__(self, file: int, exact: Mapping[ProbePoint, Stored], noise: dict[ProbePoint, float]) -> None:
        super().__init__()
        self._file, self._exact, self._noise = file, exact, noise

    def see(self, point: ProbePoint, tensor: torch.Tensor) -> None:
        stored = self._exact.get(point)
        if stored is not None and stored.shape == tuple(tensor.shape):
            error = largest_deviation(tensor.cpu(), read_at(self._file, stored))
            self._noise[point] = max(self._noise.get(point, 0.0), error)


class ProbeReference:
    """The right value of each place, and the noise of each."""

    def __init__(self, path: Path) -> None:
        self._file = ProbeFile(path)
        noise: list[float] = self._file.more["noise"]
        self._found = {s.point: (s, n) for s, n in zip(self._file.stored, noise, strict=True)}

    def __contains__(self, point: ProbePoint) -> bool:
        return point in self._found

    @property
    def points(self) -> Iterable[ProbePoint]:
        """All places."""
        return self._found

    def __getitem__(self, point: ProbePoint) -> torch.Tensor:
        return self._file.tensor(self._found[point][0])

    def noise(self, point: ProbePoint) -> float:
        """Return the largest deviation of a float32 run."""
        return self._found[point][1]


def ask_probes(
    training: Training, world_size: int, path: Path, *, limit_s: float, device: str = "cpu"
) -> ProbeReference:
    """Train the oracle with probes in another process; the values stay in a file at ``path``.

    Raises HarnessBug if the model raises, or after ``limit_s`` seconds.
    """
    try:
        answer = ask(limit_s, _LONGEST, _answer, training, world_size, path, device)
    except NoAnswerError as error:
        answer = str(error).encode()
    if answer:
        raise HarnessBug(
            "the oracle with probes",
            expected="the training on one process",
            got=answer.decode(),
            hint="reporting this",
        )
    return ProbeReference(path)


def _answer(training: Training, world_size: int, path: Path, device: str) -> bytes:
    use_only(device)
    torch.compiler.set_stance("force_eager")
    try:
        with drawing_apart():
            _write(training, world_size, path, device)
    except Exception:
        return json.dumps(traceback.format_exc()[-_LONGEST // 2 :]).encode()
    return b""


def _write(training: Training, world_size: int, path: Path, device: str) -> None:
    batches = Batches(training.problem)
    order = reference_order(training.problem.is_widened, training.convert)
    writer, seen = _exact(training, world_size, path, order, batches)
    if seen.draws and training.problem.is_widened:
        dtype = training.plan.compute_dtype or training.convert or torch.float32
        writer, _ = _exact(training, world_size, path, EXACT_ORDER, batches, partial(drawing_in, dtype))
    exact = {stored.point: stored for stored in writer.stored}
    noise: dict[ProbePoint, float] = {}
    there = noise_device(training.problem, device)
    with path.open("rb") as file:
        for number in range(_NUM_NOISE_RUNS):
            # Rows keep their places, or activations could not be compared.
            run = reordering(number, training.plan, training.convert)
            run = replace(run, keeps_rows=True, device=there)
            compared = _Comparing(file.fileno(), exact, noise)
            train(training, world_size, run, kept_nowhere, batches, probes=compared)
    writer.close(noise=[noise.get(stored.point, 0.0) for stored in writer.stored])


def _exact(
    training: Training,
    world_size: int,
    path: Path,
    order: Summation,
    batches: Batches,
    drawing: Inside | None = None,
) -> tuple[ProbeWriter, OracleObservation]:
    with suppress(FileNotFoundError):
        path.unlink()
    writer = ProbeWriter(path)
    inside = {} if drawing is None else {"drawing": drawing}
    seen = train(training, world_size, order, kept_nowhere, batches, probes=_Writing(writer), **inside)
    writer.flush()
    return writer, seen
