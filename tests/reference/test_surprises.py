"""Uses that no schedule foresees either train rightly or are refused with a reason."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import ShardingStrategy

from shardproof.engine.reference import (
    FullyShardedDataParallel,
    clip_grad_norm_,
    fully_shard,
    replicate,
)
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import WorldKind
from tests.reference.models import assert_gradients, hybrid_mesh
from tests.reference.ranks import Ranks


def _twins(num_layers: int = 2) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a model to shard and a plain one that starts equal."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(num_layers)))
    return copy.deepcopy(plain), plain


def _inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


def _error(model: nn.Module, plain: nn.Module) -> float:
    with torch.no_grad():
        error: torch.Tensor = (model(_inputs()) - plain(_inputs())).abs().max()
    return error.item()


def _gradients(plain: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def _flags_before_the_first_forward(context: RankContext) -> None:
    model, plain = _twins()
    fully_shard(model[0])
    model[0].set_is_last_backward(False)  # type: ignore[operator]  # gained by sharding
    fully_shard(model)
    for trained in (model, plain):
        trained(_inputs()).square().mean().backward()
        if trained is model:
            model.set_is_last_backward(True)  # type: ignore[operator]  # gained by sharding
        trained(_inputs()).square().mean().backward()
    assert_gradients(model, _gradients(plain))


def test_flags_may_be_set_before_the_root_is_known(ranks: Ranks) -> None:
    ranks.run(2, _flags_before_the_first_forward)


def _partly_used_while_only_scattering(context: RankContext) -> None:
    """Use both layers with reduce-scatters alone, then one layer; the other's part must still reach its gradient."""
    mesh = hybrid_mesh(2, 2)
    model, plain = _twins()
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    for _ in range(2):
        for trained in (model, plain):
            trained.zero_grad()
            if trained is model:
                model.set_requires_all_reduce(False)  # type: ignore[operator]  # gained by sharding
            trained(_inputs()).square().mean().backward()
            if trained is model:
                model.set_requires_all_reduce(True)  # type: ignore[operator]
            trained.forward = trained[0].__call__  # type: ignore[method-assign]
            trained(_inputs()).square().mean().backward()
            del trained.forward
        assert_gradients(model, _gradients(plain))


def test_a_gradient_that_was_only_scattered_is_not_left_for_the_next_step(ranks: Ranks) -> None:
    ranks.run(4, _partly_used_while_only_scattering)


def _written_between_forward_and_backward(context: RankContext, reshard: bool | int) -> float:
    model, plain = _twins()
    for module in (model[0], model):
        fully_shard(module, reshard_after_forward=reshard)
    model.set_reshard_after_backward(False)  # type: ignore[operator]  # gained by sharding
    loss = model(_inputs()).square().mean()
    with torch.no_grad():
        for trained in (model, plain):
            trained[0].get_parameter("weight").mul_(2.0)
    loss.backward()
    return _error(model, plain)


@pytest.mark.parametrize("reshard", [True, 2], ids=["all", "a part"])
def test_a_write_between_forward_and_backward_reaches_the_next_forward(
    reshard: bool | int, ranks: Ranks
) -> None:
    errors = ranks.run(4, _written_between_forward_and_backward, reshard)
    assert errors == pytest.approx([0] * 4, abs=1e-12)


def _refused_then_ignored(context: RankContext) -> float:
    model, plain = _twins()
    scalar = nn.Parameter(torch.ones((), dtype=torch.float64))
    model[1].register_parameter("scale", scalar)
    with pytest.raises(ValueError, match="scalar"):
        fully_shard(model)
    fully_shard(model, ignored_params={scalar})
    return _error(model, plain)


def test_a_refused_call_changes_nothing(ranks: Ranks) -> None:
    assert ranks.run(2, _refused_then_ignored) == pytest.approx([0, 0], abs=1e-12)


def _cleared_while_whole(context: RankContext) -> str:
    model, plain = _twins()
    root = FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True
    )
    loss = root(_inputs()).sum()
    with pytest.raises(ValueError, match="non-leaf"):
        torch.optim.SGD(root.parameters())
    loss.backward()
    loss = root(_inputs()).sum()
    root.zero_grad()
    loss.backward()
    plain(_inputs()).sum().backward()
    with FullyShardedDataParallel.summon_full_params(root, with_grads=True):
        assert_gradients(model, _gradients(plain))
    return "cleared"


def test_whole_parameters_that_are_listed_belong_to_no_optimizer_and_are_cleared(ranks: Ranks) -> None:
    assert ranks.run(2, _cleared_while_whole) == ["cleared"] * 2


def _stepped_before_backward(context: RankContext) -> str:
    model, _ = _twins()
    replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first, second = (model(_inputs()).square().mean() for _ in range(2))
    first.backward()
    optimizer.step()
    try:
        second.backward()
    except RuntimeError as refusal:
        return str(refusal)
    return "trained on"


def test_a_step_before_backward_is_refused_where_the_shards_are_the_parameters(ranks: Ranks) -> None:
    for outcome in ranks.run(2, _stepped_before_backward):
        assert "changed by an optimizer before backward" in outcome or outcome == "trained on", outcome


def _compiled(context: RankContext, whole: bool) -> float:
    model, plain = _twins()
    fully_shard(model[0])
    fully_shard(model)
    runs = torch.compile(model, backend="eager") if whole else model
    if not whole:
        model[0].compile(backend="eager")
    for trained, called in ((model, runs), (plain, plain)):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            called(_inputs()).square().mean().backward()
            optimizer.step()
    return _error(model, plain)


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a unit"])
def test_compiled_modules_train_the_same(whole: bool, ranks: Ranks) -> None:
    errors = ranks.run(2, _compiled, whole, kind=WorldKind.PROCESSES)
    assert errors == pytest.approx([0, 0], abs=1e-12)


def _saved_and_copied(context: RankContext, call: str) -> list[int]:
    model, _ = _twins()
    (replicate if call == "replicate" else fully_shard)(model)
    for _ in range(2):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        copied = copy.deepcopy(model.state_dict())
        assert all(torch.equal(copied[k].to_local(), v.to_local()) for k, v in model.state_dict().items())
        model(_inputs()).square().mean().backward()
    alone = io.BytesIO()
    torch.save(model.state_dict()["1.bias"], alone)
    return [len(alone.getvalue()), len(file.getvalue())]


@pytest.mark.parametrize("call", ["fully_shard", "replicate"])
def test_a_state_dict_is_saved_and_copied_as_any_other(call: str, ranks: Ranks) -> None:
    for alone, together in ranks.run(2, _saved_and_copied, call, kind=WorldKind.PROCESSES):
        assert alone < together, "one parameter carries no other"


def _other_uses_per_rank(context: RankContext) -> float:
    """Run a kept unit once or twice, as the rank likes, with a collective of the user's in between."""
    model, _ = _twins()
    fully_shard(model[0], reshard_after_forward=False)
    fully_shard(model[1])

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(context.rank + 1):
                x = self.layers[0](x)
            dist.all_reduce(torch.ones(1))
            out: torch.Tensor = self.layers[1](x)
            return out

    root = fully_shard(Root())
    for _ in range(3):
        root(_inputs()).square().mean().backward()
    return float(context.rank)


def test_ranks_may_run_a_whole_unit_as_often_as_they_like(ranks: Ranks) -> None:
    assert ranks.run(2, _other_uses_per_rank) == [0.0, 1.0]


class _Caches(nn.Module):
    """Computes with the value that its ``__setattr__`` received last."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["cached"] = []
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def __setattr__(self, name: str, value: Any) -> None:  # Any: any value
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["cached"][:] = [value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x @ self.__dict__["cached"][0]
        return out


def _set_through_the_module(context: RankContext) -> bool:
    model = fully_shard(_Caches())
    model(_inputs()).sum().backward()
    return model.weight.grad is not None


def test_a_module_sees_registrations_through_its_own_setattr(ranks: Ranks) -> None:
    assert ranks.run(2, _set_through_the_module) == [True, True]


@dataclass
class _Carried:
    """A value that one unit passes to the next beside its output."""

    extra: torch.Tensor | float = 0.0


class _Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor, carried: _Carried) -> torch.Tensor:
        carried.extra = 1.0
        return x * self.weight


def _writes_to_its_argument(context: RankContext) -> float:
    model = fully_shard(_Adds())
    carried = _Carried()
    model(_inputs(), carried)
    assert isinstance(carried.extra, float)
    return carried.extra


def _forward_mode(context: RankContext) -> None:
    """Take a directional derivative first, and train afterwards."""
    model, plain = _twins()
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard(model[1])
    fully_shard(model)
    tangents = []
    for module in (model, plain):
        with forward_ad.dual_level():
            output = module(forward_ad.make_dual(_inputs(), torch.ones_like(_inputs())))
            tangents.append(forward_ad.unpack_dual(output).tangent)
    torch.testing.assert_close(*tangents)
    for module in (model, plain):
        module(_inputs()).square().mean().backward()
    assert_gradients(model, _gradients(plain))


def _mapped(context: RankContext) -> None:
    """Run over a batch by ``vmap``, with and without gradients of the inputs."""
    for needs_gradient in (False, True):
        model, plain = _twins()
        fully_shard(model[0], reshard_after_forward=True)
        fully_shard(model[1])
        fully_shard(model)
        for module in (model, plain):
            output = torch.vmap(module)(_inputs().requires_grad_(needs_gradient))
            output.square().mean().backward()
        assert_gradients(model, _gradients(plain))


def test_a_forward_may_be_mapped_over_a_batch(ranks: Ranks) -> None:
    ranks.run(2, _mapped, kind=WorldKind.PROCESSES)  # transforms are of the process


def test_a_first_forward_may_carry_tangents(ranks: Ranks) -> None:
    """torch 2.13 refuses its own identity function in forward mode."""
    ranks.run(2, _forward_mode, kind=WorldKind.PROCESSES)  # one level in a process


def test_a_container_without_changed_tensors_is_the_callers_own(ranks: Ranks) -> None:
    assert ranks.run(2, _writes_to_its_argument) == [1.0, 1.0]


def _norms(context: RankContext) -> list[float]:
    model, _ = _twins()
    fully_shard(model)
    model(_inputs()).square().mean().backward()
    if context.rank:
        model[0].weight.grad = None
    plain = torch.full((4,), 2.0, requires_grad=True)
    plain.grad = torch.full((4,), 50.0)
    clip_grad_norm_(model.parameters(), 1.0)
    return [clip_grad_norm_(plain, 1.0).item(), plain.grad.norm().item()]


def test_clipping_takes_a_tensor_and_ranks_without_gradients(ranks: Ranks) -> None:
    for norms in ranks.run(2, _norms, kind=WorldKind.PROCESSES):
        assert norms == pytest.approx([100.0, 1.0], rel=1e-5)


def _data_of_a_whole_parameter(context: RankContext) -> None:
    model: Any = FullyShardedDataParallel(
        nn.Linear(2, 2), use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    )
    loss = model(torch.ones(1, 2)).sum()
    model.module.weight.data = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match=r"\['_fsdp_wrapped_module.weight'\]: expected none assigned"):
        loss.backward()


def test_other_data_for_a_parameter_that_waits_for_backward_are_refused(ranks: Ranks) -> None:
    ranks.run(2, _data_of_a_whole_parameter)
