"""The observation of one rank of a training: tensors by step and name, in one file that contains only data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardproof.engine.contract import Copies, Cut, NoGradient, Shard
from shardproof.harness.errors import UnreadableError
from shardproof.harness.records.tensor_file import read_tree, write_tree
from shardproof.harness.torch_compat.dtypes import bytes_of
from shardproof.harness.tracing.codec import decode, encode
from shardproof.harness.tracing.events import EventLog
from shardproof.harness.tracing.ledger import Ledger
from shardproof.harness.tracing.memory.memory_report import ROWS, CensusEntry, LifetimeReport
from shardproof.harness.tracing.races.race_report import RACES, RaceReport

Shards = Mapping[str, Shard]

_ENCODER = json.JSONEncoder()  # bound before an engine is imported, which may replace json.dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A fact about a moment of a step: of a unit, an output, or the engine."""

    moment: str
    subject: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepObservation:
    """One optimizer step on one rank.

    ``losses``: this rank's losses in the order of the script, one for each microbatch in a plain script, on the scale
    of the global mean times the number of ranks with data. ``gradients``: after the last backward, clipped if the plan
    clips, before the optimizer step; None where the engine has none. ``parameters``: after the optimizer step.
    ``norm``: the result of clipping. ``facts`` and ``snapshots``: observations that the script requested, snapshots
    being the parameters as the module had them, by moment.
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

    ``input_digest`` is a hash of all data of the rank, so that equal data on two ranks shows. ``repeat_digests`` are
    hashes of all observations of each of several repeated trainings. ``race_report`` is the report of the stream watch
    over all of them, and ``lifetime_report`` that of the memory watch; None without a watch. ``events`` are empty in
    trainings that were saved before the field existed. ``cut``, ``no_gradient`` and ``copies`` are the adapter's
    declarations about flat pieces, missing gradients, and what the optimizer updates. ``counts`` is the census, empty
    if none was taken, and ``filled`` its count with the most bytes while a model without memory was filled.
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
    events: EventLog = ()
    cut: Cut = Cut.EVENLY
    no_gradient: NoGradient = NoGradient.NONE
    copies: Copies = Copies.NONE
    counts: tuple[CensusEntry, ...] = ()
    filled: CensusEntry | None = None


def save_observation(observation: Observation, path: Path) -> None:
    """Write all but ledger and events, which are separate files of JSON lines."""
    bare = replace(observation, ledger=(), events=())
    write_tree(encode(bare, ROWS | {Shard}), path)
    if observation.race_report is not None:
        # Once more as plain text, for reports, which do not read tensors.
        path.with_suffix(RACES).write_text(_ENCODER.encode(encode(observation.race_report)))


def digest(observation: Observation) -> str:
    """Hash every bit of every tensor, loss and norm of an observation; the ledger is excluded."""
    seen = hashlib.sha256()
    for name, shard in _tensors(observation):
        seen.update(
            f"{name} {shard.offsets} {shard.is_flat} {shard.tensor.dtype} {tuple(shard.tensor.shape)}".encode()
        )
        seen.update(bytes_of(shard.tensor))
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


def load_observation(path: Path, ledger: Ledger, events: EventLog = ()) -> Observation:
    """Read the file of `save_observation`; raises UnreadableError if it is missing or damaged."""
    try:
        bare = decode(Observation, read_tree(path))
        return replace(bare, ledger=ledger, events=events)
    except Exception as error:  # the errors of a file that is not an observation
        raise UnreadableError(
            f"{path.parent.name}/{path.name}",
            expected="a complete observation",
            got="missing" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}",
            hint="running the case again",
        ) from error
