"""Intercepts c10d's own operators: reads and records each call, and passes it on.

[Note: why kernels] Every collective reaches its backend through an operator of the ``c10d`` namespace, whether Python,
a functional collective or a C++ reducer calls it. The harness registers kernels for these few operators before the
backends' kernels. They see all calls, in any thread and any autograd mode, and add no overhead to ordinary operators. A
dispatch mode would add Python overhead to each of them. The harness's kernel calls the backend's kernel, so gloo and
nccl behave as before. In the threads world the harness's transport takes the backend's place.

[Note: the GIL] A backend's kernel must run without the GIL, as it does when torch calls it. gloo's own threads release
works, and so Python objects, while they hold the lock that its kernels take. A thread that waited for that lock with
the GIL held would deadlock. Some kernels also wait for other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardproof.harness.torch_compat.dispatch import are_of_meta, kernels_before_backends
from shardproof.harness.torch_compat.private_names import optional
from shardproof.harness.tracing.collectives.c10d_ops import SCHEMAS, CollectiveSchema, process_group
from shardproof.harness.tracing.collectives.call import Call, short_name
from shardproof.harness.tracing.collectives.call_site import call_site
from shardproof.harness.tracing.collectives.futures import late_futures
from shardproof.harness.tracing.collectives.watched_work import Valuer, Works
from shardproof.harness.tracing.ledger import CallSummary, Op, ViolationKind
from shardproof.harness.tracing.recorder import Recorder

_REDUCE_OP_NAMES = {op: name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}


class CollectiveTransport(Protocol):
    """Moves the data of a call; without a transport the backend does."""

    def start(self, call: Call, on_violation: Callable[[ViolationKind, str], None] | None) -> dist.Work:
        """Start the call and return its work; a synchronous call is complete on return.

        ``on_violation`` receives each premature use of the buffers of an asynchronous call, with its call site.
        """


class CollectiveObserver(Protocol):
    """Receives calls and the waits for them, in addition to the recorder."""

    # Any: the observer's own handle of a call.
    def issued(self, call: Call, seq: int) -> Any:
        """Record a call before it starts; the return value is passed to `waited`.

        ``seq`` is the recorder's number for the call, -1 without a recorder.
        """

    def handed_over(self) -> None:
        """Record that the transport has taken over, or completed, the last call issued on this thread."""

    def waited(self, issued: Any) -> None:
        """Record a wait; one call may have several."""


def _no_observer() -> CollectiveObserver | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interceptor:
    """The recorder of calls made on this thread, another observer, the transport, and the ranks of a group.

    ``is_split`` splits flat buffers into one piece per rank, which is slow for thousands of ranks.
    """

    recorder: Callable[[], Recorder | None]
    ranks_of: Callable[[dist.ProcessGroup], tuple[int, ...]]
    transport: CollectiveTransport | None = None
    observer: Callable[[], CollectiveObserver | None] = _no_observer
    is_split: bool = True


@contextmanager
def standing_in_c10d(interceptor: Interceptor) -> Iterator[None]:
    """Intercept all c10d operators before the backends' kernels, for every device, until exit.

    Process-wide: ranks that are threads share one interceptor, and its ``recorder`` distinguishes them.
    """
    works = Works()
    kernels = {name: partial(_untraced, name, schema, interceptor, works) for name, schema in SCHEMAS.items()}
    with late_futures, kernels_before_backends("c10d", kernels):
        yield


# Any: a kernel, as the dispatcher calls it.
def _untraced(name: str, schema: CollectiveSchema, interceptor: Interceptor, works: Works, go_on: Any) -> Any:
    """Make a kernel that compilers do not trace: an engine's collective may be called inside a compiled forward."""
    kernel = _Kernel(name, schema, interceptor, works, go_on)
    dynamo = optional("torch._dynamo")
    return kernel if dynamo is None else dynamo.disable(kernel.__call__)


class _Kernel:
    """The kernel that runs before the backends' kernels of one operator."""

    # Any: calls the backend's kernel.
    def __init__(
        self, name: str, schema: CollectiveSchema, interceptor: Interceptor, works: Works, go_on: Any
    ) -> None:
        self._schema = schema
        self._go_on = go_on
        self._interceptor = interceptor
        self._works = works
        arguments = getattr(torch.ops.c10d, name).default._schema.arguments
        self._names = tuple(a.name for a in arguments)
        self._defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    # Any: boxed arguments and results; the operator's schema fixes their types.
    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = self._interceptor.recorder()
        if (recorder is None and self._interceptor.transport is None) or are_of_meta(keyset):
            return self._go_on(keyset, *args, **kwargs)
        # The dispatcher omits trailing defaults.
        arguments = {**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs}
        call = _read(self._schema, arguments, self._interceptor)
        seq = -1 if recorder is None else recorder.issued(_summary(call))
        observers = self._announce(call, recorder, seq)
        inner: dist.Work | None
        result = None
        if self._interceptor.transport is not None:
            inner = self._interceptor.transport.start(
                call, None if recorder is None else partial(recorder.record_violation, seq)
            )
        else:
            result = self._go_on(keyset, *args, **kwargs)
            inner = _work_in(result)
        observers.handed_over()
        if not self._schema.returns_work or inner is None:
            observers.waits(is_over=True)
            return result  # of a synchronous call nccl returns tensors alone (torch 2.11)
        outputs = [tensor for piece in call.outputs for tensor in piece]
        boxed = self._works.watch(inner, observers, _valuer(self._interceptor, call.device), outputs).boxed()
        return boxed if self._schema.returned is None else (arguments[self._schema.returned], boxed)

    def _announce(self, call: Call, recorder: Recorder | None, seq: int) -> _Observers:
        """Report a call to the observer before it starts; return the observers of its waits."""
        observer = self._interceptor.observer()
        issued = None if observer is None else observer.issued(call, seq)
        return _Observers(recorder, seq, observer, issued)


class _Observers:
    """The recorder and the observer of one call."""

    # Any: the observer's own handle of the call.
    def __init__(
        self, recorder: Recorder | None, seq: int, observer: CollectiveObserver | None, issued: Any
    ) -> None:
        self._recorder = recorder
        self._seq = seq
        self._observer = observer
        self._issued = issued

    def handed_over(self) -> None:
        if self._observer is not None:
            self._observer.handed_over()

    def waits(self, *, is_over: bool | None) -> None:
        if self._recorder is not None:
            self._recorder.waited(self._seq, is_over=is_over)
        if self._observer is not None:
            self._observer.waited(self._issued)

    def over(self) -> None:
        if self._recorder is not None:
            self._recorder.over(self._seq)


def _valuer(interceptor: Interceptor, device: torch.device) -> Valuer | None:
    if device.type != "cpu":
        return None
    return _value_of_own_future if interceptor.transport is None else _outputs


# Any: the list of a work's outputs.
def _outputs(carried: dist.Work) -> Callable[[], Any]:
    outputs = carried.result()  # read now, so that they are still available at the wait
    return lambda: outputs


def _value_of_own_future(work: dist.Work) -> Callable[[], Any]:
    return lambda: work.get_future().value()


def _work_in(result: Any) -> dist.Work | None:
    boxed = result[-1] if isinstance(result, tuple) and result else result
    return dist.Work.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else None


def _read(schema: CollectiveSchema, a: dict[str, Any], interceptor: Interceptor) -> Call:
    group = process_group(a)
    ranks = interceptor.ranks_of(group)
    exchanged = schema.exchanged(a, group.rank(), len(ranks) if interceptor.is_split else 1)
    reduce_op = dist.ReduceOp.RedOpType(a["reduce_op"].op()) if "reduce_op" in a else None
    timeout_ms = a.get("timeout", -1)
    first = next((t for piece in (*exchanged.inputs, *exchanged.outputs) for t in piece), None)
    return Call(
        op=schema.op,
        group=group,
        group_name=group.group_name,
        ranks=ranks,
        rank=group.rank(),
        inputs=exchanged.inputs,
        outputs=exchanged.outputs,
        reduce_op=reduce_op,
        peer=exchanged.peer,
        tag=exchanged.tag,
        is_async=a.get("async_op", True),
        device=torch.device("cpu") if first is None else first.device,
        timeout_s=None if timeout_ms is None or timeout_ms < 0 else timeout_ms / 1000,
        site=call_site(),
    )


def _summary(call: Call) -> CallSummary:
    paid = call.outputs if call.op in {Op.ALL_GATHER, Op.BROADCAST, Op.SCATTER, Op.RECV} else call.inputs
    contribution = call.outputs if call.op in {Op.BROADCAST, Op.SCATTER, Op.RECV} else call.inputs
    tensors = [t for piece in paid for t in piece]
    return CallSummary(
        op=call.op,
        group_name=call.group_name,
        group=call.ranks,
        dtype=short_name(tensors[0].dtype) if tensors else "",
        shapes=tuple(_shape(piece, call) for piece in contribution if piece),
        num_bytes=sum(t.numel() * t.element_size() for t in tensors),
        reduce_op=None if call.reduce_op is None else _REDUCE_OP_NAMES[call.reduce_op],
        peer=None if call.peer is None else call.ranks[call.peer],
        is_async=call.is_async,
        site=call.site,
    )


def _shape(piece: tuple[torch.Tensor, ...], call: Call) -> tuple[int, ...]:
    """Return one tensor's shape; for W pieces, their number and size, or their total when they are uneven."""
    if len(piece) == 1:
        whole, num_ranks = piece[0], len(call.ranks)
        if call.op is Op.REDUCE_SCATTER and num_ranks > 1:  # the harness did not split it
            even = whole.numel() % num_ranks == 0
            return (num_ranks, whole.numel() // num_ranks) if even else (whole.numel(),)
        return tuple(whole.shape)
    sizes = {t.numel() for t in piece}
    return (len(piece), sizes.pop()) if len(sizes) == 1 else (sum(t.numel() for t in piece),)
