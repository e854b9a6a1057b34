"""Meta tensors get memory and values once, modules get one device, and ranks begin with the values of the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._init_utils import _materialize_meta_module as torch_materialize
from torch.distributed.tensor import DTensor, Shard

from shardproof.engine.reference.fsdp1.materialize import broadcast_states, materialize, move_to_device
from shardproof.harness.tracing.ledger import Op
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import OWN_KINDS, WorldKind
from tests.reference.ranks import Ranks

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """A layer beside a parameter and a buffer of its own, neither saved by a state dict nor without a reset."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, device=device)
        self.scale = nn.Parameter(torch.empty(3, device=device), requires_grad=False)
        self.register_buffer("offset", torch.empty(3, device=device), persistent=False)
        self.num_resets = 0

    def reset_parameters(self) -> None:
        """Fill the tensors that this module itself owns."""
        self.num_resets += 1
        self.scale.fill_(2.0)
        self.get_buffer("offset").fill_(3.0)


def _values(module: nn.Module) -> dict[str, list[float]]:
    states = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.flatten().tolist() for name, tensor in states}


def _fill(value: float) -> Callable[[nn.Module], None]:
    """Make a function that allocates a module's own tensors and fills them with one value."""

    def fill(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(value)

    return fill


# --- memory -------------------------------------------------------------------------------------------------------


def test_meta_tensors_get_memory_and_the_values_of_their_own_module() -> None:
    model = Scaled()
    torch.manual_seed(7)
    materialize(model, param_init_fn=None, device=CPU)
    torch.manual_seed(7)
    expected = nn.Linear(3, 3)
    assert torch.equal(model.layer.weight, expected.weight)
    assert torch.equal(model.layer.bias, expected.bias)
    assert model.scale.tolist() == [2.0] * 3
    assert model.get_buffer("offset").tolist() == [3.0] * 3
    assert model.num_resets == 1
    assert [p.requires_grad for p in model.parameters()] == [False, True, True]
    assert "offset" not in model.state_dict()


def test_values_are_those_of_torch_for_the_same_seed() -> None:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Sequential(nn.Linear(2, 3, device="meta"), nn.ReLU()), nn.Linear(3, 2, device="meta")
        )

    mine, theirs = build(), build()
    torch.manual_seed(3)
    materialize(mine, param_init_fn=None, device=CPU)
    torch.manual_seed(3)
    handle: Any = None  # used only without a device
    torch_materialize(theirs, CPU, set(), handle)
    assert _values(mine) == _values(theirs)
    assert len({value for values in _values(mine).values() for value in values}) > 10


def test_function_is_called_with_the_owners_of_meta_tensors_alone_parents_first() -> None:
    model = nn.Sequential(Scaled(), nn.ReLU(), nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3, device="meta")))
    before = _values(model[2])
    seen: list[nn.Module] = []

    def fill(module: nn.Module) -> None:
        seen.append(module)
        _fill(1.0)(module)

    materialize(model, param_init_fn=fill, device=CPU)
    assert seen == [model[0], model.get_submodule("0.layer"), model.get_submodule("3.0")]
    assert _values(model[2]) == before
    assert model.get_parameter("0.scale").tolist() == [1.0] * 3
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_function_that_also_fills_children_is_not_called_with_them() -> None:
    model = nn.Sequential(Scaled())
    seen: list[nn.Module] = []

    def fill(module: nn.Module) -> None:
        seen.append(module)
        module.to_empty(device="cpu")

    materialize(model, param_init_fn=fill, device=CPU)
    assert seen == [model[0]]


def test_tensors_that_have_memory_keep_their_values_beside_meta_ones() -> None:
    model = nn.Linear(2, 2, device="meta")
    model.register_buffer("table", torch.arange(4.0))
    model.register_parameter("gain", nn.Parameter(torch.full((2,), 5.0)))
    table, gain = model.get_buffer("table"), model.get_parameter("gain")
    materialize(model, param_init_fn=None, device=CPU)
    assert model.get_buffer("table") is table
    assert table.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert model.get_parameter("gain") is gain
    assert gain.tolist() == [5.0, 5.0]
    assert not model.weight.is_meta


def test_marks_on_a_parameter_survive() -> None:
    model = nn.Linear(2, 2, device="meta")
    model.weight.is_embedding = True  # type: ignore[attr-defined]  # users do that
    materialize(model, param_init_fn=None, device=CPU)
    assert model.weight.is_embedding is True  # type: ignore[attr-defined]


class Tied(nn.Module):
    """Two layers of one weight; the second has a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False, device="meta")
        self.second = nn.Linear(3, 3, device="meta")
        self.second.weight = self.first.weight
        self.third = nn.Linear(3, 3, bias=False, device="meta")
        self.third.weight = self.first.weight


def _new_parameters(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.ones_like(parameter, device="cpu")))


@pytest.mark.parametrize(
    "fill",
    [None, _fill(1.0), _new_parameters, lambda module: module.to_empty(device="cpu")],
    ids=["reset", "fill", "replace", "recurse"],
)
def test_shared_meta_parameters_stay_shared(fill: Callable[[nn.Module], None] | None) -> None:
    model = Tied()
    materialize(model, param_init_fn=fill, device=CPU)
    assert model.first.weight is model.second.weight
    assert model.first.weight is model.third.weight
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_parameter_of_two_names_in_one_module_stays_one() -> None:
    model = nn.Linear(2, 2, device="meta")
    model.alias = model.weight
    materialize(model, param_init_fn=None, device=CPU)
    assert model.alias is model.weight
    assert not model.weight.is_meta


def test_ignored_modules_are_left_on_the_meta_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Sequential(nn.Linear(2, 2, device="meta")))
    materialize(model, param_init_fn=None, device=CPU, ignored_modules={model[1]})
    assert [p.is_meta for p in model.parameters()] == [False, False, True, True]
    materialize(model, param_init_fn=None, device=CPU, ignored_modules={model})
    assert [p.is_meta for p in model.parameters()] == [False, False, True, True]


def test_model_without_meta_tensors_is_left_as_it_is() -> None:
    model = Scaled(device="cpu")
    called: list[nn.Module] = []
    materialize(model, param_init_fn=called.append, device=CPU)
    materialize(model, param_init_fn=None, device=CPU)
    assert called == []
    assert model.num_resets == 0


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(2, device="meta"))


def test_module_without_a_reset_is_refused_before_any_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), NoReset())
    with pytest.raises(
        AttributeError, match=r"module '1' \(NoReset\): expected a method reset_parameters\(\).*'table'"
    ):
        materialize(model, param_init_fn=None, device=CPU)
    assert model.get_parameter("0.weight").is_meta


def test_something_that_cannot_be_called_is_refused() -> None:
    not_callable: Any = 42
    with pytest.raises(ValueError, match="expected it to be callable, got 42"):
        materialize(nn.Linear(2, 2, device="meta"), param_init_fn=not_callable, device=CPU)


def test_a_function_that_leaves_meta_tensors_is_reported() -> None:
    model = nn.Sequential(Scaled())

    def only_parameters(module: nn.Module) -> None:
        _new_parameters(module)

    with pytest.raises(
        RuntimeError, match=r"module '0' \(Scaled\).*got \['offset'\] still on the meta device"
    ):
        materialize(model, param_init_fn=only_parameters, device=CPU)


class FailsToReset(nn.Linear):
    """Resets when it is built on the meta device, and not later."""

    def reset_parameters(self) -> None:
        """Raise once there is memory."""
        if not self.weight.is_meta:
            raise KeyError("gain")


def _raises(module: nn.Module) -> None:
    raise KeyError("gain")


@pytest.mark.parametrize(("fill", "way"), [(None, r"reset_parameters\(\)"), (_raises, "param_init_fn")])
def test_error_of_a_function_is_chained(fill: Callable[[nn.Module], None] | None, way: str) -> None:
    model = nn.Sequential(FailsToReset(2, 2, device="meta"))
    with pytest.raises(
        RuntimeError, match=rf"module '0' \(FailsToReset\): expected {way}.*KeyError"
    ) as caught:
        materialize(model, param_init_fn=fill, device=CPU)
    assert isinstance(caught.value.__cause__, KeyError)


# --- device -------------------------------------------------------------------------------------------------------


def test_module_that_is_where_it_should_be_stays() -> None:
    model = Scaled(device="cpu")
    before = [(id(t), t.data_ptr()) for t in (*model.parameters(), *model.buffers())]
    assert move_to_device(model, CPU) == CPU
    assert move_to_device(model, None) == CPU
    assert [(id(t), t.data_ptr()) for t in (*model.parameters(), *model.buffers())] == before


def test_module_without_tensors_lies_where_it_is_asked_to() -> None:
    assert move_to_device(nn.ReLU(), None) == CPU
    assert move_to_device(nn.ReLU(), torch.device("cuda", 3)) == torch.device("cuda", 3)


def test_module_on_another_device_than_asked_for_is_refused() -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(
        ValueError, match=r"Inconsistent compute device and `device_id`: expected .* on cpu, got meta"
    ):
        move_to_device(model, CPU)


def test_module_on_two_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        RuntimeError, match="expected a single device, got parameters on cpu, meta; try device_id"
    ):
        move_to_device(model, None)
    assert move_to_device(model, None, ignored_modules=[model[1]]) == CPU
    assert move_to_device(model, None, ignored_parameters=list(model[1].parameters())) == CPU


@pytest.mark.skipif(torch.accelerator.is_available(), reason="shows the behaviour without an accelerator")
def test_number_of_a_device_needs_an_accelerator() -> None:
    with pytest.raises(RuntimeError, match="accelerator"):
        move_to_device(nn.Linear(2, 2), 0)


# --- values -------------------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    """Tensors of every kind that a module may own; ``seed`` makes the values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        # 3 bytes, so that the next tensor could begin at an odd address.
        self.flag = nn.Buffer(torch.arange(3) == seed % 3)
        self.weight = nn.Parameter(draw(4, 3))
        self.frozen = nn.Parameter(draw(5), requires_grad=False)
        self.narrow = nn.Parameter(draw(7).half())
        self.brain = nn.Parameter(draw(2, 2).bfloat16())
        self.wide = nn.Parameter(draw(3).double())
        self.plane = nn.Parameter(torch.complex(draw(2), draw(2)))
        self.eight = nn.Buffer(draw(3).to(torch.float8_e4m3fn))
        self.count = nn.Buffer(torch.tensor(seed))
        self.short = nn.Buffer(torch.arange(seed, seed + 3, dtype=torch.int16), persistent=False)
        self.empty = nn.Parameter(draw(0, 3))
        self.transposed = nn.Parameter(draw(3, 4).t())
        self.strided = nn.Buffer(draw(6, 2)[::2, 1])


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


def _states(module: nn.Module) -> dict[str, bytes]:
    return {name: _bytes(t) for name, t in (*module.named_parameters(), *module.named_buffers())}


def _broadcast_zoo(context: RankContext, bucket_bytes: int) -> int:
    """Broadcast a model with every kind of tensor; return the number of messages."""
    model = Zoo(seed=context.rank + 10)
    expected, mine = _states(Zoo(seed=10)), _states(model)
    assert context.rank == 0 or all(mine[name] != expected[name] for name in mine if mine[name])
    before = [(name, id(p), p.stride()) for name, p in model.named_parameters()]
    broadcast_states(model, dist.group.WORLD, bucket_bytes=bucket_bytes)  # type: ignore[arg-type]  # set in a world
    assert _states(model) == expected
    assert [(name, id(p), p.stride()) for name, p in model.named_parameters()] == before
    assert all(p.grad_fn is None for p in model.parameters())
    return len([entry for entry in context.recorder.ledger() if entry.op is Op.BROADCAST])


NUM_FILLED = len([value for value in _states(Zoo(seed=1)).values() if value])


@pytest.mark.parametrize("kind", OWN_KINDS)
@pytest.mark.parametrize(("bucket_bytes", "num_messages"), [(1, NUM_FILLED), (40, None), (2**20, 1)])
def test_all_ranks_get_the_states_of_the_first(
    kind: WorldKind, bucket_bytes: int, num_messages: int | None, ranks: Ranks
) -> None:
    """Tensors of all dtypes go in one message, where that may be large enough."""
    for num in ranks.run(2, _broadcast_zoo, bucket_bytes, kind=kind):
        assert num_messages in {None, num}


def _broadcast_in_a_part(context: RankContext) -> list[float]:
    group = dist.new_group([1, 2])
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, context.rank)
    if context.rank > 0:
        assert isinstance(group, dist.ProcessGroup)
        broadcast_states(model, group)
    return model.weight.flatten().tolist()


def test_first_rank_of_the_group_is_the_source(ranks: Ranks) -> None:
    assert ranks.run(3, _broadcast_in_a_part) == [[0.0], [1.0], [1.0]]


def _broadcast_but_some(context: RankContext) -> list[float]:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(4)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, context.rank)
    model[1].weight = model[2].weight  # shared with one that is ignored, so ignored
    broadcast_states(
        model,
        dist.group.WORLD,  # type: ignore[arg-type]  # set in a world
        ignored_modules=[model[2]],
        ignored_parameters=[model.get_parameter("3.weight")],
    )
    return [float(module.weight) for module in model if isinstance(module, nn.Linear)]


def test_ignored_states_are_left_alone(ranks: Ranks) -> None:
    assert ranks.run(2, _broadcast_but_some) == [
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 1.0, 1.0],
    ]


def _broadcast_shards(context: RankContext) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(1, 2, bias=False)
    local = torch.full((1, 1), float(context.rank))
    model.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)]))
    broadcast_states(model, mesh.get_group("dp"))
    assert isinstance(model.weight, DTensor)
    return model.weight.to_local().flatten().tolist()


def test_shards_of_another_axis_are_sent_as_they_lie(ranks: Ranks) -> None:
    assert ranks.run(4, _broadcast_shards) == [[0.0], [1.0], [0.0], [1.0]]


def _broadcast_without_backend(context: RankContext) -> str:
    group = dist.new_group(backend="cuda:fake")
    assert isinstance(group, dist.ProcessGroup)
    model = nn.Linear(1, 1)
    try:
        broadcast_states(model, group)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_states_that_the_backend_cannot_reach_are_refused(ranks: Ranks) -> None:
    for error in ranks.run(2, _broadcast_without_backend, kind=WorldKind.PROCESSES):
        assert error.startswith("The module has CPU parameters or buffers when `sync_module_states=True`")
        assert "a group of cuda:fake" in error
