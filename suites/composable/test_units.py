"""The effect of fully_shard on modules and parameters, and what a caller may do to these before training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardproof import EVEN, SEVERAL
from shardproof.suites.composable.bench import STEP, Bench, expects, whole
from shardproof.suites.params import parametrize
from shardproof.suites.tower import UNITS, copies, shown_gradients, tower

VALUES = "values"


@pytest.mark.kills("MarksWhatIsInside")
@expects("the class", "classes inside", "a part")
def test_modules_stay_what_they_were(bench: Bench) -> None:
    model = bench.shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), units=())
    bench.same("the class", isinstance(model, nn.Sequential), True)
    bench.same("classes inside", [type(inside) for inside in model], [nn.Linear, nn.ReLU, nn.Linear])
    bench.same("a part", type(model[:2]), nn.Sequential)


@pytest.mark.kills("GoesOnWithWhatWasReplaced")
@parametrize("is_loaded", True, False, ids=["loaded", "set"])
@expects(STEP)
def test_trains_the_parameter_that_was_put_in_place(bench: Bench, is_loaded: bool) -> None:
    model, alone = bench.shard(tower()), tower()
    others = {name: nn.Parameter(2 * parameter.detach()) for name, parameter in model.named_parameters()}
    if is_loaded:
        model.load_state_dict(others, assign=True, strict=False)  # buffers stay
    else:
        for path, other in others.items():
            module, _, name = path.rpartition(".")
            setattr(model.get_submodule(module), name, other)
    for parameter in alone.parameters():
        parameter.data.mul_(2)
    bench.steps(model, alone=alone)


@pytest.mark.kills("PacksShardsIntoOne")
@expects("what is left of others", STEP)
def test_memory_of_each_shard_goes_and_comes_back_alone(bench: Bench) -> None:
    model = bench.shard(tower())
    shards = {name: p.to_local().detach() for name, p in model.named_parameters()}
    for name, shard in shards.items():
        kept, storage = shard.clone(), shard.untyped_storage()
        size = storage.size()
        storage.resize_(0)
        left = {other for other, t in shards.items() if other != name and t.untyped_storage().size()}
        expected = {other for other, t in shards.items() if other != name and t.numel()}
        bench.same("what is left of others", left >= expected, True)
        storage.resize_(size)
        shard.copy_(kept)
    bench.steps(model)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("ShardsOverAllRanksWhateverTheMesh")
@expects(STEP)
def test_shards_over_the_ranks_of_a_group_that_exists(bench: Bench) -> None:
    halves = [range(bench.size // 2), range(bench.size // 2, bench.size)]
    groups = [distributed.new_group([*half]) for half in halves]
    mine = int(bench.rank in halves[1])
    mesh = DeviceMesh.from_group(groups[mine], bench.device.type)
    bench.steps(bench.shard(tower(), mesh=mesh), halves[mine])


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("ShardsOverAllRanksWhateverTheMesh")
@expects("the layout", STEP)
def test_trains_replicas_of_shards_on_groups_that_exist(bench: Bench) -> None:
    given = bench.mesh(2)
    mesh = DeviceMesh.from_group(
        given.get_all_groups(), bench.device.type, mesh=given.mesh, mesh_dim_names=("a", "b")
    )
    model = bench.shard(tower(), mesh=mesh)
    weight = model.stem.weight
    bench.same("the layout", (weight.device_mesh.mesh_dim_names, weight.device_mesh.ndim), (("a", "b"), 2))
    bench.steps(model)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("TakesEveryDimForTheFirst")
@expects("the dims", VALUES)
def test_dims_may_be_counted_from_the_end(bench: Bench) -> None:
    torch.manual_seed(0)
    width = 2 * bench.size
    model = nn.Sequential(nn.Linear(width, 3, bias=False), nn.Linear(3, width))
    before = copies(model.named_parameters())
    bench.shard(model, units=(), shard_placement_fn=lambda p: Shard(-1) if p.shape[-1] == width else Shard(0))
    cuts = [p.placements for p in model.parameters() if isinstance(p, DTensor)]
    bench.same("the dims", cuts, [(Shard(dim),) for dim in (1, 0, 0)])
    bench.same(VALUES, whole(model), before)


class _Scaled(nn.Linear):
    """A layer with a frozen scale of eight bits."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        values = torch.tensor([0.5, 1, 2, 4]).to(torch.float8_e4m3fn)
        self.scale = nn.Parameter(values, requires_grad=False)
        self.seen: list[Any] = []  # Any: dtypes, which have no public type

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Scale the rows."""
        self.seen.append(self.scale.dtype)
        return super().forward(rows * self.scale.float())


@pytest.mark.kills("CastsWhatIsFrozen")
@expects("the dtype in forward", "gradients")
def test_frozen_parameters_keep_a_dtype_of_their_own(bench: Bench) -> None:
    torch.manual_seed(0)
    model, rows = _Scaled(), torch.arange(8.0).view(2, 4) + bench.rank
    alone = nn.Linear(4, 4)
    alone.load_state_dict({"weight": model.weight, "bias": model.bias})
    bench.shard(model, units=())
    model(rows.to(bench.device)).sum().backward()
    bench.same("the dtype in forward", set(model.seen), {torch.float8_e4m3fn})
    mean = sum(torch.arange(8.0).view(2, 4) + rank for rank in bench.ranks) / bench.size
    alone(mean * torch.tensor([0.5, 1, 2, 4])).sum().backward()
    got, expected = (shown_gradients(trained)["weight"] for trained in (model, alone))
    assert isinstance(got, DTensor)
    bench.near("gradients", got.full_tensor(), expected.to(bench.device), tolerance=1e-5)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("NeverCallsTheReductionHook")
@expects("calls", STEP)
def test_a_hook_may_reduce_across_replicas(bench: Bench) -> None:
    """The engine handles only the shards; the hook averages over ranks that the engine does not treat as replicas."""
    mesh = bench.mesh(2)
    calls: list[int] = []
    across = mesh.get_group("replicate")

    def average(reduced: torch.Tensor) -> None:
        calls.append(reduced.numel())
        distributed.all_reduce(reduced, group=across)
        reduced.div_(2)

    model = bench.shard(tower(), mesh=mesh["shard"])
    for module in (*(model.get_submodule(unit) for unit in UNITS), model):
        module.set_all_reduce_hook(average)
    bench.steps(model)
    bench.same("calls", len(calls), 1 + len(UNITS))


@pytest.mark.kills("SavesTheFirstStateForEver")
@parametrize("gathered", False, True, ids=["sharded", "gathered"])
@expects("the names", "whether it is the memory of the shards", "values afterwards")
def test_a_state_is_the_shards_and_loads_in_place(bench: Bench, gathered: bool) -> None:
    model = bench.shard(tower())
    if gathered:
        bench.train(model)  # lazily initialised: otherwise a unit would treat itself as the root
        model.unshard()
    state = model.state_dict()
    bench.same("the names", list(state), list(tower().state_dict()))
    own = {name: p.to_local() for name, p in model.named_parameters()}
    shown = {name: v.to_local() for name, v in state.items() if isinstance(v, DTensor)}
    is_same = [shown[name].data_ptr() == own[name].data_ptr() for name in own]
    bench.same("whether it is the memory of the shards", is_same, [True] * len(own))
    model.load_state_dict({n: v * 2 if isinstance(v, DTensor) else v for n, v in state.items()})
    doubled = [torch.equal(own[name], p.to_local()) for name, p in model.named_parameters()]
    bench.same("values afterwards", (doubled, whole(model)), ([True] * len(own), _doubled()))


def _doubled() -> dict[str, torch.Tensor]:
    return {name: 2 * value for name, value in copies(tower().named_parameters()).items()}
