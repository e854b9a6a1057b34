"""One norm over all gradients, however they are spread: the norm of one process, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from engine import reference
from harness.worlds.launch import launch
from harness.worlds.outcome import Raised, causal
from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind, WorldSpec
from tests.reference.front_doors import BY_NAME, REFERENCE, TORCH

Clip = Callable[..., torch.Tensor]

CLIPS: dict[str, Clip] = {
    TORCH.name: torch.nn.utils.clip_grad_norm_,
    REFERENCE.name: reference.clip_grad_norm_,
}
ORDERS = (1.0, 2.0, 3.0, math.inf)
# Float64; only the order of summation differs, and roots and powers add a few units in the last place.
TOLERANCE = 1e-12
NUM_ROWS = 12  # divisible by every world size here

each_door = pytest.mark.parametrize("door", BY_NAME)


class Net(nn.Module):
    """Uneven for worlds of 3 and 4; no shard is empty there, except of ``last`` if ``num_outputs`` is small."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.middle = nn.Linear(8, 10)
        self.last = nn.Linear(10, num_outputs)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows of five."""
        output: torch.Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(rows)))))
        return output


def _plain(num_outputs: int) -> Net:
    model = Net(num_outputs).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


def _backward(model: nn.Module, *, rank: int = 0, size: int = 1) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(NUM_ROWS, 5, dtype=torch.float64, generator=generator)
    loss: torch.Tensor = model(batch.chunk(size)[rank]).square().mean()
    loss.backward()


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _assert_clips_like_one_process(
    clip: Clip,
    ours: Iterable[nn.Parameter],
    theirs: Iterable[nn.Parameter],
    *,
    orders: Iterable[float] = ORDERS,
    **options: object,
) -> None:
    """Hold norm and clipped gradients to torch's on whole tensors: above the limit, below it, and far below."""
    __tracebackhide__ = True
    mine, whole = list(ours), list(theirs)
    before = [[None if p.grad is None else p.grad.clone() for p in side] for side in (mine, whole)]
    for order in orders:
        for max_norm in (1e-3, 0.5, 1e3):
            for side, gradients in zip((mine, whole), before, strict=True):
                for parameter, gradient in zip(side, gradients, strict=True):
                    parameter.grad = None if gradient is None else gradient.clone()
            found = clip(mine, max_norm, norm_type=order, **options)
            expected = torch.nn.utils.clip_grad_norm_(whole, max_norm, norm_type=order)
            told = f"order {order}, max_norm {max_norm}"
            _assert_close(_whole(found), expected, f"norm of {told}")
            for i, (parameter, oracle) in enumerate(zip(mine, whole, strict=True)):
                _assert_gradient(parameter, oracle, f"gradient {i} of {told}")


def _assert_gradient(parameter: torch.Tensor, oracle: torch.Tensor, told: str) -> None:
    __tracebackhide__ = True
    if oracle.grad is None:
        assert parameter.grad is None, told
        return
    assert parameter.grad is not None, told
    expected, found = oracle.grad, parameter.grad
    if isinstance(found, DTensor):
        expected = distribute_tensor(expected, found.device_mesh, found.placements).to_local()
        found = found.to_local()
    _assert_close(found, expected, told)


def _assert_close(found: torch.Tensor, expected: torch.Tensor, told: str) -> None:
    __tracebackhide__ = True
    torch.testing.assert_close(
        found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{told}: expected {expected}, got {found}"
    )


def _launch(kind: WorldKind, size: int, body: Callable[..., None], *args: object, folder: Path) -> None:
    """Run a body on every rank; shows the cause where one did not return."""
    __tracebackhide__ = True
    result = launch(WorldSpec(kind=kind, size=size), body, *args, folder=folder)
    cause = causal(result)
    assert result.is_clean, cause.traceback if isinstance(cause, Raised) else (cause, result.leaks)


# Any: the two engines' sharded modules share no base class.
def _sharded(door: str, num_outputs: int, mesh: DeviceMesh, **options: object) -> Any:
    model = _plain(num_outputs)
    for module in (model.first, model.last, model):
        BY_NAME[door].fully_shard(module, mesh=mesh, **options)
    return model


# --- what an engine leaves behind ---------------------------------------------------------------------------------


def _clip_sharded(
    context: RankContext, door: str, shape: tuple[int, ...], num_outputs: int, orders: tuple[float, ...]
) -> None:
    model = _sharded(door, num_outputs, _mesh(shape))
    oracle = _plain(num_outputs)
    _backward(model, rank=context.rank, size=context.size)
    _backward(oracle)
    _assert_clips_like_one_process(CLIPS[door], model.parameters(), oracle.parameters(), orders=orders)


@each_door
@pytest.mark.parametrize("shape", [(4,), (3,), (2, 2), (1, 4), (4, 1)], ids=str)
def test_norm_over_any_mesh_is_that_of_one_process(door: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    size = math.prod(shape)
    _launch(WorldKind.THREADS, size, _clip_sharded, door, shape, 7, ORDERS, folder=tmp_path)


@each_door
def test_norm_is_that_of_one_process_where_ranks_are_processes(door: str, tmp_path: Path) -> None:
    _launch(WorldKind.PROCESSES, 2, _clip_sharded, door, (2,), 7, ORDERS, folder=tmp_path)


@each_door
def test_empty_shards_add_nothing(door: str, tmp_path: Path) -> None:
    # The largest of nothing: torch 2.13 raises on the rank whose shard is empty, and leaves the others waiting.
    orders = ORDERS[:-1] if door == TORCH.name else ORDERS
    _launch(WorldKind.THREADS, 4, _clip_sharded, door, (4,), 2, orders, folder=tmp_path)


def _clip_replicated(context: RankContext, door: str) -> None:
    model = _plain(7)
    for module in (model.first, model):
        BY_NAME[door].replicate(module)
    oracle = _plain(7)
    _backward(model, rank=context.rank, size=context.size)
    _backward(oracle)
    _assert_clips_like_one_process(CLIPS[door], model.parameters(), oracle.parameters())


@each_door
def test_replicas_count_once(door: str, tmp_path: Path) -> None:
    _launch(WorldKind.THREADS, 3, _clip_replicated, door, folder=tmp_path)


def _clip_with_ignored(context: RankContext) -> None:
    model = _plain(7)
    mesh = _mesh((context.size,))
    ignored = set(model.last.parameters())
    for module in (model.first, model):
        REFERENCE.fully_shard(module, mesh=mesh, ignored_params=ignored)
    oracle = _plain(7)
    _backward(model, rank=context.rank, size=context.size)
    _backward(oracle)
    for mine, whole in zip(model.last.parameters(), oracle.last.parameters(), strict=True):
        assert not isinstance(mine, DTensor)
        mine.grad = whole.grad  # what the user's own synchronisation of ignored parameters would leave
    _assert_clips_like_one_process(reference.clip_grad_norm_, model.parameters(), oracle.parameters())


def test_plain_parameters_count_once_beside_shards(tmp_path: Path) -> None:
    _launch(WorldKind.THREADS, 3, _clip_with_ignored, folder=tmp_path)


def _clip_tensor_parallel(context: RankContext) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, tensor = mesh["dp"], mesh["tp"]
    model = _plain(7)
    plan = {
        "first": ColwiseParallel(output_layouts=Replicate()),
        "last": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    }
    # ``middle`` stays out of the plan: its mesh is the data-parallel one alone.
    parallelize_module(model, tensor, plan)
    for module in (model.first, model.last, model):
        REFERENCE.fully_shard(module, mesh=data)
    oracle = _plain(7)
    _backward(model, rank=data.get_local_rank(), size=data.size())
    _backward(oracle)
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    assert {m.ndim for m in meshes} == {1, 2}, "one call is to meet parameters of two meshes"
    _assert_clips_like_one_process(reference.clip_grad_norm_, model.parameters(), oracle.parameters())


def test_tensor_parallel_and_data_parallel_parameters_clip_together(tmp_path: Path) -> None:
    _launch(WorldKind.THREADS, 4, _clip_tensor_parallel, folder=tmp_path)


# --- what no engine need have made --------------------------------------------------------------------------------


def _spread(value: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    """Make a parameter and its gradient, spread alike."""
    parameter = nn.Parameter(distribute_tensor(value, mesh, placements))
    parameter.grad = distribute_tensor(value.square() - 1, mesh, placements)
    return parameter


def _clip_many_spreads(context: RankContext) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    generator = torch.Generator().manual_seed(2)

    def value(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    values = [value(5, 3), value(3, 5), value(7), value(4, 4), value(3, 2), value(2), value(6)]
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
    _assert_clips_like_one_process(reference.clip_grad_norm_, ours, theirs)
    _assert_clips_like_one_process(reference.clip_grad_norm_, reversed(ours), reversed(theirs))


def test_gradients_spread_in_every_way_have_one_norm(tmp_path: Path) -> None:
    _launch(WorldKind.THREADS, 4, _clip_many_spreads, folder=tmp_path)


def _refuse_partial(context: RankContext) -> None:
    mesh = _mesh((context.size,))
    local = torch.ones(3)
    parameter = nn.Parameter(DTensor.from_local(local, mesh, (Partial(),), run_check=False))
    parameter.grad = DTensor.from_local(local, mesh, (Partial(),), run_check=False)
    with pytest.raises(ValueError, match=r"P\(sum\)|Partial"):
        reference.clip_grad_norm_([parameter], 1.0)


def test_a_sum_that_was_never_taken_is_refused(tmp_path: Path) -> None:
    _launch(WorldKind.THREADS, 2, _refuse_partial, folder=tmp_path)


# --- arguments and corners ----------------------------------------------------------------------------------------


def _clip_with(context: RankContext, door: str) -> None:
    model, oracle = _sharded(door, 7, _mesh((context.size,))), _plain(7)
    _backward(model, rank=context.rank, size=context.size)
    _backward(oracle)
    clip = CLIPS[door]
    for foreach in (True, False):
        _assert_clips_like_one_process(clip, model.parameters(), oracle.parameters(), foreach=foreach)
    # One parameter alone, and an iterator that can be walked once.
    found = clip(model.first.weight, 1e-4)
    _assert_close(_whole(found), torch.nn.utils.clip_grad_norm_(oracle.first.weight, 1e-4), "one parameter")
    _assert_gradient(model.first.weight, oracle.first.weight, "one parameter")
    found = clip((p for p in model.parameters()), 1e-4)
    _assert_close(_whole(found), torch.nn.utils.clip_grad_norm_(oracle.parameters(), 1e-4), "an iterator")
    # Some parameters without gradients, the same ones on every rank.
    for module in (model, oracle):
        module.middle.weight.grad = module.last.bias.grad = None
    _assert_clips_like_one_process(clip, model.parameters(), oracle.parameters())


@each_door
def test_takes_what_torch_takes(door: str, tmp_path: Path) -> None:
    _launch(WorldKind.THREADS, 3, _clip_with, door, folder=tmp_path)


def _clip_nothing(context: RankContext, door: str) -> None:
    model = _sharded(door, 7, _mesh((context.size,)))
    for parameters in (list(model.parameters()), []):
        total = _whole(CLIPS[door](parameters, 1.0, error_if_nonfinite=True))
        assert total.shape == ()
        assert total == 0
    assert all(p.grad is None for p in model.parameters())


@each_door
def test_no_gradients_have_norm_zero(door: str, tmp_path: Path) -> None:
    _launch(WorldKind.THREADS, 2, _clip_nothing, door, folder=tmp_path)


def _clip_nonfinite(context: RankContext, door: str, bad: float) -> None:
    model = _sharded(door, 7, _mesh((context.size,)))
    _backward(model, rank=context.rank, size=context.size)
    gradient = model.last.weight.grad.to_local()
    if context.rank == 1:
        gradient[0, 0] = bad  # on this rank's shard alone
    before = gradient.clone()
    clip = CLIPS[door]
    for order in ORDERS:
        with pytest.raises(RuntimeError, match="finite"):
            clip(model.parameters(), 1.0, norm_type=order, error_if_nonfinite=True)
    assert torch.equal(gradient.nan_to_num(), before.nan_to_num()), "an error must leave gradients alone"
    assert not _whole(clip(model.parameters(), 1.0)).isfinite()


@each_door
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_bad_number_on_one_rank_raises_on_every_rank(door: str, bad: float, tmp_path: Path) -> None:
    _launch(WorldKind.THREADS, 3, _clip_nonfinite, door, bad, folder=tmp_path)
