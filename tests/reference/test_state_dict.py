"""A sharded model saves and loads its state: from world to world, whole or in shards, at any moment."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.distributed.tensor import DTensor, distribute_tensor

from shardproof.engine.reference import FullyShardedDataParallel
from shardproof.harness.worlds.rank import RankContext
from tests.reference.models import BY_NAME, each_api
from tests.reference.ranks import Ranks

NUM_ROWS = 12  # divisible by every world size here, so that the mean of the ranks' means is the batch's
# Float64 everywhere; only the order of summation differs. AdamW's root and division magnify it somewhat.
TOLERANCE = 1e-10


class Optimizer(StrEnum):
    """An optimizer: one has a scalar in its state, another has none."""

    ADAMW = "adamw"
    MOMENTUM = "momentum"

    def over(self, module: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in module.parameters() if p.requires_grad]
        if self is Optimizer.ADAMW:
            return torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)


class Net(nn.Module):
    """No world divides its sizes, ``last`` has fewer rows than a world of four; the root owns ``middle``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Linear(7, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(rows)))))
        return output


UNITS = ("first", "last")


def _plain(*, seed: int = 0) -> nn.Module:
    """Build a whole model in float64; the seed decides every value."""
    model = Net().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


# Any: the two engines' sharded modules share no base class.
def _sharded(api: str, mesh: DeviceMesh, *, seed: int = 0, **options: object) -> Any:
    model = _plain(seed=seed)
    for name in UNITS:
        BY_NAME[api].fully_shard(model.get_submodule(name), mesh=mesh, **options)
    return BY_NAME[api].fully_shard(model, mesh=mesh, **options)


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _loss(model: nn.Module, step: int, *, rank: int = 0, size: int = 1) -> torch.Tensor:
    """Return a rank's part of the loss of a step's global batch."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(NUM_ROWS, 5, dtype=torch.float64, generator=generator)
    loss: torch.Tensor = model(batch.chunk(size)[rank]).square().mean()
    return loss


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, rank: int = 0, size: int = 1
) -> None:
    for step in steps:
        _loss(model, step, rank=rank, size=size).backward()
        optimizer.step()
        optimizer.zero_grad()


def _oracle(optimizer: Optimizer, num_steps: int) -> nn.Module:
    """Train a whole model on whole batches, in one process."""
    model = _plain()
    _train(model, optimizer.over(model), range(num_steps))
    return model


def _assert_is(sharded: nn.Module, plain: nn.Module) -> None:
    """Compare parameters with those of a model that no engine touched."""
    __tracebackhide__ = True
    _assert_values(dict(sharded.named_parameters()), dict(plain.named_parameters()))
    for mine, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert mine.requires_grad == theirs.requires_grad


def _assert_values(found: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare every tensor's shard on this rank, and its whole value."""
    __tracebackhide__ = True
    assert list(found) == list(expected)
    for name, value in expected.items():
        mine = found[name]
        assert isinstance(mine, DTensor), f"{name}: expected a DTensor, got {type(mine).__name__}"
        shard = distribute_tensor(value.detach(), mine.device_mesh, mine.placements).to_local()
        for what, ours, theirs in (("shard", mine.to_local(), shard), ("whole", mine.full_tensor(), value)):
            message = f"{what} of {name}: expected {theirs}, got {ours}"
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE, msg=message)


# --- from world to world ------------------------------------------------------------------------------------------


def _save_after_two_steps(
    context: RankContext, api: str, optimizer: Optimizer, shape: tuple[int, ...], checkpoint: Path
) -> None:
    model = _sharded(api, _mesh(shape))
    optim = optimizer.over(model)
    _train(model, optim, range(2), rank=context.rank, size=context.size)
    state, optim_state = get_state_dict(model, optim)
    save({"model": state, "optim": optim_state}, checkpoint_id=checkpoint)


def _load_and_train_the_third(context: RankContext, api: str, optimizer: Optimizer, checkpoint: Path) -> None:
    model = _sharded(api, _mesh((context.size,)), seed=1)
    optim = optimizer.over(model)
    state, optim_state = get_state_dict(model, optim)
    loaded: dict[str, Any] = {"model": state, "optim": optim_state}  # Any: the loader fills both in place
    load(loaded, checkpoint_id=checkpoint)
    set_state_dict(model, optim, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    _assert_is(model, _oracle(optimizer, 2))
    _train(model, optim, range(2, 3), rank=context.rank, size=context.size)
    _assert_is(model, _oracle(optimizer, 3))


@each_api
@pytest.mark.parametrize(
    ("optimizer", "shape"), [(Optimizer.ADAMW, (4,)), (Optimizer.MOMENTUM, (2, 2))], ids=["flat", "hybrid"]
)
def test_a_checkpoint_is_trained_on_in_worlds_of_other_sizes(
    api: str, optimizer: Optimizer, shape: tuple[int, ...], ranks: Ranks, tmp_path: Path
) -> None:
    saved = tmp_path / "checkpoint"
    ranks.run(4, _save_after_two_steps, api, optimizer, shape, saved)
    for size in (2, 3):
        ranks.run(size, _load_and_train_the_third, api, optimizer, saved)


def _load_incomplete_state(context: RankContext, api: str) -> None:
    model = _sharded(api, _mesh((context.size,)))
    state = model.state_dict()
    del state["last.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*last\.bias"):
        model.load_state_dict(state)
    missing = model.load_state_dict({**state, "extra": torch.ones(1)}, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["last.bias"], ["extra"])
    _assert_is(model, _plain())


@each_api
def test_strict_loading_names_missing_keys(api: str, ranks: Ranks) -> None:
    ranks.run(2, _load_incomplete_state, api)


# --- plain state_dict and load_state_dict -------------------------------------------------------------------------


def _save_at_every_moment(context: RankContext, api: str, reshard: bool, shape: tuple[int, ...]) -> None:
    model = _sharded(api, _mesh(shape), reshard_after_forward=reshard)
    before, after = _plain().state_dict(), _oracle(Optimizer.MOMENTUM, 1).state_dict()
    _assert_values(model.state_dict(), before)
    loss = _loss(model, 0, rank=context.rank, size=context.size)
    _assert_values(model.state_dict(), before)
    loss.backward()
    _assert_values(model.state_dict(), before)
    Optimizer.MOMENTUM.over(model).step()
    _assert_values(model.state_dict(), after)
    with torch.no_grad():
        model(torch.ones(2, 5, dtype=torch.float64))
    _assert_values(model.state_dict(), after)
    model.unshard()
    _assert_values(model.state_dict(), after)


@each_api
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_state_dict_returns_shards_at_every_moment(
    api: str, reshard: bool, shape: tuple[int, ...], ranks: Ranks
) -> None:
    size = torch.Size(shape).numel()
    ranks.run(size, _save_at_every_moment, api, reshard, shape)


class Moment(StrEnum):
    """When a state is loaded."""

    BEFORE_FORWARD = "before forward"  # nothing ran yet
    AFTER_FORWARD = "after forward"  # without gradients, and parameters stay whole
    AFTER_TRAINING = "after training"  # gradients were there, and an optimizer stepped


def _load(context: RankContext, api: str, moment: Moment, assign: bool) -> None:
    mesh, place = _mesh((context.size,)), {"rank": context.rank, "size": context.size}
    trained = _sharded(api, mesh)
    _train(trained, Optimizer.MOMENTUM.over(trained), range(1), **place)
    model = _sharded(api, mesh, seed=1, reshard_after_forward=False)
    if moment is Moment.AFTER_FORWARD:
        with torch.no_grad():
            _loss(model, 5, **place)
    if moment is Moment.AFTER_TRAINING:
        _train(model, Optimizer.ADAMW.over(model), range(5, 7), **place)
    state = {name: value.detach().clone() for name, value in trained.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    oracle = _oracle(Optimizer.MOMENTUM, 1)
    _assert_is(model, oracle)
    # The optimizers of both are new ones.
    _train(oracle, Optimizer.MOMENTUM.over(oracle), range(1, 3))
    _train(model, Optimizer.MOMENTUM.over(model), range(1, 3), **place)
    _assert_is(model, oracle)


@each_api
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("moment", Moment)
def test_training_continues_from_a_loaded_state(api: str, moment: Moment, assign: bool, ranks: Ranks) -> None:
    ranks.run(3, _load, api, moment, assign)


def _load_on_meta(context: RankContext, api: str) -> None:
    mesh = _mesh((context.size,))
    state = {name: value.detach().clone() for name, value in _sharded(api, mesh).state_dict().items()}
    with torch.device("meta"):
        model = Net().double()
    for module in (model.first, model.last, model):
        BY_NAME[api].fully_shard(module, mesh=mesh)
    model.load_state_dict(state, assign=True)
    _train(model, Optimizer.ADAMW.over(model), range(2), rank=context.rank, size=context.size)
    _assert_is(model, _oracle(Optimizer.ADAMW, 2))


@each_api
def test_a_model_on_meta_is_made_real_by_loading(api: str, ranks: Ranks) -> None:
    ranks.run(3, _load_on_meta, api)


def _nested(is_named: bool) -> nn.Module:
    return nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 3), use_orig_params=is_named), nn.Linear(3, 2))


def _through_files(context: RankContext, folder: Path, kind: StateDictType, is_named: bool) -> None:
    saved, loaded = (FullyShardedDataParallel(_nested(is_named), use_orig_params=is_named) for _ in range(2))
    wholes = []
    for model in (saved, loaded):
        with FullyShardedDataParallel.state_dict_type(model, kind):
            state = model.state_dict()
            if model is saved:
                save(state, checkpoint_id=folder)
            else:
                load(state, checkpoint_id=folder)
                model.load_state_dict(state, strict=kind is not StateDictType.LOCAL_STATE_DICT)
        with FullyShardedDataParallel.summon_full_params(model):
            wholes.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*wholes, rtol=0, atol=0)


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "flat"])
@pytest.mark.parametrize("kind", [StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT])
def test_files_keep_what_every_rank_of_a_wrapper_has(
    kind: StateDictType, is_named: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """Plain tensors of one name are taken for copies, of which files keep one (pytorch#120356)."""
    ranks.run(2, _through_files, tmp_path, kind, is_named)


def _named_optimizer(context: RankContext, is_named: bool) -> None:
    model = FullyShardedDataParallel(_nested(is_named), use_orig_params=is_named)
    names, optimizer = [name for name, _ in model.named_parameters()], torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    own = optimizer.state_dict()
    by_name = {
        "state": {names[number]: state for number, state in own["state"].items()},
        "param_groups": [{**own["param_groups"][0], "params": sorted(names, reverse=True)}],
    }
    expected = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer, by_name)
    torch.testing.assert_close(saved["state"], expected["state"], rtol=0, atol=0)
    loaded = FullyShardedDataParallel.optim_state_dict_to_load(
        model, optimizer, saved, is_named_optimizer=True
    )
    torch.testing.assert_close(loaded["state"], by_name["state"], rtol=0, atol=0)


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "flat"])
def test_a_wrapper_keeps_the_state_of_an_optimizer_of_names(is_named: bool, ranks: Ranks) -> None:
    """Its parameters are in an order of their own, by the names in the wrapped model."""
    ranks.run(2, _named_optimizer, is_named)


def _without_optimizer(context: RankContext) -> None:
    model, plain = FullyShardedDataParallel(_nested(True), use_orig_params=True), nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    whole = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
    for optim_input in (None, model.parameters(), [{"params": list(model.parameters())}]):
        made = FullyShardedDataParallel.shard_full_optim_state_dict(whole, model, optim_input)
        torch.testing.assert_close(made, optimizer.state_dict(), rtol=0, atol=0)
    # An optimizer may have its parameters in another order than the model, and loads them in that order.
    bias_first = FullyShardedDataParallel.rekey_optim_state_dict(
        {"state": {"weight": 1, "bias": 2}, "param_groups": [{"params": ["weight", "bias"]}]},
        OptimStateKeyType.PARAM_ID,
        plain,
        [*plain.parameters()][::-1],
    )
    assert bias_first == {"state": {1: 1, 0: 2}, "param_groups": [{"params": [0, 1]}]}


def test_a_state_of_the_optimizer_is_converted_without_the_optimizer(ranks: Ranks) -> None:
    ranks.run(2, _without_optimizer)
