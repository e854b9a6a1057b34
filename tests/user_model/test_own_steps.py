"""A user's own training step runs alike on ranks and in the reference; see [Note: own steps]."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from shardproof.engine.registry import shipped_mutants
from shardproof.harness.cases.own_step import SeveralOptimizers
from shardproof.harness.errors import UsageError
from shardproof.harness.runner.user_model.read import read_model
from tests.user_model.models import run_check

GAN = """
import torch
from torch import nn
from torch.nn.functional import softplus

class Networks(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    def forward(self, noise, real, part):
        fake = self.generator(noise)
        if part == "generator":
            return softplus(-self.discriminator(fake)).mean()
        return softplus(-self.discriminator(real)).mean() + softplus(self.discriminator(fake.detach())).mean()

class Mine:
    units = ("generator", "discriminator")
    def build(self):
        return Networks()
    def batch(self, generator):
        return {"noise": torch.randn(6, 4, generator=generator), "real": torch.randn(6, 6, generator=generator)}
    def optimizers(self, model):
        return [
            torch.optim.Adam(model.generator.parameters(), lr=1e-3),
            torch.optim.SGD(model.discriminator.parameters(), lr=0.1, momentum=0.9),
        ]
    def step(self, model, batch, of_generator, of_discriminator):
        loss = model(**batch, part="discriminator")
        loss.backward()
        of_discriminator.step()
        of_discriminator.zero_grad()
        other = model(**batch, part="generator")
        other.backward()
        of_generator.step()
        of_generator.zero_grad()
        of_discriminator.zero_grad()
        return {"discriminator": loss, "generator": other}
"""
# A teacher that averages its student, microbatches weighted by their tokens, clipping, and recomputed activations.
TEACHER = """
import copy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 20))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
    def forward(self, tokens):
        hidden = checkpoint(self.student[1:3], self.student[0](tokens), use_reentrant=False)
        output, soft = self.student[3](hidden), self.teacher(tokens)
        return nn.functional.cross_entropy(output, tokens, reduction="sum") + (output - soft).square().sum()

class Mine:
    units = ("student.1",)
    def build(self):
        return Pair()
    def batch(self, generator):
        lengths = torch.randint(2, 9, (3,), generator=generator)
        return [torch.randint(20, (int(n),), generator=generator) for n in lengths]
    def optimizer(self, params):
        return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1, momentum=0.9)
    def step(self, model, batch, optimizer):
        num_tokens, total = sum(map(len, batch)), 0.0
        for tokens in batch:
            loss = model(tokens) / num_tokens
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(model.teacher.parameters(), model.student.parameters()):
                mean.lerp_(parameter, 0.1)
        return total
"""
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
@pytest.mark.parametrize("text", [GAN, TEACHER], ids=["several_optimizers", "teacher"])
def test_a_right_engine_is_proven(
    file: Path, text: str, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    is_undeclared = engine == "torch.zero1" and text == GAN
    assert run_check(file, engine, "-k", "trains") == int(is_undeclared)
    assert ("needs SEVERAL_OPTIMIZERS" in capsys.readouterr().out) == is_undeclared


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("SumsInsteadOfAveraging", "loss 'loss' on rank"),
        ("forgetful.py:Forgetful", "gradient 'generator."),
    ],
)
def test_a_wrong_engine_is_caught(
    file: Path, engine: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(GAN)
    file.with_name("forgetful.py").write_text(FORGETFUL)
    specs = {m.name: m.engine_spec for m in shipped_mutants()}
    assert run_check(file, specs.get(engine, f"{file.parent}/{engine}"), "-k", "trains") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert f"trains as one process does: matches the oracle: step 0, {words}" in shown


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("loss.backward()", "pass", "step() updates no parameter that has a gradient"),
        ("return total", "pass", "step() returned no loss"),
        (
            "lerp_(parameter, 0.1)",
            "add_(batch[0][0])",
            "leaves other values of 'teacher.0.weight' on each rank",
        ),
        (
            "    def step(",
            "    loss = len\n    def step(",
            "loss() and step(): a step computes its losses itself",
        ),
        ("total += float(loss)", "model.nothing", "has no attribute 'nothing' (mine.py:"),
    ],
)
def test_a_mistake_is_refused(file: Path, old: str, new: str, words: str) -> None:
    file.write_text(TEACHER.replace(old, new))
    with pytest.raises(UsageError) as caught:
        read_model(f"{file}:Mine", limit_s=60)
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
