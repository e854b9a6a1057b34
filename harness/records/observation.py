"""What one rank of a training showed: tensors by step and name, kept in one file that is read as data.

torch.save writes each tensor as an entry of its own in an archive: that takes longer than a small training.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardproof.engine.contract import Cut, Masters, NoGradient, Shard
from shardproof.harness.errors import UnreadableError
from shardproof.harness.tracing.events import EventLog
from shardproof.harness.tracing.ledger import Ledger
from shardproof.harness.tracing.memory import memory_report as lifetimes
from shardproof.harness.tracing.memory.census_report import CensusEntry, counts_from_json, counts_to_json
from shardproof.harness.tracing.memory.memory_report import LifetimeReport
from shardproof.harness.tracing.races.race_report import RACES, RaceReport, report_from_json, report_to_json

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


def read_tree(path: Path | BinaryIO) -> Any:
    """Read what `write_tree` wrote, without running code of the file; a broken file raises what torch or json do."""
    stored = torch.load(path, weights_only=True)
    data = stored["data"]
    return json.loads(stored["tree"], object_hook=lambda found: _tensor(found, data))


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
    plain = {
        "rank": observation.rank,
        "input_digest": observation.input_digest,
        "initial": _pack(observation.initial),
        "steps": [
            {
                "losses": s.losses,
                "gradients": _pack(s.gradients),
                "parameters": _pack(s.parameters),
                "norm": s.norm,
                "facts": [asdict(fact) for fact in s.facts],
                "snapshots": {moment: _pack(shards) for moment, shards in s.snapshots.items()},
            }
            for s in observation.steps
        ],
        "optimizer_state": _pack(observation.optimizer_state),
        "buffers": _pack(observation.buffers),
        "repeat_digests": observation.repeat_digests,
        "cut": observation.cut.name,
        "no_gradient": observation.no_gradient.name,
        "masters": observation.masters.name,
        "counts": counts_to_json(observation.counts),
        "race_report": observation.race_report and report_to_json(observation.race_report),
        "lifetime_report": observation.lifetime_report
        and lifetimes.report_to_json(observation.lifetime_report),
    }
    write_tree(plain, path)
    if observation.race_report is not None:
        # Once more in plain text, for reports, which know no tensors.
        path.with_suffix(RACES).write_text(_ENCODER.encode(report_to_json(observation.race_report)))


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
        return _observation(read_tree(path), ledger, course)
    except Exception as error:  # torch raises a different type for each way in which a file can be broken
        raise UnreadableError(
            f"{path.parent.name}/{path.name}",
            expected="a complete observation",
            got="missing" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}",
            hint="running the case again",
        ) from error


# Any, from here on: the trees that files hold.
def _observation(plain: dict[str, Any], ledger: Ledger, course: EventLog) -> Observation:
    return Observation(
        rank=plain["rank"],
        input_digest=plain["input_digest"],
        initial=_unpack(plain["initial"]),
        steps=tuple(
            StepObservation(
                losses=tuple(s["losses"]),
                gradients=_unpack_optional(s["gradients"]),
                parameters=_unpack(s["parameters"]),
                norm=s["norm"],
                facts=tuple(Fact(**fact) for fact in s["facts"]),
                snapshots={moment: _unpack(shards) for moment, shards in s["snapshots"].items()},
            )
            for s in plain["steps"]
        ),
        optimizer_state=_unpack(plain["optimizer_state"]),
        buffers=_unpack(plain["buffers"]),
        repeat_digests=tuple(plain["repeat_digests"]),
        # Observations that were kept before there was a watch have none.
        race_report=report_from_json(report) if (report := plain.get("race_report")) else None,
        lifetime_report=lifetimes.report_from_json(seen) if (seen := plain.get("lifetime_report")) else None,
        ledger=ledger,
        course=course,
        cut=Cut[plain.get("cut", Cut.EVENLY.name)],  # kept before an engine could say
        no_gradient=NoGradient[plain.get("no_gradient", NoGradient.NONE.name)],  # as above
        masters=Masters[plain.get("masters", Masters.NONE.name)],  # as above
        counts=counts_from_json(plain.get("counts", ())),  # kept before there was a census
    )


def _pack(shards: Mapping[str, Shard | None]) -> dict[str, Any]:
    return {
        name: None if s is None else (s.tensor, list(s.offsets), list(s.global_shape), s.is_flat)
        for name, s in shards.items()
    }


def _unpack_optional(plain: dict[str, Any]) -> dict[str, Shard | None]:
    return {
        name: None
        if packed is None
        else Shard(
            tensor=packed[0], offsets=tuple(packed[1]), global_shape=tuple(packed[2]), is_flat=packed[3]
        )
        for name, packed in plain.items()
    }


def _unpack(plain: dict[str, Any]) -> dict[str, Shard]:
    return {name: shard for name, shard in _unpack_optional(plain).items() if shard is not None}
