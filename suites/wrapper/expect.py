"""What cases expect of an engine's own interface: a test's body runs on every rank, and claims what is right there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from shardproof import Actor, EachMicrobatch, Exercise, InterfaceBench, Layout, Plan, Schedule, Training
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.suites.wrapper.differences import difference
from shardproof.suites.wrapper.model import LR, UNITS, Wrapping, batch, copies, original, tower, trained_alone

if TYPE_CHECKING:  # ranks import this file too, and judge nothing
    from shardproof.harness.runner.trial import Trial

RIGHT = "as it should be"
STEP = "parameters after one step"
# How an interface says no. Anything else that is raised is an accident.
_REFUSALS = (AssertionError, NotImplementedError, RuntimeError, ValueError)
_LONGEST = 400  # a note is read by a person


class Bench:
    """One rank with an engine's own interface, which notes of each subject that it is right, or what was got instead.

    ``api`` is the engine's ``FullyShardedDataParallel``; ``ledger`` returns what this rank has communicated so far.
    """

    def __init__(self, given: InterfaceBench) -> None:
        self.names = given.names
        self.api = given.names.FullyShardedDataParallel
        self.rank = given.rank
        self.size = given.size
        self.ranks = range(given.size)
        self.device = given.device
        self.ledger = given.ledger
        self._note = given.note

    # Any: values of the interface under test, plain or nested.
    def same(self, subject: str, got: Any, expected: Any) -> None:
        """Claim that two values are equal: tensors in shape, dtype and every bit, mappings in their order too."""
        self._claim(subject, difference(got, expected))

    def near(self, subject: str, got: Any, expected: Any, *, tolerance: float) -> None:
        """Claim as `same`, but that floats may differ by that share of the largest of their tensor."""
        self._claim(subject, difference(got, expected, tolerance))

    def refuses(self, subject: str, call: Callable[[], object], *errors: type[Exception]) -> None:
        """Claim that a call raises one of these errors; by default any by which an interface says no."""
        try:
            result = call()
        except Exception as error:  # noted, not raised: the other ranks must go on and note theirs
            is_refusal = isinstance(error, errors or _REFUSALS)
            self._claim(subject, None if is_refusal else f"{type(error).__name__}: {error}")
        else:
            self._claim(subject, f"accepted, with {result!r}")

    # Any: engines share no base class, and options are what is put to the test.
    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """Wrap a module where the rank computes, parameters under their own names unless told otherwise."""
        return self.api(module, **{"device_id": self.device, "use_orig_params": True, **options})

    def wrapped(self, model: nn.Module, units: tuple[str, ...] = UNITS, **options: Any) -> Any:
        """Wrap the units and the model."""
        chosen = {model.get_submodule(name) for name in units}
        # A policy refuses a model that has wrapped units already.
        policy = self.names.CustomPolicy(lambda module: module in chosen) if chosen else None
        return self.wrap(model, auto_wrap_policy=policy, **options)

    def wrapped_by(self, wrapping: Wrapping, model: nn.Module) -> Any:
        """Wrap a model in one of several ways."""
        options: dict[str, Any] = {
            "sharding_strategy": wrapping.strategy,
            "use_orig_params": wrapping.form.use_orig_params,
        }
        if wrapping.strategy is ShardingStrategy.HYBRID_SHARD:
            options["device_mesh"] = self.mesh(1 if self.size % 2 else self.size // 2)
        elif wrapping.by_mesh:
            options["device_mesh"] = self.mesh()
        return self.wrapped(model, wrapping.units, **options)

    def mesh(self, num_replicas: int | None = None) -> DeviceMesh:
        """Arrange all ranks in one axis, or in replicas that shard."""
        if num_replicas is None:
            return init_device_mesh(self.device.type, (self.size,))
        shape = (num_replicas, self.size // num_replicas)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))

    def train(self, root: Any, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Take this rank's rows of a step forward and backward; returns the output.

        The loss is weighed so that its mean over ranks is a sum of integers: exact in every world.
        """
        output: torch.Tensor = root(batch(self.rank, step, dtype))
        (output.sum() * self.size).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output

    def step_of(self, ranks: range, **options: Any) -> Any:
        """Wrap a tower, take one step, and claim that it is that of one process with the rows of these ranks."""
        root = self.wrap(tower(), **options)
        optimizer = torch.optim.SGD(root.parameters(), lr=LR)
        self.train(root)
        optimizer.step()
        # Losses are weighed for a mean over all ranks; the mean over some of them is that much larger.
        expected = trained_alone(ranks, lr=LR * self.size / len(ranks))
        self.same(STEP, self.summoned(root), expected)
        return root

    def summoned(self, root: Any) -> dict[str, torch.Tensor]:
        """Copy whole parameters, by name."""
        with self.api.summon_full_params(root, writeback=False):
            return copies(root.named_parameters())

    def units_of(self, root: nn.Module) -> list[str]:
        """Name the modules that were wrapped, as the model called them; sorted."""
        units = {id(unit) for unit in self.api.fsdp_modules(root)}
        return sorted(original(name) for name, module in root.named_modules() if id(module) in units)

    def summed(self, numbers: list[int]) -> list[int]:
        """Add up each of these numbers over all ranks."""
        totals = torch.tensor(numbers, device=self.device)
        distributed.all_reduce(totals)
        return [int(total) for total in totals]

    def sizes_of(self, saved: dict[str, Any], names: list[str], *, is_sharded: bool) -> dict[str, int]:
        """Count the elements of saved tensors: this rank's, or those of all ranks where they are shared out."""
        held = {name: v.to_local() if isinstance(v, DTensor) else v for name, v in saved.items()}
        counts = [held[name].numel() if name in held else 0 for name in names]
        return dict(zip(names, self.summed(counts) if is_sharded else counts, strict=True))

    def _claim(self, subject: str, wrong: str | None) -> None:
        self._note(subject, RIGHT if wrong is None else wrong[:_LONGEST])


Body = Callable[..., None]  # takes a bench, and the test's parameters


def expects(*subjects: str) -> Callable[[Body], Body]:
    """Make a test of a function: every rank calls it with a `Bench`, then trains one step.

    The engine passes if each rank makes a claim of each subject, all of these claims are right, and it still trains the
    oracle's model. Claims of other subjects do not count.
    """

    def as_test(body: Body) -> Body:
        _, *parameters = inspect.signature(body).parameters.values()

        @functools.wraps(body)
        def test(trial: Trial, **arguments: object) -> None:
            __tracebackhide__ = True
            # Here, because ranks import this file too, and judge nothing.
            from shardproof.harness.laws.parity import MatchesOracle
            from shardproof.harness.laws.runtime import Notes

            claims = [Notes(subject=subject, value=RIGHT, is_explained=True) for subject in subjects]
            training = _training(body, tuple(arguments[parameter.name] for parameter in parameters))
            trial.holds(training, MatchesOracle(), *claims)

        trial = inspect.Parameter("trial", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([trial, *parameters])  # type: ignore[attr-defined]  # for pytest
        body.__qualname__ += ".__wrapped__"  # by which pickle finds it again in a rank's process
        return test

    return as_test


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _OnABench(Exercise):
    """An exercise whose body takes a `Bench`."""

    def play(self, actor: Actor) -> None:
        given: InterfaceBench | None = actor.bench()
        if given is not None:
            self.body(Bench(given), *self.arguments)
        EachMicrobatch().play(actor)


# Any: whatever the body takes.
def _training(body: Body, arguments: tuple[Any, ...]) -> Training:
    script = _OnABench(body=body, arguments=arguments)
    plan = Plan(layout=Layout.SHARD, demands=script.demands)
    return Training(problem=MLP_EVEN, optimizer=SGD, plan=plan, schedule=Schedule(steps=1), script=script)
