"""A user's own model as a `Problem`: a class with ``build``, ``batch`` and ``loss``, loaded by name in each process.

[Note: what a user writes] Three methods: ``build()`` returns the model, ``batch(generator)`` one rank's microbatch, and
``loss(output, batch)`` the mean loss over it. A batch is a mapping of keyword arguments, a tuple of arguments, or the
only argument. ``units`` names the submodules that are natural communication groups, by patterns such as ``layers.*``.
``optimizer(params)`` and ``scheduler(optimizer)`` are optional. Both random generators, the passed one and torch's
default, are seeded alike for each (step, microbatch, rank), and for ``build()``.

[Note: one build at a time] Rank threads run in turns, but the scheduler ends a long turn, and a build or an import may
be long. Libraries that import their parts on first use do not expect two threads there, so a lock admits one thread.

[Note: means of means] Each microbatch of each rank has the same weight: the loss of a step is the mean of their means,
as in most training loops.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from shardproof.engine.capability import Capability, UnsupportedError
from shardproof.engine.contract import PreparedModel
from shardproof.engine.import_by_name import load
from shardproof.harness.cases.batch import Batch, ModelBatch, microbatch_seed
from shardproof.harness.cases.own_step import SeveralOptimizers
from shardproof.harness.cases.sync_batch_norm import with_sync_batch_norm
from shardproof.harness.cases.training import NamedOptimizer, Training
from shardproof.harness.torch_compat.dispatch import drawing_apart

_BUILD_SEED = 20_011
_SCHEDULE = "_shardproof_schedule"  # the name of an attribute of optimizers
_one_at_a_time = threading.RLock()  # see [Note: one build at a time]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOutline:
    """A parameter or buffer under one of its names; ``first`` is the first name of the same tensor."""

    name: str
    first: str
    shape: tuple[int, ...]
    dtype: str
    is_buffer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model, found by a few passes.

    ``frozen`` parameters require no gradient; forward changes those that are ``written``, such as the averages of a
    teacher. ``seldom`` ones had no gradient in some pass. ``slow`` ones have gradients so small beside their values
    that plain descent hardly moves them. ``evaluating`` names the modules in evaluation mode, "" for the whole
    model. ``communicates`` is the first call by which the model or its loss communicates with other ranks, and its
    place; empty if there is none. ``outside`` names the parts of units that are called without their unit.
    ``hooked`` parameters have hooks of the user's on their gradients. ``uncounted``, ``not_in_bfloat16``,
    ``unscaled``, ``unsaved`` and ``unevaluated`` are the reasons why closed forms, bfloat16, a gradient scaler, a
    saved state or an evaluation do not apply to the model; empty if they do. ``sparse`` parameters have sparse
    gradients. ``unthreaded`` is why ranks cannot be threads, and what to change; empty if they can be. After a pass
    modules hold tensors of ``attribute_bytes`` that are neither parameters nor buffers.
    """

    frozen: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    seldom: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    evaluating: tuple[str, ...] = ()
    communicates: str = ""
    outside: tuple[str, ...] = ()
    hooked: tuple[str, ...] = ()
    uncounted: str = ""
    not_in_bfloat16: str = ""
    unscaled: str = ""
    unsaved: str = ""
    unevaluated: str = ""
    sparse: tuple[str, ...] = ()
    unthreaded: tuple[str, ...] = ()
    attribute_bytes: int = 0

    @property
    def unclipped(self) -> str:
        """Why clipping does not apply to the model; empty if it does."""
        refused = "torch's clip_grad_norm_ takes no sparse gradient, as that of"
        return f"{refused} {self.sparse[0]!r}" if self.sparse else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModel:
    """The model that ``spec`` names; ``digest`` is that of its file, so that an edited model is another problem.

    ``units`` are the names that the user's patterns match, and ``idle`` the parameters that the loss never reaches. A
    case does not require that its training moves the ``still`` parameters; it compares them like all others.
    ``has_step``: its class has ``step()`` in place of ``loss()``.
    ``demands`` are the capabilities that the model needs of every engine, such as parameters without a gradient.
    ``is_widened``: the model runs in float64, and neither it nor its optimizer asks for fewer bits than float32.
    ``outline`` lists the model's tensors for callers that need no values: the judging process never runs users' code.
    ``facts`` are derived from the other fields.
    """

    spec: str
    name: str
    digest: str
    units: tuple[str, ...]
    idle: tuple[str, ...] = ()
    still: tuple[str, ...] = ()
    demands: frozenset[Capability] = frozenset()
    facts: ModelFacts = field(default=ModelFacts(), compare=False)
    has_step: bool = False
    is_exact: bool = False
    is_widened: bool = True
    parallelize: None = None
    stages: None = None
    outline: tuple[TensorOutline, ...] = field(default=(), compare=False)

    @property
    def is_narrow(self) -> bool:
        """Whether some parameter has fewer bits than float32."""
        return any(not t.is_buffer and t.dtype in {"bfloat16", "float16"} for t in self.outline)

    @property
    def unsplit(self) -> str:
        """Why a case does not apply that asks for something between forward, backward and update."""
        return "not judged, because step() does forward, backward and update itself" if self.has_step else ""

    @property
    def default_optimizer(self) -> Literal["AdamW", "SGD"]:
        """Class name of the optimizer for a model without ``optimizer()``; AdamW takes no sparse gradients."""
        return "SGD" if self.facts.sparse else "AdamW"

    def skeleton(self) -> nn.Module:
        """Return a module of the same names, shapes and dtypes, without values or code."""
        if not self.outline:
            return self.build()
        root, known = nn.Module(), dict[str, torch.Tensor]()
        for found in self.outline:
            tensor = known.get(found.first)
            if tensor is None:
                tensor = torch.empty(found.shape, dtype=getattr(torch, found.dtype), device="meta")
                tensor = tensor if found.is_buffer else nn.Parameter(tensor, requires_grad=False)
                known[found.name] = tensor
            _place(root, found.name.split("."), tensor)
        return root

    def build(self) -> nn.Module:
        """Build the model under one seed, in the mode that the user's code leaves it in."""
        with _one_at_a_time, _seeded(_BUILD_SEED):
            model: object = definition(self.spec).build()
        if not isinstance(model, nn.Module):
            raise TypeError(f"build() returned a {type(model).__name__}, not an nn.Module")
        return with_sync_batch_norm(model)

    def num_items(self, *, step: int, microbatch: int, rank: int) -> int:
        """Return 1: each microbatch has the same weight, see [Note: means of means]."""
        return 1

    def batch(self, *, step: int, microbatch: int, rank: int) -> Batch:
        """Make the microbatch of one rank."""
        seed = microbatch_seed(_BUILD_SEED, step=step, microbatch=microbatch, rank=rank)
        make = definition(self.spec).batch
        with _seeded(seed):
            takes_generator = bool(inspect.signature(make).parameters)
            return ModelBatch(value=make(torch.Generator().manual_seed(seed)) if takes_generator else make())

    # Any: the output is the model's return value.
    def loss_sum(self, output: Any, batch: Batch) -> torch.Tensor:
        """Return the user's mean loss over the microbatch."""
        given = batch.value if isinstance(batch, ModelBatch) else batch
        loss: torch.Tensor = definition(self.spec).loss(output, given)
        return loss

    # Any: what a user's step takes and returns.
    def own_step(self, model: Any, batch: Any, *optimizers: Any) -> Any:
        """Run the user's step, which returns its losses."""
        return definition(self.spec).step(model, batch, *optimizers)


def still_parameters(problem: object) -> frozenset[str]:
    """Return the parameters that training need not move; only users' models have any."""
    return frozenset(problem.still) if isinstance(problem, UserModel) else frozenset()


def frozen_parameters(problem: object, model: nn.Module) -> frozenset[str]:
    """Return the parameters that require no gradient; ``model`` may be the skeleton of a user's model."""
    if isinstance(problem, UserModel):
        return frozenset(problem.facts.frozen)
    return frozenset(name for name, p in model.named_parameters() if not p.requires_grad)


def attribute_bytes(problem: object) -> int:
    """Return the bytes of tensors that a model holds beside its parameters and buffers, on each rank."""
    return problem.facts.attribute_bytes if isinstance(problem, UserModel) else 0


def written_by_forward(problem: object) -> frozenset[str]:
    """Return the frozen parameters that forward changes: each rank has its own, as it has buffers of its own."""
    return frozenset(problem.facts.written) if isinstance(problem, UserModel) else frozenset()


def has_level_memory(training: Training) -> bool:
    """Return whether each step must hold as much as the one before: a user's model may keep more by itself."""
    return training.is_counted and not isinstance(training.problem, UserModel)


def is_communicating(problem: object) -> bool:
    """Return whether a user's model or loss communicates, so that its reference needs all ranks at once."""
    return isinstance(problem, UserModel) and bool(problem.facts.communicates)


def is_stepping(problem: object) -> bool:
    """Return whether a user's model has a training step of its own; see [Note: own steps]."""
    return isinstance(problem, UserModel) and problem.has_step


def needs_of(problem: object) -> frozenset[Capability]:
    """Return the capabilities that a model needs of every engine; only users' models have any."""
    return problem.demands if isinstance(problem, UserModel) else frozenset()


def outline_of(model: nn.Module) -> Iterator[TensorOutline]:
    """List the tensors of a model, in its order, under all of their names."""
    first: dict[int, str] = {}
    for is_buffer, named in ((False, model.named_parameters), (True, model.named_buffers)):
        for name, tensor in named(remove_duplicate=False):
            yield TensorOutline(
                name=name,
                first=first.setdefault(id(tensor), name),
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                is_buffer=is_buffer,
            )


def _place(module: nn.Module, path: list[str], tensor: torch.Tensor) -> None:
    *parents, name = path
    for parent in parents:
        if parent not in module._modules:
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserOptimizer:
    """The optimizer that a user's model defines; ``digest`` as in `UserModel`.

    ``names`` are those of all parameters, in order, if the model defines ``optimizers(model)``.
    """

    spec: str
    digest: str
    name: str = "own"
    names: tuple[str, ...] = ()

    def __call__(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        defined, given = definition(self.spec), list(params)
        if not self.names:
            optimizer: torch.optim.Optimizer = defined.optimizer(given)
            return optimizer
        if len(given) != len(
            self.names
        ):  # pieces of others, in which parts of the model cannot be told apart
            raise UnsupportedError((Capability.SEVERAL_OPTIMIZERS,))
        model = nn.Module()
        for name, parameter in zip(self.names, given, strict=True):
            _place(model, name.split("."), parameter)
        return SeveralOptimizers(defined.optimizers(model))


class StepSchedules:
    """The schedules of all optimizers that a factory makes in one training, if it defines any.

    The loop steps them after the optimizer, because loading state into an optimizer may call its ``step`` too. They
    live as long as their optimizers, of which an engine may make some for a moment alone. Where an engine hands out
    another optimizer than those that the factory made, users schedule that one.
    """

    def __init__(self, factory: NamedOptimizer, steps_done: int = 0) -> None:
        self._factory = factory
        defined = definition(factory.spec) if isinstance(factory, UserOptimizer) else factory
        self._make = getattr(defined, "scheduler", None)
        self._steps_done = steps_done
        self._made: list[weakref.ref[torch.optim.Optimizer]] = []

    @property
    def factory(self) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
        """The factory that engines use instead."""
        return self._factory if self._make is None else self._scheduled

    def follow(self, prepared: PreparedModel) -> None:
        """Schedule the optimizer that an engine hands out, and no longer those that it was made of."""
        if self._make is None:
            return
        handed_out: object = prepared.built_optimizer()  # some engines' own are of no class of torch
        is_made = any(made() is handed_out for made in self._made)
        if isinstance(handed_out, torch.optim.Optimizer) and not is_made:
            self._made.clear()
            self._schedule(handed_out)

    def step(self) -> None:
        """Step each schedule once."""
        for optimizer in (made() for made in self._made):
            if optimizer is not None:
                optimizer.__dict__[_SCHEDULE].step()

    def _scheduled(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = self._factory(params)
        self._schedule(optimizer)
        return optimizer

    def _schedule(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._make is not None
        schedule = optimizer.__dict__[_SCHEDULE] = self._make(optimizer)
        self._made.append(weakref.ref(optimizer))
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # warnings of steps before an optimizer step: another optimizer took it
            for _ in range(self._steps_done):
                schedule.step()


def definition(spec: str) -> Any:
    """Return the object that ``spec`` names; a class is instantiated once per process."""
    with _one_at_a_time:
        return _definition(spec)


@cache
def _definition(spec: str) -> Any:
    found = load(spec)
    return found() if isinstance(found, type) else found


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the default generator during a call, and restore its state."""
    with drawing_apart():
        torch.default_generator.manual_seed(seed)
        yield
