"""What one rank of a training showed: tensors by step and name, kept in one file that is read as data.

torch.save writes each tensor as an entry of its own in an archive: that takes longer than a small training.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardproof.engine.contract import Cut, Masters, NoGradient, Shard
from shardproof.harness.errors import UnreadableError
from shardproof.harness.tracing.codec import decode, encode
from shardproof.harness.tracing.events import EventLog
from shardproof.harness.tracing.ledger import Ledger
from shardproof.harness.tracing.memory.census_report import CensusEntry
from shardproof.harness.tracing.memory.memory_report import ROWS, LifetimeReport
from shardproof.harness.tracing.races.race_report import RACES, RaceReport

# The only key of an object that stands for a tensor: where it begins, its dtype and shape. No parameter can have this
# name: torch refuses dots.
_LEAF = "."
# Bound before an engine is imported, which may replace them in their modules.
_Encoder, _save = json.JSONEncoder, torch.save
_ALIGNMENT_BYTES = 16  # so that the buffer can be read as any dtype


# Any, throughout: a tree of what JSON knows, and tensors.
def write_tree(tree: Any, path: Path | BinaryIO) -> None:
    """Write dicts with string keys, sequences, CPU tensors, and what JSON knows; sequences are read as lists."""
    writer = _Writer()
    text = _Encoder(default=writer.leaf).encode(tree)
    _save({"tree": text, "data": writer.data()}, path)


def read_tree(path: Path | BinaryIO, unfinite: Callable[[str], Any] = float) -> Any:
    """Read what `write_tree` wrote, without running code of the file; a broken file raises what torch or json do.

    ``unfinite`` reads the literals of floats that are not finite.
    """
    stored = torch.load(path, weights_only=True)
    data = stored["data"]
    return json.loads(stored["tree"], object_hook=lambda found: _tensor(found, data), parse_constant=unfinite)


def _as_text(literal: str) -> str:
    """Return a float's text as the codec writes it; observations of older releases hold literals."""
    return str(float(literal))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as files have it."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Read what `dtype_name` spelled; raises ValueError for any other name of torch's."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a dtype, got {name!r}")
    return dtype


class _Writer:
    """Collects the bytes of tensors, each padded."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []
        self._num_bytes = 0

    def leaf(self, value: Any) -> dict[str, Any]:
        """Take a tensor, give what stands for it; anything else is no part of a tree."""
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"write_tree: expected tensors and what JSON knows, got {type(value).__name__}")
        plain = value.detach().contiguous().flatten().view(torch.uint8)
        padding = -plain.numel() % _ALIGNMENT_BYTES
        start = self._num_bytes
        self._pieces += [plain, plain.new_zeros(padding)]
        self._num_bytes += plain.numel() + padding
        return {_LEAF: [start, dtype_name(value.dtype), list(value.shape)]}

    def data(self) -> torch.Tensor:
        """Return all bytes so far: uint8[bytes]."""
        return torch.cat([torch.empty(0, dtype=torch.uint8), *self._pieces])


def _tensor(found: dict[str, Any], data: torch.Tensor) -> Any:
    if found.keys() != {_LEAF}:
        return found
    start, name, shape = found[_LEAF]
    dtype = dtype_of(name)
    return data[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)


Shards = Mapping[str, Shard]

_ENCODER = json.JSONEncoder()  # made before an engine is imported, which may replace json.dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that was so at a moment of a step: of a unit, of an output, of the engine."""

    moment: str
    subject: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepObservation:
    """One optimizer step on one rank.

    ``losses``: this rank's losses in the order of the script, one for each microbatch where that is a plain one,
    on the scale of the global mean times the number of ranks with data. ``gradients``: after the last backward,
    clipped if so asked, before the optimizer step; None where the engine has none. ``parameters``: after the
    optimizer step. ``norm``: what clipping returned. ``facts`` and ``snapshots``: what the script had looked
    at on the way, snapshots being the parameters as the module showed them, by moment.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, Shard | None]
    parameters: Shards
    norm: float | None = None
    facts: tuple[Fact, ...] = ()
    snapshots: Mapping[str, Shards] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """One rank of one training: parameters after prepare, each step, state and buffers at the end, ledger.

    ``input_digest`` is a hash of all data the rank was given, so that equal data on two ranks shows.
    ``repeat_digests`` are hashes of all that each of the repeated trainings observed. ``race_report`` is what the
    watch over streams found in all of them, and ``lifetime_report`` what that over memory saw; None where there
    was none. ``course`` is empty where a training was kept before there was one. ``cut`` is what the engine says of
    its flat pieces, ``no_gradient`` what it shows for none, ``masters`` what its optimizer
    updates. ``counts`` is the census, empty where none was taken.
    """

    rank: int
    input_digest: str
    initial: Shards
    steps: tuple[StepObservation, ...]
    optimizer_state: Shards
    buffers: Shards
    ledger: Ledger
    repeat_digests: tuple[str, ...] = ()
    race_report: RaceReport | None = None
    lifetime_report: LifetimeReport | None = None
    course: EventLog = ()
    cut: Cut = Cut.EVENLY
    no_gradient: NoGradient = NoGradient.NONE
    masters: Masters = Masters.NONE
    counts: tuple[CensusEntry, ...] = ()


def save_observation(observation: Observation, path: Path) -> None:
    """Write all but ledger and course, which are kept as JSON lines of their own beside it."""
    bare = replace(observation, ledger=(), course=())
    write_tree(encode(bare, ROWS | {Shard}), path)
    if observation.race_report is not None:
        # Once more in plain text, for reports, which know no tensors.
        path.with_suffix(RACES).write_text(_ENCODER.encode(encode(observation.race_report)))


def digest(observation: Observation) -> str:
    """Hash every bit of every tensor, loss and norm of an observation; the ledger plays no part."""
    seen = hashlib.sha256()
    for name, shard in _tensors(observation):
        seen.update(
            f"{name} {shard.offsets} {shard.is_flat} {shard.tensor.dtype} {tuple(shard.tensor.shape)}".encode()
        )
        plain = shard.tensor.contiguous()
        seen.update(ctypes.string_at(plain.data_ptr(), plain.nbytes))
    for step in observation.steps:
        seen.update(repr((step.losses, step.norm)).encode())
    return seen.hexdigest()


def _tensors(observation: Observation) -> Iterator[tuple[str, Shard]]:
    groups: list[Mapping[str, Shard | None]] = [
        observation.initial,
        *(group for step in observation.steps for group in (step.gradients, step.parameters)),
        observation.optimizer_state,
        observation.buffers,
    ]
    yield from ((name, shard) for group in groups for name, shard in group.items() if shard is not None)


def load_observation(path: Path, ledger: Ledger, course: EventLog = ()) -> Observation:
    """Read what `save_observation` wrote; raises UnreadableError for a missing or damaged file."""
    try:
        bare = decode(Observation, {"ledger": [], **read_tree(path, _as_text)})  # older ones do not name it
        return replace(bare, ledger=ledger, course=course)
    except Exception as error:  # torch raises a different type for each way in which a file can be broken
        raise UnreadableError(
            f"{path.parent.name}/{path.name}",
            expected="a complete observation",
            got="missing" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}",
            hint="running the case again",
        ) from error
