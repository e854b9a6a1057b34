"""Parts of a run: a shard, the rest of an interrupted run, the failures of an earlier one, or what fits in a time."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import pytest

from shardproof.harness.cases.case_id import SUITES, Node
from shardproof.harness.errors import UsageError
from shardproof.harness.records.diff.comparability import ComparedRun
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import Run, read_run
from shardproof.harness.runner.record_writer import CATALOGUE, IS_PART, NUM_SELECTED, PART_FROM_WORKER
from shardproof.harness.runner.time_limit import LIMIT_S, note_power, put_most_telling_first

NUM_ELSEWHERE = pytest.StashKey[int]()  # cases that other shards run, or that the interrupted run has run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShard:
    """One of several runs that share the cases of one run."""

    number: int  # from 1
    of: int

    @classmethod
    def parse(cls, text: str) -> RunShard:
        """Read ``2/8``; raises UsageError for any other form."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UsageError("--shard", expected="NUMBER/OF from 1/1 on", got=repr(text), hint="--shard 2/8")
        return cls(number=int(match[1]), of=int(match[2]))


def cut(keys: Collection[str], shard: RunShard, durations: Mapping[str, float]) -> set[str]:
    """Return the keys of one shard; all shards are disjoint and complete, independently of the order of keys.

    The longest key goes first, each to the shard with the least load so far. A key without a duration counts as the
    median of the others; ties are broken by a hash, so that neighbours are spread.
    """
    known = {key: durations[key] for key in keys if key in durations}
    usual = median(known.values()) if known else 1.0
    cost = {key: max(known.get(key, usual), 1e-3) for key in keys}
    loads = [0.0] * shard.of
    mine = set()
    for key in sorted(
        cost, key=lambda key: (-cost[key], hashlib.sha256(key.encode("utf-8", "replace")).digest(), key)
    ):
        place = loads.index(min(loads))
        loads[place] += cost[key]
        if place == shard.number - 1:
            mine.add(key)
    return mine


def selected(config: pytest.Config) -> dict[str, str]:
    """Describe which cases a session selects and how it runs them, for the header of its run."""
    durations = config.getoption("shardproof_durations_of")
    failed = config.getoption("shardproof_last_failed_of")
    options = {
        "cases": " ".join(map(_below_suites, config.args)),
        "keyword": config.getoption("keyword"),
        "marks": config.getoption("markexpr"),
        "model": config.getoption("shardproof_model"),
        "deadline": str(config.getoption("shardproof_deadline")),
        "keep": config.getoption("shardproof_keep"),
        "shard": config.getoption("shardproof_shard"),
        "durations": _digest(_durations(read_run(Path(durations)))) if durations else "",
        "last failed": _digest(dict.fromkeys(not_conforming(read_run(Path(failed))), 0.0)) if failed else "",
    }
    return {name: value for name, value in options.items() if value}


def interrupted(folder: Path) -> ComparedRun:
    """Read a run that was interrupted; raises UsageError for any other, and for a damaged one.

    A truncated last line is the trace of a kill, and is ignored: its case runs again.
    """
    run = read_run(folder)
    left = [record for record in run.records if record.verdict is not Verdict.NOT_RUN]
    damage = [problem for problem in run.problems if "cut off" not in problem]
    if damage or (not run.is_interrupted and len(left) == run.header.num_cases):
        raise UsageError(
            f"--resume {folder}",
            expected="an interrupted run whose files are whole",
            got=damage[0] if damage else f"one that has run all {len(left)} cases",
            hint="running everything again, or --last-failed" if damage else "--last-failed",
        )
    return ComparedRun(folder=str(folder), run=replace(run, records=tuple(left), problems=()))


def not_conforming(run: Run) -> list[str]:
    """Return the cases of a run that do not conform, with engine and world."""
    return [_name(r.engine, r.case, r.world) for r in run.records if not r.verdict.is_conforming]


@pytest.hookimpl(trylast=True)  # so that no shard contains what -k and others deselect
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that other parts run."""
    failed, shard, resumed = (
        config.getoption(f"shardproof_{o}") for o in ("last_failed_of", "shard", "resume")
    )
    if failed:
        _keep(config, items, set(not_conforming(read_run(Path(failed)))))
    note_power(config, items)
    num_selected = len(items)
    if shard:
        durations = config.getoption("shardproof_durations_of")
        took = _durations(read_run(Path(durations))) if durations else {}
        _keep(config, items, cut([*map(_name_of, items)], RunShard.parse(shard), took))
        config.stash[CATALOGUE] = replace(config.stash[CATALOGUE], is_sharded=True)
    if resumed:
        done = {_name(r.engine, r.case, r.world) for r in interrupted(Path(resumed)).run.records}
        _keep(config, items, {name for item in items if (name := _name_of(item)) not in done})
    if LIMIT_S in config.stash:
        put_most_telling_first(config, items)
        config.stash[CATALOGUE] = replace(config.stash[CATALOGUE], is_sharded=True)
    config.stash[NUM_ELSEWHERE] = num_selected - len(items)
    config.stash[IS_PART] = bool(shard or resumed) and num_selected > 0
    config.stash[NUM_SELECTED] = num_selected if shard else 0
    if hasattr(config, "workeroutput"):
        config.workeroutput[PART_FROM_WORKER] = (config.stash[IS_PART], config.stash[NUM_SELECTED])


def _keep(config: pytest.Config, items: list[pytest.Item], names: set[str]) -> None:
    if others := [item for item in items if _name_of(item) not in names]:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _name_of(item) in names]


def _name_of(item: pytest.Item) -> str:
    node = Node.parse(item.nodeid)
    return item.nodeid if node is None else _name(*node.key)


def _name(engine: str, case: str, world: str) -> str:
    return f"{case} {engine}@{world}"


def _durations(run: Run) -> dict[str, float]:
    ran = (record for record in run.records if record.verdict is not Verdict.NOT_RUN)
    return {_name(r.engine, r.case, r.world): r.duration_s for r in ran}


def _digest(durations: Mapping[str, float]) -> str:
    return hashlib.sha256(repr(sorted(durations.items())).encode()).hexdigest()[:12]


def _below_suites(argument: str) -> str:
    path, colons, rest = argument.partition("::")
    place = Path(path).resolve()
    return f"{place.relative_to(SUITES) if place.is_relative_to(SUITES) else path}{colons}{rest}"
