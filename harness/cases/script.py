"""How the microbatches of one optimizer step go through a model: one script, played by engines and by the oracle.

A script says what a training loop does between two optimizer steps: which parts of the model are called in what
order, when losses go backward, what it does to units meanwhile. It knows neither engine nor oracle, only the
`Actor` that plays one rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from shardproof.engine.contract import Capability, PreparedModel, UnitHandle
from shardproof.harness.cases.batch import Batch
from shardproof.harness.tracing.ledger import Ledger


class Evaluation(Enum):
    """How an evaluation keeps autograd out."""

    NO_GRAD = "torch.no_grad"
    INFERENCE = "torch.inference_mode: its tensors may never be used in training"

    @property
    def context(self) -> AbstractContextManager[object]:
        return torch.no_grad() if self is Evaluation.NO_GRAD else torch.inference_mode()


class Probe(Enum):
    """What a forward with gradients is for that no backward of the step follows."""

    DROPPED = "its loss goes backward never, as that of a batch which is left out"
    OF_INPUTS = "the gradient of its loss by its inputs, as adversaries and saliency maps take it"


class GradientEdit(Enum):
    """What a user does to each gradient between backwards."""

    CLEARED = "None is put in its place"
    HALVED = "it is halved in place"
    REPLACED = "a new tensor of half of it is put in its place"


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceBench:
    """What calls of an engine's own interface work with, on one rank: its names, and where to record what was seen.

    ``prepared`` has the names; ``ledger`` gives what this rank has communicated so far.
    """

    prepared: PreparedModel
    rank: int
    size: int
    device: torch.device
    note: Callable[[str, object], None]
    ledger: Callable[[], Ledger]


class Actor(ABC):
    """One rank in one optimizer step, as a script sees it.

    ``weight`` is what a sum over items is multiplied with so that averaging over ranks gives the global mean.
    """

    step: int
    num_microbatches: int
    weight: float

    @abstractmethod
    def batch(self, microbatch: int) -> Batch:
        """Return this rank's data, on its device, floats in the dtype of the parameters."""

    @abstractmethod
    def part(self, name: str) -> nn.Module:
        """Return the submodule of that name, as the loop may call it; ``""`` is the model."""

    # Any: a model takes and returns what it likes.
    @abstractmethod
    def forward(self, microbatch: int, *inputs: Any, part: str = "") -> Any:
        """Call the model, or a part of it."""

    @abstractmethod
    def loss(self, microbatch: int, output: Any, target: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weighted loss of a microbatch's output, or of the part of it that belongs to ``target``."""

    @abstractmethod
    def backward(self, microbatch: int, loss: torch.Tensor, *, is_counted: bool = True) -> None:
        """Run backward; the value is one of the step's losses unless it stands in for a gradient."""

    @abstractmethod
    def backward_of_branch(self, microbatch: int, loss: torch.Tensor) -> None:
        """Run backward from one of several losses of one forward, and keep the graph for the next."""

    @abstractmethod
    def evaluate(self, microbatch: int, how: Evaluation = Evaluation.NO_GRAD) -> None:
        """Run the model in eval mode without gradients; the loss of its output is one of the step's losses."""

    @abstractmethod
    def probe(self, microbatch: int, probe: Probe) -> None:
        """Run forward with gradients, and no backward by parameters; what is seen counts as one of the losses."""

    @abstractmethod
    def synchronisation(self, microbatch: int) -> AbstractContextManager[None]:
        """Return a context around forward and backward of a microbatch: no sync before the last, if so planned."""

    @abstractmethod
    def units(self) -> Mapping[str, UnitHandle]:
        """Return handles of the plan's units by name, ``""`` for the root."""

    @abstractmethod
    def look(self, moment: str) -> None:
        """Observe the parameters, and whether units are gathered, as they are now."""

    @abstractmethod
    def note(self, subject: str, value: object) -> None:
        """Record a fact."""

    @abstractmethod
    def hold(self, name: str, *tensors: torch.Tensor) -> None:
        """Report to the watches that the loop, and not the engine, keeps these tensors alive."""

    @abstractmethod
    def bench(self) -> InterfaceBench | None:
        """Return what calls of the engine's own interface need; None where there is no engine."""

    @abstractmethod
    def recover(self) -> None:
        """Ask the engine to reset after a forward that an exception ended."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Clear the gradients of this step so far, to begin it again."""

    @abstractmethod
    def edit_gradients(self, edit: GradientEdit) -> None:
        """Change the gradients that are reduced so far, as a user would: by ``.grad`` of each parameter."""

    @abstractmethod
    def convert(self, *dtypes: torch.dtype) -> None:
        """Convert the engine's model to these dtypes in turn, of which the last is the one it had."""


class Script(Protocol):
    """A picklable, comparable value whose ``repr`` says all that it does."""

    @property
    def demands(self) -> frozenset[Capability]:
        """What it asks of an engine beyond forward and backward; the plan must demand it too."""

    def play(self, actor: Actor) -> None:
        """Run all microbatches of one step forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EachMicrobatch:
    """Forward and backward of one microbatch after the other: what most training loops do."""

    demands: ClassVar[frozenset[Capability]] = frozenset()

    def play(self, actor: Actor) -> None:
        for microbatch in range(actor.num_microbatches):
            train_microbatch(actor, microbatch)


def train_microbatch(actor: Actor, microbatch: int) -> None:
    """Run forward and backward of one microbatch."""
    with actor.synchronisation(microbatch):
        output = actor.forward(microbatch, *actor.batch(microbatch).inputs)
        actor.backward(microbatch, actor.loss(microbatch, output))


def with_gradients(inputs: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the inputs as leaves that get gradients; others than floats cannot."""
    return tuple(given.detach().requires_grad_() for given in inputs)


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return one number in which a difference in any element shows, in whatever order rows are."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum()
