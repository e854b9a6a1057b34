"""A user's own model as a `Problem`: a class with ``build``, ``batch`` and ``loss``, loaded by name where it is needed.

[Note: what a user writes] Three methods: ``build()`` returns the model, ``batch(generator)`` one rank's microbatch, and
``loss(output, batch)`` the mean loss over it. A batch is a mapping of keyword arguments, a tuple of arguments, or the
only argument. ``units`` names the submodules that are natural communication groups, by patterns such as ``layers.*``;
``optimizer(params)`` and ``scheduler(optimizer)`` are optional. Both random generators, the one that is passed and
torch's own, are seeded alike for each (step, microbatch, rank), and for ``build()``.

[Note: one build at a time] Rank threads run by turns, but a turn that lasts is given up, and a build or an import may
last. Libraries that import their parts on first use do not expect two threads there, so a lock admits one of them.

[Note: means of means] Each microbatch of each rank counts the same: the loss of a step is the mean of their means, as
most training loops have it.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from shardproof.engine.capability import Capability
from shardproof.engine.import_by_name import load
from shardproof.harness.cases.batch import Batch, ModelBatch, microbatch_seed
from shardproof.harness.cases.training import NamedOptimizer
from shardproof.harness.torch_compat.dispatch import drawing_apart

_BUILD_SEED = 20_011
_one_at_a_time = threading.RLock()  # see [Note: one build at a time]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOutline:
    """A parameter or buffer under one of its names; ``first`` is the name under which the same tensor comes first."""

    name: str
    first: str
    shape: tuple[int, ...]
    dtype: str
    is_buffer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What some passes of a model show.

    ``frozen`` parameters require no gradient, ``seldom`` ones had none in some pass, and ``slow`` ones have gradients
    so small beside their values that plain descent hardly moves them. ``evaluating`` names the modules that are in
    evaluation mode, "" for the whole model, ``outside`` the parts of units that are called without their unit.
    ``uncounted``, ``not_in_bfloat16`` and ``unscaled`` are why closed forms, bfloat16 or a gradient scaler do not
    apply to the model; empty if they do. ``sparse`` parameters have sparse gradients.
    ``is_compiled``: inductor compiles the model, which rank threads of one process cannot do at the same time.
    """

    frozen: tuple[str, ...] = ()
    seldom: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    evaluating: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    uncounted: str = ""
    not_in_bfloat16: str = ""
    unscaled: str = ""
    sparse: tuple[str, ...] = ()
    is_compiled: bool = False

    @property
    def unclipped(self) -> str:
        """Why clipping does not apply to the model; empty if it does."""
        refused = "torch's clip_grad_norm_ takes no sparse gradient, as that of"
        return f"{refused} {self.sparse[0]!r}" if self.sparse else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserModel:
    """The model that ``spec`` names; ``digest`` is that of its file, so that an edited model is another problem.

    ``units`` are the names that the user's patterns match, ``idle`` the parameters that the loss never reaches, and
    ``still`` those of which a case does not claim that its training moves them; they are compared like all others.
    ``demands`` is what the model asks of every engine, such as parameters that go without a gradient.
    ``is_widened``: the model runs in float64, and neither it nor its optimizer asks for fewer bits than float32.
    ``outline`` lists the model's tensors, for those who need no values: code of users never runs where it is judged.
    ``facts`` follow from the rest.
    """

    spec: str
    name: str
    digest: str
    units: tuple[str, ...]
    idle: tuple[str, ...] = ()
    still: tuple[str, ...] = ()
    demands: frozenset[Capability] = frozenset()
    facts: ModelFacts = field(default=ModelFacts(), compare=False)
    is_exact: bool = False
    is_widened: bool = True
    parallelize: None = None
    stages: None = None
    outline: tuple[TensorOutline, ...] = field(default=(), compare=False)

    @property
    def is_narrow(self) -> bool:
        """Whether some parameter has fewer bits than float32."""
        return any(not t.is_buffer and t.dtype in {"bfloat16", "float16"} for t in self.outline)

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
        return model

    def num_items(self, *, step: int, microbatch: int, rank: int) -> int:
        """Return 1: each microbatch counts the same, see [Note: means of means]."""
        return 1

    def batch(self, *, step: int, microbatch: int, rank: int) -> Batch:
        """Make the microbatch of one rank."""
        seed = microbatch_seed(_BUILD_SEED, step=step, microbatch=microbatch, rank=rank)
        make = definition(self.spec).batch
        with _seeded(seed):
            takes_generator = bool(inspect.signature(make).parameters)
            return ModelBatch(given=make(torch.Generator().manual_seed(seed)) if takes_generator else make())

    # Any: the output is whatever the model returns.
    def loss_sum(self, output: Any, batch: Batch) -> torch.Tensor:
        """Return the user's mean loss over the microbatch."""
        given = batch.given if isinstance(batch, ModelBatch) else batch
        loss: torch.Tensor = definition(self.spec).loss(output, given)
        return loss


def still_parameters(problem: object) -> frozenset[str]:
    """Return the parameters of which a case does not claim that its training moves them: of users' models alone."""
    return frozenset(problem.still) if isinstance(problem, UserModel) else frozenset()


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
    """The optimizer that a user's model names itself; ``digest`` as in `UserModel`."""

    spec: str
    digest: str
    name: str = "own"

    def __call__(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = definition(self.spec).optimizer(params)
        return optimizer


class StepSchedules:
    """The learning rate schedules of the optimizers that a factory makes in one training, if a user's model has one.

    The loop steps them after the optimizer: loading state into an optimizer may call its ``step`` too.
    """

    def __init__(self, factory: NamedOptimizer, steps_done: int = 0) -> None:
        self._factory = factory
        self._make = (
            getattr(definition(factory.spec), "scheduler", None)
            if isinstance(factory, UserOptimizer)
            else None
        )
        self._steps_done = steps_done
        self._made: list[Any] = []  # Any: whatever has a step()

    @property
    def factory(self) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
        """What engines are given in place of the factory."""
        return self._factory if self._make is None else self._scheduled

    def step(self) -> None:
        """Step each schedule once."""
        for scheduler in self._made:
            scheduler.step()

    def _scheduled(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = self._factory(params)
        assert self._make is not None
        self._made.append(self._make(optimizer))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps without an optimizer's: another one took those
            for _ in range(self._steps_done):
                self._made[-1].step()
        return optimizer


def definition(spec: str) -> Any:
    """Return the object that ``spec`` names, made once per process where it is a class."""
    with _one_at_a_time:
        return _definition(spec)


@cache
def _definition(spec: str) -> Any:
    found = load(spec)
    return found() if isinstance(found, type) else found


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the default generator for the time of a call, and restore its state."""
    with drawing_apart():
        torch.default_generator.manual_seed(seed)
        yield
