"""All uses of private torch APIs in this engine, with the reason."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Placement

__all__ = [
    "HYBRID_SHARD_ZERO2",
    "after_accumulation",
    "allocated_by",
    "at_end_of_backward",
    "chunk_cat",
    "concatenated",
    "default_hooks",
    "eager",
    "inside_backward",
    "inside_transform",
    "joined",
    "local_tensor",
    "optimizers_in_backward",
    "outside_transforms",
    "run_where_shards_lie",
    "sets_grad_dtype",
    "sharded_like",
    "strided_shard",
]


P = ParamSpec("P")
T = TypeVar("T")


HYBRID_SHARD_ZERO2: ShardingStrategy | None = getattr(ShardingStrategy, "_HYBRID_SHARD_ZERO2", None)
"""The strategy that keeps parameters from forward to backward within replicas; None where torch has no such name."""


def allocated_by(
    group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return memory of the group's own allocator, from which it may send without a copy; else of torch's."""
    backend = group._get_backend(device)
    if backend.supports_tensor_alloc(device):
        return backend.allocate_tensor(numel, dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward has executed its last node; no public hook fires there."""
    engine: Any = Variable._execution_engine
    engine.queue_callback(callback)


def chunk_cat(tensors: list[torch.Tensor], out: torch.Tensor) -> None:
    """Fill ``out`` (rows, columns) with each tensor's equal chunks of dim 0, one in a row, padded with zeros.

    The public API needs two operators for each tensor.
    """
    if len({tensor.dtype for tensor in tensors}) > 1:
        tensors = [tensor.to(out.dtype) for tensor in tensors]
    torch._chunk_cat(tensors, dim=0, num_chunks=out.shape[0], out=out)


def eager(method: Callable[P, T]) -> Callable[P, T]:
    """Run a hook uncompiled in a compiled module; decides late, because disabling a function loads the compiler."""
    uncompiled: Callable[P, T] | None = None

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal uncompiled
        if not torch.compiler.is_compiling():  # the compiler traces this as True
            return method(*args, **kwargs)
        if uncompiled is None:
            uncompiled = torch.compiler.disable(method)
        return uncompiled(*args, **kwargs)

    return run


def inside_backward() -> bool:
    """Whether this thread runs a backward: then a forward is the recomputation of a checkpoint."""
    return torch._C._current_graph_task_id() != -1


inside_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of functorch, such as ``jvp``, runs: its tensors hide what they wrap."""

outside_transforms: Callable[[], AbstractContextManager[object]] = torch._C._DisableFuncTorch
"""Leave functorch's transforms: what they wrap has no memory that could be freed."""


def local_tensor(sharded: DTensor) -> torch.Tensor:
    """Return the tensor itself that ``sharded`` wraps; ``to_local`` of a parameter returns a new one each time."""
    return sharded._local_tensor


def run_where_shards_lie(operator: Any) -> None:
    """Make DTensor run an operator of one tensor on its shards, of any sizes, permanently.

    ``register_sharding``, the public API, skips shards if there are more ranks than elements. Raises RuntimeError if
    torch has no such strategies, because the operator would then run on gathered copies.
    """
    try:
        from torch.distributed.tensor._op_schema import OpSpec, OpStrategy

        register = DTensor._op_dispatcher.sharding_propagator.register_op_strategy
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"{operator} on unevenly sharded parameters needs a way to register strategies with DTensor that torch "
            f"{torch.__version__} does not have: {error}"
        ) from error

    # Any for both: the classes of a call's schema and of its result differ between releases.
    def as_the_input_lies(schema: Any) -> Any:
        (given,) = (argument for argument in schema.args_schema if isinstance(argument, OpStrategy))
        return OpStrategy([kept(given.strategies, i) for i in range(len(given.strategies))])

    def kept(choices: Any, chosen: int) -> Any:
        spec = choices[chosen].output_spec
        # Accept only an input with this placement: another one must not be redistributed first.
        costs = [0.0 if i == chosen else math.inf for i in range(len(choices))]
        return OpSpec(output_specs=spec, input_specs=[spec], redistribute_cost=[costs])

    register(operator, as_the_input_lies)


_KNOWS_OVERRIDES = hasattr(torch.Tensor, "_has_grad_dtype_override")  # since torch 2.15


def sets_grad_dtype(parameter: torch.Tensor) -> bool:
    """Whether a parameter sets grad_dtype; before torch 2.15, only one that differs from its own dtype shows this."""
    if _KNOWS_OVERRIDES:
        return bool(getattr(parameter, "_has_grad_dtype_override"))  # noqa: B009 -- older releases do not type it
    return parameter.grad_dtype != parameter.dtype


def sharded_like(template: DTensor, local: torch.Tensor) -> DTensor:
    """Wrap ``local`` with the mesh, placements and global shape of ``template``.

    ``DTensor.from_local`` does the same twenty times slower, and there is one gradient per parameter and step;
    ``DTensor.__init__``, which does nothing, costs twice what remains.
    """
    spec = template._spec
    meta = spec.tensor_meta
    if meta is not None and meta.dtype != local.dtype:
        spec = type(spec)(spec.mesh, spec.placements, tensor_meta=meta._replace(dtype=local.dtype))
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def after_accumulation(parameter: nn.Parameter) -> None:
    """Do what a user asked for once a gradient is accumulated: autograd never writes sharded gradients.

    First hooks are called, then optimizers step that `_apply_optimizer_in_backward` of torch gave the parameter.
    """
    hooks = cast("dict[int, Callable[[torch.Tensor], None]] | None", parameter._post_accumulate_grad_hooks)
    for hook in list(hooks.values()) if hooks else ():
        hook(parameter)
    for optimizer in optimizers_in_backward(parameter):
        optimizer.step()
        parameter.grad = None


def optimizers_in_backward(parameter: nn.Parameter) -> list[torch.optim.Optimizer]:
    """Return the optimizers that are to step as soon as a parameter's gradient is there."""
    found: list[torch.optim.Optimizer] = getattr(parameter, "_in_backward_optimizers", [])
    return found


def concatenated(*meshes: DeviceMesh) -> DeviceMesh:
    """Join meshes that were cut from one root mesh; slicing by name is public only on the root itself."""
    return DeviceMesh._concatenate(list(meshes))


def joined(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return these axes of ``mesh`` as one axis."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Shard ``dim`` over an outer mesh axis although an inner one sharded it first, into ``split_factor``."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)
