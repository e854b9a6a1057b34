"""Draw one training step of the reference engine from the ledger of a real run: what overlaps with what.

``python -m examples.step_timeline`` trains a small model on two ranks and writes docs/step-timeline.svg. Left to
right is the order of events on one rank and not time, so the picture is the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from engine.reference import FSDPModule, fully_shard
from engine.reference.collectives import DefaultAllGather, DefaultReduceScatter
from harness.ledger.entry import Phase
from harness.worlds.launch import launch
from harness.worlds.outcome import Returned
from harness.worlds.rank import RankContext, journal_path
from harness.worlds.spec import WorldKind, WorldSpec

__all__ = ["Event", "Happening", "draw", "main", "record"]

NUM_RANKS = 2
NUM_BLOCKS = 3
NUM_STEPS = 3  # the first learns the order of forward, so the last is what every later one looks like
ROOT = "root"
BLOCKS = tuple(f"block {index}" for index in range(NUM_BLOCKS))
UNITS = (ROOT, *BLOCKS)
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "step-timeline.svg"

_VOCABULARY, _WIDTH, _TOKENS = 32, 16, 8


# What is recorded


class Happening(StrEnum):
    """What an event says."""

    STARTS = "a unit's compute starts"
    ENDS = "a unit's compute ends"
    GATHER_ISSUED = "an all-gather of a unit's parameters is issued"
    GATHER_WAITED = "somebody first waits for an all-gather"
    REDUCTION_ISSUED = "a reduce-scatter of a unit's gradients is issued"
    REDUCTION_WAITED = "somebody first waits for a reduce-scatter"


_WAITED = {
    Happening.GATHER_ISSUED: Happening.GATHER_WAITED,
    Happening.REDUCTION_ISSUED: Happening.REDUCTION_WAITED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of one step; ``part`` is the piece of the unit that computes.

    ``whole``: the units whose whole parameters had memory then; None for waits, where nobody looks.
    """

    happening: Happening
    unit: str
    part: str
    phase: Phase
    step: int
    whole: frozenset[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event that a hook saw when the journal was ``place`` bytes long."""

    event: Event
    place: int


# The training that is watched


class Block(nn.Module):
    """One hidden layer with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add what the layer finds."""
        return inputs + functional.gelu(self.hidden(inputs))


class Model(nn.Module):
    """Blocks between an embedding and a head; these two are left to the root's own group."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score the next token."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


class Watch:
    """Sees one rank's training through public hooks, and notes how long the journal was at each event."""

    def __init__(self, context: RankContext, model: Model) -> None:
        self.marks: list[Mark] = []
        self._journal = journal_path(context.folder, context.rank)
        self._phase, self._step = Phase.PREPARE, -1
        self._owners: dict[str, tuple[nn.Module, ...]] = {ROOT: (model.embed, model.head)}
        self._owners |= {name: (block.hidden,) for name, block in zip(BLOCKS, model.blocks, strict=True)}  # type: ignore[dict-item]
        self._wholes: dict[str, torch.Tensor] = {}
        for unit, module in zip(UNITS, (model, *model.blocks), strict=True):
            assert isinstance(module, FSDPModule)
            module.set_custom_all_gather(_WatchedGather(self, unit))
            module.set_custom_reduce_scatter(_WatchedReduceScatter(self, unit))
        for name, block in zip(BLOCKS, model.blocks, strict=True):
            self._watch_forward(block, name, name)
            block.register_forward_hook(_HookingBackward(self, name, name, ends_at_inputs=True))
        for part, layer in (("embed", model.embed), ("head", model.head)):
            self._watch_forward(layer, ROOT, part)
            layer.register_forward_hook(_HookingBackward(self, ROOT, part, ends_at_inputs=False))

    def enter(self, phase: Phase, step: int) -> None:
        """Say what the loop does from now on."""
        self._phase, self._step = phase, step

    def mark(self, happening: Happening, unit: str, part: str = "") -> None:
        """Note an event; what the journal gets from here on comes after it."""
        event = Event(
            happening=happening,
            unit=unit,
            part=part,
            phase=self._phase,
            step=self._step,
            whole=self._units_in_memory(),
        )
        self.marks.append(Mark(event=event, place=self._journal.stat().st_size))

    def _watch_forward(self, module: nn.Module, unit: str, part: str) -> None:
        # After the engine's own first hook and before its last one: this is compute and nothing else.
        module.register_forward_pre_hook(lambda *_: self.mark(Happening.STARTS, unit, part))
        module.register_forward_hook(lambda *_: self.mark(Happening.ENDS, unit, part), prepend=True)

    def _units_in_memory(self) -> frozenset[str]:
        """Look at the memory of plain parameters: seen once, they keep their identity, and only memory goes."""
        for unit, modules in self._owners.items():
            plain = modules[0].weight
            if isinstance(plain, torch.Tensor) and not _is_sharded(plain):
                self._wholes[unit] = plain
        return frozenset(unit for unit, plain in self._wholes.items() if plain.untyped_storage().size())


