"""Equal content has one digest in every process, other content has another, and unreadable content has none."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from shardproof import Capability, Case, Cell, MatchesOracle, Plan, Schedule, Training, Verdict
from shardproof.fixtures.optimizers import ADAMW, SGD, Sgd
from shardproof.fixtures.problems import MLP_EVEN, PROBLEMS, ModelProblem
from shardproof.harness.cases.content import content_digest
from shardproof.harness.runner.session import Source, TrialSession
from shardproof.harness.runner.training_request import Identities
from shardproof.harness.worlds.spec import WorldKind, WorldSpec
from tests.judging import judged
from tests.shell import ROOT

CELL = Cell(engine="torch.ddp", world=WorldSpec(kind=WorldKind.THREADS, size=2, deadline_s=20.0))

# Pairs of modules with equal names, which differ in one place of the code that a problem calls.
SOURCE = """
import functools, torch
from torch import nn
SCALE = {scale}
class Base(nn.Module):
    factor = {factor}
    def again(self, x):
        return x {operator} x
class Net(Base):
    def forward(self, x):
        return self.again(x) * self.factor
def inner(x):
    return x * SCALE
def loss(x, power={power}):
    return [inner(y) ** power for y in x]
made = (lambda n: lambda x: x * n)({closed})
part = functools.partial(loss, power={bound})
@functools.cache
def cached(x):
    return x + {inside}
def through_a_class(x):
    return Net()(x)
"""
SAME = {
    "scale": "2",
    "factor": "2",
    "operator": "+",
    "power": "2",
    "closed": "2",
    "bound": "3",
    "inside": "1",
}


def module(**changes: str) -> Any:  # Any: a module made here
    made = ModuleType("of_a_user")
    exec(SOURCE.format(**SAME | changes), vars(made))
    return made


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("loss", {"scale": "3"}),
        ("loss", {"power": "3"}),
        ("part", {"scale": "3"}),
        ("part", {"bound": "4"}),
        ("made", {"closed": "3"}),
        ("cached", {"inside": "2"}),
        ("Net", {"factor": "3"}),
        ("Net", {"operator": "*"}),
        ("through_a_class", {"operator": "*"}),
    ],
)
def test_a_difference_in_called_code_changes_the_digest(name: str, change: dict[str, str]) -> None:
    same, other = getattr(module(), name), getattr(module(**change), name)
    assert content_digest(same) == content_digest(getattr(module(), name)) is not None
    assert content_digest(same) != content_digest(other)


def test_a_difference_in_other_code_keeps_the_digest() -> None:
    for name, change in (("loss", {"factor": "3"}), ("made", {"scale": "3"}), ("Net", {"power": "3"})):
        assert content_digest(getattr(module(), name)) == content_digest(getattr(module(**change), name))


def test_attributes_of_a_module_of_the_user_are_read() -> None:
    def calls(of: ModuleType) -> Callable[..., object]:
        made = ModuleType("another")
        made.__dict__["of_a_user"] = of
        exec("def loss(x):\n    return of_a_user.loss(x)", vars(made))
        loss: Callable[..., object] = vars(made)["loss"]
        return loss

    assert content_digest(calls(module())) == content_digest(calls(module()))
    assert content_digest(calls(module())) != content_digest(calls(module(scale="3")))


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True, slots=True)
class Value:
    content: object


@pytest.mark.parametrize(
    "values",
    [
        (1, 1.0, True, "1", b"1", None, ..., (1,), [1], {1}, frozenset({1}), {1: 1}, {1: 2}, {2: 1}),
        (0.0, -0.0, float("nan"), float("inf"), 0j),
        ((1, 2), (2, 1), ((1,), 2), (1, (2,)), ("12",), ("1", "2"), (), ((),)),
        (Colour.RED, Colour.BLUE, Colour, Capability.CLIP, Capability.CONVERT),
        (torch.zeros(2), torch.zeros(2, 1), torch.zeros(2).double(), nn.Parameter(torch.zeros(2)), -torch.zeros(2)),
        (torch.float32, torch.float64, torch.device("cpu"), torch.nn.functional.gelu, torch.tanh, len, abs),
        (MLP_EVEN.build, MLP_EVEN.num_items, replace(MLP_EVEN, seed=1).build, [1].append, [2].append),
        (SGD, ADAMW, replace(SGD, lr=0.2), replace(SGD, lr=float("nan")), Sgd, *PROBLEMS),
        (threading.Thread, functools.partial(pow, 2), functools.partial(pow, 3), range(3), range(4)),
    ],
)  # fmt: skip
def test_different_values_have_different_digests(values: tuple[object, ...]) -> None:
    for wrap in (lambda x: x, Value, lambda x: [x]):
        digests = [content_digest(wrap(value)) for value in values]
        assert None not in digests
        assert len(set(digests)) == len(values)
        assert digests == [content_digest(wrap(value)) for value in values]


def test_sets_have_no_order_and_containers_may_contain_themselves() -> None:
    names = [f"name {i}" for i in range(50)]
    backwards = names[::-1]
    assert content_digest(set(names)) == content_digest(set(backwards))
    endless: list[object] = [1]
    endless.append(endless)
    assert content_digest(endless) is not None


def _numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        _numbers(),
        sys.stdout,
        torch.zeros(2).to_sparse(),
        torch.zeros(2, device="meta"),
    ],
    ids=["a lock", "a generator", "a file", "a sparse tensor", "a tensor without data"],
)
def test_an_unreadable_value_has_no_digest(value: object) -> None:
    assert content_digest(value) is None
    assert content_digest(replace(MLP_EVEN, model=lambda _: nn.Linear(len(str(value)), 1))) is None
    deep: object = value
    for _ in range(10_000):
        deep = [deep]
    assert content_digest(deep) is None


SCRIPT = """
from shardproof.engine.contract import Capability, Plan
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import PROBLEMS
from shardproof.harness.cases.training import Training, Watch
from shardproof.harness.cases.content import content_digest
plan = Plan(demands=frozenset(Capability))
for p in PROBLEMS:
    print(content_digest(Training(problem=p, optimizer=ADAMW, plan=plan, watch=frozenset(Watch))))
"""


def test_processes_agree_whatever_their_hash_seed_is() -> None:
    def printed(hash_seed: int) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SCRIPT]
        return subprocess.run(command, check=True, env=environment, cwd=ROOT, stdout=-1, text=True).stdout

    first = printed(1)
    assert "None" not in first
    assert len(set(first.split())) == len(PROBLEMS)
    assert printed(2) == first


# Sessions


def training(problem: ModelProblem = MLP_EVEN, **changes: Any) -> Training:  # Any: fields of a training
    return Training(problem=problem, schedule=Schedule(steps=1), **{"optimizer": SGD, **changes})


def run(session: TrialSession, asked: Training, case: str = "case") -> tuple[Verdict, str]:
    record = session.run(Case(id=case, training=asked, laws=(MatchesOracle(),)), CELL, suite="", command="")
    return record.verdict, record.observation


def test_a_name_does_not_answer_for_another_problem_or_optimizer(session: TrialSession) -> None:
    honest, first = run(session, training())
    nothing, second = run(session, training(optimizer=replace(SGD, lr=float("nan"))))
    still, third = run(session, training(problem=replace(MLP_EVEN, loss=_nothing)))
    assert (honest, nothing, still) == (Verdict.PASSED, Verdict.VACUOUS, Verdict.VACUOUS)
    assert len({first, second, third}) == 3
    assert run(session, training(plan=Plan()))[1] == first


def _nothing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0 * (output - target).sum()


class _Unreadable:
    """A loss that no two processes can compare, although ranks can use it."""

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().sum()

    def __reduce_ex__(self, protocol: object) -> Any:  # Any: as pickle has it
        if sys._getframe(1).f_code.co_filename.endswith("content.py"):
            raise TypeError("not for reading")
        return super().__reduce_ex__(4)


def test_a_path_that_reads_alike_does_not_answer_for_another_engine(
    session: TrialSession, tmp_path: Path
) -> None:
    engines = {
        "a-b": "adapters.torch_ddp:DistributedDataParallelEngine",
        "a/b": "mutants.gradient_sync:NeverSynchronises",
    }
    verdicts = []
    for folder, engine in engines.items():
        module, name = engine.split(":")
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "e.py").write_text(f"from shardproof.engine.{module} import {name} as E\n")
        verdicts.append(judged(session, f"{tmp_path / folder / 'e.py'}:E").verdict)
    assert verdicts == [Verdict.PASSED, Verdict.FAILED]


def test_a_problem_without_a_digest_is_shared_by_no_two_cases_and_found_again(tmp_path: Path) -> None:
    asked = [training(replace(MLP_EVEN, loss=_Unreadable())) for _ in range(2)]
    assert content_digest(asked[0]) is None

    def names(*, is_replay: bool) -> list[tuple[Verdict, str]]:
        session = TrialSession(Source(folder=tmp_path, is_replay=is_replay))
        seen = [run(session, one, case) for one, case in itertools.product(asked, ("one", "other"))]
        session.close()
        return seen

    made = names(is_replay=False)
    assert {verdict for verdict, _ in made} == {Verdict.PASSED}
    assert len({name for _, name in made}) == 4
    assert names(is_replay=True) == made


def test_a_part_is_read_once_per_case_and_again_for_another() -> None:
    layers: list[int] = [1]
    problem = replace(MLP_EVEN, model=functools.partial(_layers, layers))
    training = Training(problem=problem, optimizer=SGD)
    identities = Identities()
    first = identities.digest(training, "one")
    layers.append(2)
    assert identities.digest(replace(training), "one") == first
    assert identities.digest(training, "other") != first


def _layers(sizes: list[int], _: torch.Generator) -> nn.Module:
    return nn.Sequential(*(nn.Linear(size, size) for size in sizes))
