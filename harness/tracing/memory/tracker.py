"""The watch over one rank's memory: sees operators, collectives, resizes and the user's tensors, and tracks lives."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardproof.engine.contract import Plan, PreparedModel
from shardproof.harness.tracing.collectives.call import Call
from shardproof.harness.tracing.collectives.call_site import call_site
from shardproof.harness.tracing.ledger import Op, Phase
from shardproof.harness.tracing.memory.allocations import Allocations, Role
from shardproof.harness.tracing.memory.memory_report import LifetimeReport, UserTensor
from shardproof.harness.tracing.operators import RanOperator
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.tracing.storages import Storages
from shardproof.harness.tracing.unit_hooks import unit_of

# Operators that keep every element's value, in whatever order; their results are copies of the same contents.
_COPIES = frozenset(
    {
        "_chunk_cat",
        "_foreach_copy_",
        "_to_copy",
        "cat",
        "clone",
        "constant_pad_nd",
        "copy_",
        "split_with_sizes_copy",
        "stack",
    }
)
_DUPLICATES = frozenset({"_to_copy", "clone"})
# Operators that scale or add gradients in place; their results, unlike the tensors that they write to, may be anything.
_SUMS = frozenset({"_foreach_add_", "_foreach_div_", "_foreach_mul_", "add_", "div", "div_", "mul", "mul_"})
_SCALED_COPIES = frozenset({"div", "mul"})
_REDUCTIONS = frozenset({Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER})
_GATHERS = frozenset({Op.ALL_GATHER, Op.GATHER, Op.BROADCAST})


@dataclass(slots=True, eq=False)
class _Held:
    """A tensor of the user's, as it was when the watch first saw it."""

    name: str
    tensor: weakref.ref[torch.Tensor]
    key: int
    num_bytes: int
    change: str = ""


class MemoryTracker:
    """One rank's watch, on any device. Thread-safe: an engine may allocate memory on threads of its own.

    The harness's own operators that observe begin no lives; lives that end meanwhile are recorded.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lives = Allocations()
        self._storages = Storages()
        self._held: list[_Held] = []
        self._closed: list[UserTensor] = []  # those that can no longer change
        self._num_collectives = 0
        self._lock = threading.RLock()

    # What the engine does -------------------------------------------------------------------------------------

    def operator(self, ran: RanOperator) -> None:
        if self._is_observing:
            return
        name, writes = ran.name, ran.writes
        with self._lock:
            self._advance()
            sources = self._keys(ran.reads, name)
            targets = self._keys(writes, name)
            if name in _COPIES:
                self._lives.copied(sources, targets, is_packing=name not in _DUPLICATES)
                return
            self._lives.computed(sources)
            if name in _SUMS and self._recorder.phase is Phase.BACKWARD:
                old = self._keys([t for t in writes if id(t.untyped_storage()) not in ran.fresh], name)
                self._lives.summed(sources, old, is_packing=name in _SCALED_COPIES)

    def allocated(self, tensor: torch.Tensor) -> None:
        if self._is_observing:
            return
        with self._lock:
            self._advance()
            self._keys((tensor,), "empty")

    def host_read(self) -> None:
        """Do nothing: memory does not change."""

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Record that a storage releases its memory, and allocates new memory if the new size is not zero."""
        with self._lock:
            self._advance()
            site = call_site()
            key = self._storages.key(storage)
            if not self._lives.is_alive(key):
                self._lives.born(key, storage.nbytes(), "unknown", site)
            for held in self._held:
                if held.key == key and held.tensor() is not None and not held.change:
                    held.change = f"its {held.num_bytes} bytes were resized to {num_bytes} at {site}"
            self._lives.resized(key, num_bytes, "resize_", site)

    def issued(self, call: Call, seq: int = -1) -> None:
        if self._is_observing:
            return
        with self._lock:
            self._advance()
            self._num_collectives += 1
            name = str(call.op)
            inputs = self._keys((t for part in call.inputs for t in part), name)
            outputs = self._keys((t for part in call.outputs for t in part), name)
            if call.op in _GATHERS:
                self._lives.gathered(inputs, outputs)
            elif call.op in _REDUCTIONS:
                self._lives.reduced(inputs, outputs, is_scattered=call.op is Op.REDUCE_SCATTER)

    def handed_over(self) -> None:
        """Do nothing."""

    def waited(self, issued: object) -> None:
        """Do nothing."""

    # Called by the training loop ----------------------------------------------------------------------------

    def mark(self) -> None:
        """Record the end of all lives that have ended by now, at the loop's position."""
        with self._lock:
            self._advance()

    def meet(self, prepared: PreparedModel, plan: Plan) -> None:
        """Take the optimizer's parameters for shares, and their gradients for reduced ones; the rest is the user's."""
        with self._lock, torch.no_grad():
            for name, parameter in prepared.owned_parameters().items():
                if name in plan.ignored:
                    self._hold(f"the ignored parameter {name!r}", parameter)
                else:
                    self._is(parameter, Role.SHARE, unit_of(name, plan))
                if parameter.grad is not None:
                    self._is(parameter.grad, Role.REDUCED, unit_of(name, plan))
            for name, buffer in prepared.named.named_buffers():
                self._hold(f"buffer {name!r}", buffer)

    def holds(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Record tensors as the user's, who may hold them for any time."""
        with self._lock:
            for tensor in tensors:
                self._hold(name, tensor)

    def end_step(self) -> None:
        """Check the user's tensors, and collect reference cycles: an engine does not control when Python does that."""
        with self._lock:
            gc.collect()
            self._advance()
            for held in self._held:
                self._look_at(held)
            over = [h for h in self._held if h.change or h.tensor() is None]
            self._held = [h for h in self._held if h not in over]
            self._closed += map(_user_tensor, over)

    def report(self) -> LifetimeReport:
        """Return all lives so far."""
        with self._lock:
            return LifetimeReport(
                num_events=self._lives.num_events,
                num_collectives=self._num_collectives,
                lives=self._lives.report(),
                stretches=self._lives.stretches(),
                user_tensors=(*self._closed, *map(_user_tensor, self._held)),
            )

    # ----------------------------------------------------------------------------------------------------------

    @property
    def _is_observing(self) -> bool:
        return self._recorder.phase is Phase.OBSERVE

    def _advance(self) -> None:
        self._lives.advance(self._recorder.place)
        for key in self._storages.ended():
            self._lives.died(key)

    def _keys(self, tensors: Iterable[torch.Tensor], operator: str) -> list[int]:
        """Return the storages of tensors, each once; storages not seen before begin lives."""
        keys: dict[int, None] = {}
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = self._storages.key(storage)
            num_bytes = storage.nbytes()
            if not self._lives.is_alive(key):
                self._lives.born(key, num_bytes, operator, call_site())
            elif self._lives.size_of(key) != num_bytes:
                self._lives.resized(key, num_bytes, operator, call_site())  # from C++, past Python's resize_
            keys[key] = None
        return list(keys)

    def _is(self, tensor: torch.Tensor, role: Role, unit: str) -> None:
        for key in self._keys((_local(tensor),), "unknown"):
            self._lives.is_role(key, role, unit)

    def _hold(self, name: str, tensor: torch.Tensor) -> None:
        local = _local(tensor)
        keys = self._keys((local,), "unknown")
        if any(h.tensor() is local for h in self._held) or not keys:
            return
        (key,) = keys
        if not self._lives.has_role(key, Role.SHARE):
            self._lives.is_role(key, Role.USER)
        num_bytes = local.untyped_storage().nbytes()
        is_there = num_bytes >= local.nbytes
        change = (
            ""
            if is_there
            else f"of its {local.nbytes} bytes {num_bytes} were left when it was looked at first"
        )
        self._held.append(
            _Held(name=name, tensor=weakref.ref(local), key=key, num_bytes=num_bytes, change=change)
        )

    def _look_at(self, held: _Held) -> None:
        tensor = held.tensor()
        if tensor is None or held.change:
            return
        storage = tensor.untyped_storage()
        if self._storages.key(storage) != held.key:
            held.change = f"its memory of {held.num_bytes} bytes was exchanged for other"
        elif storage.nbytes() != held.num_bytes:
            held.change = f"its {held.num_bytes} bytes became {storage.nbytes()}"


def _user_tensor(held: _Held) -> UserTensor:
    return UserTensor(name=held.name, num_bytes=held.num_bytes, change=held.change)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
