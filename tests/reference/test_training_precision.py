"""Mixed precision: what is computed, reduced and returned in which dtype, and to the number what comes out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind
from tests.reference.front_doors import BY_NAME, FrontDoor
from tests.reference.models import Scores, build, tensors_of
from tests.reference.oracle import DOORS, HYBRID, Group, Mesh, Plan, laid_out, run_world, shard_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Reduced in float32, two summation orders differ by a few units of 2**-24; in the 16-bit types by some of 2**-8 or
# 2**-11. Gradients of the size of a few units in the last place of the largest may cancel, hence the absolute part.
TOLERANCE = {FP32: (2e-6, 1e-7), BF16: (3e-2, 1e-2), FP16: (4e-3, 1e-3), FP64: (1e-10, 1e-12)}


class Probe(nn.Module):
    """Two linears that write down what they were given and with which parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Recorded(6, 5)
        self.last = Recorded(5, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(rows))
        output: torch.Tensor = self.last(hidden)
        return output


class Recorded(nn.Linear):
    """A linear that remembers dtypes."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.seen: set[tuple[torch.dtype, ...]] = set()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        self.seen.add((rows.dtype, self.weight.dtype, self.bias.dtype))
        return super().forward(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One policy, the same for every unit, and what it means."""

    policy: Mapping[str, Any]  # Any: the fields of MixedPrecisionPolicy
    compute: torch.dtype = FP32
    reduce: torch.dtype = FP32
    output: torch.dtype | None = None
    given: torch.dtype = FP32  # what the caller passes in
    call: Literal["fully_shard", "replicate"] = "fully_shard"
    mesh: Mesh | None = None
    units: tuple[Group, ...] = ("first", "last", "")
    num_microbatches: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)  # Any: fully_shard's


def _mixed(
    compute: torch.dtype, reduce: torch.dtype | None, **more: Any
) -> Setting:  # Any: fields of Setting
    policy = {"param_dtype": compute} if reduce is None else {"param_dtype": compute, "reduce_dtype": reduce}
    return Setting(policy=policy, compute=compute, reduce=reduce or compute, **more)


SETTINGS: dict[str, Setting] = {
    "none": Setting(policy={}),
    **{f"{str(d)[6:]}_reduced_in_float32": _mixed(d, FP32) for d in (BF16, FP16)},
    **{f"{str(d)[6:]}_reduced_in_itself": _mixed(d, None) for d in (BF16, FP16)},
    "only_reduced_in_bfloat16": Setting(policy={"reduce_dtype": BF16}, reduce=BF16),
    "only_reduced_in_float64": Setting(policy={"reduce_dtype": FP64}, reduce=FP64),
    "computed_in_float64": Setting(
        policy={"param_dtype": FP64, "reduce_dtype": FP64}, compute=FP64, reduce=FP64
    ),
    "output_in_float32": Setting(
        policy={"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32}, compute=BF16, output=FP32
    ),
    "output_in_float64": Setting(policy={"param_dtype": FP32, "output_dtype": FP64}, output=FP64),
    "inputs_not_cast": Setting(
        policy={"param_dtype": BF16, "reduce_dtype": FP32, "cast_forward_inputs": False},
        compute=BF16,
        given=BF16,
    ),
    "single_unit": _mixed(BF16, FP32, units=("",)),
    "grouped": _mixed(BF16, FP32, units=(("first", "last"), "")),
    "kept": _mixed(BF16, FP32, options={"reshard_after_forward": False}),
    "hybrid": _mixed(BF16, FP32, mesh=HYBRID),
    "hybrid_reduced_in_itself": _mixed(BF16, None, mesh=HYBRID),
    "accumulating": _mixed(BF16, FP32, num_microbatches=3),
    "accumulating_hybrid": _mixed(BF16, FP32, num_microbatches=3, mesh=HYBRID),
    "accumulating_in_itself": _mixed(BF16, None, num_microbatches=2),
    "replicas": _mixed(BF16, FP32, call="replicate"),
    "replicas_in_itself": _mixed(FP16, None, call="replicate"),
    "replicas_accumulating": _mixed(BF16, FP32, call="replicate", num_microbatches=3),
}


def _trains(context: RankContext, door_name: str, setting: Setting) -> None:
    plain = build(Probe, dtype=FP32)
    plan = Plan(units=setting.units, call=setting.call, precision=setting.policy, options=setting.options)
    model = plan.apply(BY_NAME[door_name], copy.deepcopy(plain), laid_out(setting.mesh))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.125, momentum=0.9) for m in (model, plain)]
    for step in range(3):
        output = _run(model, _data(setting, step, context.rank))
        _demand_dtypes(model, output, setting)
        _learn(plain, [_data(setting, step, rank) for rank in range(context.size)], setting)
        _compare(model, plain, setting)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        # The next step starts from the same place on both sides, so that errors do not add up over steps.
        for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            rtol, atol = TOLERANCE[setting.reduce]
            torch.testing.assert_close(
                parameter.full_tensor(), whole, rtol=max(rtol, 2e-6), atol=max(atol, 1e-6)
            )
            with torch.no_grad():
                whole.copy_(parameter.full_tensor())


def _run(model: Any, data: list[torch.Tensor]) -> torch.Tensor:  # Any: the engines share no base class
    for i, rows in enumerate(data):
        model.set_requires_gradient_sync(i == len(data) - 1)
        output: torch.Tensor = model(rows)
        _loss(output).backward()
    return output


def _demand_dtypes(model: nn.Module, output: torch.Tensor, setting: Setting) -> None:
    assert output.dtype == (setting.output or setting.compute)
    first, last = (model.get_submodule(name) for name in ("first", "last"))
    assert isinstance(first, Recorded)
    assert isinstance(last, Recorded)
    assert first.seen == last.seen == {(setting.compute,) * 3}
    for name, parameter in model.named_parameters():
        assert parameter.dtype == FP32, name
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == FP32, name


def _learn(plain: nn.Module, data: list[list[torch.Tensor]], setting: Setting) -> None:
    """Give ``plain`` the mean over ranks of gradients computed in the low precision and summed in float64."""
    totals = [torch.zeros_like(p, dtype=FP64) for p in plain.parameters()]
    for of_rank in data:
        for rows in of_rank:
            low = _casting(copy.deepcopy(plain).to(setting.compute), setting)
            _loss(low(rows)).backward()
            for total, parameter in zip(totals, low.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad.double()
    for total, parameter in zip(totals, plain.parameters(), strict=True):
        parameter.grad = (total / len(data)).to(FP32)


def _compare(model: nn.Module, plain: nn.Module, setting: Setting) -> None:
    # A gradient is stored in float32 whatever it was reduced in.
    rtol, atol = TOLERANCE[FP32 if setting.reduce == FP64 else setting.reduce]
    for (name, parameter), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        assert whole.grad is not None
        assert whole.grad.abs().max() > 1e-3, name
        torch.testing.assert_close(
            parameter.grad.to_local(),
            shard_of(whole.grad, parameter.grad),
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"gradient of {name}: {text}",  # type: ignore[misc] # a default binds it
        )


def _casting(low: nn.Module, setting: Setting) -> nn.Module:
    """Make every unit take and give the dtypes of the policy."""
    output = setting.output or setting.compute
    for module in low.modules():
        module.register_forward_pre_hook(lambda _, args: tuple(arg.to(setting.compute) for arg in args))
        module.register_forward_hook(lambda _, args, result: result.to(output))
    return low


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + output.mean()


def _data(setting: Setting, step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(4, 6, generator=generator).to(setting.given) for _ in range(setting.num_microbatches)]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", SETTINGS)
def test_every_dtype_is_where_the_policy_puts_it(name: str, door: str, tmp_path: Path) -> None:
    size = 4 if SETTINGS[name].mesh else 2
    run_world(WorldKind.THREADS, size, _trains, door, SETTINGS[name], folder=tmp_path)


class Nested(nn.Module):
    """A unit that is given tensors in containers, floats among things that no cast may touch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.dtypes: dict[str, object] = {}

    def forward(self, table: dict[str, Any], pair: tuple[Any, ...], *, scores: Scores) -> object:
        assert scores.aside is not None
        self.dtypes = {
            "dict": table["rows"].dtype,
            "list": table["list"][0].dtype,
            "ids": table["ids"].dtype,
            "tuple": pair[0].dtype,
            "flags": pair[1].dtype,
            "word": pair[2],
            "dataclass": scores.main.dtype,
            "label": scores.label,
            "aside": scores.aside.dtype,
            "weight": self.weight.dtype,
        }
        total = table["rows"] + table["list"][0] + pair[0] + scores.main + scores.aside
        return {"whole": total * self.weight, "ids": table["ids"], "more": (total.sum() * self.weight,)}


def _nests(context: RankContext, door_name: str, casts: bool) -> None:
    door = BY_NAME[door_name]
    policy = {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP64, "cast_forward_inputs": casts}
    model = Plan(precision=policy).apply(door, build(Nested, dtype=FP32), None)
    assert isinstance(model, Nested)
    leaves = [torch.full((2, 3), float(i + 1), requires_grad=True) for i in range(5)]
    rows, listed, in_tuple, main, aside = leaves
    table = {"rows": rows, "list": [listed], "ids": torch.arange(2)}
    scores = Scores(main=main, label="a word", aside=aside)
    output = model(table, (in_tuple, torch.tensor([True]), "a word"), scores=scores)
    floats = BF16 if casts else FP32
    assert model.dtypes == {
        **dict.fromkeys(("dict", "list", "tuple", "dataclass", "aside"), floats),
        "ids": torch.int64,
        "flags": torch.bool,
        "word": "a word",
        "label": "a word",
        "weight": BF16,
    }
    assert [t.dtype for t in tensors_of(output)] == [FP64, torch.int64, FP64]
    assert [leaf.dtype for leaf in leaves] == [FP32] * 5, "the caller's tensors changed"
    torch.stack([t.sum() for t in tensors_of(output) if t.is_floating_point()]).sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    assert all(g is not None and g.dtype == FP32 and bool(g.abs().min() > 0) for g in gradients)
    (parameter,) = model.parameters()
    assert isinstance(parameter.grad, DTensor)
    assert parameter.grad.full_tensor().tolist() == [30.0 + 90.0] * 3


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("casts", [True, False], ids=["cast", "left"])
def test_containers_are_searched_for_floats(casts: bool, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, 2, _nests, door, casts, folder=tmp_path)


class TwoInOneCall(nn.Module):
    """Two linears of one unit, with a conversion to float32 between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, 6, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(rows).float())
        return output


def _casts_per_module(context: RankContext, door_name: str) -> None:
    model = _two_in_one_call(BY_NAME[door_name])
    output = model(torch.ones(2, 6) * (context.rank + 1))
    assert output.dtype == BF16
    _loss(output).backward()
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.full_tensor().abs().max() > 0
        assert parameter.grad.dtype == FP32


def _two_in_one_call(door: FrontDoor) -> nn.Module:
    plan = Plan(units=(("first", "last"), ""), precision={"param_dtype": BF16, "cast_forward_inputs": True})
    return plan.apply(door, build(TwoInOneCall, dtype=FP32), None)


@pytest.mark.parametrize("door", DOORS)
def test_each_module_of_a_unit_casts_its_inputs(door: str, tmp_path: Path) -> None:
    """Upstream row T18."""
    run_world(WorldKind.THREADS, 2, _casts_per_module, door, folder=tmp_path)
