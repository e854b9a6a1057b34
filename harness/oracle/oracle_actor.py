"""The actor that plays one rank for the oracle, on one model without an engine; takes gradients out in pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from shardproof.engine.contract import UnitHandle
from shardproof.harness.cases.batch import Batch, ModelBatch, Rows, arguments_of, converted, converted_tree
from shardproof.harness.cases.draws import Seeds, has_drawn
from shardproof.harness.cases.script import (
    Actor,
    Evaluation,
    GradientEdit,
    Probe,
    evaluating,
    having_gradients,
    load_weights,
    sum_of_squares,
    with_gradients,
)
from shardproof.harness.cases.state_form import StateForm
from shardproof.harness.cases.training import Problem, Training, loss_weight
from shardproof.harness.cases.user_model import is_communicating, written_by_forward
from shardproof.harness.oracle.reduction_orders import Summation
from shardproof.harness.torch_compat.dtypes import cast, cast_module, cast_parameters, dense
from shardproof.harness.tracing.probe_point import ValueKind
from shardproof.harness.worlds.threads.together import Inside, together

_T = TypeVar("_T")
_EXTRA_STATE = "_extra_state"  # torch's name of it in a state dict


class Batches:
    """The data of a training, created once for all runs of an oracle."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: dict[tuple[int, int, int], Rows] = {}

    def batch(self, *, step: int, microbatch: int, rank: int) -> Batch:
        """Return the data of a microbatch; a `Summation` copies rows from it."""
        place = (step, microbatch, rank)
        if (made := self._made.get(place)) is not None:
            return made
        batch = self._problem.batch(step=step, microbatch=microbatch, rank=rank)
        # A user's model may modify its inputs, and its data may be large.
        if isinstance(batch, Rows):
            self._made[place] = batch
        return batch


class ProbesOfRanks(Protocol):
    """Probes on the models that compute in the place of ranks; see `harness.oracle.oracle_probes`."""

    def follow(self, models: Sequence[nn.Module]) -> object:
        """Hook the models of all ranks."""

    def at(self, rank: int, *, step: int, microbatch: int, is_backward: bool = False) -> None:
        """Note what a rank does next."""

    def loss(self, rank: int, loss: torch.Tensor) -> None:
        """See the loss of a microbatch."""

    def shared(self, kind: ValueKind, step: int, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """See tensors that all ranks share."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankModel:
    """The model that computes in the place of one rank, and its parameters without those that forward writes."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]


class OracleModels:
    """The models of the oracle: the trained model, and for each rank a model that computes in its place.

    The ranks' models share the trained parameters, unless forward and backward compute in another dtype, or the model
    communicates, so that all ranks compute at the same time. Each has its own buffers and plain attributes, because
    forward may change, replace or resize them, and its own parameters of those that are ``written`` by forward.
    """

    def __init__(
        self,
        problem: Problem,
        model: nn.Module,
        world_size: int,
        summation: Summation,
        batches: Batches | None = None,
        probes: ProbesOfRanks | None = None,
    ) -> None:
        self.world_size = world_size
        self.probes = probes
        self.summation = summation
        self.batches = batches
        self.draws = False  # whether a forward or loss has drawn random numbers; only in runs in order
        self._is_together = is_communicating(problem)
        self._written = written_by_forward(problem)
        is_cast = summation.compute_dtype is not summation.dtype
        if self._is_together:
            # Built as ranks, because a model may ask for its ranks when it is built.
            copies = together(world_size, lambda rank: cast_module(problem.build(), summation.dtype))
            for each in copies:
                self._take_buffers(each, model)
                if is_cast:
                    _casting(each, summation)
        else:
            computing = _casting(_with_own_buffers(model, ()), summation) if is_cast else model
            shared = parameters_apart(computing, self._written).values()
            copies = [_with_own_buffers(computing, shared) for _ in range(world_size)]
        self._of_rank = [
            RankModel(model=each, parameters=parameters_apart(each, self._written)) for each in copies
        ]
        if probes is not None:
            probes.follow(copies)
        self._of_trained = parameters_apart(model, self._written)
        self.dtypes = {name: parameter.dtype for name, parameter in self._of_trained.items()}

    @torch.no_grad()
    def _take_buffers(self, copied: nn.Module, model: nn.Module) -> None:
        of_model = changed_by_forward(model, self._written)
        for name, tensor in changed_by_forward(copied, self._written).items():
            tensor.copy_(of_model[name])

    # Any: an extra state is of any type.
    def extra_state(self) -> dict[str, Any]:
        """Return what the first rank's modules save beside parameters and buffers."""
        state = self._of_rank[0].model.state_dict()
        return {name: value for name, value in state.items() if name.endswith(_EXTRA_STATE)}

    def each_rank(self, play: Callable[[int], _T], inside: Inside = nullcontext) -> list[_T]:
        """Call a function for each rank, one after the other, or together if the model communicates."""
        if self._is_together:
            return together(self.world_size, play, inside)
        with inside():
            return [play(rank) for rank in range(self.world_size)]

    @contextmanager
    def playing(self, rank: int) -> Iterator[RankModel]:
        """Yield the model of one rank, with no gradients in it."""
        found = self._of_rank[rank]
        # Nothing restores .grad after an assignment of None: the gradients for the optimizer are set afterwards.
        kept = [(p, p.grad) for p in found.parameters.values()]
        pairs = zip(found.parameters.values(), self._of_trained.values(), strict=True)
        copies = [(mine, trained) for mine, trained in pairs if mine is not trained]
        with torch.no_grad():
            for parameter, _ in kept:
                parameter.grad = None
            for mine, trained in copies:
                mine.copy_(trained)
        versions = [mine._version for mine, _ in copies]
        try:
            yield found
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
            with torch.no_grad():  # what a script has loaded is trained from here on
                for (mine, trained), version in zip(copies, versions, strict=True):
                    if mine._version != version:
                        trained.copy_(mine)

    def calling(self, seeds: Seeds, microbatch: int) -> AbstractContextManager[None]:
        """Seed the random numbers of one call; on the first call, record whether it draws any."""
        seeds.begin(microbatch)
        is_known = self.draws or self.summation.seed is not None
        return nullcontext() if is_known else has_drawn(self._drew)

    def _drew(self) -> None:
        self.draws = True

    def buffers(self) -> tuple[Mapping[str, torch.Tensor], ...]:
        """Return each rank's buffers, with the parameters that forward writes."""
        return tuple(
            {
                name: tensor.detach().clone()
                for name, tensor in changed_by_forward(of_rank.model, self._written).items()
            }
            for of_rank in self._of_rank
        )


def parameters_apart(model: nn.Module, written: frozenset[str]) -> dict[str, nn.Parameter]:
    """Return a model's parameters without those that forward writes."""
    return {name: parameter for name, parameter in model.named_parameters() if name not in written}


def changed_by_forward(model: nn.Module, written: frozenset[str]) -> dict[str, torch.Tensor]:
    """Return a model's buffers, and the parameters that forward writes."""
    parameters = {name: model.get_parameter(name) for name in sorted(written)}
    return {**dict(model.named_buffers()), **parameters}


def _with_own_buffers(model: nn.Module, shared: Iterable[nn.Parameter]) -> nn.Module:
    """Copy a model but for the shared parameters.

    Weights that each forward computes anew, as weight_norm and pruning do, are tensors that torch refuses to copy.
    """
    attributes = (value for module in model.modules() for value in vars(module).values())
    computed = {id(t): t.detach() for t in attributes if isinstance(t, torch.Tensor) and not t.is_leaf}
    return copy.deepcopy(model, {**computed, **{id(parameter): parameter for parameter in shared}})


def _casting(model: nn.Module, summation: Summation) -> nn.Module:
    """Make every module that owns parameters compute in another dtype, as units of a plan do; buffers keep theirs."""
    dtype, uncast = summation.compute_dtype, {model.get_parameter(name) for name in summation.uncast}

    # Any: a module's inputs are of any type.
    def cast_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(cast(x, dtype) if isinstance(x, torch.Tensor) else x for x in inputs)

    for module in model.modules():
        if any(parameter not in uncast for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(cast_inputs)
    return cast_parameters(model, dtype, uncast=uncast)


class OracleActor(Actor):
    """One rank of one step; ``gradients`` are by (microbatch, parameter), in the parameters' dtype."""

    has_engine = False

    def __init__(
        self, models: OracleModels, played: RankModel, training: Training, step: int, rank: int
    ) -> None:
        self.step = step
        self.num_microbatches = training.schedule.microbatches_in(step)
        self.weight = loss_weight(training, models.world_size, step)
        self.losses: list[float] = []
        self.gradients: dict[tuple[int, str], torch.Tensor] = {}
        self.loads_at_end = False
        self._models = models
        self._played = played
        # A power of two changes no rounding, but for operators that look at the size of a gradient, as matrix_exp does.
        self._loss_scale = training.schedule.loss_scale(step)
        self._problem = training.problem
        self._output_dtype = None
        if models.summation.dtype is not torch.float64 or training.convert is torch.float64:
            self._output_dtype = training.plan.output_dtype
        self._rank = rank
        self._seeds = Seeds(step=step, rank=rank)

    def batch(self, microbatch: int) -> Batch:
        """Return the data in the order and dtype of this summation."""
        make = self._problem.batch if self._models.batches is None else self._models.batches.batch
        batch = make(step=self.step, microbatch=microbatch, rank=self._rank)
        return self._models.summation.prepare(batch)

    def part(self, name: str) -> nn.Module:
        return self._played.model.get_submodule(name)

    # Any: a model's inputs and outputs are of any type.
    def forward(self, microbatch: int, *inputs: Any, part: str = "") -> Any:
        self._at(microbatch)
        with self._models.calling(self._seeds, microbatch):
            args, kwargs = arguments_of([self._cast(given) for given in inputs])
            if (
                self._models.summation.device != "cpu"
            ):  # a script may take them from the host: engines move them
                args, kwargs = converted_tree((args, kwargs), self._models.summation.moved)
            output = self.part(part)(*args, **kwargs)
        if self._output_dtype is not None and not part and isinstance(output, torch.Tensor):
            return output.to(self._output_dtype)
        return output

    def _cast(self, given: Any) -> Any:
        """Cast all arguments of a user's model, as units of a plan do; other inputs were cast before."""
        dtype = self._models.summation.compute_dtype
        return converted(given, partial(cast, dtype=dtype)) if isinstance(given, ModelBatch) else given

    def loss(self, microbatch: int, output: Any, target: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.batch(microbatch) if target is None else Rows(inputs=(), target=target)
        self._at(microbatch)
        with self._models.calling(self._seeds, microbatch):
            found = self._problem.loss_sum(output, rows) * self.weight
        if self._models.probes is not None:
            self._models.probes.loss(self._rank, found)
        return found

    def _at(self, microbatch: int, *, is_backward: bool = False) -> None:
        if self._models.probes is not None:
            self._models.probes.at(self._rank, step=self.step, microbatch=microbatch, is_backward=is_backward)

    def backward(self, microbatch: int, loss: torch.Tensor, *, is_counted: bool = True) -> None:
        self._at(microbatch, is_backward=True)
        self._scaled(loss).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._take(microbatch, loss if is_counted else None)

    def backward_of_branch(self, microbatch: int, loss: torch.Tensor) -> None:
        self._at(microbatch, is_backward=True)
        self._scaled(loss).backward(retain_graph=True)  # type: ignore[no-untyped-call]  # as above
        self._take(microbatch, loss)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self._loss_scale == 1.0 else loss * self._loss_scale

    def _take(self, microbatch: int, counted: torch.Tensor | None) -> None:
        self._at(microbatch)
        if counted is not None:
            self.losses.append(float(counted.detach()))
        for name, parameter in self._played.parameters.items():
            if parameter.grad is not None:
                found = parameter.grad.to(self._models.dtypes[name])
                found = found if self._loss_scale == 1.0 else found / self._loss_scale
                key = (microbatch, name)
                self.gradients[key] = self.gradients[key] + found if key in self.gradients else found
                parameter.grad = None

    def evaluate(self, microbatch: int, how: Evaluation = Evaluation.NO_GRAD) -> None:
        """Switch the model to eval and back around one forward."""
        with evaluating(self._played.model), how.context:
            output = self.forward(microbatch, *self.batch(microbatch).inputs)
            self.losses.append(float(self.loss(microbatch, output)))

    def probe(self, microbatch: int, probe: Probe) -> None:
        """Record the loss, or the sum of squares of the gradients by the inputs."""
        inputs = with_gradients(self.batch(microbatch).inputs)
        loss = self.loss(microbatch, self.forward(microbatch, *inputs))
        is_dropped = probe is Probe.DROPPED
        seen = loss if is_dropped else sum_of_squares(torch.autograd.grad(loss, having_gradients(inputs)))
        self.losses.append(float(seen.detach()))

    def leave_out(self) -> None:
        """Record a loss of zero."""
        self.losses.append(0.0)

    def synchronisation(self, microbatch: int) -> AbstractContextManager[None]:
        """Do nothing: there is no other rank to synchronize with."""
        return nullcontext()

    def units(self) -> Mapping[str, UnitHandle]:
        return _NoUnits()

    def save(self, form: StateForm) -> None:
        """Do nothing: a save changes nothing."""

    def look(self, moment: str) -> None:
        """Observe nothing."""

    def note(self, subject: str, value: object) -> None:
        """Observe nothing."""

    def hold(self, name: str, *tensors: torch.Tensor) -> None:
        """Do nothing: the oracle holds no units."""

    def bench(self) -> None:
        """Do nothing: there is no engine."""

    def recover(self) -> None:
        """Do nothing."""

    def zero_grad(self) -> None:
        """Discard the gradients taken out so far."""
        self.gradients.clear()

    def edit_gradients(self, edit: GradientEdit) -> None:
        """Edit the gradients taken out so far."""
        kept = {} if edit is GradientEdit.CLEARED else self.gradients
        self.gradients = {place: gradient * 0.5 for place, gradient in kept.items()}

    def load_weights(self) -> None:
        """Load them; after a backward leave it to the end of the step, because other ranks have yet to compute."""
        self.loads_at_end = bool(self.losses)
        if not self.loads_at_end:
            load_weights(self.part(""))

    def convert(self, *dtypes: torch.dtype) -> None:
        """Do nothing: the oracle's values have their dtype already."""


Pieces = dict[str, list[list[torch.Tensor]]]  # of each parameter: [microbatches][ranks]


def dense_pieces(pieces: Pieces) -> Pieces:
    """Return pieces as dense tensors if some are sparse."""
    return {name: [[*map(dense, of_ranks)] for of_ranks in rows] for name, rows in pieces.items()}


class StackedPieces(Mapping[str, torch.Tensor]):
    """The pieces of each parameter as one tensor [microbatches, ranks, ...], made on access."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def __getitem__(self, name: str) -> torch.Tensor:
        rows = self._pieces[name]
        pieces = [piece for of_ranks in rows for piece in of_ranks]
        return torch.stack(pieces).view(len(rows), len(rows[0]), *pieces[0].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def pieces_of_step(
    training: Training, models: OracleModels, step: int, inside: Inside = nullcontext
) -> tuple[torch.Tensor, Pieces]:
    """Play the script of a step for each rank; returns losses, and gradients of each microbatch and rank.

    Each thread that plays enters the context that ``inside`` makes.
    """
    num_microbatches, world_size = training.schedule.microbatches_in(step), models.world_size

    def play(rank: int) -> OracleActor:
        with models.playing(rank) as played:
            actor = OracleActor(models, played, training, step, rank)
            training.script.play(actor)
        return actor

    found: Pieces = {}
    actors = models.each_rank(play, inside)
    for rank, actor in enumerate(actors):
        if actor.loads_at_end:
            with models.playing(rank) as played:
                load_weights(played.model)
        for (microbatch, name), gradient in actor.gradients.items():
            if name not in found:
                is_plain = gradient.layout is torch.strided
                zeros = gradient.new_zeros(()).expand_as(gradient) if is_plain else torch.zeros_like(gradient)
                found[name] = [[zeros] * world_size for _ in range(num_microbatches)]
            found[name][microbatch][rank] = gradient
    losses = [torch.tensor(actor.losses, dtype=torch.float64) for actor in actors]
    return torch.stack(losses, dim=1), found


class _NoUnit(UnitHandle):
    """A unit that is always whole."""

    def unshard(self) -> None:
        pass

    def unshard_async(self) -> Any:
        return lambda: None

    def reshard(self) -> None:
        pass

    def is_unsharded(self) -> bool:
        return True

    def set_gradient_sync(self, *, is_on: bool) -> None:
        pass

    def set_replica_sync(self, *, is_on: bool) -> None:
        pass

    def set_last_backward(self, *, is_last: bool) -> None:
        pass

    def set_reshard_after_forward(self, *, is_on: bool) -> None:
        pass

    def set_reshard_after_backward(self, *, is_on: bool) -> None:
        pass


class _NoUnits(dict[str, UnitHandle]):
    def __missing__(self, name: str) -> UnitHandle:
        return _NoUnit()
