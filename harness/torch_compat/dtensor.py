"""DTensor's sharding propagation, computed once for all ranks that are threads of one process.

DTensor caches its results per thread, so in a world of threads each rank would compute the same results again, and
again under each schedule. That took a third of the ranks' time.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from shardproof.harness.torch_compat.patching import Replacement
from shardproof.harness.torch_compat.private_names import optional
from shardproof.harness.torch_compat.releases import minor


class _Classes(NamedTuple):
    """The classes of DTensor's sharding propagation."""

    spec: Any
    output: Any
    propagator: Any


@cache
def _classes() -> _Classes:
    tensor = "torch.distributed.tensor"
    return _Classes(
        spec=optional(f"{tensor}._dtensor_spec:DTensorSpec"),
        output=optional(f"{tensor}._op_schema:OutputSharding"),
        propagator=optional(f"{tensor}._sharding_prop:ShardingPropagator"),
    )


def shared_propagation() -> Replacement:
    """Serialize sharding propagations of threads, and compute each only once for all of them.

    Serialized, because torch's fake mode is not thread-safe. Only results that do not depend on a rank's place in the
    mesh are shared: shapes, which are global, and placements of results that need no redistribution of arguments.
    """
    propagator = _classes().propagator
    wrappers = {
        "_propagate_tensor_meta_non_cached": _shared_shapes,
        "propagate_op_sharding_non_cached": _shared_placements,
    }
    if None in _classes() or not all(hasattr(propagator, name) for name in wrappers):
        return Replacement(lambda: ())  # each rank computes it itself, which is slower
    lock = threading.RLock()
    replacements: dict[str, object] = {
        name: wrap(getattr(propagator, name), lock) for name, wrap in wrappers.items()
    }
    replacements["_fake_mode_lock"] = lock
    return Replacement(lambda: [(propagator, name, made) for name, made in replacements.items()])


def keep_device_guard() -> None:
    """Let the calling thread own the guard that stands for a missing GPU in torch's fake mode.

    Where torch 2.11 was built for CUDA and there is no GPU, the first thread in that mode makes the guard for all,
    and frees it at its end. A rank that enters the mode afterwards ends the process (pytorch#178950).
    """
    ensure = optional("torch._C:_ensureCUDADeviceGuardSet")
    if ensure is not None and minor(torch.__version__) < (2, 12):
        ensure()


def _shared_shapes(propagate: Callable[[Any, Any], Any], lock: threading.RLock) -> Callable[[Any, Any], Any]:
    known: dict[Any, Any] = {}

    def look_up(propagator: Any, schema: Any) -> Any:
        if (own := own_shape(schema)) is not None:
            return own
        try:
            key = _key(schema, lambda spec: spec.tensor_meta)
        except _NoKeyError:
            return propagate(propagator, schema)
        with lock:  # ranks request the same result at the same time
            if key not in known:
                known[key] = propagate(propagator, schema)
        found = known[key]
        return [*found] if isinstance(found, list) else found

    return look_up


def _shared_placements(
    propagate: Callable[[Any, Any], Any], lock: threading.RLock
) -> Callable[[Any, Any], Any]:
    known: dict[Any, Any] = {}

    def look_up(propagator: Any, schema: Any) -> Any:
        if (own := own_placement(schema)) is not None:
            return own
        meshes: list[DeviceMesh] = []

        def spec_key(spec: Any) -> object:
            meshes.append(spec.mesh)
            return spec.placements, spec.tensor_meta, spec.shard_order, spec.use_strided_shard_as_shard_order

        try:
            key = _key(schema, spec_key)
        except _NoKeyError:
            return propagate(propagator, schema)
        if not meshes or any(mesh is not meshes[0] for mesh in meshes):
            return propagate(propagator, schema)
        key = (key, _mesh_key(meshes[0]))
        with lock:
            if key in known:
                return _on_mesh(known[key], meshes[0])
            result = propagate(propagator, schema)
            if result.redistribute_schema is None:
                known[key] = _on_mesh(result, meshes[0])  # a copy: torch may modify the result
        return result

    return look_up


# Any: torch's result of a propagation.
def _on_mesh(result: Any, mesh: DeviceMesh) -> Any:
    """Copy a result onto a rank's own mesh, by which torch looks up the rank's groups."""

    def moved(spec: Any) -> Any:
        if isinstance(spec, tuple | list):
            return type(spec)(map(moved, spec))
        if spec is None:
            return None
        own = copy.copy(spec)
        own.mesh = mesh
        return own

    own = copy.copy(result)
    own.__dict__.pop("mesh", None)  # cached there after the first access
    own.output_spec = moved(result.output_spec)
    return own


# Any: the stubs lack the fields by which meshes are compared.
def _mesh_key(mesh: Any) -> object:
    """Return the key that the meshes of all ranks share: all fields of comparison except the rank's thread.

    ``mesh.mesh`` has the same values, but reading it runs operators that a watch of the rank would see.
    """
    return mesh._flatten_rank_map, mesh._layout, mesh.device_type, mesh.mesh_dim_names


# Any: an operator's schema, and the shape, stride and dtype of a tensor.
def own_shape(schema: Any) -> Any:
    """Return the shape of an operator's first argument if it is the result's by rule; inferring it takes longest.

    The rule covers detach, copies of contiguous tensors, and elementwise operators that write to their argument.
    """
    first, *others = schema.args_schema or (None,)
    if not isinstance(first, _classes().spec) or first.tensor_meta is None:
        return None
    meta = first.tensor_meta
    if schema.op is _ATEN.detach.default:
        return meta
    if schema.op is _ATEN.clone.default:
        is_plain = meta.stride == torch.empty(meta.shape, device="meta").stride()
        keeps = set(schema.kwargs_schema.values()) <= {torch.preserve_format}
        return meta if is_plain and keeps else None
    fits = all(_fits(other, meta) for other in (*others, *schema.kwargs_schema.values()))
    return meta if schema.op in _IN_PLACE and fits else None


# Any: an operator's schema, and torch's result of a propagation.
def own_placement(schema: Any) -> Any:
    """Return the placement of an operator's result if by rule it is that of all arguments.

    The rule covers the elementwise operators of `own_shape`, if no argument is a partial sum.
    """
    meta = own_shape(schema)
    if meta is None:
        return None
    arguments = (*schema.args_schema, *schema.kwargs_schema.values())
    first, *others = (a for a in arguments if isinstance(a, _classes().spec))
    is_alike = all(o.mesh is first.mesh and o.placements == first.placements for o in others)
    if not is_alike or any(type(p) not in {Shard, Replicate} for p in first.placements):
        return None
    if any(
        spec.shard_order != _classes().spec.compute_default_shard_order(spec.placements)
        for spec in (first, *others)
    ):
        return None
    spec = _classes().spec(first.mesh, first.placements, tensor_meta=meta)
    return _classes().output(spec)


def _fits(argument: object, meta: Any) -> bool:
    """Whether an argument needs no broadcasting that could change the result's shape."""
    if isinstance(argument, _classes().spec):
        return argument.tensor_meta is not None and argument.tensor_meta.shape == meta.shape
    return type(argument) in {int, float, bool}


# Any: missing in the stubs.
_ATEN: Any = torch.ops.aten
_IN_PLACE = frozenset(
    {
        _ATEN.add_.Tensor,
        _ATEN.addcdiv_.default,
        _ATEN.addcmul_.default,
        _ATEN.copy_.default,
        _ATEN.div_.Tensor,
        _ATEN.lerp_.Scalar,
        _ATEN.mul_.Tensor,
        _ATEN.sub_.Tensor,
        _ATEN.zero_.default,
    }
)


class _NoKeyError(Exception):
    """An operator has an argument of a type that cannot be compared."""


# Any: an operator's schema.
def _key(schema: Any, of_spec: Callable[[Any], object]) -> object:
    """Return all that the result can depend on: the operator and its arguments; ``of_spec`` describes tensors."""

    def of(argument: object) -> object:
        if isinstance(argument, _classes().spec):
            return of_spec(argument)
        if isinstance(argument, tuple | list):
            return (type(argument), *map(of, argument))
        if isinstance(argument, dict):
            return tuple((name, of(value)) for name, value in sorted(argument.items()))
        if argument is None or type(argument) in _PLAIN:
            return type(argument), argument  # 1, 1.0 and True are different arguments
        raise _NoKeyError

    return schema.op, torch.get_default_dtype(), of(schema.args_schema), of(schema.kwargs_schema)


_PLAIN = {bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
