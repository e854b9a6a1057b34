"""Options that tune DistributedDataParallel: they change memory and messages, but no number."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import pytest
import torch
from torch import distributed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from shardproof import SEVERAL
from shardproof.suites.data_parallel.bench import Bench, expects
from shardproof.suites.tower import LR, copies, gradients, shown_gradients, tower

GRADIENTS, PARAMETERS = "gradients", "parameters"
_SKIPS = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
_STATIC = "a_static_graph"
_LAZY = "lazy_bucket_allocation"
_OPTIONS: dict[str, dict[str, Any]] = {
    "gradients_in_buckets": {"gradient_as_bucket_view": True},
    "a_size_for_each_bucket": {"bucket_cap_mb_list": [1e-5, 25]},
    "one_copy_for_each_bucket": {"batched_grad_copy": True},
    "buckets_made_in_backward": {_LAZY: True},
    "all_in_buckets": {
        _LAZY: True,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": 1e-6,
    },
    "unused_are_looked_for": {"find_unused_parameters": True},
    "unused_are_left_out": _SKIPS,
    _STATIC: {"static_graph": True},
}
# Releases of torch differ in the options that they have.
_KNOWN = inspect.signature(DistributedDataParallel).parameters.keys()
_TUNING = {name: options for name, options in _OPTIONS.items() if options.keys() <= _KNOWN}
_KILLS = {
    "gradients_in_buckets": "ClearsWhatIsHeldInBuckets",
    "all_in_buckets": "ClearsWhatIsHeldInBuckets",
    _STATIC: "CountsTheGraphOnceForAll",
}
# The number of microbatches of each step, of which only the last is reduced.
_LOOPS = {"each": (1, 1, 1), "held_at_first": (2, 1, 2), "held_later": (1, 2, 2)}


def _kills(tuning: str, loop: str) -> pytest.MarkDecorator:
    """Return the mark of a case: in some loops nothing is held back that a mutant could lose."""
    special = _KILLS.get(tuning) if tuning == _STATIC or loop != "each" else None
    return pytest.mark.kills("SumsWhatItWraps", *filter(None, (special,)))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize(
    ("tuning", "loop"),
    [
        pytest.param(tuning, loop, id=f"{tuning}-{loop}", marks=_kills(tuning, loop))
        for tuning, loop in product(_TUNING, _LOOPS)
    ],
)
@expects(GRADIENTS, PARAMETERS)
def test_an_option_changes_no_number(bench: Bench, tuning: str, loop: str) -> None:
    root, alone = bench.wrap(tower(), **_TUNING[tuning]), tower()
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR / 64) for model in (root, alone)]
    for step, num_microbatches in enumerate(_LOOPS[loop]):  # buckets are rebuilt after the first
        *held, last = range(8 * step, 8 * step + num_microbatches)
        with root.no_sync():
            for microbatch in held:
                bench.train(root, step=microbatch)
        bench.train(root, step=last)
        expected = gradients(alone, bench.ranks, (*held, last))
        bench.near(GRADIENTS, shown_gradients(root.module), expected, tolerance=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    bench.near(
        PARAMETERS, copies(root.module.named_parameters()), copies(alone.named_parameters()), tolerance=1e-5
    )


if _LAZY in _KNOWN:

    @pytest.mark.worlds(SEVERAL)
    @pytest.mark.kills("SumsWhatItWraps")
    @pytest.mark.parametrize("is_view", [False, True], ids=["gradients_copied", "gradients_in_buckets"])
    @expects(GRADIENTS, "buckets that are left")
    def test_buckets_made_in_backward_are_given_back(bench: Bench, is_view: bool) -> None:
        root = bench.wrap(tower(), **{_LAZY: True}, gradient_as_bucket_view=is_view)
        buckets: list[StorageWeakRef] = []
        root.register_comm_hook(buckets, _averages_a_copy)
        for step in range(3):  # buckets are rebuilt after the first
            bench.train(root, step=step)
            bench.same(GRADIENTS, shown_gradients(root.module), gradients(tower(), bench.ranks, [step]))
            root.zero_grad()
        left = sum(not bucket.expired() for bucket in buckets)  # type: ignore[no-untyped-call]
        bench.same("buckets that are left", (left, len(buckets)), (0, 3))


# Any: DDP accepts no annotations, or types; these are strings.
def _averages_a_copy(buckets: list[StorageWeakRef], bucket: Any) -> Any:
    """Keep a weak reference to a bucket, which no collective keeps alive."""
    buckets.append(StorageWeakRef(bucket.buffer().untyped_storage()))  # type: ignore[no-untyped-call]
    mean = bucket.buffer().clone()
    distributed.all_reduce(mean)
    future = torch.futures.Future[torch.Tensor]()
    future.set_result(mean / distributed.get_world_size())
    return future


_averages_a_copy.__annotations__.clear()
