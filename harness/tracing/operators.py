"""Reports which operator reads and writes which tensors: one dispatch mode reports to every watch of the rank.

[Note: which threads] A dispatch mode belongs to a thread. On a CPU backward runs on the thread that called it, because
autograd has no CPU threads of its own. So one mode around a rank's training sees forward, backward and the optimizer,
whether Python or C++ calls the operators. On a device backward runs on threads of autograd, to which torch passes the
modes of the calling thread. Operators on threads that an engine starts itself are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from shardproof.harness.torch_compat.dispatch import device_kernel, hide_from_dynamo, make_operators
from shardproof.harness.torch_compat.patching import Replacement
from shardproof.harness.torch_compat.private_names import optional
from shardproof.harness.tracing.collectives.call import Call
from shardproof.harness.tracing.collectives.watched_work import is_inside_backend
from shardproof.harness.tracing.current_rank import current_rank

# The interceptor sees the tensors of these; the operators only pass them on.
_COMMUNICATION = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
_SILENT = frozenset({"profiler", "prim", "debugprims", "rngprims"})
# The schemas of other namespaces need not declare their writes, so the operators that they call are observed instead.
_KNOWN = frozenset({"aten", "prims", "quantized", "mkldnn", "mkl", "inductor"})
# The host waits for the value. Other operators that return no tensor read only metadata such as sizes.
_HOST_READS = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::allclose"})
_UNWRITTEN = ("aten::empty", "aten::new_empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Footprint:
    """The reads and writes of its arguments that an operator's schema declares."""

    name: str
    positions: tuple[bool, ...]  # whether the argument at each position is written
    names: Mapping[str, bool]
    is_metadata: bool
    is_host_read: bool
    leaves_unwritten: bool
    non_blocking: int | None  # the position of this argument, if the operator has it

    # Any: arguments of any operator.
    def is_deferred(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call of the operator is non-blocking."""
        if self.non_blocking is None:
            return False
        given = args[self.non_blocking : self.non_blocking + 1]
        return bool(given[0] if given else kwargs.get("non_blocking", False))


class RanOperator(NamedTuple):
    """An operator that ran; tensors are plain ones with memory of their own.

    ``fresh`` contains the ids of the storages that it has just made. ``is_deferred``: it was issued as non-blocking, so
    that the host may go on before a copy is over.
    """

    name: str
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    fresh: set[int]
    is_deferred: bool


class OperatorObserver(Protocol):
    """Receives operators."""

    def operator(self, ran: RanOperator) -> None:
        """Record an operator that ran."""

    def allocated(self, tensor: torch.Tensor) -> None:
        """Record memory that was allocated, and is not written yet."""

    def host_read(self) -> None:
        """Record that the host waited for the result of the last operator."""


# If it is missing no mode is made: `private_names.require` refuses the watches first, and a census reports that it is
# empty.
_Mode: Any = optional("torch.utils._python_dispatch:TorchDispatchMode")
_current_mode: Any = optional("torch.utils._python_dispatch:_get_current_dispatch_mode")
_Made = Callable[[Any, str], None]  # Any: what an operator returns, with the name of the operator


class OperatorMode(_Mode or object):  # type: ignore[misc]  # a class of Any
    """Reports each operator on the calling thread to observers, and its results, except views, to ``made``."""

    def __init__(self, witnesses: Sequence[OperatorObserver], made: _Made | None = None) -> None:
        super().__init__()
        self._witnesses = witnesses
        self._made = made

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Report nothing until exit, and add no overhead, unless a mode of the engine is above this one.

        Only without observers: they have to see the engine's operators while it is read.
        """
        if self._witnesses or _current_mode is None or _current_mode() is not self:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def ignore_compile_internals(self) -> bool:
        """Let compiled functions stay compiled where only results are observed: that changes no verdict."""
        return not self._witnesses

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Mark the method below instead of letting torch wrap it: the wrapper costs more than the rest of it."""
        return not hide_from_dynamo(cls.__torch_dispatch__)

    # Any: an operator takes and returns any type.
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if types:
            for kind in types:
                if hasattr(kind, "__tensor_flatten__"):
                    return NotImplemented  # for a DTensor, for example, which returns here with the tensors inside it
            return func(*args, **kwargs)
        known = _operators.get(id(func)) or _look_at(func)
        if known.is_foreign and self._witnesses and (kernel := _kernel(func, args, kwargs)) is not None:
            with self:
                return kernel(*args, **kwargs)
        result = func(*args, **kwargs)
        if not (known.makes_memory or self._witnesses) or is_inside_backend():
            return result
        if known.makes_memory and self._made is not None:
            self._made(result, known.func.__name__)
        if known.footprint is not None and self._witnesses:
            self._report(known.footprint, args, kwargs, result)
        return result

    def _report(
        self, footprint: _Footprint, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        if footprint.is_metadata:
            return
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for value, is_write in _arguments(footprint, args, kwargs):
            (writes if is_write else reads).extend(_tensors(value))
        known = {id(t.untyped_storage()) for t in (*reads, *writes) if t.layout is torch.strided}
        outputs = [t for t in _tensors(result) if t.layout is torch.strided]
        made = [t for t in outputs if id(t.untyped_storage()) not in known]
        if footprint.leaves_unwritten:
            for witness in self._witnesses:
                for tensor in made:
                    witness.allocated(tensor)
            return
        if not made and not writes and not footprint.is_host_read:
            return  # a view, or a metadata query
        fresh = {id(t.untyped_storage()) for t in made}
        is_deferred = footprint.is_deferred(args, kwargs)
        ran = RanOperator(footprint.name, reads, (*writes, *made), fresh, is_deferred)
        for witness in self._witnesses:
            witness.operator(ran)
            if footprint.is_host_read:
                witness.host_read()


# Any: an operator, its arguments and its kernel.
def _kernel(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return a function that calls the kernel for the device of the arguments."""
    devices = {tensor.device.type for tensor in _tensors((*args, *kwargs.values()))}
    return device_kernel(func, next(iter(devices - {"cpu"}), "cpu"))


class _Operator(NamedTuple):
    """The properties of an operator: ``footprint`` is None where no watch needs it."""

    func: Any  # kept alive, so that its id is not reused
    makes_memory: bool  # its schema allows results other than its arguments and views of them
    is_foreign: bool
    footprint: _Footprint | None


# Keyed by id: an operator computes its hash anew, in Python, each time.
_operators: dict[int, _Operator] = {}


def _look_at(func: Any) -> _Operator:  # Any: an operator
    is_reported = func.namespace not in _COMMUNICATION | _SILENT
    found = _operators[id(func)] = _Operator(
        func,
        makes_memory=any(returned.alias_info is None for returned in func._schema.returns),
        is_foreign=is_reported and func.namespace not in _KNOWN,
        footprint=_footprint(func) if is_reported else None,
    )
    return found


def _footprint(func: Any) -> _Footprint:
    arguments = func._schema.arguments
    written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    name = func._schema.name
    return _Footprint(
        name=name.removeprefix("aten::"),
        positions=tuple(w for a, w in zip(arguments, written, strict=True) if not a.kwarg_only),
        names={a.name: w for a, w in zip(arguments, written, strict=True)},
        is_metadata=torch.Tag.inplace_view in func.tags or name == "aten::set_",
        is_host_read=name in _HOST_READS,
        leaves_unwritten=name.startswith(_UNWRITTEN),
        non_blocking=next((i for i, a in enumerate(arguments) if a.name == "non_blocking"), None),
    )


def _arguments(
    footprint: _Footprint, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, bool]]:
    yield from zip(args, footprint.positions, strict=False)  # trailing defaults are omitted
    for name, value in kwargs.items():
        yield value, footprint.names[name]


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return ()


class Witness(OperatorObserver, Protocol):
    """A watch over one rank: receives operators, collectives, waits for them, and resizes of storages."""

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Record that a storage is about to be resized."""

    # Any: the witness's own handle of a collective.
    def issued(self, call: Call, seq: int) -> Any:
        """Record a collective before it starts; ``seq`` is its place in the ledger, -1 where there is none."""

    def handed_over(self) -> None:
        """Record that the transport has taken over the last collective issued on this thread."""

    def waited(self, issued: Any) -> None:
        """Record a wait for a collective."""


class _Witnesses:
    """All witnesses of a rank, as the interceptor's observer."""

    def __init__(self, witnesses: Sequence[Witness]) -> None:
        self._witnesses = witnesses

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        for witness in self._witnesses:
            witness.resized(storage, num_bytes)

    def issued(self, call: Call, seq: int) -> tuple[Any, ...]:
        return tuple(witness.issued(call, seq) for witness in self._witnesses)

    def handed_over(self) -> None:
        for witness in self._witnesses:
            witness.handed_over()

    def waited(self, issued: tuple[Any, ...]) -> None:
        for witness, what in zip(self._witnesses, issued, strict=True):
            witness.waited(what)


_of_rank: dict[int | None, _Witnesses] = {}  # None is the only rank of its process


def current_witnesses() -> _Witnesses | None:
    """Return the witnesses of the calling thread's rank, if there are any."""
    return _of_rank.get(current_rank()) if _of_rank else None


@contextmanager
def observing_operators(*witnesses: Witness, made: _Made | None = None) -> Iterator[OperatorMode | None]:
    """Report memory operations of the calling thread's rank to the observers until exit; without observers, do nothing.

    ``made`` is called with the results of operators, except views, and with their names. Yields the mode that reports.
    """
    if not witnesses:
        with nullcontext() if made is None or _Mode is None else OperatorMode((), made) as mode:
            yield mode
        return
    with _heard_resizes:
        _of_rank[current_rank()] = _Witnesses(witnesses)
        try:
            with OperatorMode(witnesses, made) as mode:
                yield mode
        finally:
            del _of_rank[current_rank()]


# Any: the arguments of the resize.
def _reporting(resize: Any) -> Any:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        witnesses = current_witnesses()
        if witnesses is not None and storage.nbytes() != size:
            witnesses.resized(storage, size)
        return resize(storage, size)

    return resize_


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    make_operators()
    yield torch.UntypedStorage, "resize_", _reporting(torch.UntypedStorage.resize_)


_heard_resizes = Replacement(_replacements)
