"""Draw one step of an engine with a stream race, from what the watch over it kept: docs/timeline.svg.

``python -m examples.race_timeline`` trains a small model on two ranks in a world of threads. The engine is FSDP2, made
wrong on purpose: it lets go of the input of a reduction too early. The picture shows order and not time, and is the
same on every machine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
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
from shardproof.harness.records.world_result import keep_result
from shardproof.harness.tracing.races.race_report import Race
from shardproof.harness.training.rank_body import drive_rank
from shardproof.reports.timeline_svg import draw_alone

__all__ = ["PICTURE", "draw_picture", "main", "observe"]

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "timeline.svg"
ENGINE = "shardproof.engine.mutants.races_fsdp2:FreesTheReduceInput"
TRAINING = Training(
    problem=CHAIN,
    optimizer=SGD,
    plan=Plan(
        layout=Layout.SHARD, units=CHAIN.units, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD
    ),
    schedule=Schedule(steps=2),
    watch=frozenset({Watch.RACES}),
)


def observe(folder: Path) -> Path:
    """Train under the watch, and return the folder of the results."""
    spec = WorldSpec(kind=WorldKind.THREADS, size=2, deadline_s=50)
    keep_result(launch(spec, drive_rank, TRAINING, ENGINE, folder=folder), folder)
    return folder


def draw_picture(timeline: Timeline) -> str:
    """Draw the step with the most races, without line numbers, which change with every release."""
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the picture."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURE, help="where the picture goes")
    out = parser.parse_args(arguments).out
    with tempfile.TemporaryDirectory() as folder:
        out.write_text(draw_picture(read_timeline(observe(Path(folder)))), encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
