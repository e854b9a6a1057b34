"""Counts of gathers: ahead in forward, and in a backward that recomputes a unit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardproof.harness.tracing.ledger import Op, Phase
from shardproof.harness.worlds.rank import RankContext
from tests.reference.apis import BY_NAME, each_api
from tests.reference.models import (
    Chain,
    apply_to,
    assert_gradients,
    chain_gradients,
    inputs_of,
    train,
    whole_units,
)
from tests.reference.ranks import Ranks, collectives

AG, RS = Op.ALL_GATHER, Op.REDUCE_SCATTER


def _gathers_before(context: RankContext) -> list[int]:
    """Count the gathers that are issued when each unit of a second forward starts to compute."""
    model, counts = (
        apply_to(Chain(), BY_NAME["reference"].fully_shard, reshard_after_forward=True),
        list[int](),
    )
    train(context, model, step=0)
    for unit in model.units:
        unit.register_forward_pre_hook(lambda *_: counts.append(collectives(context, step=1)[AG]))
    train(context, model, step=1)
    return counts


def test_the_reference_gathers_one_ahead_in_forward(ranks: Ranks) -> None:
    """The engine prefetches once it has seen an order; torch needs explicit lists. The root comes first."""
    assert ranks.run(2, _gathers_before) == [[3, 4, 4]] * 2


class Checkpointed(Chain):
    """Runs each unit under a checkpoint."""

    is_reentrant = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            inputs = checkpoint(unit, inputs, use_reentrant=self.is_reentrant)
        return inputs * self.scale


def _recompute(context: RankContext, api: str, is_reentrant: bool) -> dict[Op, int]:
    """Count a backward's collectives where each unit prefetches the next one in forward."""
    chain = Checkpointed()
    chain.is_reentrant = is_reentrant
    model = apply_to(chain, BY_NAME[api].fully_shard, reshard_after_forward=True)
    for unit, following in pairwise(model.units):
        unit.set_modules_to_forward_prefetch([following])
    for step in range(2):
        model.zero_grad()
        # Reentrant checkpoints need an input that requires a gradient.
        loss = model(inputs_of(context.rank).requires_grad_()).sum()
        with context.recorder.during(Phase.BACKWARD, step=step):
            loss.backward()
    assert not whole_units(chain)
    assert_gradients(chain, chain_gradients(context.size))
    return collectives(context, step=1)


@each_api
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["", "reentrant"])
def test_a_recomputed_forward_prefetches_nothing(is_reentrant: bool, api: str, ranks: Ranks) -> None:
    if api == "torch" and is_reentrant and not torch.__version__.startswith("2.13."):
        pytest.skip("measured with torch 2.13; look again")
    # torch takes a forward that a nested backward recomputes for one of the training (pytorch/pytorch#169349 is near),
    # and gathers a unit whose backward is over.
    num_more = 2 if api == "torch" and is_reentrant else 0
    assert ranks.run(2, _recompute, api, is_reentrant) == [{AG: 4 + num_more, RS: 4}] * 2
