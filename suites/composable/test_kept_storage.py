"""Memory of gathered parameters that must keep its address, because captured graphs of kernels read it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardproof import EVEN, Capability
from shardproof.suites.composable import bench as benches
from shardproof.suites.composable.bench import Bench
from shardproof.suites.params import param, parametrize
from shardproof.suites.tower import LR, UNITS, copies, gradients, tower

expects = partial(benches.expects, beside=frozenset({Capability.KEEP_STORAGE}))


@pytest.mark.worlds(EVEN)
@parametrize(
    "kept",
    param("all", kills="FreesWhatIsToBeKept", rows="T55"),
    param("root", kills="FreesWhatIsToBeKept", rows="T55"),
    param("replicas", kills="ShowsTheFirstValues", rows="R22"),
)
@expects("values", "addresses", "with memory between", "shown between")
def test_stays_where_it_is_and_shows_the_newest_values(bench: Bench, kept: str) -> None:
    model, alone = tower(), tower()
    units = [*(model.get_submodule(unit) for unit in reversed(UNITS)), model]
    apply = bench.api.replicate if kept == "replicas" else bench.api.fully_shard
    handles = [apply(unit, mesh=bench.mesh()) for unit in units]
    handles[-1].set_keep_unsharded_storage(True, recurse=kept != "root")
    optimizers = [torch.optim.SGD(m.parameters(), lr=LR / 64) for m in (model, alone)]
    addresses = []
    for step in range(3):
        for handle in handles:
            handle.unshard()
        whole = dict(model.named_parameters())
        bench.near("values", copies(whole.items()), copies(alone.named_parameters()), tolerance=1e-5)
        keeps = {n: kept != "root" or not n.startswith("middle") for n in whole}
        addresses.append([p.data_ptr() for n, p in whole.items() if keeps[n]])
        for handle in handles:
            handle.reshard()
        held = {name: p.untyped_storage().nbytes() > 0 for name, p in whole.items()}
        bench.same("with memory between", held, {n: k or kept == "replicas" for n, k in keeps.items()})
        bench.same("shown between", {isinstance(p, DTensor) for p in model.parameters()}, {True})
        bench.train(model, step=step)
        gradients(alone, bench.ranks, [step])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    bench.same("addresses", addresses[1:], addresses[:-1])
