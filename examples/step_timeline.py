"""Draw one training step of the reference engine from the ledger of a real run: what overlaps with what.

``python -m examples.step_timeline`` trains a small model on two ranks and writes docs/step-timeline.svg. Left to
right is the order of events on one rank and not time, so the picture is the same on every machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardproof import Phase, RankContext, Returned, WorldKind, WorldSpec, launch
from shardproof.engine.reference import FSDPModule, fully_shard
from shardproof.engine.reference.collectives import DefaultAllGather, DefaultReduceScatter
from shardproof.harness.worlds.rank import journal_path

__all__ = ["Event", "EventKind", "draw", "main", "record"]

NUM_RANKS = 2
NUM_BLOCKS = 3
NUM_STEPS = 3  # the first determines the order of forward, so the last represents all later ones
ROOT = "root"
BLOCKS = tuple(f"block {index}" for index in range(NUM_BLOCKS))
UNITS = (ROOT, *BLOCKS)
OPTIMIZER = "optimizer"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "step-timeline.svg"

_VOCABULARY, _WIDTH, _TOKENS = 32, 16, 8


# What is recorded


class EventKind(StrEnum):
    """The kind of an event."""

    STARTS = "a unit's compute starts"
    ENDS = "a unit's compute ends"
    GATHER_ISSUED = "an all-gather of a unit's parameters is issued"
    GATHER_WAITED = "first wait for an all-gather"
    REDUCTION_ISSUED = "a reduce-scatter of a unit's gradients is issued"
    REDUCTION_WAITED = "first wait for a reduce-scatter"


_WAITED = {
    EventKind.GATHER_ISSUED: EventKind.GATHER_WAITED,
    EventKind.REDUCTION_ISSUED: EventKind.REDUCTION_WAITED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of one step; ``part`` is the piece of the unit that computes.

    ``whole``: the units whose whole parameters had memory then; None for waits, where it is not read.
    """

    happening: EventKind
    unit: str
    part: str
    phase: Phase
    step: int
    whole: frozenset[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event that a hook recorded when the journal was ``place`` bytes long."""

    event: Event
    place: int


# The training that is watched


class Block(nn.Module):
    """One hidden layer with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Add the layer's output."""
        return inputs + functional.gelu(self.hidden(inputs))


class Model(nn.Module):
    """Blocks between an embedding and a head, which both belong to the root's own group."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute scores for the next token."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


class Watch:
    """Watches one rank's training through public hooks, and records how long the journal was at each event."""

    def __init__(self, context: RankContext, model: Model) -> None:
        self.marks: list[Mark] = []
        self._journal = journal_path(context.folder, context.rank)
        self._phase, self._step = Phase.PREPARE, -1
        self._layers: dict[str, nn.Module] = {ROOT: model.embed}
        self._plain: dict[str, torch.Tensor] = {}
        self._watch_collectives(ROOT, model)
        for unit, block in zip(BLOCKS, model.blocks, strict=True):
            assert isinstance(block, Block)
            self._layers[unit] = block.hidden
            self._watch_collectives(unit, block)
            self._watch_compute(block, unit, unit)
        self._watch_compute(model.embed, ROOT, "embed")
        self._watch_compute(model.head, ROOT, "head")

    def enter(self, phase: Phase, step: int) -> None:
        """Set the phase of the loop from now on."""
        self._phase, self._step = phase, step

    def mark(self, happening: EventKind, unit: str, part: str = "") -> None:
        """Record an event; later journal lines come after it."""
        event = Event(
            happening=happening,
            unit=unit,
            part=part,
            phase=self._phase,
            step=self._step,
            whole=self._units_in_memory(),
        )
        self.marks.append(Mark(event=event, place=self._journal.stat().st_size))

    def _watch_collectives(self, unit: str, module: nn.Module) -> None:
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(_WatchedGather(self, unit))
        module.set_custom_reduce_scatter(_WatchedReduceScatter(self, unit))

    def _watch_compute(self, module: nn.Module, unit: str, part: str) -> None:
        """Mark where the module itself computes: inside the engine's pre- and post-hooks."""

        def starts(*_: Any) -> None:
            self.mark(EventKind.STARTS, unit, part)

        def ends(*_: Any) -> None:
            self.mark(EventKind.ENDS, unit, part)

        def watch_backward(_: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            # Hooks of a node run after those of its tensors, and so after the engine has gathered.
            _node(output).register_prehook(starts)
            if inputs[0].grad_fn is not None and unit != ROOT:
                # The engine's own node, which ends the unit's backward.
                inputs[0].grad_fn.register_prehook(ends)
            else:
                _node(output).register_hook(ends)  # the root's layers are one node each

        module.register_forward_pre_hook(starts)
        module.register_forward_hook(ends, prepend=True)
        module.register_forward_hook(watch_backward)

    def _units_in_memory(self) -> frozenset[str]:
        """List the units whose plain parameters have memory; the parameters stay, only their memory is freed."""
        for unit, layer in self._layers.items():
            weight = layer.get_parameter("weight")
            if not isinstance(weight, DTensor):
                self._plain[unit] = weight
        return frozenset(unit for unit, plain in self._plain.items() if plain.untyped_storage().size())


class _WatchedGather(DefaultAllGather):
    """The default all-gather; marks its unit just before the ledger's own entry."""

    def __init__(self, watch: Watch, unit: str) -> None:
        self._watch, self._unit = watch, unit

    # Any: passed on unchanged.
    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self._watch.mark(EventKind.GATHER_ISSUED, self._unit)
        return super().__call__(*args, **kwargs)


class _WatchedReduceScatter(DefaultReduceScatter):
    """The default reduce-scatter; marks its unit just before the ledger's own entry."""

    def __init__(self, watch: Watch, unit: str) -> None:
        self._watch, self._unit = watch, unit

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self._watch.mark(EventKind.REDUCTION_ISSUED, self._unit)
        return super().__call__(*args, **kwargs)


# A rank returns plain values: names, numbers and text.
PlainMark = tuple[int, str, str, str, str, int, list[str] | None]


def _plain(mark: Mark) -> PlainMark:
    event = mark.event
    whole = None if event.whole is None else sorted(event.whole)
    return mark.place, event.happening.name, event.unit, event.part, event.phase.name, event.step, whole


def _mark(plain: PlainMark) -> Mark:
    place, happening, unit, part, phase, step, whole = plain
    event = Event(
        happening=EventKind[happening],
        unit=unit,
        part=part,
        phase=Phase[phase],
        step=step,
        whole=None if whole is None else frozenset(whole),
    )
    return Mark(event=event, place=place)


def train(context: RankContext) -> tuple[PlainMark, ...]:
    """Train on one rank and return the marks; the ledger is in its journal."""
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = Watch(context, model)
    tokens = torch.randint(_VOCABULARY, (_TOKENS + 1,), generator=torch.Generator().manual_seed(context.rank))
    for step in range(NUM_STEPS):
        watch.enter(Phase.FORWARD, step)
        with context.recorder.during(Phase.FORWARD, step=step):
            loss = functional.cross_entropy(model(tokens[:-1]), tokens[1:])
        watch.enter(Phase.BACKWARD, step)
        with context.recorder.during(Phase.BACKWARD, step=step):
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        watch.enter(Phase.STEP, step)
        with context.recorder.during(Phase.STEP, step=step):
            watch.mark(EventKind.STARTS, OPTIMIZER, "optimizer")
            optimizer.step()
            optimizer.zero_grad()
            watch.mark(EventKind.ENDS, OPTIMIZER, "optimizer")
    return tuple(map(_plain, watch.marks))


def _node(tensor: torch.Tensor) -> Node:
    assert tensor.grad_fn is not None
    return tensor.grad_fn


# From marks and journals to one sequence


def record() -> tuple[Event, ...]:
    """Train, and return the events of the last step in order; raises if ranks differ."""
    with tempfile.TemporaryDirectory() as folder:
        spec = WorldSpec(kind=WorldKind.THREADS, size=NUM_RANKS)
        result = launch(spec, train, folder=Path(folder))
        stories = []
        for outcome in result.outcomes:
            if not isinstance(outcome, Returned):
                raise RuntimeError(f"rank {outcome.rank}: expected marks, got {outcome}")
            marks = tuple(map(_mark, outcome.value))
            stories.append(_story(marks, journal_path(Path(folder), outcome.rank)))
    if len(set(stories)) != 1:
        raise RuntimeError("expected the same events in the same order on every rank, got different ones")
    return stories[0]


def _story(marks: Sequence[Mark], journal: Path) -> tuple[Event, ...]:
    """Merge marks and waits into one order; keep the last step."""
    waits, seq_at = _read(journal)
    issued = {seq_at[m.place]: m.event for m in marks if m.event.happening in _WAITED}
    placed = [(mark.place, 1, mark.event) for mark in marks]
    for place, wait in waits:
        event = issued[wait["wait"]]
        waited = replace(
            event, happening=_WAITED[event.happening], phase=wait["phase"], step=wait["step"], whole=None
        )
        placed.append((place, 0, waited))
    # A mark at the end of a journal of n bytes comes before the line that starts there.
    placed.sort(key=lambda p: (p[0], -p[1]))
    return tuple(event for _, _, event in placed if event.step == NUM_STEPS - 1)


# Any: lines of JSON.
def _read(journal: Path) -> tuple[list[tuple[int, dict[str, Any]]], dict[int, int]]:
    """Return the waits with the position of each in the journal, and the number of the collective at each position."""
    waits, seq_at, place, begin = [], {}, 0, 0
    for text in journal.read_bytes().splitlines(keepends=True):
        line = json.loads(text)
        if "entry" in line:
            seq_at[begin] = line["entry"]["seq"]
        elif "wait" in line:
            waits.append((begin, line))
        place += len(text)
        if "marks" not in line:  # which are written together with the line after them
            begin = place
    return waits, seq_at


# From the story to bars


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A span from one event to another; both are positions in the sequence."""

    unit: str
    part: str
    first: int
    last: int


def bars(events: Sequence[Event], begins: EventKind, ends: EventKind) -> tuple[Bar, ...]:
    """Pair the events that start a span with those that end it."""
    began: dict[tuple[str, str], int] = {}
    found = []
    for index, event in enumerate(events):
        key = (event.unit, event.part)
        if event.happening is begins:
            began[key] = index
        elif event.happening is ends:
            found.append(Bar(unit=event.unit, part=event.part, first=began.pop(key), last=index))
    return tuple(found)


def wholes(events: Sequence[Event]) -> tuple[Bar, ...]:
    """Return the spans in which a unit's whole parameters had memory, as far as events recorded it."""
    found = []
    looked = [(index, event.whole) for index, event in enumerate(events) if event.whole is not None]
    for unit in UNITS:
        first: int | None = None
        for index, whole in looked:
            if first is None and unit in whole:
                first = index
            elif first is not None and unit not in whole:
                found.append(Bar(unit=unit, part="", first=first, last=index))
                first = None
        if first is not None:
            found.append(Bar(unit=unit, part="", first=first, last=len(events) - 1))
    return tuple(found)


# The picture

_SIZE = (940, 420)
_LEFT, _RIGHT = 136.0, 922.0  # where the step begins and ends
_NARROW = 7.0  # between two events that are not the start of a compute
_HEADER, _COMPUTE, _GATHERS, _REDUCTIONS, _MEMORY = 34, 50, 122, 184, 240
_BOX, _BAR, _STRIP, _STRIP_STEP = 36, 20, 12, 19
_FOOT = 340

_STYLE = """
    .back { fill: #ffffff; stroke: #d0d7de }
    text { fill: #1f2328; font: 12px system-ui, sans-serif }
    .middle { text-anchor: middle }
    .title { font-weight: 600 }
    .small { font-size: 11px; fill: #57606a }
    .line { stroke: #d0d7de }
    .edge { stroke: #57606a; stroke-width: 1.5; fill: none }
    .root { fill: #eaeef2; stroke: #57606a; color: #57606a }
    .block-0 { fill: #ddf4ff; stroke: #0969da; color: #0969da }
    .block-1 { fill: #fff1c2; stroke: #9a6700; color: #9a6700 }
    .block-2 { fill: #fbe4f0; stroke: #bf3989; color: #bf3989 }
    .optimizer { fill: #ffffff; stroke: #8c959f; color: #8c959f }
    .dot { fill: currentColor; stroke: none }
    .tick { stroke: currentColor; stroke-width: 3 }
    @media (prefers-color-scheme: dark) {
      .back { fill: #0d1117; stroke: #30363d }
      text { fill: #e6edf3 }
      .small { fill: #9da7b3 }
      .line { stroke: #30363d }
      .edge { stroke: #9da7b3 }
      .root { fill: #262c34; stroke: #9da7b3; color: #9da7b3 }
      .block-0 { fill: #0c2d4f; stroke: #58a6ff; color: #58a6ff }
      .block-1 { fill: #3d2e00; stroke: #d29922; color: #d29922 }
      .block-2 { fill: #42162e; stroke: #f778ba; color: #f778ba }
      .optimizer { fill: #0d1117; stroke: #6e7681; color: #6e7681 }
    }
    .column { stroke: none; opacity: 0.5 }
    .strip { fill: currentColor; stroke: none; opacity: 0.75 }
"""

_DESCRIPTION = """Rows of one step: what computes, which all-gathers and reduce-scatters are under way from issue to
    first wait, and whose whole parameters are in memory. While a block computes in forward, the gather of the
    next one is under way. While it computes in backward, so are the gather of the block before it and the
    reduction of the block after it."""


def draw(events: Sequence[Event]) -> str:
    """Return the step as SVG: a function of the order of events alone."""
    places = _places(events)
    width, height = _SIZE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        ' aria-labelledby="title desc">',
        '  <title id="title">One training step of the reference engine, as its ledger tells it</title>',
        f'  <desc id="desc">{_DESCRIPTION}</desc>',
        f"  <style>{_STYLE}  </style>",
        f'  <rect class="back" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="8"/>',
        *_columns(events, places),
        *_titles(),
        *_phases(events, places),
        *_boxes(events, places),
        *_collectives(events, places, EventKind.GATHER_ISSUED, _GATHERS),
        *_collectives(events, places, EventKind.REDUCTION_ISSUED, _REDUCTIONS),
        *_strips(events, places),
        *_foot(events),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _places(events: Sequence[Event]) -> list[float]:
    """Return the x of every event; compute is drawn wide, for its name, and everything else narrow."""
    wide = sum(event.happening is EventKind.STARTS for event in events)
    width = (_RIGHT - _LEFT - _NARROW * (len(events) - 1 - wide)) / wide
    places = [_LEFT]
    for event in events[:-1]:
        places.append(places[-1] + (width if event.happening is EventKind.STARTS else _NARROW))
    return places


def _columns(events: Sequence[Event], places: Sequence[float]) -> Iterator[str]:
    """Shade the area below a unit that computes: spans there overlap with it."""
    top, bottom = _COMPUTE + _BOX, _MEMORY - 14
    for bar in bars(events, EventKind.STARTS, EventKind.ENDS):
        if bar.unit in UNITS:
            yield _rect(f"{_class(bar.unit)} column", places[bar.first], places[bar.last], top, bottom - top)


def _titles() -> Iterator[str]:
    middles = {
        "compute": _COMPUTE + _BOX / 2,
        "all-gathers": _GATHERS + _BAR / 2,
        "reduce-scatters": _REDUCTIONS + _BAR / 2,
    }
    for title, y in middles.items():
        yield _text("title", 16, y + 4, title)
    yield _text("title", 16, _MEMORY + 10, "whole in")
    yield _text("title", 16, _MEMORY + 25, "memory")
    for index, unit in enumerate(UNITS):
        yield _text("small", 84, _MEMORY + index * _STRIP_STEP + 10, unit)
    for y in (_GATHERS - 22, _REDUCTIONS - 22, _MEMORY - 14, _FOOT - 16):
        yield f'  <path class="line" d="M16 {y} H{_RIGHT:g}"/>'


def _phases(events: Sequence[Event], places: Sequence[float]) -> Iterator[str]:
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        mine = [place for place, event in zip(places, events, strict=True) if event.phase is phase]
        first, last = mine[0], mine[-1]
        yield f'  <path class="edge" d="M{first:.1f} {_HEADER + 6} V{_HEADER} H{last:.1f} V{_HEADER + 6}"/>'
        yield _text("title middle", (first + last) / 2, _HEADER - 8, phase)


def _boxes(events: Sequence[Event], places: Sequence[float]) -> Iterator[str]:
    for bar in bars(events, EventKind.STARTS, EventKind.ENDS):
        first, last = places[bar.first], places[bar.last]
        yield _rect(_class(bar.unit), first, last, _COMPUTE, _BOX, radius=4)
        yield _text("middle", (first + last) / 2, _COMPUTE + _BOX / 2 + 4, _short(bar.part))


def _collectives(
    events: Sequence[Event], places: Sequence[float], issued: EventKind, top: int
) -> Iterator[str]:
    for bar in bars(events, issued, _WAITED[issued]):
        first, last = places[bar.first], places[bar.last]
        yield from _bar(bar.unit, first, last, top)
        fits = last - first > 4 * _NARROW
        y = top + _BAR / 2 + 4 if fits else top - 7
        yield _text("middle" if fits else "small middle", (first + last) / 2, y, bar.unit)


def _bar(unit: str, first: float, last: float, top: float) -> Iterator[str]:
    """Draw a collective: a dot where it is issued, a tick where it is first waited for."""
    middle = top + _BAR / 2
    yield f'  <g class="{_class(unit)}">'
    yield "  " + _rect("", first, last, top, _BAR)
    yield f'    <circle class="dot" cx="{first:.1f}" cy="{middle:.1f}" r="3.5"/>'
    yield f'    <path class="tick" d="M{last:.1f} {top - 2:.1f} V{top + _BAR + 2:.1f}"/>'
    yield "  </g>"


def _strips(events: Sequence[Event], places: Sequence[float]) -> Iterator[str]:
    for bar in wholes(events):
        top = _MEMORY + UNITS.index(bar.unit) * _STRIP_STEP
        yield f'  <g class="{_class(bar.unit)}">'
        yield "  " + _rect("strip", places[bar.first], places[bar.last], top, _STRIP, radius=2)
        yield "  </g>"


def _foot(events: Sequence[Event]) -> Iterator[str]:
    legend = "dot: issued; tick: first waited for. Shaded: under way while the unit above computes."
    most = max(len(event.whole) for event in events if event.whole is not None)
    lines = (
        f"Step {NUM_STEPS} of {NUM_STEPS} on rank 0 of {NUM_RANKS}; both ranks agree. Left to right is"
        " the order of events, not time: widths mean nothing.",
        f"Whole parameters as seen at each event but waits: at most {most} of {len(UNITS)} units at once. Buffers"
        " of gathers under way are not shown.",
    )
    yield from _bar(BLOCKS[0], 22, 62, _FOOT)
    yield _text("small", 84, _FOOT + 14, legend)
    for index, line in enumerate(lines):
        yield _text("small", 16, _FOOT + 42 + 18 * index, line)


def _rect(kind: str, first: float, last: float, top: float, height: float, radius: float = 3) -> str:
    kind = f' class="{kind}"' if kind else ""
    return (
        f'  <rect{kind} x="{first:.1f}" y="{top:g}" width="{last - first:.1f}" height="{height:g}"'
        f' rx="{radius:g}"/>'
    )


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'  <text class="{kind}" x="{x:.1f}" y="{y:.1f}">{words}</text>'


def _class(unit: str) -> str:
    return unit.replace(" ", "-")


def _short(part: str) -> str:
    return "optim." if part == OPTIMIZER else part


def main(arguments: Sequence[str] | None = None) -> None:
    """Record a run and write the picture."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURE, help="where the picture goes")
    out = parser.parse_args(arguments).out
    out.write_text(draw(record()), encoding="utf-8")
    print(out)


if __name__ == "__main__":
    # Ranks import the body by the name of its module, and "__main__" is a different module in their processes.
    from examples.step_timeline import main as importable_main

    importable_main()
