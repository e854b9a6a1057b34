"""Draw one step of two engines, from the files of a world: the pictures docs/timeline.svg and docs/step-timeline.svg.

``python -m examples.timelines`` trains a small model on two ranks in a world of threads. The first engine is FSDP2,
made wrong on purpose: it lets go of the input of a reduction too early, which the watch over streams sees. The second
is the reference engine. Pictures show order and not time, and are the same on every machine.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from shardproof import (
    Grouping,
    Layout,
    Plan,
    Reshard,
    Schedule,
    Training,
    Watch,
    WorldKind,
    WorldSpec,
    launch,
)
from shardproof.fixtures.chain import CHAIN
from shardproof.fixtures.optimizers import SGD
from shardproof.harness.records.rank_timeline import RankTimeline, Timeline, read_timeline
from shardproof.harness.records.saved_result import keep_result
from shardproof.harness.tracing.races.race_report import Race
from shardproof.harness.training.rank_body import drive_rank
from shardproof.reports.timeline_svg import draw_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """One picture of the documentation: the file, the engine, and what of its training is shown."""

    file: Path
    engine: str
    watch: frozenset[Watch]
    ranks: tuple[int, ...]


_DOCS = Path(__file__).resolve().parents[1] / "docs"
RACES = Drawing(
    file=_DOCS / "timeline.svg",
    engine="shardproof.engine.mutants.races:FreesTheReduceInput",
    watch=frozenset({Watch.RACES}),
    ranks=(0, 1),
)
STEP = Drawing(file=_DOCS / "step-timeline.svg", engine="reference", watch=frozenset(), ranks=(0,))
DRAWINGS = (RACES, STEP)
_TRAINING = Training(
    problem=CHAIN,
    optimizer=SGD,
    plan=Plan(
        layout=Layout.SHARD, units=CHAIN.units, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD
    ),
    schedule=Schedule(
        steps=2
    ),  # the first determines the order of forward, so the last represents all later ones
)


def observe(drawing: Drawing, folder: Path) -> Timeline:
    """Train, keep the results in a folder, and read them."""
    spec = WorldSpec(kind=WorldKind.THREADS, size=2, deadline_s=50)
    training = replace(_TRAINING, watch=drawing.watch)
    keep_result(launch(spec, drive_rank, training, drawing.engine, folder=folder), folder)
    return read_timeline(folder).of_ranks(drawing.ranks.__contains__)


def draw_picture(timeline: Timeline) -> str:
    """Draw the step with the most races, else the last, without line numbers, which change with every release."""
    return draw_alone(replace(timeline, ranks=tuple(map(_without_lines, timeline.ranks))))


def _without_lines(rank: RankTimeline) -> RankTimeline:
    return replace(
        rank,
        collectives=tuple(
            replace(p, entry=replace(p.entry, site=_file(p.entry.site))) for p in rank.collectives
        ),
        races=tuple(replace(c, race=_race_without_lines(c.race)) for c in rank.races),
    )


def _race_without_lines(race: Race) -> Race:
    first, second = (replace(touch, site=_file(touch.site)) for touch in (race.first, race.second))
    return replace(race, first=first, second=second)


def _file(site: str) -> str:
    return site.partition(":")[0]


def main() -> None:
    """Train, and write the pictures."""
    for drawing in DRAWINGS:
        with tempfile.TemporaryDirectory() as folder:
            picture = draw_picture(observe(drawing, Path(folder)))
        drawing.file.write_text(picture, encoding="utf-8")
        print(drawing.file)


if __name__ == "__main__":
    main()
