"""Operators, kernels, generators and backwards of torch below its documented interface."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial, reduce
from operator import or_
from typing import Any

import torch

from shardproof.harness.torch_compat.patching import Replacement
from shardproof.harness.torch_compat.private_names import optional, private

# The names by which torch refers to its default CPU generator.
_GENERATOR_HOLDERS: tuple[Any, ...] = (torch, torch.random, sys.modules["torch._C"])


@cache
def _key(name: str) -> Any:  # Any: torch's stubs lack it
    return private("torch._C:DispatchKey").__members__[name]


def _bookkeeping() -> Any:  # Any: a set of keys
    keys = private("torch._C:DispatchKeySet")
    names = ("ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutogradOther")
    return reduce(or_, (keys(_key(name)) for name in names))


@cache
def _raw() -> tuple[Any, Any, Any]:  # Any: guards and keys, untyped by torch
    guard, disable = private("torch._C:_ExcludeDispatchKeyGuard"), private("torch._C:_DisableTorchDispatch")
    return guard, _bookkeeping(), disable


class _Raw(threading.local):
    depth = 0


_inside_raw = _Raw()


def is_raw() -> bool:
    """Return whether the calling thread is inside `raw_access`."""
    return _inside_raw.depth > 0


class raw_access:  # noqa: N801 - reads as the context that it is
    """A context in which tensors are read and written as a backend does it.

    Autograd, version counters, dispatch modes and torch's trace do not see these operations. A class, because it is
    entered twice for every collective, and a generator would cost as much as the copy.
    """

    __slots__ = ("_dispatch", "_exclude")

    def __enter__(self) -> None:
        _inside_raw.depth += 1
        exclude, keys, disable = _raw()
        self._exclude = exclude(keys)
        self._exclude.__enter__()
        self._dispatch = disable()
        self._dispatch.__enter__()

    def __exit__(self, *error: object) -> None:
        self._dispatch.__exit__(*error)
        self._exclude.__exit__(*error)
        _inside_raw.depth -= 1


def generator_address(generator: torch.Generator) -> int:
    """Identify a generator; each call of an operator receives a new Python object for it."""
    # Any: missing in the stubs.
    untyped: Any = generator
    return int(untyped._cdata)


@cache
def random_operators() -> tuple[str, ...]:
    """Return the aten operators that draw random numbers on CPU and accept a generator."""
    names = []
    has_kernel = private("torch._C:_dispatch_has_kernel_for_dispatch_key")
    for full_name in private("torch._C:_dispatch_get_all_op_names")():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten" or not has_kernel(full_name, "CPU"):
            continue
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if operator is None or torch.Tag.nondeterministic_seeded not in operator.tags:
            continue
        if any(a.name == "generator" for a in operator._schema.arguments):
            names.append(name)
    return tuple(sorted(names))


_made: set[str] = set()  # what was made stays


def make_operators() -> None:
    """Create the Python object of every operator, before threads could request one at the same time.

    torch creates them on first use, for example under a dispatch mode, without a lock. If two threads request one
    together, one may receive an object that the other's has replaced, and C++ keeps its address for good.
    """
    for full_name in set(private("torch._C:_dispatch_get_all_op_names")()) - _made:
        namespace, _, name = full_name.partition("::")
        base, _, overload = name.partition(".")
        packet = getattr(getattr(torch.ops, namespace), base, None)
        getattr(packet, overload or "default", None)
        _made.add(full_name)


def hide_from_dynamo(function: Callable[..., Any]) -> bool:
    """Exclude a function and its callees from torch's compiler; returns whether this release supports that."""
    mark = optional("torch._C._dynamo.eval_frame:set_code_exec_strategy")
    strategy = optional("torch._C._dynamo.eval_frame:_FrameExecStrategy")
    action = optional("torch._C._dynamo.eval_frame:_FrameAction")
    if mark is None or strategy is None or action is None:
        return False
    mark(function.__code__, strategy(action.SKIP, action.SKIP))
    return True


# Any: an operator and its kernel.
def device_kernel(operator: Any, device_type: str) -> Callable[..., Any] | None:
    """Return a function that calls an operator's device kernel without the dispatcher, so that modes see its calls.

    None if there is no such kernel.
    """
    key_of = optional("torch._C:_dispatch_key_for_device")
    key = device_type.upper() if key_of is None else key_of(device_type)
    try:
        kernel: Any = torch.library.get_kernel(operator, key)
    except RuntimeError:
        return None
    return partial(kernel.call_boxed, private("torch._C:DispatchKeySet")(_key(key)))


class Backward(Enum):
    """The state of the backward that is running on the calling thread."""

    ABSENT = "none is under way"
    COMPUTES = "gradients are computed"
    CALLS_BACK = "all is computed, and who asked for it is called back"


def backward_of_thread() -> Backward:
    """Return the state of the calling thread's backward."""
    if private("torch._C:_current_graph_task_id")() == -1:
        return Backward.ABSENT
    is_over = private("torch._C:_current_autograd_node")() is None
    return Backward.CALLS_BACK if is_over else Backward.COMPUTES


def call_after_backward(callback: Callable[[], None]) -> None:
    """Register a callback for the end of the backward running on this thread; callbacks run in order."""
    private("torch.autograd:Variable._execution_engine").queue_callback(callback)


# Any: modules.
def guards_of_record_stream() -> list[tuple[Any, str]]:
    """Return the places where torch calls ``Tensor.record_stream``, with a function that skips CPU tensors.

    FSDP1 is such a place; its streams are only in order with this call. Modules that are not loaded yet are left out.
    """
    name = "_no_dispatch_record_stream"
    loaded = [m for n, m in list(sys.modules.items()) if n.startswith("torch.distributed.fsdp")]
    return [(module, name) for module in loaded if name in vars(module)]


@contextmanager
def kernels_before_backends(namespace: str, kernels: Mapping[str, Callable[[Any], object]]) -> Iterator[None]:
    """Wrap each operator's call of its backend kernel with these functions, until exit.

    A function calls the backend kernel as kernels are called, with the keys first. This call releases the GIL, as torch
    does; a direct call of a kernel would not. A kernel that waits or takes a lock needs that.
    """
    with _kernels_of_ours(namespace) as library:
        for name, make in kernels.items():
            operator = getattr(getattr(torch.ops, namespace), name).default
            # The one key that calls for every device pass, after all keys that are not backends.
            library.impl(name, make(partial(_go_on, operator)), "BackendSelect", with_keyset=True)
        yield


# Any: an operator, the keys of its call, and boxed arguments and results.
def _go_on(operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    return operator.redispatch(keyset.remove(_key("BackendSelect")), *args, **kwargs)


def are_of_meta(keyset: Any) -> bool:
    """Return, from the keys of a call, whether its tensors have no data, so that only shapes are computed."""
    return bool(keyset.has(_key("Meta")))


@contextmanager
def replaced_kernels(namespace: str, kernels: Mapping[str, Callable[[Any], object]]) -> Iterator[None]:
    """Replace operators' CPU kernels by the functions' versions of the originals, until exit."""
    with _kernels_of_ours(namespace) as library:
        with warnings.catch_warnings():
            # These kernels are replaced on purpose; torch warns once for all of them.
            warnings.filterwarnings(
                "ignore", message="(?s).*previously registered kernel", category=UserWarning
            )
            for name, make in kernels.items():
                original = torch.library.get_kernel(f"{namespace}::{name}", "CPU")
                library.impl(name, make(original), "CPU", with_keyset=True)
        yield


@contextmanager
def _kernels_of_ours(namespace: str) -> Iterator[Any]:
    # Any: a library has no type.
    library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    try:
        yield library
    finally:
        library._destroy()  # the only way to restore kernels; Library has no public method for it


def replace_default_generator(generator: torch.Generator) -> Replacement:
    """Set ``generator`` in all places where torch's Python code finds its default CPU generator."""
    return Replacement(lambda: [(holder, "default_generator", generator) for holder in _GENERATOR_HOLDERS])


def keep_backward_in_thread() -> None:
    """Run backward passes that the calling thread starts on this thread only, so that hooks can find their rank."""
    private("torch._C:_set_multithreading_enabled")(False)


def copy_all(outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into the output at its place."""
    copy = optional("torch:_foreach_copy_")
    if len(outputs) > 1 and copy is not None:
        copy(outputs, sources)
        return
    for output, source in zip(outputs, sources, strict=True):
        output.copy_(source)


@contextmanager
def drawing_apart() -> Iterator[None]:
    """Restore the state of the process's default generator at exit."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
