"""Cases of an engine's own interface: a test's body runs on every rank, and claims what is right there."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardproof import Actor, Capability, EachMicrobatch, Exercise, InterfaceBench, Layout, Op, Plan, Schedule
from shardproof import Training, Watch
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.suites.differences import difference
from shardproof.suites.tower import batch

if TYPE_CHECKING:  # ranks import this file too, and do not judge
    from shardproof.harness.runner.trial import Trial

RIGHT = "as it should be"
# Exceptions by which an interface refuses. Any other exception is a defect.
_REFUSALS = (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError)
_LONGEST = 400  # a person reads the claim's text


class Claims:
    """One rank that records for each subject that its value is right, or the wrong value.

    ``ledger`` returns this rank's communication so far.
    """

    def __init__(self, bench: InterfaceBench) -> None:
        self.rank = bench.rank
        self.size = bench.size
        self.ranks = range(bench.size)
        self.device = bench.device
        self.ledger = bench.ledger
        self._note = bench.note

    # Any: values of the interface under test, plain or nested.
    def same(self, subject: str, got: Any, expected: Any) -> None:
        """Claim that two values are equal: tensors in shape, dtype and every bit, mappings in their order too."""
        self._claim(subject, difference(got, expected))

    def near(self, subject: str, got: Any, expected: Any, *, tolerance: float) -> None:
        """Claim as `same`, but floats may differ by that fraction of the largest of their tensor."""
        self._claim(subject, difference(got, expected, tolerance))

    def refuses(
        self, subject: str, call: Callable[[], object], *errors: type[Exception], naming: str = ""
    ) -> None:
        """Claim that a call raises one of these errors, in words that the pattern finds; by default any refusal."""
        try:
            result = call()
        except Exception as error:  # recorded, not raised: the other ranks must continue and record theirs
            is_named = re.search(naming, str(error), re.DOTALL | re.IGNORECASE)
            is_refusal = isinstance(error, errors or _REFUSALS) and is_named
            self._claim(subject, None if is_refusal else f"{type(error).__name__}: {error}")
        else:
            self._claim(subject, f"accepted, with {result!r}")

    def mesh(self, num_replicas: int | None = None) -> DeviceMesh:
        """Arrange all ranks in one axis, or in replicas that shard."""
        if num_replicas is None:
            return init_device_mesh(self.device.type, (self.size,))
        shape = (num_replicas, self.size // num_replicas)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def num_reductions(self) -> int:
        """Count this rank's reductions so far."""
        return sum(entry.op in {Op.REDUCE_SCATTER, Op.ALL_REDUCE} for entry in self.ledger())

    def train(self, root: Any, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Take this rank's rows of a step forward and backward; returns the output.

        The loss is weighted so that its mean over ranks is a sum of integers: exact in every world.
        """
        rows = batch(self.rank, step, dtype).to(next(root.parameters()).device)
        output: torch.Tensor = root(rows)
        (output.sum() * self.size).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output

    def _claim(self, subject: str, wrong: str | None) -> None:
        self._note(subject, RIGHT if wrong is None else wrong[:_LONGEST])


Body = Callable[..., None]  # receives a bench, and the test's parameters


def expects_of(
    interface: Capability,
    bench: Callable[[InterfaceBench], Claims],
    *subjects: str,
    beside: frozenset[Capability] = frozenset(),
    watch: frozenset[Watch] = frozenset(),
) -> Callable[[Body], Body]:
    """Make a test of a function: every rank calls it with a bench for that interface, then trains one step.

    The engine passes if each rank makes a claim about each subject, all of these claims are right, and it still trains
    the oracle's model. Claims about other subjects do not count. ``watch`` implies laws of its own.
    """

    def as_test(body: Body) -> Body:
        _, *parameters = inspect.signature(body).parameters.values()

        @functools.wraps(body)
        def test(trial: Trial, **arguments: object) -> None:
            __tracebackhide__ = True
            # Here, because ranks import this file too, and do not judge.
            from shardproof.harness.laws.parity import MatchesOracle
            from shardproof.harness.laws.runtime import Notes

            claims = [Notes(subject=subject, value=RIGHT, is_explained=True) for subject in subjects]
            given = tuple(arguments[parameter.name] for parameter in parameters)
            training = _training(
                _OnABench(body=body, arguments=given, interface=interface, beside=beside, bench=bench), watch
            )
            trial.holds(training, MatchesOracle(), *claims)

        trial = inspect.Parameter("trial", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([trial, *parameters])  # type: ignore[attr-defined]  # for pytest
        body.__qualname__ += ".__wrapped__"  # by which pickle finds it in a rank's process
        return test

    return as_test


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _OnABench(Exercise):
    """An exercise whose body receives a bench of its interface."""

    bench: Callable[[InterfaceBench], Claims]

    def play(self, actor: Actor) -> None:
        bench: InterfaceBench | None = actor.bench()
        if bench is not None:
            self.body(self.bench(bench), *self.arguments)
        EachMicrobatch().play(actor)


def _training(script: Exercise, watch: frozenset[Watch]) -> Training:
    layout = Layout.NATIVE if script.interface is Capability.DATA_PARALLEL else Layout.SHARD
    schedule = Schedule(steps=1)
    return Training(
        problem=MLP_EVEN,
        optimizer=SGD,
        plan=Plan(layout=layout),
        schedule=schedule,
        script=script,
        watch=watch,
    )
