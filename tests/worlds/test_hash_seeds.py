"""Ranks in processes hash texts differently, as on a cluster, and the seed of a session repeats their hashes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardproof import (
    MatchesOracle,
    RankContext,
    Returned,
    Training,
    TrialSession,
    Verdict,
    WorldKind,
    WorldSpec,
    launch,
)
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.registry import EngineNotFoundError
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.cli.main import main
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.engines import describe
from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, hash_seeds, server_of
from shardproof.harness.worlds.processes.fresh_process import ask
from tests.judging import judged
from tests.shell import python
from tests.values import returned


def _hash(context: RankContext) -> int:
    return hash("layers.0.weight")


class _PreparedInSetOrder(PreparedDdp):
    def step(self) -> None:
        shapes = {name: tuple(p.shape) for name, p in self.named.named_parameters()}
        for name in set(shapes):
            dist.all_reduce(torch.zeros(shapes[name], dtype=torch.int32))
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


# Preloaded modules.


MODULE = "tests.worlds.imported_once"


def _found(_: RankContext) -> tuple[bool, str]:
    return MODULE in sys.modules, os.environ["PYTHONHASHSEED"]


def _found_by_an_oracle() -> bytes:
    return str(MODULE in sys.modules).encode()


@pytest.mark.parametrize("world", ["threads:2", "processes:2"])
def test_a_rank_that_imports_its_engine_anew_does_so_unless_it_is_preloaded(
    session: TrialSession, world: str
) -> None:
    anew = judged(session, f"{MODULE}:ImportsItsModule", world)
    assert (anew.verdict, "imported the module anew" in anew.headline) == (Verdict.CRASHED, True)
    once = judged(session, f"{MODULE}:WantsItsModule", world)
    assert once.verdict is Verdict.PASSED, once.headline


def test_a_module_is_preloaded_only_in_its_own_world_with_the_hash_seeds_of_others(tmp_path: Path) -> None:
    for name, preload, is_there in (
        ("it", (MODULE,), True),
        ("other", ("tests.values",), False),
        ("none", (), False),
    ):
        world = WorldSpec(kind=WorldKind.PROCESSES, size=2, preload=preload)
        outcomes = launch(world, _found, folder=tmp_path / name).outcomes
        found = [o.value for o in outcomes if isinstance(o, Returned)]
        assert found == [(is_there, str(seed)) for seed in hash_seeds(0)[:2]]
        assert ask(30, 100, _found_by_an_oracle) == b"False"


def test_a_module_that_is_missing_is_named() -> None:
    with pytest.raises(EngineNotFoundError, match=r"preload raised .*tests\.no_such_module"):
        describe(f"{MODULE}:WantsWhatIsMissing")


def test_prints_of_modules_at_import_are_no_part_of_the_output_of_the_session(tmp_path: Path) -> None:
    arguments = ("--engine", f"{MODULE}:WantsItsModule", "--world", "processes:2", "--suite", "smoke")
    done = python("-m", "shardproof", "run", *arguments, "--json", "--out", str(tmp_path / "run"))
    assert json.loads(done.stdout)["conforms"], done.stderr
    assert "imported" in done.stderr
