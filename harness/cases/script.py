"""Scripts: how the microbatches of one optimizer step go through a model, for engines and for the oracle.

A script defines the part of a training loop between two optimizer steps: which parts of the model are called in which
order, when losses go backward, and what else happens to units. It depends on neither engine nor oracle, only on the
`Actor` that plays one rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from shardproof.engine.contract import Capability, PreparedModel, UnitHandle
from shardproof.harness.cases.batch import Batch
from shardproof.harness.cases.state_form import StateForm
from shardproof.harness.tracing.ledger import Ledger


class Move(Protocol):
    """A user's action between the forwards and backwards of a step; picklable, and described by its ``repr``."""

    @property
    def demands(self) -> frozenset[Capability]:
        """The capabilities that it needs."""

    def play(self, actor: Actor) -> None:
        """Act on one rank."""


class Evaluation(Enum):
    """A move: the first microbatch is evaluated, with autograd disabled in this way."""

    NO_GRAD = "torch.no_grad"
    INFERENCE = "torch.inference_mode: its tensors may never be used in training"

    @property
    def demands(self) -> frozenset[Capability]:
        return frozenset()

    def play(self, actor: Actor) -> None:
        actor.evaluate(0, self)

    @property
    def context(self) -> AbstractContextManager[object]:
        return torch.no_grad() if self is Evaluation.NO_GRAD else torch.inference_mode()


class Probe(Enum):
    """A move: a forward with gradients that has no backward in the step, for this purpose."""

    DROPPED = "its loss gets no backward, like that of a skipped batch"
    OF_INPUTS = "the gradient of its loss by its inputs, as adversaries and saliency maps take it"

    @property
    def demands(self) -> frozenset[Capability]:
        return frozenset()

    def play(self, actor: Actor) -> None:
        actor.probe(0, self)


class GradientEdit(Enum):
    """A move: the user edits each gradient between backwards."""

    CLEARED = "None is put in its place"
    HALVED = "it is halved in place"
    REPLACED = "a new tensor of half of it is put in its place"

    @property
    def demands(self) -> frozenset[Capability]:
        return frozenset({Capability.EDIT_GRADIENTS})

    def play(self, actor: Actor) -> None:
        actor.edit_gradients(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceBench:
    """The arguments for calls of an engine's own interface on one rank: its names, and where to record observations.

    ``prepared`` has the names; ``ledger`` returns the communication of this rank so far.
    """

    prepared: PreparedModel
    rank: int
    size: int
    device: torch.device
    note: Callable[[str, object], None]
    ledger: Callable[[], Ledger]


class Actor(ABC):
    """One rank in one optimizer step, as a script calls it.

    ``weight`` multiplies a sum over items, so that averaging over ranks gives the global mean.
    """

    step: int
    num_microbatches: int
    weight: float
    has_engine = True  # the oracle has none, and keeps no notes

    @abstractmethod
    def batch(self, microbatch: int) -> Batch:
        """Return this rank's data, on its device, floats in the dtype of the parameters."""

    @abstractmethod
    def part(self, name: str) -> nn.Module:
        """Return the submodule of that name, callable by the loop; ``""`` is the model."""

    # Any: a model takes and returns any values.
    @abstractmethod
    def forward(self, microbatch: int, *inputs: Any, part: str = "") -> Any:
        """Call the model, or a part of it."""

    @abstractmethod
    def loss(self, microbatch: int, output: Any, target: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weighted loss of a microbatch's output, or of the part of it that belongs to ``target``."""

    @abstractmethod
    def backward(self, microbatch: int, loss: torch.Tensor, *, is_counted: bool = True) -> None:
        """Run backward; the value counts as one of the step's losses unless it stands in for a gradient."""

    @abstractmethod
    def backward_of_branch(self, microbatch: int, loss: torch.Tensor) -> None:
        """Run backward from one of several losses of one forward, and keep the graph for the next."""

    @abstractmethod
    def evaluate(self, microbatch: int, how: Evaluation = Evaluation.NO_GRAD) -> None:
        """Run the model in eval mode without gradients; the loss of its output counts as one of the step's losses."""

    @abstractmethod
    def probe(self, microbatch: int, probe: Probe) -> None:
        """Run forward with gradients but no backward by parameters; the observed value counts as one of the losses."""

    @abstractmethod
    def leave_out(self) -> None:
        """Record that a microbatch has no loss on this rank, which does nothing for it."""

    @abstractmethod
    def synchronisation(self, microbatch: int) -> AbstractContextManager[None]:
        """Return a context around forward and backward of a microbatch: no sync before the last, if planned."""

    @abstractmethod
    def units(self) -> Mapping[str, UnitHandle]:
        """Return handles of the plan's units by name, ``""`` for the root."""

    @abstractmethod
    def save(self, form: StateForm) -> None:
        """Take the state, as a loop does that saves and goes on; note whether a whole one is what the ranks hold."""

    @abstractmethod
    def look(self, moment: str) -> None:
        """Observe the current parameters, and whether units are gathered."""

    @abstractmethod
    def note(self, subject: str, value: object) -> None:
        """Record a fact."""

    @abstractmethod
    def hold(self, name: str, *tensors: torch.Tensor) -> None:
        """Report to the watches that the loop, not the engine, keeps these tensors alive."""

    @abstractmethod
    def bench(self) -> InterfaceBench | None:
        """Return the arguments for calls of the engine's own interface; None where there is no engine."""

    @abstractmethod
    def recover(self) -> None:
        """Ask the engine to reset after an exception ended a forward."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Clear this step's gradients, so that the step can start again."""

    @abstractmethod
    def edit_gradients(self, edit: GradientEdit) -> None:
        """Edit the gradients that are reduced so far, as a user would: by ``.grad`` of each parameter."""

    @abstractmethod
    def load_weights(self) -> None:
        """Load other weights into the module, before the first forward of the step or after its last backward."""

    @abstractmethod
    def convert(self, *dtypes: torch.dtype) -> None:
        """Convert the engine's model to these dtypes in turn; the last is the original one."""


class Script(Protocol):
    """A picklable, comparable value whose ``repr`` describes it completely."""

    @property
    def demands(self) -> frozenset[Capability]:
        """The capabilities that it needs beyond forward and backward; the plan must demand them too."""

    def play(self, actor: Actor) -> None:
        """Run all microbatches of one step forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EachMicrobatch:
    """Forward and backward of each microbatch in turn, as in most training loops.

    If it ``leaves_out_empty``, a rank does nothing for a microbatch without rows, so that ranks run different numbers.
    """

    leaves_out_empty: bool = False
    demands: ClassVar[frozenset[Capability]] = frozenset()

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches):
            if self.leaves_out_empty and not len(actor.batch(microbatch).target):
                actor.leave_out()
            else:
                train_microbatch(actor, microbatch)


def train_microbatch(actor: Actor, microbatch: int) -> None:
    """Run forward and backward of one microbatch."""
    with actor.synchronisation(microbatch):
        output = actor.forward(microbatch, *actor.batch(microbatch).inputs)
        actor.backward(microbatch, actor.loss(microbatch, output))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation and back, as loops do; what was in evaluation before stays in it."""
    fixed = [module for module in model.modules() if not module.training]
    model.eval()
    yield
    model.train()
    for module in fixed:
        module.training = False


def load_weights(module: nn.Module) -> None:
    """Load the absolute values of all tensors of the module's state dict.

    Loading them once more changes nothing, because the oracle plays a script for every rank on one model.
    """
    state = module.state_dict()
    module.load_state_dict({n: v.abs() if isinstance(v, torch.Tensor) else v for n, v in state.items()})


# Any: a user's data are of any type, and stay as they are.
def with_gradients(inputs: Iterable[Any]) -> tuple[Any, ...]:
    """Return the tensors of numbers with gradients among the inputs as leaves that get them."""
    return tuple(
        given.detach().requires_grad_()
        if isinstance(given, torch.Tensor) and is_differentiable(given)
        else given
        for given in inputs
    )


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Return whether the dtype of a tensor can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def having_gradients(inputs: Iterable[Any]) -> list[torch.Tensor]:
    """Return those of the inputs for which a loss has gradients."""
    return [given for given in inputs if isinstance(given, torch.Tensor) and given.requires_grad]


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return one number that changes with any element but not with the order of rows."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum()
