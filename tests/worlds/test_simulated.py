"""Simulated ranks make the calls of real ranks, and show memory that grows with their number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardproof import Layout, Training, UsageError, launch
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_UNEVEN, TRANSFORMER
from shardproof.harness.records.saved_result import SavedResult, keep_result, load_kept
from shardproof.harness.tracing import codec
from shardproof.harness.tracing.ledger import Entry
from shardproof.harness.training.rank_body import drive_rank
from shardproof.harness.worlds.spec import ANY, SEVERAL, SIMULATED, WorldKind, WorldSpec
from shardproof.suites.training import train

SHARDING = {"reference", "reference.wrapper", "torch.fsdp1", "torch.fsdp2"}
ENGINES = ["reference", "reference.wrapper", "torch.ddp", "torch.fsdp1", "torch.fsdp2", "torch.replicate"]


def _observe(kind: WorldKind, size: int, engine: str, training: Training, folder: Path) -> SavedResult:
    result = launch(WorldSpec(kind=kind, size=size), drive_rank, training, engine, folder=folder)
    assert result.is_clean, result
    keep_result(result, folder)
    return load_kept(folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_simulated_rank_has_the_calls_and_the_memory_of_a_real_one(engine: str, tmp_path: Path) -> None:
    layout = Layout.SHARD if engine in SHARDING else Layout.REPLICATE
    training = train(MLP_UNEVEN, ADAMW, microbatches=2, layout=layout)
    simulated, threads = (
        _observe(kind, 4, engine, training, tmp_path / kind)
        for kind in (WorldKind.SIMULATED, WorldKind.THREADS)
    )
    assert [o.rank for o in simulated.ranks] == [0, 1, 2, 3]
    for rank, ledger in simulated.ledgers_by_rank.items():
        assert ledger == threads.ledgers[rank]
        assert ledger, "an empty ledger compares nothing"
    for one, other in zip(simulated.ranks, threads.ranks, strict=True):
        held, held_for_real = ([count.num_bytes for count in seen.counts] for seen in (one, other))
        assert held == held_for_real
        assert one.counts


def test_a_rank_of_sixteen_thousand_is_seen(tmp_path: Path) -> None:
    kept = _observe(WorldKind.SIMULATED, 16384, "torch.replicate", train(TRANSFORMER, steps=1), tmp_path)
    assert list(kept.ledgers_by_rank) == [0, 1, 8192, 16383]
    assert {len(entry.group) for ledger in kept.ledgers for entry in ledger} == {16384}
    assert all(path.stat().st_size < 1e6 for path in tmp_path.glob("*.jsonl")), "groups are rows, not lists"


def _entry(group: object) -> Entry:
    plain = {
        "seq": 0,
        "op": "barrier",
        "group": group,
        "group_seq": 0,
        "axis": None,
        "dtype": "",
        "shapes": [],
    }
    rest = {"num_bytes": 0, "reduce_op": None, "peer": None, "is_async": False, "wait": None, "step": 0}
    place = {"phase": "step", "microbatch": -1, "unit": None, "thread": "main", "site": ""}
    return codec.decode(Entry, {**plain, **rest, **place})


@pytest.mark.parametrize(
    "ranks", [range(100), range(3, 20_000, 8), (*range(70), 90), range(64), (5, 3)], ids=str
)
def test_a_group_is_read_as_it_was_written(ranks: tuple[int, ...]) -> None:
    entry = _entry(list(ranks))
    written = codec.encode(entry)
    assert len(json.dumps(written)) < 1000
    assert codec.decode(Entry, json.loads(json.dumps(written))) == entry
    assert entry.group == tuple(ranks)


@pytest.mark.parametrize("group", [{"first": 0, "end": 2**40, "step": 1}, {"first": 0, "end": 9, "step": 0}])
def test_a_row_of_ranks_has_an_end(group: object) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        _entry(group)


def test_cases_with_numbers_are_left_out() -> None:
    world = WorldSpec.parse("simulated:16384")
    assert SIMULATED.suits(world)
    assert not any(sizes.suits(world) for sizes in (ANY, SEVERAL))
    assert not SIMULATED.suits(WorldSpec.parse("threads:4"))
    with pytest.raises(UsageError, match="1 to 65536 ranks"):
        WorldSpec.parse("simulated:1000000")
