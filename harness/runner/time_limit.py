"""A run of limited time: the most telling cases first, none begun after the limit, and what that leaves unproven."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import pytest

from shardproof.harness.cases.case_id import Node
from shardproof.harness.records.record import Power, Record
from shardproof.harness.runner.engines import describe
from shardproof.harness.runner.kill_power import (
    interleaved,
    most_telling_first,
    power,
    read_kill_power,
    seconds_of,
)
from shardproof.harness.worlds.spec import WorldSpec

LIMIT_S = pytest.StashKey[float]()
ENDS_AT = pytest.StashKey[float]()  # of the monotonic clock, which all processes of a machine share
KILLS = pytest.StashKey[dict[str, dict[str, int]]]()  # of each engine's cases, by node id: mutants as bits
KILLS_FROM_WORKER = "shardproof.kills"
_TO_WORKER = "shardproof.ends_at"
# Cases are kept that take so many times the limit on one core of the table's machine: the others have no chance.
_CHANCE = 8.0


def begin(config: pytest.Config) -> None:
    """Start the clock, if the time of this session is limited; workers have that of the process that started them."""
    text = config.getoption("shardproof_within")
    if text is None:
        return
    config.stash[LIMIT_S] = seconds_of(text)
    sent = getattr(config, "workerinput", {}).get(_TO_WORKER)
    config.stash[ENDS_AT] = sent if sent is not None else time.monotonic() + config.stash[LIMIT_S]
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.register(_Stopper(config.stash[ENDS_AT]), "shardproof-stopper")


def told(config: pytest.Config) -> dict[str, float]:
    """Return what the workers of a session must know."""
    return {_TO_WORKER: config.stash[ENDS_AT]} if ENDS_AT in config.stash else {}


def note_power(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Note which mutants each selected case kills, before parts of them are left out."""
    if ENDS_AT not in config.stash:
        return
    declared: dict[str, frozenset[str]] = {}
    found: dict[str, dict[str, int]] = {}
    for node in filter(None, (Node.parse(item.nodeid) for item in items)):
        if node.engine not in declared:
            declared[node.engine] = frozenset(each.name for each in describe(node.engine).capabilities)
        bits = read_kill_power().kills(node.case, WorldSpec.parse(node.world), declared[node.engine])
        found.setdefault(node.engine, {})[node.nodeid] = bits
    config.stash[KILLS] = found
    if hasattr(config, "workeroutput"):
        config.workeroutput[KILLS_FROM_WORKER] = found


def put_most_telling_first(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the cases of each engine and world by their power, interleave them, and drop those without a chance."""
    table = read_kill_power()
    kills = {nodeid: bits for of_engine in config.stash[KILLS].values() for nodeid, bits in of_engine.items()}
    cells: dict[tuple[str, str], list[str]] = {}
    seconds: dict[str, float] = {}
    for item in items:
        if (node := Node.parse(item.nodeid)) is not None:
            cells.setdefault((node.engine, node.world), []).append(node.nodeid)
            seconds[node.nodeid] = table.seconds(node.case)
    orders = [most_telling_first({name: kills[name] for name in names}, seconds) for names in cells.values()]
    place = {
        name: number
        for number, name in enumerate(_in_time(config.stash[LIMIT_S], interleaved(orders), seconds))
    }
    if late := [item for item in items if item.nodeid not in place and item.nodeid in seconds]:
        config.hook.pytest_deselected(items=late)
    items[:] = sorted(
        (item for item in items if item.nodeid in place or item.nodeid not in seconds),
        key=lambda item: place.get(item.nodeid, -1),
    )


def powers(config: pytest.Config, records: Iterable[Record]) -> tuple[Power, ...]:
    """Return what the limit left of the power of each engine's cases; nothing if there was no limit."""
    ran = {record.key for record in records}
    return tuple(
        power(engine, kills, {name for name in kills if (node := Node.parse(name)) and node.key in ran})
        for engine, kills in config.stash.get(KILLS, {}).items()
    )


class _Stopper:
    """A pytest plugin object that begins no case after the limit; cases that have begun end."""

    def __init__(self, ends_at: float) -> None:
        self._ends_at = ends_at

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """Take a case that comes too late for done, so that pytest goes on to the next one."""
        return True if time.monotonic() > self._ends_at else None


def _in_time(limit_s: float, order: Sequence[str], seconds: Mapping[str, float]) -> Iterable[str]:
    spent_s = 0.0
    for name in order:
        spent_s += seconds[name]
        yield name
        if spent_s > _CHANCE * limit_s:
            return
