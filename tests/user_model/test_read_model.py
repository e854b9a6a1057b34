"""What reading a user's model finds out about it, and what it becomes for the cases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardproof.engine.capability import Capability
from shardproof.fixtures.optimizers import ADAMW, COARSE_ADAMW
from shardproof.fixtures.user_model import USER_MODEL
from shardproof.harness.cases.batch import ModelBatch, arguments_of, converted, tensors_of
from shardproof.harness.cases.units import matching_units
from shardproof.harness.cases.user_model import UserModel
from shardproof.harness.cli.commands.check import deadline_for
from shardproof.harness.errors import ModelError
from shardproof.harness.runner.user_model import read
from shardproof.harness.runner.user_model.model_summary import model_summary
from shardproof.harness.runner.user_model.read import read_model
from shardproof.suites.user_model.conftest import default_optimizer
from tests.user_model.models import GOOD, LOSS, with_optimizer


def test_a_model_of_bfloat16_is_trained_in_larger_steps(file: Path) -> None:
    """The weight of a norm, which is 1, would move by one rounding at most."""
    assert default_optimizer(read_model(f"{file}:Mine", limit_s=60)[0]) == ADAMW
    file.write_text(
        GOOD.replace("return Net()", "return Net().bfloat16()").replace(
            "r=generator)", "r=generator).bfloat16()"
        )
    )
    assert default_optimizer(read_model(f"{file}:Mine", limit_s=60)[0]) == COARSE_ADAMW


def test_a_model_is_read(file: Path) -> None:
    model, optimizer = read_model(f"{file}:Mine", limit_s=60)
    assert (model.name, model.units) == ("Mine", ("blocks.0", "blocks.1"))
    # A bias before its mean is taken off has a gradient that is zero but for rounding.
    assert model.idle == ("normed.bias",)
    assert optimizer is None
    assert not model.demands


def test_a_string_is_one_pattern(file: Path) -> None:
    file.write_text(GOOD.replace('("blocks.*",)', '"blocks.*"'))
    assert read_model(f"{file}:Mine", limit_s=60)[0].units == ("blocks.0", "blocks.1")


@pytest.mark.parametrize(
    ("part", "evaluating", "shown"),
    [
        ("net.out", ("out",), "evaluation    out, as build() returned them"),
        ("net", ("",), "evaluation    the whole model, as build() returned it"),
    ],
)
def test_the_mode_of_a_built_model_is_kept_and_shown(
    file: Path, part: str, evaluating: tuple[str, ...], shown: str
) -> None:
    """Some users train in evaluation mode to keep running statistics; loaded models are in it by default."""
    file.write_text(GOOD.replace("return Net()", f"net = Net()\n        {part}.eval()\n        return net"))
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert model.facts.evaluating == evaluating
    assert not any(model.build().get_submodule(name).training for name in evaluating)
    assert shown in model_summary(model, None, pass_s=1.0, limit_s=60.0)


def test_a_model_whose_gradients_are_finite_in_its_own_dtypes_alone_is_judged_in_them(file: Path) -> None:
    """Masks are often the least number of float32, as a Longformer's, whose gradients are NaN in float64."""
    masked = "hidden = self.normed(x) + ((x * 0).sqrt().sum() if x.dtype is torch.float64 else 0)"
    text = GOOD.replace("hidden = self.normed(x)", masked)
    file.write_text(text)
    assert not read_model(f"{file}:Mine", limit_s=60)[0].is_widened
    for wrong in (
        text.replace("class Mine:", "class Mine:\n    float64 = True"),
        text.replace("x.dtype is torch.float64", "self"),
    ):
        file.write_text(wrong)
        with pytest.raises(
            ModelError, match=r"gradient of 'blocks\.0\.weight' is not finite in step 0 on rank 0"
        ):
            read_model(f"{file}:Mine", limit_s=60)


_BLOCK = """class Block(nn.ModuleDict):
    def __init__(self):
        super().__init__({"in": nn.Linear(6, 6)})
    def forward(self, x):
        return self["in"](x)

class Net"""


def test_parts_called_outside_their_unit_are_named(file: Path) -> None:
    """DiT's model itself calls the embedding of its first block."""
    file.write_text(
        GOOD.replace("block(x)", 'block["in"](block(x))')
        .replace("nn.Linear(6, 6) for", "Block() for")
        .replace("class Net", _BLOCK)
    )
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert model.facts.outside == ("blocks.0.in", "blocks.1.in")
    assert "called outside the forward of the unit" in model_summary(model, None, pass_s=1.0, limit_s=60.0)


def test_hooks_on_gradients_are_named_because_engines_drop_them(file: Path) -> None:
    hooked = "net = Net()\n        net.out.bias.register_hook(lambda g: g.clamp(-1, 1))\n        return net"
    file.write_text(GOOD.replace("return Net()", hooked))
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert model.facts.hooked == ("out.bias",)
    assert "drop the hooks" in " ".join(model_summary(model, None, pass_s=1.0, limit_s=60.0).split())


def test_units_that_backward_recomputes_are_counted_once(file: Path) -> None:
    file.write_text(
        GOOD.replace("block(x)", "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)").replace(
            "import torch\n", "import torch\nimport torch.utils.checkpoint\n", 1
        )
    )
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert (model.facts.uncounted, model.facts.outside) == ("", ())


_LARS = """
class Scaled(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p -= 0.1 * p.norm() / p.grad.norm() * p.grad
"""


@pytest.mark.parametrize(
    ("optimizer", "needed"),
    [
        ("torch.optim.AdamW(p, lr=0.01)", False),
        ("torch.optim.SGD([q for q in p if q.ndim], lr=0.01, momentum=0.9)", False),
        ("torch.optim.Adafactor(p, lr=0.01)", True),
        ("torch.optim.Muon([q for q in p if q.ndim == 2])", True),
        ("Scaled(p)", True),
    ],
)
def test_optimizers_that_look_at_whole_parameters_ask_engines_for_them(
    file: Path, optimizer: str, needed: bool
) -> None:
    file.write_text(GOOD.replace(LOSS, with_optimizer(optimizer)) + _LARS)
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert (Capability.PARAMETER_SHAPES in model.demands) == needed


def test_an_edited_file_is_another_problem(file: Path) -> None:
    before, _ = read_model(f"{file}:Mine", limit_s=60)
    file.write_text(GOOD.replace("0.5", "0.25"))
    after, _ = read_model(f"{file}:Mine", limit_s=60)
    assert before != after


def test_batches_may_have_rows_of_their_own_number(file: Path) -> None:
    file.write_text(GOOD.replace("randn(4, 6,", "randn(4 + generator.initial_seed() % 2, 6,"))
    read_model(f"{file}:Mine", limit_s=60)


_BUILT_ALONE = """if not building.acquire(blocking=False):
            raise RuntimeError("two threads build at a time")
        threading.Event().wait(0.5)  # as an import may take
        building.release()
        return Net()"""


def test_rank_threads_build_one_after_the_other(file: Path) -> None:
    """Libraries import their parts on first use, and may fail if two threads do so at once."""
    shared = "import threading\nbuilding = threading.Lock()\n\nclass Mine"
    file.write_text(GOOD.replace("class Mine", shared).replace("return Net()", _BUILT_ALONE))
    problem = UserModel(spec=f"{file}:Mine", name="Mine", digest="", units=())
    with ThreadPoolExecutor(2) as pool:
        built = [pool.submit(problem.build) for _ in range(2)]
    assert all(done.result().training for done in built)


def test_the_first_lines_describe_the_model(file: Path) -> None:
    file.write_text(GOOD.replace(LOSS, with_optimizer("torch.optim.SGD(p, lr=0.1)")))
    model, optimizer = read_model(f"{file}:Mine", limit_s=60)
    demanding = replace(model, demands=frozenset({Capability.UNUSED}), is_widened=False)
    shown = " ".join(model_summary(demanding, optimizer, pass_s=0.5, limit_s=90).split())
    assert (
        "140 elements in 8 parameters, which communicate as 2 units (blocks.0, blocks.1) and the rest"
        in shown
    )
    assert "reference one process, in the model's own dtypes" in shown
    assert "optimizer optimizer() of the model" in shown
    assert "need not move normed.bias" in shown
    assert "needs an engine that lets parameters have no gradient in a step (UNUSED)" in shown
    assert "forward and backward take 0.5 s; a case that takes longer than 90 s counts as hung" in shown


@pytest.mark.parametrize(("factor", "is_zero"), [(1e-5, False), (1e-12, True)])
def test_a_small_gradient_is_distinguished_from_one_that_is_zero_but_for_rounding(
    file: Path, factor: float, is_zero: bool
) -> None:
    text = GOOD.replace("keepdim=True))}", f"keepdim=True)) + {factor} * self.faint}}")
    file.write_text(
        text.replace(
            "        self.out =", "        self.faint = nn.Parameter(torch.ones(2))\n        self.out ="
        )
    )
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert set(model.idle) == {"normed.bias"} | ({"faint"} if is_zero else set())


def test_a_layer_that_one_batch_leaves_out_is_known(file: Path) -> None:
    """The first batches use all layers; the last batch of the second step, computed in float32, leaves one out."""
    text = GOOD.replace("self.normed(x)", "self.normed(x) if x[0, 0] > 0 else x")
    file.write_text(text.replace("hidden - hidden.mean(0, keepdim=True)", "hidden"))
    model, _ = read_model(f"{file}:Mine", limit_s=60)
    assert model.facts.seldom == ("normed.bias", "normed.weight")
    assert Capability.RANK_DEPENDENT in model.demands


def test_a_deadline_grows_with_the_model() -> None:
    assert deadline_for(0.001, 2) == 61
    assert deadline_for(2.0, 2) == 60 + 30 * 9 * 2 * 2
    assert deadline_for(2.0, 4) > deadline_for(2.0, 2)
    assert deadline_for(2.0, 2, is_widened=False) == 60 + 3 * 30 * 9 * 2 * 2


def test_a_pattern_matches_one_part_of_a_name() -> None:
    model = USER_MODEL.build()
    assert matching_units(model, ["layers.*"]) == USER_MODEL.units
    assert matching_units(model, ["layers.*.mix", "head"]) == ("layers.0.mix", "layers.1.mix", "head")
    assert matching_units(model, ["layers.*", "layers.*.mix"])[:2] == ("layers.0.mix", "layers.1.mix")
    with pytest.raises(ValueError, match="matches no submodule"):
        matching_units(model, ["*.*.*.*"])


def test_the_model_that_ships_is_described_as_it_is() -> None:
    described, optimizer = read_model(USER_MODEL.spec, limit_s=60)
    assert described == USER_MODEL
    assert optimizer is not None


@pytest.mark.parametrize(
    ("value", "args", "kwargs"),
    [
        ({"x": 1}, (), {"x": 1}),
        ((1, 2), (1, 2), {}),
        ([1, 2], (1, 2), {}),
        (3, (3,), {}),
    ],
)
def test_a_batch_becomes_the_arguments_of_forward(
    value: object, args: tuple[object, ...], kwargs: object
) -> None:
    assert arguments_of(ModelBatch(value=value).inputs) == (args, kwargs)


def test_every_tensor_of_a_tree_is_converted() -> None:
    batch = ModelBatch(
        value={"a": (torch.ones(1), [torch.ones(2), None]), "b": {"c": torch.ones(3)}, "d": "x"}
    )
    doubled = converted(batch, torch.Tensor.double)
    assert [(t.numel(), t.dtype) for t in tensors_of(doubled)] == [(n, torch.float64) for n in (1, 2, 3)]
    assert isinstance(doubled, ModelBatch)
    assert doubled.value["a"][1][1] is None
    assert doubled.value["d"] == "x"


def test_data_and_model_are_the_same_each_time() -> None:
    def numbers(model: UserModel) -> list[torch.Tensor]:
        batch = model.batch(step=1, microbatch=2, rank=3)
        return [*tensors_of(batch), *model.build().parameters()]

    state = torch.get_rng_state()
    first = numbers(USER_MODEL)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(17)
    assert all(torch.equal(a, b) for a, b in zip(first, numbers(USER_MODEL), strict=True))


def test_the_command_and_the_suite_read_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = list[str]()

    def noted(spec: str, *, limit_s: float, num_ranks: int) -> tuple[UserModel, None]:
        specs.append(spec)
        return USER_MODEL, None

    monkeypatch.setattr(read, "_known", {})
    monkeypatch.setattr(read, "read_model", noted)
    for limit_s in (600.0, 75.0):
        assert read.known_model(USER_MODEL.spec, limit_s) == (USER_MODEL, None)
    assert specs == [USER_MODEL.spec]
