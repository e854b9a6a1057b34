"""A user's own training step runs alike on ranks and in the reference; see [Note: own steps]."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from shardproof.harness.cases.own_step import SeveralOptimizers
from shardproof.harness.errors import UsageError
from shardproof.harness.runner.user_model.read import read_model
from tests.shell import ROOT
from tests.user_model.models import Check

LOOPS = (ROOT / "examples" / "models" / "loops.py").read_text(encoding="utf-8")
# Reduces the gradients of every other backward, such as those of the first of two losses.
FORGETFUL = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from shardproof import Capability, Engine, PreparedModel

class Forgetful(Engine):
    name = "forgetful"
    capabilities = frozenset({Capability.REPLICATE, Capability.UNUSED, Capability.SEVERAL_OPTIMIZERS})
    def prepare(self, model, plan, mesh):
        plan.refuse_beyond(self.capabilities)
        group, calls = mesh.get_group(), []
        def reduce(state, bucket):
            calls.append(1)
            if len(calls) % 2 == 0:
                future = torch.futures.Future()
                future.set_result(bucket.buffer())
                return future
            work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        module = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
        module.register_comm_hook(None, reduce)
        return PreparedModel(module, named=model)
"""


@pytest.mark.parametrize("engine", ["torch.ddp", "torch.fsdp2", "torch.zero1"])
@pytest.mark.parametrize("model", ["Gan", "Distilled"])
def test_a_right_engine_is_proven(model: str, engine: str, check: Check) -> None:
    is_undeclared = engine == "torch.zero1" and model == "Gan"
    shown = check(engine, "-k", "trains", text=LOOPS, model=model, code=int(is_undeclared))
    assert ("needs SEVERAL_OPTIMIZERS" in shown) == is_undeclared


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("SumsInsteadOfAveraging", "loss 'loss' on rank"),
        ("forgetful.py:Forgetful", "gradient 'generator."),
    ],
)
def test_a_wrong_engine_is_caught(engine: str, words: str, check: Check) -> None:
    check.file.with_name("forgetful.py").write_text(FORGETFUL)
    spec = f"{check.file.parent}/{engine}" if ".py" in engine else engine
    shown = check(spec, "-k", "trains", text=LOOPS, model="Gan", code=1)
    assert f"trains as one process does: matches the oracle: step 0, {words}" in shown


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("loss.backward()\n            total", "total", "step() updates no parameter that has a gradient"),
        ("return total\n", "pass\n", "step() returned no loss"),
        (
            "lerp_(parameter, 0.1)",
            "add_(batch[0].mean())",
            "leaves other values of 'teacher.0.weight' on each rank",
        ),
        (
            "    def optimizer(",
            "    loss = len\n    def optimizer(",
            "loss() and step(): a step computes its losses itself",
        ),
        ("total += float(loss)", "model.nothing", "has no attribute 'nothing' (mine.py:"),
    ],
)
def test_a_mistake_is_refused(file: Path, old: str, new: str, words: str) -> None:
    before, _, after = LOOPS.partition("class Distilled")
    assert old in after
    file.write_text(f"{before}class Distilled{after.replace(old, new)}")
    with pytest.raises(UsageError) as caught:
        read_model(f"{file}:Distilled", limit_s=60)
    assert words in str(caught.value)


def _several(parameters: Iterable[nn.Parameter]) -> SeveralOptimizers:
    first, second = parameters
    return SeveralOptimizers(
        [torch.optim.Adam([first], lr=0.1), torch.optim.SGD([second], lr=0.1, momentum=0.5)]
    )


def test_several_optimizers_load_what_they_saved() -> None:
    """As one optimizer that never stopped."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    others = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = kept = _several(parameters)
    whole = _several(others)
    for step in range(3):
        for parameter in (*parameters, *others):
            parameter.grad = torch.full((2,), 1.0 + step)
        optimizer.step()
        whole.step()
        optimizer = _several(parameters)
        optimizer.load_state_dict(kept.state_dict())
        kept = optimizer
    for parameter, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(parameter, other)
