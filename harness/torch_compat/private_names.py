"""Every private name of torch that the harness uses: its use, and the loss in a release that lacks it.

Names are looked up when they are used, so that a release without one of them loses only the features that need it.
Other private names are those of the reference engine and of the adapters, each in one file.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch

from shardproof.harness.errors import HarnessBug, ShardproofError


class Feature(Enum):
    """A part of the harness that needs some private names; the value is its description for users."""

    COLLECTIVES = "the ledger of collectives"  # every world needs it
    THREADS = "worlds of threads"
    OPERATORS = "the watches over races and lifetimes"
    CUDA_STREAMS = "the watch over CUDA's streams"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateName:
    """One name below ``torch``: its use, and the feature that is lost without it, or the fallback of the harness."""

    path: str
    use: str
    without: Feature | str


class UnsupportedTorchError(ShardproofError):
    """This torch lacks a private name; the features that need it are refused, which is no verdict on an engine."""


def private(path: str) -> Any:  # Any: torch does not type private names
    """Return the object at ``path``; raises UnsupportedTorchError if this release has no such name."""
    found = optional(path)
    if found is None:
        raise _refusal([_BY_PATH[path]])
    return found


def optional(path: str) -> Any:  # Any: as above
    """Return the object at ``path``, None if this release has no such name."""
    if path not in _BY_PATH:
        raise HarnessBug(path, expected="a name listed in NAMES", got="another", hint="adding it there")
    return _find(path)


def require(*features: Feature) -> None:
    """Raise UnsupportedTorchError unless this release has all names that ``features`` need."""
    missing = [name for name in NAMES if name.without in features and _find(name.path) is None]
    if missing:
        raise _refusal(missing)


@cache
def _find(path: str) -> Any:  # Any: as above
    module, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for name in attributes.split(".") if attributes else ():
        found = getattr(found, name, None)
    return found


def _refusal(missing: Iterable[PrivateName]) -> UnsupportedTorchError:
    lost = {
        name.without.value: name.path.replace(":", ".")
        for name in missing
        if isinstance(name.without, Feature)
    }
    paths = ", ".join(name.path.replace(":", ".") for name in missing)
    return UnsupportedTorchError(
        " and ".join(lost) or "an optional part of the harness",
        expected=f"a release of torch that has {paths}",
        got=f"torch {torch.__version__}",
        hint="a release named in docs/torch-versions.md",
    )


# By what is lost without them: names and their uses. A path is a module, and after the colon attributes of it.
_USES: Mapping[Feature | str, Mapping[str, str]] = {
    Feature.COLLECTIVES: {
        "torch._C:DispatchKey": "names the keys under which kernels are registered and calls redispatched",
        "torch._C:DispatchKeySet": "shows which device a call is for, and excludes autograd's keys",
        "torch._C:_current_graph_task_id": "shows whether a future is waited for inside a backward",
        "torch._C:_current_autograd_node": "shows whether a backward has computed all gradients",
        "torch.autograd:Variable._execution_engine": "calls back at the end of a backward",
    },
    "operators of a library on accelerators other than CUDA are looked at as a whole": {
        "torch._C:_dispatch_key_for_device": "names the key of the kernels of a maker's device",
    },
    Feature.THREADS: {
        "torch._C:_ExcludeDispatchKeyGuard": (
            "writes results as a backend does, unseen by autograd and version counters"
        ),
        "torch._C:_DisableTorchDispatch": "writes results as a backend does, unseen by dispatch modes",
        "torch._C:_dispatch_get_all_op_names": (
            "lists the operators that draw random numbers, so that each rank draws its own"
        ),
        "torch._C:_dispatch_has_kernel_for_dispatch_key": "keeps to operators that have a kernel on the CPU",
        "torch._C:_set_multithreading_enabled": "runs a backward on the thread of the rank that called it",
        "torch.distributed.distributed_c10d:_World": "holds the process groups of a rank",
        "torch.distributed.distributed_c10d:_world": "is replaced, so that every rank finds its own process groups",
        "torch.distributed.distributed_c10d:_new_process_group_helper": (
            "makes the group of a split on its members alone"
        ),
        "torch.distributed.distributed_c10d:_get_default_timeout": "is the timeout of such a group",
        "torch._C._distributed_c10d:_set_thread_isolation_mode": (
            "looks up a group's name among those of the calling thread"
        ),
        "torch._C._distributed_c10d:_register_process_group": (
            "makes a rank's groups known on threads that the rank starts"
        ),
        "torch._C._distributed_c10d:FakeProcessGroup": "is the backend below a group of threads, and moves nothing",
    },
    Feature.OPERATORS: {
        "torch.utils._python_dispatch:TorchDispatchMode": "sees each operator, with what it reads and writes",
    },
    "it sees the operators of reads too, which makes them slower": {
        "torch.utils._python_dispatch:_get_current_dispatch_mode": (
            "shows whether the mode that sees operators can step aside while an engine is read"
        ),
    },
    "labels are made that no profiler reads, which makes steps slower": {
        "torch.autograd:_profiler_enabled": "shows whether a profiler reads the labels of an engine",
    },
    "torch wraps what sees operators, which makes them slower": {
        "torch._C._dynamo.eval_frame:set_code_exec_strategy": "keeps the compiler out of what sees operators",
        "torch._C._dynamo.eval_frame:_FrameExecStrategy": "says for which calls it is kept out",
        "torch._C._dynamo.eval_frame:_FrameAction": "says what it does instead",
    },
    "they are written one by one, which is slower": {
        "torch:_foreach_copy_": "writes the outputs of a collective in one call",
    },
    "every rank imports what it needs of it, a second each; compiled forwards may hang": {
        "torch._dynamo": "is imported once by the fork server, for all ranks, and leaves collectives uncompiled",
    },
    "nothing is replaced: FSDP1 times no longer": {
        "torch.distributed.fsdp._debug_utils:SimpleProfiler": (
            "is given a set of names for each thread, so that FSDP1 saves states on several ranks at once"
        ),
    },
    "nothing is kept: a release without it sets no guard": {
        "torch._C:_ensureCUDADeviceGuardSet": (
            "sets the guard that stands for a missing GPU, for a thread that outlives the ranks"
        ),
    },
    "a rank that leaves join early waits for ever for a hook that goes on in Python": {
        "torch.nn.parallel:DistributedDataParallel._match_all_reduce_for_bwd_pass": (
            "is where a rank without batches runs the hook of the others"
        ),
    },
    "ranks that are threads propagate shardings each for itself, which is slower": {
        "torch.distributed.tensor._dtensor_spec:DTensorSpec": "is what a sharding propagation depends on",
        "torch.distributed.tensor._op_schema:OutputSharding": "is the result of a sharding propagation",
        "torch.distributed.tensor._sharding_prop:ShardingPropagator": (
            "is where results of sharding propagations are shared between ranks that are threads"
        ),
    },
    Feature.CUDA_STREAMS: {
        "torch.cuda._gpu_trace": "reports events, waits and synchronizations of CUDA's streams",
        "torch._C:_activate_gpu_trace": "turns these reports on",
    },
}
NAMES = tuple(
    PrivateName(path=path, use=use, without=without)
    for without, uses in _USES.items()
    for path, use in uses.items()
)

_BY_PATH = {name.path: name for name in NAMES}
