"""Models under fully_shard and replicate beside their callers' own actions: fill, ignore, convert, save."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard

from shardproof import APART, FOURS, SEVERAL
from shardproof.suites.composable.bench import STEP, Bench, cut, expects, whole, whole_gradients
from shardproof.suites.params import param, parametrize
from shardproof.suites.tower import LR, UNITS, batch, copies, fill, gradients, shown_gradients, tower

VALUES = "values"
NUM_STEPS = 10
NUM_MICROBATCHES = 3


class _Layer(nn.Linear):
    """Resets itself to characteristic numbers."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the parameters."""
        for parameter in self.parameters():
            parameter.fill_(self.in_features + self.out_features)


@pytest.mark.kills("LeavesNewMemoryAtZeros")
@expects(VALUES, STEP)
def test_modules_without_memory_reset_themselves(bench: Bench) -> None:
    model, alone = (nn.Sequential(_Layer(3, 5, device=d), _Layer(5, 1, device=d)) for d in ("meta", "cpu"))
    bench.shard(model, units=("0", "1")).to_empty(device=bench.device)
    for layer in model.children():
        assert isinstance(layer, _Layer)
        layer.reset_parameters()
    bench.same(VALUES, whole(model), copies(alone.named_parameters()))
    bench.steps(model, alone=alone)


class _Sharing(nn.Sequential):
    """Two towers with one buffer."""

    def __init__(self) -> None:
        super().__init__(tower(), nn.Linear(1, 3), tower())
        self[2].offset = self[0].offset


@pytest.mark.kills("CopiesBuffers")
@expects("whether it is one", "its names")
def test_a_buffer_of_two_modules_stays_one(bench: Bench) -> None:
    model = bench.shard(_Sharing(), units=("0", "2"))
    bench.same("whether it is one", model[0].offset is model[2].offset, True)
    shown = [name for name, _ in model.named_buffers() if name.endswith("offset")]
    bench.same("its names", shown, ["0.offset"])


@pytest.mark.worlds(FOURS)
@pytest.mark.kills("TakesEveryDimForTheFirst")
@expects("where parameters lie", VALUES)
def test_the_data_axis_cuts_the_dim_that_is_whole(bench: Bench) -> None:
    model, mesh = cut(bench)
    before = whole(model)
    places = {id(p): 1 - i for i, p in enumerate(model.parameters())}
    bench.shard(model, units=(), mesh=mesh["data"], shard_placement_fn=lambda p: Shard(places[id(p)]))
    shown = [
        (p.device_mesh.mesh_dim_names, p.placements) for p in model.parameters() if isinstance(p, DTensor)
    ]
    lie = [(("data", "tensor"), (Shard(1 - dim), Shard(dim))) for dim in (0, 1)]
    bench.same("where parameters lie", shown, lie)
    bench.same(VALUES, whole(model), before)


@pytest.mark.worlds(FOURS)
@pytest.mark.kills("SavesTheFirstStateForEver")
@parametrize("is_cut", False, True, ids=["shards", "shards_of_cut_tensors"])
@expects("what other ranks have", "what the first rank has", VALUES, "moments")
def test_the_first_rank_saves_and_loads_for_all(bench: Bench, is_cut: bool) -> None:
    model, mesh = cut(bench) if is_cut else (tower(), None)
    bench.shard(model, units=(), mesh=bench.mesh() if mesh is None else mesh["data"])
    model.state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    optimizer.zero_grad()  # else torch takes a fresh optimizer for one with state, pytorch#140898
    moments = _moments(optimizer)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state, expected = get_model_state_dict(model, options=options), whole(model)
    state_of_optimizer = get_optimizer_state_dict(model, optimizer, options=options)
    bench.same("what other ranks have", bench.rank > 0 and list(state), [] if bench.rank else False)
    kept = {name: value for name, value in state.items() if name in expected}
    bench.same("what the first rank has", kept, {n: v.cpu() for n, v in expected.items() if bench.rank == 0})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    bench.same(VALUES, whole(model), expected)
    fresh = torch.optim.Adam(model.parameters())
    set_optimizer_state_dict(model, fresh, state_of_optimizer, options=options)
    bench.same("moments", _moments(fresh), moments)


def _moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Gather whole moments, in the order of parameters."""
    states = (optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    return [state[key].full_tensor() for state in states for key in ("exp_avg", "exp_avg_sq")]


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ManagesWhatItShouldIgnore")
@parametrize("api", "fully_shard", "replicate")
@expects("gradients of what is ignored", "gradients of others")
def test_gradients_of_what_is_ignored_are_each_ranks_own(bench: Bench, api: str) -> None:
    model = tower().to(bench.device)
    ignored = {*model.stem.parameters()}
    getattr(bench.api, api)(model, mesh=bench.mesh(), ignored_params=ignored)
    bench.train(model)
    own = {name: bench.size * g for name, g in gradients(tower(), [bench.rank]).items()}
    mean, shown, got = gradients(tower(), bench.ranks), shown_gradients(model), whole_gradients(model)
    stem = {name for name in own if name.startswith("stem")}
    bench.same("gradients of what is ignored", {n: shown[n] for n in stem}, {n: own[n] for n in stem})
    bench.same("gradients of others", {n: got[n] for n in got if n not in stem}, _without(mean, stem))


def _without(values: dict[str, torch.Tensor], names: set[str]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if name not in names}


@pytest.mark.kills("ManagesWhatItShouldIgnore")
@expects("what is sharded", STEP)
def test_another_engine_trains_the_rest_and_what_is_ignored(bench: Bench) -> None:
    model = tower().to(bench.device)
    bench.api.fully_shard(model.middle, mesh=bench.mesh(), ignored_params={*model.middle[0].parameters()})
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    bench.same("what is sharded", sharded, ["middle.1.weight", "middle.1.bias"])
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(_average)  # type: ignore[no-untyped-call]
    bench.steps(model)


def _average(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    distributed.all_reduce(parameter.grad)
    parameter.grad /= distributed.get_world_size()


class _Gained(nn.Module):
    """A layer of whole numbers, and a factor that is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(3, 2, bias=False), nn.Parameter(torch.tensor([3.0, 1.0]))
        fill(self.layer)
        self.seen: list[Any] = []  # Any: dtypes, which have no public type

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Scale the layer's output."""
        self.seen.append((self.layer.weight.dtype, self.gain.dtype))
        result: torch.Tensor = self.layer(rows) * self.gain
        return result


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ManagesWhatItShouldIgnore")
@parametrize("api", "fully_shard", "replicate")
@expects("dtypes in forward", "gradients")
def test_what_is_ignored_keeps_its_bits(bench: Bench, api: str) -> None:
    model, alone = _Gained().to(bench.device), _Gained()
    policy = bench.api.mixed_precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    getattr(bench.api, api)(model, mesh=bench.mesh(), mp_policy=policy, ignored_params={model.gain})
    bench.train(model)
    bench.same("dtypes in forward", model.seen, [(torch.bfloat16, torch.float32)])
    own = bench.size * gradients(alone, [bench.rank])["gain"]
    mean = gradients(alone, bench.ranks)["layer.weight"]
    bench.near("gradients", whole_gradients(model), {"gain": own, "layer.weight": mean}, tolerance=2**-6)


# The gradient that remains, by the caller's action.
_EDITS: dict[str, tuple[float, Callable[[torch.Tensor], torch.Tensor | None]]] = {
    "cleared": (0, lambda gradient: None),
    "zeroed": (0, torch.Tensor.zero_),
    "doubled_in_place": (2, lambda gradient: gradient.mul_(2)),
    "replaced": (3, lambda gradient: gradient * 3),
}


@pytest.mark.kills("HidesWhatWaits")
@parametrize("edit", *_EDITS)
@expects("gradients")
def test_what_waits_is_reduced_as_the_caller_left_it(bench: Bench, edit: str) -> None:
    """Between forward and backward gathered parameters have the held gradients; the caller edits one module's."""
    model = bench.shard(tower(), units=("stem",), reshard_after_forward=False)
    model.set_requires_gradient_sync(False)
    bench.train(model)
    model.set_requires_gradient_sync(True)
    output = model(batch(bench.rank, 1).to(bench.device))
    share, change = _EDITS[edit]
    for parameter in model.stem.parameters():
        if parameter.grad is not None:
            parameter.grad = change(parameter.grad)
    (output.sum() * bench.size).backward()
    first, second = (gradients(tower(), bench.ranks, [step]) for step in (0, 1))
    left = {name: second[name] + first[name] * (share if "stem" in name else 1) for name in first}
    bench.same("gradients", whole_gradients(model), left)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("TakesTheBackwardOfInputsForAll")
@expects("gradients of inputs", "reductions", "gradients")
def test_backwards_for_inputs_and_for_weights_add_up(bench: Bench) -> None:
    """As pipeline schedules without bubbles run them: parameters stay whole, and the last backward is for both."""
    model = bench.shard(tower(), reshard_after_forward=False)
    for step in range(NUM_MICROBATCHES):
        is_last = step == NUM_MICROBATCHES - 1
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        model.set_reshard_after_backward(is_last)
        rows = batch(bench.rank, step).to(bench.device).requires_grad_()
        loss = model(rows).sum() * bench.size
        if is_last:
            early = bench.num_reductions()
            loss.backward()
        else:
            (shown,) = torch.autograd.grad(loss, rows, retain_graph=True)
            torch.autograd.backward(loss, inputs=[*model.parameters()])
    alone = batch(bench.rank).requires_grad_()  # the model is linear: each microbatch has the same one
    (expected,) = torch.autograd.grad(tower()(alone).sum() * bench.size, alone)
    bench.same("gradients of inputs", shown, expected)
    bench.same("reductions", (early, bench.num_reductions()), (0, 1 + len(UNITS)))
    bench.same("gradients", whole_gradients(model), gradients(tower(), bench.ranks, range(NUM_MICROBATCHES)))


@pytest.mark.rows("X11")
@pytest.mark.worlds(APART)  # levels of forward-mode AD are of the process
@pytest.mark.kills("StopsTangents")
@parametrize("api", "fully_shard", "replicate")
@expects("output and tangent", "gradients", STEP)
def test_a_first_forward_may_carry_tangents(bench: Bench, api: str) -> None:
    model, alone = tower(), tower()
    for module in (model.middle, model):
        getattr(bench.api, api)(module, mesh=bench.mesh())
    shown = _with_tangent(model, batch(bench.rank).to(bench.device))
    expected = [_with_tangent(alone, batch(rank)) for rank in bench.ranks]
    bench.same("output and tangent", shown, expected[bench.rank])
    torch.autograd.backward(shown.sum() * bench.size)
    torch.autograd.backward([each.sum() for each in expected])
    bench.same("gradients", whole_gradients(model), shown_gradients(alone))
    model.zero_grad()
    bench.steps(model)


def _with_tangent(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return torch.stack(torch.func.jvp(model, (rows,), (torch.ones_like(rows),)))


class _FailedError(Exception):
    """The exception with which these cases' conversions fail."""


@pytest.mark.kills("DropsGradientsOfAFailedConversion")
@parametrize("num_converted", 0, 3, ids=["at_once", "half_way"])
@expects("whether it failed", "gradients", STEP)
def test_a_conversion_that_fails_leaves_gradients_where_they_were(bench: Bench, num_converted: int) -> None:
    model, converted = bench.shard(tower()), list[torch.Tensor]()
    bench.train(model)
    before = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if len(converted) == num_converted:
            raise _FailedError
        converted.append(tensor)
        return tensor.clone()

    bench.refuses("whether it failed", lambda: model._apply(convert), _FailedError)
    grads = {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}
    bench.same("gradients", grads, before)
    model.zero_grad()
    bench.steps(model)


class _Normed(nn.Sequential):
    """Norms between two layers."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2)
        )
        generator = torch.Generator().manual_seed(0)
        for parameter in (*self[0].parameters(), *self[4].parameters()):
            nn.init.normal_(parameter, generator=generator)


@pytest.mark.kills("SumsWhatACallerPrepares")
@parametrize("api", "fully_shard", "replicate")
@parametrize("dtype", torch.bfloat16, torch.float16)
@pytest.mark.worlds(SEVERAL)
@parametrize(
    "is_apart", param(False, id="buffers_cast"), param(True, id="policy_of_its_own", kills="IgnoresPolicies")
)
@expects("the dtype of the output", "gradients", "statistics")
def test_norms_run_in_units_of_few_bits(bench: Bench, is_apart: bool, dtype: torch.dtype, api: str) -> None:
    model, alone = _Normed(), _Normed()
    apply, policy = getattr(bench.api, api), bench.api.mixed_precision
    if is_apart:
        apply(model[1], mesh=bench.mesh(), mp_policy=policy(param_dtype=torch.float32, output_dtype=dtype))
    else:
        for name, buffer in model[1].named_buffers():
            setattr(model[1], name, buffer.to(dtype) if buffer.is_floating_point() else buffer)
    apply(model, mesh=bench.mesh(), mp_policy=policy(param_dtype=dtype, reduce_dtype=torch.float32))
    rows = batch(bench.rank)
    output = model(rows.to(bench.device))
    bench.same("the dtype of the output", output.dtype, dtype)
    for module, given in ((model, output), (alone, alone(rows))):
        assert isinstance(module, nn.Module)
        given.float().square().sum().backward()
    for parameter in alone.parameters():
        _average(parameter)
    tolerance = 16 * torch.finfo(dtype).eps
    bench.near("gradients", whole_gradients(model), shown_gradients(alone), tolerance=tolerance)
    statistics = [dict(m.named_buffers())["1.running_var"].float() for m in (model, alone)]
    bench.near("statistics", *statistics, tolerance=tolerance)


@pytest.mark.kills("RemembersWhatItSharded")
@expects("whole parameters once prepared", "what is left")
def test_a_model_that_is_deleted_leaves_nothing(bench: Bench) -> None:
    model = tower()
    given = [weakref.ref(parameter) for parameter in model.parameters()]
    bench.shard(model)
    gc.collect()
    bench.same("whole parameters once prepared", sum(ref() is not None for ref in given), 0)
    bench.train(model)
    held: list[weakref.ref[Any]] = [weakref.ref(t) for p in model.parameters() for t in (p, p.grad)]
    held.extend(weakref.ref(module) for module in model.modules())
    del model
    gc.collect()
    bench.same("what is left", sum(ref() is not None for ref in held), 0)


@pytest.mark.kills("KeepsOutputsInCycles")
@expects("tensors that steps add")
def test_steps_leave_nothing_to_a_collector(bench: Bench) -> None:
    model = bench.shard(tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    counts = []
    gc.disable()
    try:
        for _ in range(NUM_STEPS):
            bench.train(model)
            optimizer.step()
            optimizer.zero_grad()
            distributed.barrier()  # ranks may share a process, and its tensors
            counts.append(sum(isinstance(found, torch.Tensor) for found in gc.get_objects()))
            distributed.barrier()
    finally:
        gc.enable()
    bench.same("tensors that steps add", counts[-1] - counts[1], 0)
