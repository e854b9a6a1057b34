"""Ranks in processes hash texts differently, as on a cluster, and the seed of a session repeats their hashes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardproof import MatchesOracle, RankContext, Training, TrialSession, Verdict
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.cli.main import main
from shardproof.harness.records.run import read_run
from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, hash_seeds, server_of
from tests.judging import judged
from tests.values import returned


def _hash(context: RankContext) -> int:
    return hash("layers.0.weight")


class _PreparedInSetOrder(PreparedDdp):
    def step(self) -> None:
        shapes = {name: tuple(p.shape) for name, p in self.named.named_parameters()}
        for name in set(shapes):
            dist.all_reduce(torch.zeros(shapes[name]))
        super().step()


class CommunicatesInSetOrder(DistributedDataParallelEngine):
    """Issues a collective for each parameter, in the order of a set of names."""

    prepared_type = _PreparedInSetOrder


def test_ranks_have_different_seeds_which_the_seed_of_the_session_repeats(tmp_path: Path) -> None:
    first = returned("processes:4", _hash, folder=tmp_path / "first")
    assert len(set(first)) == 4
    draw_hash_seeds(1)
    other = returned("processes:2", _hash, folder=tmp_path / "other")
    draw_hash_seeds(0)
    assert set(other).isdisjoint(first)
    assert returned("processes:2", _hash, folder=tmp_path / "again") == first[:2]
    assert returned("threads:2", _hash, folder=tmp_path / "threads") == [first[0]] * 2


def test_ranks_that_share_a_server_are_no_neighbours_on_a_mesh() -> None:
    servers = [server_of(rank) for rank in range(64)]
    assert servers[:16] == list(range(16))
    assert not [
        (a, a + n) for n in (1, 2, 4, 8, 16, 32) for a in range(64 - n) if servers[a] == servers[a + n]
    ]


def test_seeds_are_drawn_from_the_seed_of_the_session() -> None:
    seeds = [hash_seeds(seed) for seed in range(8)]
    assert seeds == [hash_seeds(seed) for seed in range(8)]
    assert len({seed for drawn in seeds for seed in drawn}) == 8 * 16


@pytest.mark.parametrize(
    ("world", "verdict"), [("processes:2", Verdict.FAILED), ("threads:2", Verdict.PASSED)]
)
def test_an_engine_that_communicates_in_the_order_of_a_set_fails_in_processes(
    session: TrialSession, world: str, verdict: Verdict
) -> None:
    training = Training(problem=MLP_EVEN, optimizer=SGD)
    engine = f"{__name__}:CommunicatesInSetOrder"
    record = judged(session, engine, world, training, laws=(MatchesOracle(),), deadline_s=20.0)
    assert record.verdict is verdict, record.headline
    assert verdict is Verdict.PASSED or "all_reduce" in record.headline


def test_a_run_records_its_seeds(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--engine=torch.ddp", "--world=threads:2", "--suite=smoke", "--schedule-seed=3"]
    assert main(["run", *options, f"--out={out}"]) == 0
    assert read_run(out).header.hash_seeds == hash_seeds(3)
