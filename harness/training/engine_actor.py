"""The actor that plays a rank for an engine: calls the prepared model, labels phases and takes observations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.engine.contract import Accumulation, Capability, PreparedModel, Shard, UnitHandle
from shardproof.harness.cases.batch import Batch, Rows, arguments_of, converted, tensors_of
from shardproof.harness.cases.draws import Seeds
from shardproof.harness.cases.script import (
    Actor,
    Evaluation,
    GradientEdit,
    InterfaceBench,
    Probe,
    evaluating,
    having_gradients,
    load_weights,
    sum_of_squares,
    with_gradients,
)
from shardproof.harness.cases.state_form import StateForm
from shardproof.harness.cases.training import Training, loss_weight
from shardproof.harness.cases.units import shares_of
from shardproof.harness.records.observation import Fact
from shardproof.harness.torch_compat.dtypes import bytes_of
from shardproof.harness.torch_compat.tensor_trees import tensors_in
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.tracing.unit_hooks import ComputeDtypes
from shardproof.harness.training.handover import state_of, write_files
from shardproof.harness.training.loss_scale import overflowing
from shardproof.harness.training.reads import read_shards
from shardproof.harness.training.watches import Watches
from shardproof.harness.worlds.rank import RankContext

_ASIDE = "aside"  # the folder of states that nothing loads


class StepLog:
    """The log of one actor in one step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.facts: list[Fact] = []
        self.snapshots: dict[str, dict[str, Shard]] = {}


class EngineActor(Actor):
    """One rank in one step; the loop makes an actor for each step."""

    def __init__(
        self,
        prepared: PreparedModel,
        training: Training,
        context: RankContext,
        step: int,
        inputs: Any,
        watches: Watches | None = None,
        scaled: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.step = step
        self._scaled = scaled or (lambda loss: loss)
        scaling = training.schedule.scaling
        data_size = training.plan.data_size(context.size)
        self._data_rank = training.plan.data_rank(context.rank, context.size)
        self._overflows = (
            scaling is not None
            and scaling.overflows_at == step
            and not scaling.in_one_piece
            and self._data_rank == data_size - 1
        )
        self.num_microbatches = training.schedule.microbatches_in(step)
        self.weight = 1.0 if context.is_simulated else loss_weight(training, data_size, step)
        self.log = StepLog()
        self._prepared = prepared
        self._training = training
        self._context = context
        self._inputs = inputs  # hashlib's object, whose type has no public name
        self.dtypes = ComputeDtypes() if watches is None else watches.dtypes
        self._lifetimes = None if watches is None else watches.lifetimes
        self._census = None if watches is None else watches.census
        self._probes = None if watches is None else watches.probes
        # Compares a whole state that the model hands out with this rank's shards; returns notes of it.
        self.handed_out: Callable[[dict[str, Any]], dict[str, str]] | None = None
        self.between: Callable[[], None] | None = None  # called before each forward after a backward
        self.is_at_rest = True  # whether every forward has had its backward; an evaluation's forward has none
        self._batches: dict[int, Batch] = {}
        self._seeds = Seeds(step=step, rank=self._data_rank)

    @property
    def recorder(self) -> Recorder:
        """The ledger of this rank."""
        return self._context.recorder

    def seed(self, microbatch: int) -> None:
        """Seed the random numbers of the next call."""
        self._seeds.begin(microbatch, self._context.device.type)

    def batch(self, microbatch: int) -> Batch:
        """Make the data once, hash it, and put it where the rank computes."""
        if microbatch not in self._batches:
            batch = self._training.problem.batch(step=self.step, microbatch=microbatch, rank=self._data_rank)
            for tensor in tensors_of(batch):
                self._inputs.update(bytes_of(tensor))
            # The host waits for a copy to a device, as no engine asked it to.
            with self._context.recorder.during(Phase.OBSERVE, step=self.step, microbatch=microbatch):
                self._batches[microbatch] = converted(batch, self._place)
            self.hold("an input", *tensors_of(self._batches[microbatch]))
        return self._batches[microbatch]

    def part(self, name: str) -> nn.Module:
        return self._prepared.part(name) if name else self._prepared.module

    # Any: a model's inputs and outputs are of any type.
    def forward(self, microbatch: int, *inputs: Any, part: str = "") -> Any:
        self.hold("an input", *(tensor for value in inputs for tensor in tensors_in(value)))
        if microbatch and self.is_at_rest and self.between is not None:
            self.between()
        self.seed(microbatch)
        self._announce(microbatch)
        self.is_at_rest = False
        with self._during(Phase.FORWARD, microbatch):
            args, kwargs = arguments_of(inputs)
            output = self._prepared.part(part)(*args, **kwargs) if part else self._prepared(*args, **kwargs)
        self.hold("an output", *tensors_in(output), are_outputs=True)
        return output

    def loss(self, microbatch: int, output: Any, target: torch.Tensor | None = None) -> torch.Tensor:
        if self._overflows:
            overflowing(output)
        return self._loss(microbatch, output, target)

    # Any: as above.
    def _loss(self, microbatch: int, output: Any, target: torch.Tensor | None = None) -> torch.Tensor:
        batch = self.batch(microbatch)
        self.seed(microbatch)
        with self._during(Phase.FORWARD, microbatch):
            rows = batch if target is None else Rows(inputs=(), target=target)
            loss = self._training.problem.loss_sum(output, rows) * self.weight
            if self._probes is not None:
                self._probes.loss(loss)
            return loss

    def backward(self, microbatch: int, loss: torch.Tensor, *, is_counted: bool = True) -> None:
        self._announce(microbatch)
        with self._during(Phase.BACKWARD, microbatch):
            self._prepared.backward(self._scaled(loss))
        self._rest(microbatch)
        if is_counted:
            self._keep(loss)

    def backward_of_branch(self, microbatch: int, loss: torch.Tensor) -> None:
        self._announce(microbatch)
        with self._during(Phase.BACKWARD, microbatch):
            self._prepared.backward_of_branch(self._scaled(loss))
        self._rest(microbatch)
        self._keep(loss)

    def _rest(self, microbatch: int) -> None:
        """Clear gradients of inputs, for which a model may ask: they are memory of the loop's."""
        batch = self._batches.get(microbatch)
        for tensor in () if batch is None else tensors_of(batch):
            if tensor.is_leaf:
                tensor.grad = None
        self.is_at_rest = True

    def _announce(self, microbatch: int) -> None:
        self._prepared.is_last_microbatch = microbatch == self.num_microbatches - 1

    def evaluate(self, microbatch: int, how: Evaluation = Evaluation.NO_GRAD) -> None:
        """Switch the module to eval and back around one forward."""
        inputs = self.batch(microbatch).inputs  # made outside: training uses the same tensors
        with evaluating(self._prepared.module), how.context:
            output = self.forward(microbatch, *inputs)
            self._keep(self._loss(microbatch, output))

    def probe(self, microbatch: int, probe: Probe) -> None:
        """Record the loss, or the sum of squares of the gradients by the inputs."""
        inputs = with_gradients(self.batch(microbatch).inputs)
        loss = self._loss(microbatch, self.forward(microbatch, *inputs))
        if probe is Probe.DROPPED:
            self._keep(loss)
            return
        with self._during(Phase.BACKWARD, microbatch):
            gradients = torch.autograd.grad(loss, having_gradients(inputs))
        self._keep(sum_of_squares(gradients))

    def leave_out(self) -> None:
        self.log.losses.append(0.0)

    def synchronisation(self, microbatch: int) -> AbstractContextManager[None]:
        """Use the engine's own context for all microbatches but the last."""
        is_last = microbatch == self.num_microbatches - 1
        if is_last or self._training.plan.accumulation is Accumulation.EVERY_MICROBATCH:
            return nullcontext()
        return self._prepared.accumulating()

    def units(self) -> Mapping[str, UnitHandle]:
        return self._prepared.units()

    def save(self, form: StateForm) -> None:
        """Take the state, in files or in whole tensors, which are compared with this rank's shards."""
        with self._context.recorder.during(Phase.BETWEEN, step=self.step):
            if form is not StateForm.WHOLE:
                folder = self._context.folder / _ASIDE
                folder.mkdir(exist_ok=True)
                write_files(self._prepared, form, replace(self._context, folder=folder))
                return
            state = state_of(self._prepared, form)
        assert self.handed_out is not None
        for subject, value in self.handed_out(state).items():
            self.note(subject, value)

    def overflow_in_one_piece(self) -> None:
        """Make one element of a reduced gradient infinite, on the last ranks to hold shares of gradients.

        It is neither of the first gradient nor of the last, where there are more. If the model is cut, it is of what is
        cut, on the last rank of that axis.
        """
        plan = self._training.plan
        num_shares = shares_of(plan, self._context.size).gradients
        if self._data_rank % num_shares != num_shares - 1:
            return
        gradients = [p.grad for p in self._prepared.owned_parameters().values() if p.grad is not None]
        cut = [g for g in gradients if isinstance(g, DTensor) and _is_cut(g, plan.cut_axis)]
        if cut and not _is_last(cut[0], plan.cut_axis):
            return
        local = (g.to_local() if isinstance(g, DTensor) else g for g in cut or gradients)
        pieces = [piece for piece in local if piece.numel()]
        piece = pieces[len(pieces) // 2]
        piece[(0,) * piece.dim()] = math.inf

    def look(self, moment: str) -> None:
        """Read parameters, and the state of units if the plan requires that they can be read."""
        with self._context.recorder.during(Phase.OBSERVE, step=self.step):
            self.log.snapshots[moment] = read_shards(self._prepared, "shown_parameters")
            if Capability.UNIT_STATE in self._training.plan.demands:
                for name, unit in self._prepared.units().items():
                    state = "unsharded" if unit.is_unsharded() else "sharded"
                    self.log.facts.append(Fact(moment=moment, subject=f"unit {name!r}", value=state))

    def note(self, subject: str, value: object) -> None:
        self.log.facts.append(Fact(moment="", subject=subject, value=str(value)))

    def hold(self, name: str, *tensors: Any, are_outputs: bool = False) -> None:
        """Pass the tensors among the values to the memory watches; the loop lets outputs go with its last backward."""
        held = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        if self._census is not None:
            self._census.holds(held, are_outputs=are_outputs)
        if self._lifetimes is not None:
            with self._context.recorder.during(Phase.OBSERVE, step=self.step):
                self._lifetimes.holds(name, held)

    def bench(self) -> InterfaceBench:
        """Return this rank's index and the engine's implementations of an interface."""
        context = self._context
        return InterfaceBench(
            prepared=self._prepared,
            rank=context.rank,
            size=context.size,
            device=context.device,
            note=self.note,
            ledger=context.recorder.ledger,
        )

    def recover(self) -> None:
        self._prepared.recover()

    def zero_grad(self) -> None:
        """Clear gradients by the engine's own method, to the value that they had when the step began."""
        self._prepared.zero_grad(set_to_none=self._training.schedule.clears_to_none(self.step - 1))

    def edit_gradients(self, edit: GradientEdit) -> None:
        """Edit the gradients of the parameters that the optimizer updates."""
        for parameter in self._prepared.owned_parameters().values():
            if parameter.grad is None or edit is GradientEdit.CLEARED:
                parameter.grad = None
            elif edit is GradientEdit.HALVED:
                parameter.grad.mul_(0.5)
            else:
                parameter.grad = parameter.grad * 0.5

    def load_weights(self) -> None:
        load_weights(self.part(""))

    def convert(self, *dtypes: torch.dtype) -> None:
        for dtype in dtypes:
            self._prepared.convert(dtype)

    def _keep(self, loss: torch.Tensor) -> None:
        # An observation: here the harness, not the engine, makes the host wait for a number.
        with self._context.recorder.during(Phase.OBSERVE, step=self.step):
            self.log.losses.append(float(loss.detach()))

    @contextmanager
    def _during(self, phase: Phase, microbatch: int) -> Iterator[None]:
        with self._context.recorder.during(phase, step=self.step, microbatch=microbatch):
            yield
            if self._lifetimes is not None:
                self._lifetimes.mark()

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._training.convert if tensor.is_floating_point() else None
        return tensor.to(self._context.device, dtype or tensor.dtype)


def _is_cut(tensor: DTensor, axis: str | None) -> bool:
    names = tensor.device_mesh.mesh_dim_names or ()
    return axis in names and not tensor.placements[names.index(axis)].is_replicate()


def _is_last(tensor: DTensor, axis: str | None) -> bool:
    """Whether this rank is the last one of an axis of a tensor's mesh."""
    assert axis is not None
    return tensor.device_mesh.get_local_rank(axis) == tensor.device_mesh[axis].size() - 1
