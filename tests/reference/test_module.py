"""A sharded module keeps its class, parts, parameters and dtypes, and a cast changes its values."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from shardproof.harness.tracing.ledger import Op, Phase
from shardproof.harness.worlds.rank import RankContext
from tests.reference.models import (
    BY_NAME,
    Chain,
    Unit,
    apply_to,
    assert_gradients,
    chain_gradients,
    each_api,
    hybrid_mesh,
    inputs_of,
    mean_gradients,
    whole_units,
)
from tests.reference.ranks import Ranks, collectives

SIZE = 2


def _classes(context: RankContext, api_name: str) -> list[str]:
    api = BY_NAME[api_name]
    sharded, replicated, other, plain = (Unit(index) for index in range(4))
    assert api.fully_shard(sharded) is sharded
    assert api.replicate(replicated) is replicated
    assert isinstance(sharded, Unit)
    assert isinstance(sharded, api.sharded_module)
    assert isinstance(replicated, api.sharded_module)
    assert not isinstance(plain, api.sharded_module)
    assert type(api.fully_shard(other)) is type(sharded), "one class per class"
    return [type(sharded).__name__, type(replicated).__name__]


@each_api
def test_the_class_is_named_after_the_original_class(api: str, ranks: Ranks) -> None:
    assert ranks.run(1, _classes, api) == [["FSDPUnit", "ReplicateUnit"]]


# --- parameters ---------------------------------------------------------------------------------------------------


def _placements(context: RankContext, api_name: str) -> list[set[tuple[Placement, ...]]]:
    api = BY_NAME[api_name]
    shard, replicate = api.fully_shard, api.replicate
    models = [
        apply_to(Chain(), shard),
        apply_to(Chain(), shard, mesh=hybrid_mesh(2, 2)),
        apply_to(Chain(), shard, mesh=hybrid_mesh(4, 1)),
        apply_to(Chain(), replicate),
    ]
    for model in models:
        for mine, plain in zip(model.parameters(), Chain().parameters(), strict=True):
            assert mine.shape == plain.shape
            assert mine.requires_grad
            assert mine.to_local().is_contiguous()
    own = init_device_mesh("cpu", (4,))  # a caller's mesh of all ranks, which tensors of both can share
    assert all(p.device_mesh == own for p in models[0].parameters())
    return [{p.placements for p in model.parameters()} for model in models]


@each_api
def test_shards_have_the_placements_of_their_mesh(api: str, ranks: Ranks) -> None:
    hybrid = {(Replicate(), Shard(0))}
    assert ranks.run(4, _placements, api) == [[{(Shard(0),)}, hybrid, hybrid, {(Replicate(),)}]] * 4


def _identities(context: RankContext, api: str) -> None:
    model = apply_to(Chain(), BY_NAME[api].fully_shard)
    before = list(model.parameters())
    for _ in range(2):
        model(inputs_of(context.rank)).sum().backward()
        assert all(x is y for x, y in zip(before, model.parameters(), strict=True))


@each_api
def test_parameters_keep_their_identity(api: str, ranks: Ranks) -> None:
    """Otherwise an optimizer made before the step would hold other parameters (BUGS C6-03)."""
    ranks.run(SIZE, _identities, api)


# --- values -------------------------------------------------------------------------------------------------------


def _cast(context: RankContext, api: str, unshards: bool) -> None:
    chain = Chain()
    model = apply_to(chain, BY_NAME[api].fully_shard, reshard_after_forward=False)
    if unshards:
        for module in (model, *model.units):
            module.unshard()
    assert model.to(torch.float64) is model
    assert whole_units(chain) == set()
    model(inputs_of(context.rank, torch.float64)).sum().backward()
    for param in model.parameters():
        dtypes = {param.dtype, param.to_local().dtype, param.grad.dtype, param.grad.to_local().dtype}
        assert dtypes == {torch.float64}
        assert param._spec.tensor_meta.dtype == torch.float64
    assert_gradients(model, chain_gradients(context.size, dtype=torch.float64))


@each_api
def test_a_model_may_be_cast_after_sharding(api: str, ranks: Ranks) -> None:
    """Upstream rows T06, R04."""
    ranks.run(3, _cast, api, False)


def test_a_model_may_be_cast_after_it_was_gathered(ranks: Ranks) -> None:
    # torch 2.13 keeps the gathered buffers in the old dtype: "Expected out tensor to have dtype double, but got float".
    ranks.run(3, _cast, "reference", True)


def _cast_between_backwards(context: RankContext, api: str, num_replicas: int) -> None:
    mesh = hybrid_mesh(num_replicas, context.size // num_replicas)
    model = apply_to(Chain(), BY_NAME[api].fully_shard, mesh=mesh)
    first, second = (model(inputs_of(context.rank)).sum() for _ in range(2))
    first.backward()
    model.to(torch.float64).to(torch.float32)
    second.backward()
    expected = chain_gradients(context.size)
    assert_gradients(model, {name: 2 * gradient for name, gradient in expected.items()})


@each_api
@pytest.mark.parametrize("num_replicas", [1, 2], ids=["shards", "replicas"])
def test_graphs_outlive_a_cast_and_back(api: str, num_replicas: int, ranks: Ranks) -> None:
    ranks.run(2, _cast_between_backwards, api, num_replicas)


def _share(context: RankContext, api: str, is_apart: bool) -> None:
    layer, plain_layer = Unit(0), Unit(0)
    model, plain = nn.Sequential(layer, nn.Tanh(), layer), nn.Sequential(plain_layer, nn.Tanh(), plain_layer)
    if is_apart:
        BY_NAME[api].fully_shard(layer)
    BY_NAME[api].fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        model(inputs_of(context.rank)).sum().backward()
    assert model[0] is model[2]
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert_gradients(model, mean_gradients(plain, range(SIZE)))


@each_api
@pytest.mark.parametrize("is_apart", [True, False], ids=["a unit", "in the root"])
def test_a_layer_of_two_names_is_one(is_apart: bool, api: str, ranks: Ranks) -> None:
    ranks.run(SIZE, _share, api, is_apart)


# Counts of gathers.


AG, RS = Op.ALL_GATHER, Op.REDUCE_SCATTER


class Checkpointed(Chain):
    """Runs each unit under a checkpoint."""

    is_reentrant = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            inputs = checkpoint(unit, inputs, use_reentrant=self.is_reentrant)
        return inputs * self.scale


def recompute(context: RankContext, api: str, is_reentrant: bool) -> dict[Op, int]:
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


@pytest.mark.parametrize(
    ("is_reentrant", "api"), [(False, "torch"), (False, "reference"), (True, "reference")]
)
def test_a_recomputed_forward_prefetches_nothing(is_reentrant: bool, api: str, ranks: Ranks) -> None:
    assert ranks.run(2, recompute, api, is_reentrant) == [{AG: 4, RS: 4}] * 2


def _zeroed_once_cast(context: RankContext, api_name: str) -> float:
    layer = nn.Linear(4, 4, bias=False, dtype=torch.complex64)
    BY_NAME[api_name].fully_shard(
        layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=True
    )
    rows = torch.ones(2, 4, dtype=torch.complex64)
    layer(rows)
    for dtype in (torch.complex128, torch.complex64):
        layer.weight = nn.Parameter(layer.weight.detach().to(dtype))
    with torch.no_grad():
        layer.weight.zero_()
    return float(layer(rows).abs().max())


def test_complex_parameters_that_no_policy_casts_are_current_after_a_cast(ranks: Ranks) -> None:
    assert ranks.run(1, _zeroed_once_cast, "reference") == [0.0]
