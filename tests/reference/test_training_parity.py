"""Every layout of units trains as one plain model on all ranks' data does: losses, raw gradients, parameters."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.tensor import Shard

from harness.worlds.spec import WorldKind
from tests.reference.front_doors import FrontDoor
from tests.reference.models import (
    MLP,
    TIED,
    TRANSFORMER,
    Adapted,
    Crumbs,
    Fork,
    Mixed,
    Mlp,
    NoInputs,
    Normed,
    Passing,
    Rooted,
    Transformer,
    Twice,
    Unwrapping,
    stack,
)
from tests.reference.oracle import (
    HYBRID,
    Mesh,
    Plan,
    Training,
    cases,
    nothing,
    rows,
    run_world,
    tokens,
    train_beside_oracle,
)


def _largest_dim(parameter: nn.Parameter) -> Shard:
    return Shard(max(range(parameter.ndim), key=lambda dim: parameter.shape[dim]))


def _last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


def _prefetch_two(door: FrontDoor, model: nn.Module) -> None:
    blocks = list(model.get_submodule("blocks").children())
    for i, block in enumerate(blocks):
        assert isinstance(block, door.sharded_module)
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])


BLOCKS = ("blocks.0", "blocks.1", "")
LAYERS = ("layers.0", "layers.1", "layers.2", "")
PAIRS = ("pairs.0", "pairs.1", "pairs.2", "")
RESHARDS: dict[str, dict[str, object]] = {
    "default": {},
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
}
TRAININGS: dict[str, Training] = {
    # T02
    "no_inputs": Training(model=NoInputs, draw=nothing),
    # T07: fewer rows than ranks, and padding
    **{
        f"single_{'_'.join(map(str, widths))}": Training(model=partial(Mlp, *widths), draw=rows(widths[0]))
        for widths in ((16, 15, 8), (7, 15, 3), (16, 17, 8), (3, 1, 2))
    },
    # T08, T24, T25: other dimensions
    "single_largest_dim": Training(
        model=partial(Mlp, 24, 12, 12),
        draw=rows(24),
        plan=Plan(options={"shard_placement_fn": _largest_dim}),
    ),
    "transformer_largest_dim": Training(
        model=partial(Transformer, width=12, vocabulary=12),
        draw=tokens,
        plan=Plan(units=BLOCKS, options={"shard_placement_fn": _largest_dim}),
    ),
    "mlp_last_dim": Training(
        model=partial(Mlp, 12, 24, 12),
        draw=rows(12),
        plan=Plan(units=("layers.0", ""), options={"shard_placement_fn": _last_dim}),
    ),
    # T09
    **{
        f"transformer_{name}": Training(
            model=partial(Transformer, blocks=3),
            draw=tokens,
            plan=Plan(units=("blocks.0", "blocks.1", "blocks.2", ""), options=options),
        )
        for name, options in RESHARDS.items()
    },
    **{
        f"mlp_{name}": Training(model=MLP, plan=Plan(units=LAYERS, options=options))
        for name, options in RESHARDS.items()
    },
    "root_owns_some": Training(model=partial(Rooted, 5), plan=Plan(units=PAIRS)),
    "nested": Training(
        model=TRANSFORMER,
        draw=tokens,
        plan=Plan(units=("blocks.0.attention", "blocks.0.feed", "blocks.0", "blocks.1.feed", "")),
    ),
    "groups_of_several": Training(
        model=TRANSFORMER, draw=tokens, plan=Plan(units=(("blocks.0", "blocks.1"), ""))
    ),
    # T10
    "offload": Training(model=TRANSFORMER, draw=tokens, plan=Plan(units=BLOCKS, offload=True)),
    "offload_single": Training(model=MLP, plan=Plan(offload=True)),
    # T13
    "multi_forward": Training(model=Twice, draw=rows(4), plan=Plan(units=("inner", ""))),
    "multi_forward_single": Training(model=Twice, draw=rows(4)),
    "multi_forward_reshard": Training(
        model=Twice, draw=rows(4), plan=Plan(units=("inner", "outer", ""), options=RESHARDS["reshard"])
    ),
    # T14
    "explicit_prefetch": Training(
        model=partial(Transformer, blocks=4),
        draw=tokens,
        plan=Plan(units=(*(f"blocks.{i}" for i in range(4)), ""), after=_prefetch_two),
    ),
    # T26, T27
    "tied_in_root": Training(model=TIED, draw=tokens, plan=Plan(units=BLOCKS)),
    "tied_in_group": Training(
        model=TIED, draw=tokens, plan=Plan(units=(("token", "head"), "blocks.0", "blocks.1", ""))
    ),
    "tied_single": Training(model=TIED, draw=tokens),
    # Beyond upstream
    "frozen": Training(
        model=Adapted,
        draw=rows(6),
        plan=Plan(units=("frozen.0", "frozen.1", "frozen.2", "down.0", "up.1", "")),
    ),
    "frozen_reshard": Training(
        model=Adapted,
        draw=rows(6),
        plan=Plan(units=("frozen.0", "frozen.1", "frozen.2", ""), options=RESHARDS["reshard"]),
    ),
    "frozen_and_idle_in_one_unit": Training(model=Mixed, idle=("idle",)),
    "frozen_and_idle": Training(model=Mixed, idle=("idle",), plan=Plan(units=("first", "last", "idle", ""))),
    "crumbs": Training(model=Crumbs, draw=rows(3)),
    "crumbs_in_units": Training(model=Crumbs, draw=rows(3), plan=Plan(units=("linear", ""))),
    "zero_size": Training(
        model=partial(Crumbs, num_rows=0),
        draw=rows(3),
        idle=(),
        torch_fails="its reduce-scatter raises `_chunk_cat expects non-empty tensor`",
    ),
    "buffers": Training(model=Normed, plan=Plan(units=("first", "norm", "last", ""))),
    "fork": Training(model=Fork, plan=Plan(units=("left", "right", ""))),
    "passing_an_input_on": Training(model=Passing, plan=Plan(units=("entry", "gate", "exit", ""))),
    "rows_differ_by_rank": Training(model=MLP, draw=rows(5, grows=True), plan=Plan(units=LAYERS)),
    "three_microbatches": Training(model=MLP, plan=Plan(units=LAYERS), num_microbatches=3),
    **{
        f"{kind}_inside_{returns}_outside": Training(
            model=partial(Unwrapping, kind, returns=returns), plan=Plan(units=("entry", "inner", "outer", ""))
        )
        for kind, returns in (
            ("tuple", "dict"),
            ("dict", "tuple"),
            ("dataclass", "tuple"),
            ("tuple", "dataclass"),
        )
    },
}
HYBRIDS = {
    # T35
    "mlp": Training(model=MLP, plan=Plan(units=LAYERS), mesh=HYBRID),
    "mlp_reshard": Training(model=MLP, plan=Plan(units=LAYERS, options=RESHARDS["reshard"]), mesh=HYBRID),
    **{
        f"normed_stack_{width}": Training(
            model=partial(stack, width),
            draw=rows(width),
            plan=Plan(units=("0", "1", "2", "")),
            mesh=HYBRID,
            num_microbatches=3,
        )
        for width in (3, 16, 17)
    },
    "tied": Training(model=TIED, draw=tokens, plan=Plan(units=BLOCKS), mesh=HYBRID),
    "offload": Training(model=MLP, plan=Plan(units=LAYERS, offload=True), mesh=HYBRID),
    "crumbs": Training(model=Crumbs, draw=rows(3), mesh=HYBRID),
    "all_replicas": Training(
        model=MLP, plan=Plan(units=LAYERS), mesh=Mesh(shape=(4, 1), names=("replicate", "shard"))
    ),
    "all_shards": Training(
        model=MLP, plan=Plan(units=LAYERS), mesh=Mesh(shape=(1, 4), names=("replicate", "shard"))
    ),
    "partly_resharded": Training(
        model=TRANSFORMER,
        draw=tokens,
        plan=Plan(units=BLOCKS, options={"reshard_after_forward": 2}),
        mesh=Mesh(shape=(1, 4), names=("replicate", "shard")),
    ),
}
PARTLY = {
    name: Training(
        model=model,
        draw=draw,
        plan=Plan(units=units, options={"reshard_after_forward": 2}),
        num_microbatches=2,
    )
    for name, model, draw, units in (
        ("mlp", MLP, rows(5), LAYERS),
        ("transformer", TRANSFORMER, tokens, BLOCKS),
        ("single", MLP, rows(5), ("",)),
        ("crumbs", Crumbs, rows(3), ("linear", "")),
        ("tied", TIED, tokens, BLOCKS),
    )
}
# Worlds of 1 (nothing to share), 3 (uneven) and 4, for what depends most on the cut.
OTHER_WORLDS = (
    "single_7_15_3",
    "transformer_default",
    "tied_in_group",
    "crumbs",
    "frozen",
    "mlp_reshard",
    "offload",
)
PROCESSES = ("transformer_default", "tied_in_group", "crumbs")


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS))
def test_trains_as_one_plain_model_does(name: str, door: str, tmp_path: Path) -> None:
    _train(WorldKind.THREADS, 2, door, TRAININGS[name], tmp_path)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize(("name", "door"), cases(TRAININGS, *OTHER_WORLDS))
def test_trains_alike_in_every_world(name: str, size: int, door: str, tmp_path: Path) -> None:
    _train(WorldKind.THREADS, size, door, TRAININGS[name], tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS, *PROCESSES))
def test_trains_alike_in_processes(name: str, door: str, tmp_path: Path) -> None:
    _train(WorldKind.PROCESSES, 2, door, TRAININGS[name], tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(HYBRIDS))
def test_replicas_of_shards_train_alike(name: str, door: str, tmp_path: Path) -> None:
    _train(WorldKind.THREADS, 4, door, HYBRIDS[name], tmp_path)


@pytest.mark.parametrize(("name", "door"), cases(PARTLY))
def test_resharding_to_a_smaller_group_trains_alike(name: str, door: str, tmp_path: Path) -> None:
    _train(WorldKind.THREADS, 4, door, PARTLY[name], tmp_path)


def _train(kind: WorldKind, size: int, door: str, training: Training, folder: Path) -> None:
    losses = run_world(kind, size, train_beside_oracle, door, training, folder=folder)
    seen = {tuple(of_rank) for of_rank in losses}
    assert len(seen) == (size if training.draw is not nothing else 1), "ranks saw equal data"
