"""One norm over all gradients, however they are spread: the norm of one process, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from shardproof.engine.reference import clip_grad_norm_
from shardproof.harness.worlds.rank import RankContext
from tests.reference.models import BY_NAME, each_api, hybrid_mesh, whole
from tests.reference.ranks import Ranks

CLIPS: dict[str, Callable[..., torch.Tensor]] = {
    "torch": torch.nn.utils.clip_grad_norm_,
    "reference": clip_grad_norm_,
}
ORDERS = (1.0, 2.0, 3.0, math.inf)
# Float64; only the order of summation differs, and roots and powers add a few units in the last place.
TOLERANCE = 1e-12


def _plain() -> nn.Sequential:
    """Make layers that are uneven for a world of three, with gradients."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 10), nn.Linear(10, 7)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
            parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return model


def _sharded(api: str, mesh: DeviceMesh, *, ignores: Sequence[int] = ()) -> nn.Sequential:
    """Shard the model, and its gradients alike; those of ``ignores`` stay plain."""
    model, plain = _plain(), _plain()
    ignored = {parameter for index in ignores for parameter in model[index].parameters()}
    for module in (model[0], model[2], model):
        BY_NAME[api].fully_shard(module, mesh=mesh, ignored_params=ignored)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        mine.grad = _like(mine, theirs.grad)
    return model


def _like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return value.clone()
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def _assert_clips_like_one_process(
    api: str, ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor], **options: object
) -> None:
    """Compare norm and clipped gradients with torch's on whole tensors: above the limit, below it, and far below."""
    __tracebackhide__ = True
    mine, plain = list(ours), list(theirs)
    before = [[None if p.grad is None else p.grad.clone() for p in side] for side in (mine, plain)]
    for order in ORDERS:
        for max_norm in (1e-3, 0.5, 1e3):
            for side, gradients in zip((mine, plain), before, strict=True):
                for parameter, gradient in zip(side, gradients, strict=True):
                    parameter.grad = None if gradient is None else gradient.clone()
            found = CLIPS[api](mine, max_norm, norm_type=order, **options)
            expected = torch.nn.utils.clip_grad_norm_(plain, max_norm, norm_type=order)
            pairs = [(found, expected), *((p.grad, q.grad) for p, q in zip(mine, plain, strict=True))]
            for i, (ours_, theirs_) in enumerate(pairs):
                label = f"norm or gradient {i} of order {order}, max_norm {max_norm}"
                assert (ours_ is None) == (theirs_ is None), label
                if ours_ is not None:
                    _assert_close(whole(ours_), theirs_, label)


def _assert_close(found: torch.Tensor, expected: torch.Tensor | None, label: str) -> None:
    __tracebackhide__ = True
    torch.testing.assert_close(
        found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{label}: expected {expected}, got {found}"
    )


def _clip_plain_beside_shards(context: RankContext) -> None:
    mesh = init_device_mesh("cpu", (context.size,))
    model = _sharded("reference", mesh, ignores=[2])
    assert {isinstance(p, DTensor) for p in model.parameters()} == {True, False}
    _assert_clips_like_one_process("reference", model.parameters(), _plain().parameters())


def test_plain_parameters_count_once_beside_shards(ranks: Ranks) -> None:
    ranks.run(3, _clip_plain_beside_shards)


def _spread(value: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    """Make a parameter and its gradient, spread alike."""
    parameter = nn.Parameter(distribute_tensor(value, mesh, placements))
    parameter.grad = distribute_tensor(value.square() - 1, mesh, placements)
    return parameter


def _clip_many_spreads(context: RankContext) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    generator = torch.Generator().manual_seed(2)
    shapes = [(5, 3), (3, 5), (7,), (4, 4), (3, 2), (2,), (6,)]
    values = [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes]
    plain = nn.Parameter(values[6])
    plain.grad = values[6].square() - 1
    ours = [
        _spread(values[0], mesh, Shard(0), Shard(0)),
        _spread(values[1], mesh, Shard(1), Replicate()),
        _spread(values[2], mesh["dp"], Shard(0)),
        _spread(values[3], mesh["tp"], Shard(1)),
        _spread(values[4], flat, Shard(0)),  # the last rank holds nothing
        _spread(values[5], flat, Replicate()),
        plain,
    ]
    theirs = [nn.Parameter(v) for v in values]
    for parameter in theirs:
        parameter.grad = parameter.detach().square() - 1
    _assert_clips_like_one_process("reference", ours, theirs)
    _assert_clips_like_one_process("reference", reversed(ours), reversed(theirs))


def test_gradients_spread_in_every_way_have_one_norm(ranks: Ranks) -> None:
    """One call meets parameters of several meshes, as with tensor parallelism."""
    ranks.run(4, _clip_many_spreads)


def _refuse_partial(context: RankContext) -> None:
    mesh = init_device_mesh("cpu", (context.size,))
    local = torch.ones(3)
    parameter = nn.Parameter(DTensor.from_local(local, mesh, (Partial(),), run_check=False))
    parameter.grad = DTensor.from_local(local, mesh, (Partial(),), run_check=False)
    with pytest.raises(ValueError, match=r"P\(sum\)|Partial"):
        clip_grad_norm_([parameter], 1.0)


def test_a_sum_that_was_never_taken_is_refused(ranks: Ranks) -> None:
    ranks.run(2, _refuse_partial)


def _clip_with(context: RankContext, api: str, hybrid: bool) -> None:
    mesh = hybrid_mesh(2, 2) if hybrid else init_device_mesh("cpu", (context.size,))
    model, plain = _sharded(api, mesh), _plain()
    for foreach in (True, False):
        _assert_clips_like_one_process(api, model.parameters(), plain.parameters(), foreach=foreach)
    clip, clip_plain = CLIPS[api], torch.nn.utils.clip_grad_norm_
    name = "0.weight"
    one, expected = clip(model.get_parameter(name), 1e-4), clip_plain(plain.get_parameter(name), 1e-4)
    _assert_close(whole(one), expected, "one parameter alone")
    once, expected = clip((p for p in model.parameters()), 1e-4), clip_plain(plain.parameters(), 1e-4)
    _assert_close(whole(once), expected, "an iterator that can be walked once")
    for side in (model, plain):  # parameters without gradients, the same ones on every rank
        side[1].weight.grad = side[2].bias.grad = None
    _assert_clips_like_one_process(api, model.parameters(), plain.parameters())


@each_api
@pytest.mark.parametrize("hybrid", [False, True], ids=["flat", "hybrid"])
def test_takes_the_arguments_that_torch_takes(hybrid: bool, api: str, ranks: Ranks) -> None:
    ranks.run(4 if hybrid else 3, _clip_with, api, hybrid)


def _clip_nothing(context: RankContext, api: str) -> None:
    model = _sharded(api, init_device_mesh("cpu", (context.size,)))
    model.zero_grad()
    for parameters in (list(model.parameters()), []):
        total = whole(CLIPS[api](parameters, 1.0, error_if_nonfinite=True))
        assert total.shape == ()
        assert total == 0
    assert all(p.grad is None for p in model.parameters())


@each_api
def test_no_gradients_have_norm_zero(api: str, ranks: Ranks) -> None:
    ranks.run(2, _clip_nothing, api)


def _clip_nonfinite(context: RankContext, api: str, bad: float) -> None:
    model = _sharded(api, init_device_mesh("cpu", (context.size,)))
    gradient = model[2].weight.grad
    assert isinstance(gradient, DTensor)
    local = gradient.to_local()
    if context.rank == 1:
        local[0, 0] = bad  # on this rank's shard alone
    before = local.clone()
    for order in ORDERS:
        with pytest.raises(RuntimeError, match="finite"):
            CLIPS[api](model.parameters(), 1.0, norm_type=order, error_if_nonfinite=True)
    assert torch.equal(local.nan_to_num(), before.nan_to_num()), "an error must leave gradients alone"
    assert not whole(CLIPS[api](model.parameters(), 1.0)).isfinite()


@each_api
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_bad_number_on_one_rank_raises_on_every_rank(bad: float, api: str, ranks: Ranks) -> None:
    ranks.run(3, _clip_nonfinite, api, bad)
