"""One managed parameter: the optimizer's part of it, and the plain tensor that forward uses."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from shardproof.engine.reference.geometry import Geometry, local_part
from shardproof.engine.reference.mesh import DataMesh
from shardproof.engine.reference.torch_private import (
    concatenated,
    local_tensor,
    run_where_shards_lie,
    sets_grad_dtype,
    sharded_like,
    strided_shard,
)

# Attributes of parameters: the mark of a managed original, and the listener of an optimizer's parameter.
_MARK = "_is_sharded_elsewhere"
_LISTENER = "_step_listener"
_OWNERS = WeakTensorKeyDictionary()  # unsharded parameters, with weak references to their `FSDPParam`


def sharded_param_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the optimizer's parameter behind a gathered one; return any other parameter itself."""
    reference = _OWNERS.get(parameter)
    owner: FSDPParam | None = None if reference is None else reference()
    return parameter if owner is None else owner.sharded_param


@dataclass(frozen=True, slots=True)
class ParamLocation:
    """A place where a parameter is registered; a shared parameter has several."""

    module: nn.Module
    name: str

    def get(self) -> nn.Parameter | None:
        """Return the parameter registered here now."""
        return self.module._parameters.get(self.name)

    def set(self, parameter: nn.Parameter) -> None:
        """Register ``parameter`` here; bypasses setattr, which costs more than the rest of a switch."""
        if type(self.module).__setattr__ is nn.Module.__setattr__:
            self.module._parameters[self.name] = parameter
        else:
            setattr(self.module, self.name, parameter)

    def show(self, tensor: torch.Tensor) -> None:
        """Let the module read ``tensor`` under this name, and keep the registered parameter.

        Uses a module's own setattr, such as that of nn.LSTM with its list of weights.
        """
        if type(self.module).__setattr__ is not nn.Module.__setattr__:
            registered = self.get()
            setattr(self.module, self.name, tensor)
            if registered is None:
                self.module._parameters.pop(self.name, None)
            else:  # in the same place, so that parameters keep their order
                self.module._parameters[self.name] = registered
        self.module.__dict__[self.name] = tensor

    def name_from(self, names: Mapping[nn.Module, str]) -> str:
        """Name this place, where ``names`` holds those of modules."""
        prefix = names.get(self.module, "")
        return f"{prefix}.{self.name}" if prefix else self.name


class StepListener:
    """Holds a weak callback for optimizer steps over a parameter; a copy or a pickle has no callback.

    [Note: stale parameters] After a step, whole parameters that a group still holds differ from the shards. Tensor
    versions do not detect this: optimizers with loops in C++ do not increment them, and each rank would decide alone
    about a gather, which is collective. So every sharded parameter has a listener. One stateless hook on all of
    torch's optimizers notifies the listeners of the parameters that the optimizer has.
    """

    def __init__(self, on_step: Callable[[], None] | None = None) -> None:
        self._on_step = None if on_step is None else weakref.WeakMethod(on_step)

    def __reduce__(self) -> tuple[type[StepListener], tuple[()]]:
        return (StepListener, ())

    def attach(self, parameter: nn.Parameter) -> None:
        """Listen to the steps over ``parameter``; torch may swap a parameter's attributes when it converts."""
        setattr(parameter, _LISTENER, self)

    def notify(self) -> None:
        """Call the callback, if it still exists."""
        on_step = None if self._on_step is None else self._on_step()
        if on_step is not None:
            on_step()


def _optimizer_hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            listener = getattr(parameter, _LISTENER, None)
            if isinstance(listener, StepListener):
                listener.notify()


register_optimizer_step_post_hook(_optimizer_hook)


class PendingGradient(torch.Tensor):
    """The gradient of this rank's part while whole gradients accumulate: it has a shape, but no values yet."""

    # Any: as torch calls it.
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types it as that of an instance
        """Raise RuntimeError: zeros would be wrong, and no sum over ranks exists."""
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise RuntimeError(
            f".grad while gradients accumulate in no_sync: expected no use of values, got {func}: they are whole on "
            "each rank and not reduced yet; read or clip gradients after the backward that reduces, or clear them by "
            "setting .grad to None"
        )


def pending_grad(parameter: torch.Tensor) -> PendingGradient:
    """Return a gradient that is pending: it takes the memory of one element."""
    zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    return zero.expand(parameter.shape).as_subclass(PendingGradient)


class FSDPParam(ABC):
    """A parameter in its two forms: this rank's part, and the whole parameter while it is gathered.

    ``unsharded_param`` is made once per home in memory and keeps its identity, because autograd saves it in forward and
    reads it in backward: only its memory is allocated and freed.
    """

    def __init__(
        self,
        *,
        origin: nn.Parameter,
        locations: tuple[ParamLocation, ...],
        shape: torch.Size,
        data_axes: frozenset[int] = frozenset(),
    ) -> None:
        self.locations = locations
        self.shape = shape
        self.name = locations[0].name
        # The mark is the parameter's own: an id could be another object's by now.
        self.is_tied_elsewhere = getattr(origin, _MARK, False)
        setattr(origin, _MARK, True)
        self.unsharded_param: nn.Parameter | None = None
        self._gathered: torch.Tensor | None = None  # the memory of the whole parameter, which gathers write
        self._required_grad = False  # when both last agreed
        self._grad_dtypes: tuple[torch.dtype | None, ...] = ()  # the one set for gradients, if any
        self._step_listener = StepListener()
        self.inner = _described(origin)
        self._data_axes = data_axes

    def listen_to_steps(self, on_step: Callable[[], None]) -> None:
        """Call ``on_step`` when one of torch's optimizers has stepped over this parameter."""
        self._step_listener = StepListener(on_step)
        self._step_listener.attach(self.sharded_param)

    def show_accumulation(self) -> None:
        """Set a pending gradient on the optimizer's parameter, unless it has a gradient, to detect clearing."""
        if self.sharded_param.grad is None:
            self.sharded_param.grad = pending_grad(self.sharded_param)

    @property
    @abstractmethod
    def local(self) -> torch.Tensor:
        """This rank's part."""

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype of reduced gradients, and by default of held ones; None: the dtype in which they arrive."""
        return self._grad_dtypes[0] if self._grad_dtypes else self.local.dtype

    @property
    @abstractmethod
    def sharded_param(self) -> nn.Parameter:
        """The optimizer's parameter: this rank's part, or a parameter that contains it."""

    @property
    def is_replaced(self) -> bool:
        """Whether the module has another parameter than either form, as after an assignment by the caller."""
        found = self.locations[0].get()
        return not (found is None or found is self.unsharded_param or found is self.sharded_param)

    @abstractmethod
    def current(self) -> torch.Tensor:
        """Return this rank's part as the modules hold it, replaced or not."""

    @abstractmethod
    def to_unsharded(self) -> None:
        """Let modules see the whole parameter."""

    @abstractmethod
    def to_sharded(self) -> None:
        """Let modules see this rank's part."""

    @abstractmethod
    def accumulate_sharded_grad(self, local: torch.Tensor) -> None:
        """Add a reduced gradient (this rank's part) to the gradient of the optimizer's parameter."""

    @abstractmethod
    def _whole(self, memory: torch.Tensor) -> torch.Tensor:
        """View 1-D memory in natural order as the whole parameter."""

    def init_unsharded_param(self, memory: torch.Tensor, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Make the unsharded parameter over ``memory`` (1-D); ``on_gradient`` runs when its gradient is whole."""
        self._init_from(self._whole(memory), on_gradient)

    def _init_from(self, whole: torch.Tensor, on_gradient: Callable[[torch.Tensor], None]) -> None:
        before = self.unsharded_param
        self._gathered = whole
        if before is not None and (before.dtype, before.shape, before.device) == (
            whole.dtype,
            whole.shape,
            whole.device,
        ):
            # Graphs that are open add gradients to this parameter; a DTensor does not compute with its own ``data``.
            _memory_of(before).data = _memory_of(whole)
            return
        pending = None if before is None else before.grad
        self.unsharded_param = nn.Parameter(whole, requires_grad=self.sharded_param.requires_grad)
        self.unsharded_param.grad_dtype = None  # what waits is cast when it is held, and outlives a cast
        self.unsharded_param.grad = pending
        self._required_grad = self.sharded_param.requires_grad
        _OWNERS[self.unsharded_param] = weakref.ref(self)
        self._on_gradient = on_gradient
        self._is_hooked = False
        self._hook()

    def return_to_gathered(self) -> None:
        """Let the whole parameter have the memory that gathers write, if forward gave it other memory.

        `nn.LSTM` and its kind move the weights that they meet into one block, where cuDNN computes.
        """
        assert self.unsharded_param is not None
        assert self._gathered is not None
        shown, gathered = _memory_of(self.unsharded_param), _memory_of(self._gathered)
        if shown.data_ptr() != gathered.data_ptr():
            shown.data = gathered

    def sync_requires_grad(self) -> None:
        """Set the same requires_grad on the whole and the optimizer's parameter after the caller changed one."""
        whole, owned = self.unsharded_param, self.sharded_param
        assert whole is not None
        if whole.requires_grad == owned.requires_grad == self._required_grad:
            return
        if whole.requires_grad != self._required_grad:
            owned.requires_grad_(whole.requires_grad)
        elif owned.requires_grad != self._required_grad:
            whole.requires_grad_(owned.requires_grad)
        self._required_grad = owned.requires_grad
        self._hook()

    @property
    def has_unsharded_grad(self) -> bool:
        """Whether an unsharded gradient waits to be reduced."""
        return self.unsharded_param is not None and self.unsharded_param.grad is not None

    def hold_unsharded_grad(self, dtype: torch.dtype | None) -> None:
        """Keep the unsharded gradient for a later reduction in ``dtype``, in which autograd goes on summing it."""
        whole = self.unsharded_param
        if whole is not None and whole.grad is not None and dtype not in {None, whole.grad.dtype}:
            whole.grad = whole.grad.to(dtype)

    def pop_unsharded_grad(self, dtype: torch.dtype | None) -> torch.Tensor:
        """Return and drop the unsharded gradient: plain, of shape ``shape``; zeros if there is none.

        ``dtype`` is the dtype of a reduction over tensor-parallel ranks, if one is needed.
        """
        whole = self.unsharded_param
        assert whole is not None
        gradient, whole.grad = whole.grad, None
        if gradient is None:
            return torch.zeros(self.shape, dtype=dtype or whole.dtype, device=whole.device)
        return self._plain(gradient, dtype)

    def laid_out(self, whole: torch.Tensor) -> torch.Tensor:
        """Wrap the data-parallel part as a DTensor over the other axes, if the parameter was a DTensor."""
        return whole if self.inner is None else sharded_like(self.inner, whole)

    def drop_unsharded_grad(self) -> None:
        """Drop the unsharded gradients of a failed iteration."""
        if self.unsharded_param is not None:
            self.unsharded_param.grad = None

    def _hook(self) -> None:
        if self.unsharded_param is not None and self.unsharded_param.requires_grad and not self._is_hooked:
            # Weak, because the garbage collector does not find a cycle through autograd's hooks.
            arrive = weakref.WeakMethod(self._on_gradient)

            def on_gradient(unsharded: torch.Tensor) -> None:
                method = arrive()
                if method is not None:
                    method(unsharded)

            self.unsharded_param.register_post_accumulate_grad_hook(on_gradient)
            self._is_hooked = True

    def _plain(self, gradient: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Return this rank's part of a tensor-parallel gradient, laid out as the parameter is."""
        if not isinstance(gradient, DTensor) or self.inner is None:
            return gradient
        # The engine reduces it over the data axes, even if it is a partial sum.
        pairs = enumerate(zip(gradient.placements, self.inner.placements, strict=True))
        placements = tuple(fresh if axis in self._data_axes else own for axis, (fresh, own) in pairs)
        if gradient.placements != placements:
            # Cast first: this may reduce over the tensor-parallel axis, and must do so in ``dtype``.
            wide = gradient if dtype is None else gradient.to(dtype)
            assert isinstance(wide, DTensor)
            gradient = wide.redistribute(placements=placements)
        return gradient.to_local()


class ShardedParam(FSDPParam):
    """A parameter whose part is a tensor of its own.

    ``sharded`` is a DTensor over the data-parallel mesh (and the tensor-parallel one, if it was a DTensor before).
    """

    def __init__(
        self,
        *,
        sharded: nn.Parameter,
        origin: nn.Parameter,
        locations: tuple[ParamLocation, ...],
        geometry: Geometry,
        data_axes: frozenset[int],
    ) -> None:
        super().__init__(origin=origin, locations=locations, shape=geometry.shape, data_axes=data_axes)
        self.sharded = sharded
        self._local = local_tensor(self._template)
        self._adopt_grad_dtype(sharded)
        self._seen = _fingerprint(sharded)
        self.geometry = geometry
        self.keeps_dtype = False  # although the unit's others compute in another dtype

    @property
    def sharded_param(self) -> nn.Parameter:
        """The DTensor."""
        return self.sharded

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, of shape ``geometry.shard_shape``."""
        return self._local

    def current(self) -> nn.Parameter:
        """Return the sharded parameter as the modules hold it, replaced or not."""
        found = self.locations[0].get()
        return self.sharded if found is None or found is self.unsharded_param else found

    def reset_sharded_param(self) -> bool:
        """Adopt a parameter that was moved, cast or replaced, as by loading; return whether it was."""
        found = self.current()
        if found is self.sharded and _fingerprint(found) == self._seen:
            return False
        if not isinstance(found, DTensor) or found.placements != self._template.placements:
            raise RuntimeError(
                f"parameter {self.name!r}: expected a DTensor with placements {self._template.placements}, "
                f"got {type(found).__name__} of shape {tuple(found.shape)} registered in its place; "
                "change parameters before sharding, or load DTensors"
            )
        self._adopt_grad_dtype(found)
        self._step_listener.attach(found)
        self._local, self._seen = local_tensor(found), _fingerprint(found)
        if found is not self.sharded:
            self.sharded = found
            self.to_sharded()
        return True

    def _adopt_grad_dtype(self, found: nn.Parameter) -> None:
        """Keep the parameter's grad_dtype, which conversion and loading lose."""
        for parameter in (self.sharded, found):
            if sets_grad_dtype(parameter):
                self._grad_dtypes = (parameter.grad_dtype,)
        if self._grad_dtypes and not sets_grad_dtype(found):
            found.grad_dtype = self._grad_dtypes[0]

    def init_from(self, whole: torch.Tensor, on_gradient: Callable[[torch.Tensor], None]) -> None:
        """Make the unsharded parameter from an extension's result, which may end in padding."""
        if whole.shape != self.shape:
            whole = torch.as_strided(whole, self.shape, self.geometry.whole_stride, storage_offset=0)
        self._init_from(self.laid_out(whole), on_gradient)

    def to_unsharded(self) -> None:
        """Let modules see the plain tensor."""
        self.sync_requires_grad()
        assert self.unsharded_param is not None
        for location in self.locations:
            location.set(self.unsharded_param)

    def to_sharded(self) -> None:
        """Let modules see the DTensor."""
        if self.unsharded_param is not None:
            self.sync_requires_grad()
        for location in self.locations:
            location.set(self.sharded)

    def accumulate_sharded_grad(self, local: torch.Tensor) -> None:
        """Add a reduced gradient (this rank's shard) to the sharded parameter's, in the dtype of that."""
        local = local.to(self.grad_dtype or local.dtype)
        if self.sharded.grad is None:
            self.sharded.grad = sharded_like(self._template, local)
            return
        existing = self.sharded.grad
        (local_tensor(existing) if isinstance(existing, DTensor) else existing).add_(local)

    @property
    def _template(self) -> DTensor:
        if not isinstance(self.sharded, DTensor):
            raise RuntimeError(
                f"parameter {self.name!r}: expected the DTensor that fully_shard made, got a "
                f"{type(self.sharded).__name__}; load DTensors, or load before sharding"
            )
        return self.sharded

    def _whole(self, memory: torch.Tensor) -> torch.Tensor:
        # .data has its own version counter, so that autograd does not treat another gather as an in-place
        # change of a tensor that forward saved.
        return self.laid_out(self.geometry.whole_part(memory).data)


def _memory_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that computes: a DTensor's local one."""
    return local_tensor(parameter) if isinstance(parameter, DTensor) else parameter


def _fingerprint(sharded: nn.Parameter) -> tuple[object, ...]:
    """Return a key of a sharded parameter that changes with a move, a cast or another grad_dtype."""
    if not isinstance(sharded, DTensor):
        return ()
    local = local_tensor(sharded)
    # Subclasses that pack themselves may have no memory of their own, or keep the packed tensor as an attribute.
    address = local.data_ptr() if type(local) is torch.Tensor else 0
    return id(local), address, local.dtype, len(vars(local)), sharded.grad_dtype


def _described(origin: nn.Parameter) -> DTensor | None:
    """Return a parameter's DTensor layout from before sharding, without its memory."""
    detached: torch.Tensor = origin.detach()
    if not isinstance(detached, DTensor):
        return None
    return sharded_like(detached, torch.empty(0, dtype=detached.dtype))


def cut_parameter(
    parameter: nn.Parameter,
    locations: tuple[ParamLocation, ...],
    mesh: DataMesh,
    geometry: Geometry,
    *,
    home: torch.device,
    pins: bool,
) -> ShardedParam:
    """Shard ``parameter`` over ``mesh``, keep the shard on ``home`` and register the result at its sites."""
    whole = parameter.detach()
    shard = geometry.shard_of(local_part(parameter)).clone(memory_format=torch.contiguous_format)
    spread = _over_all_axes(shard, whole, mesh, geometry.dim)
    if not shard.is_meta:
        kept = shard.to(home)  # from_local moves other tensors to the mesh's device
        spread = sharded_like(spread, kept.pin_memory() if pins else kept)
    if shard.is_complex():
        _keep_complex_views_in_place()
    sharded = nn.Parameter(spread, requires_grad=parameter.requires_grad)
    if sets_grad_dtype(parameter):
        sharded.grad_dtype = parameter.grad_dtype
    made = ShardedParam(
        sharded=sharded,
        origin=parameter,
        locations=locations,
        geometry=geometry,
        data_axes=mesh.data_axes,
    )
    made.to_sharded()
    return made


def _over_all_axes(shard: torch.Tensor, whole: torch.Tensor, mesh: DataMesh, dim: int) -> DTensor:
    """Wrap this rank's shard as a DTensor over the data-parallel axes and its earlier axes."""
    device_mesh = mesh.mesh
    inner: tuple[Placement, ...] = ()
    placement: Placement = Shard(dim)
    if isinstance(whole, DTensor):
        axes = [axis for axis in range(whole.device_mesh.ndim) if axis not in mesh.data_axes]
        inner = tuple(whole.placements[axis] for axis in axes)
        if mesh.whole is None:
            device_mesh = concatenated(mesh.mesh, whole.device_mesh)
        elif axes:
            names = mesh.whole.mesh_dim_names or ()
            device_mesh = concatenated(mesh.mesh, *(mesh.whole[names[axis]] for axis in axes))
        split = _inner_shards(whole, dim)
        # The tensor-parallel axis cut the dim first although it comes last in the mesh.
        placement = strided_shard(dim, split) if split > 1 else placement
    outer = mesh.placements(placement)
    return DTensor.from_local(
        shard, device_mesh, (*outer, *inner), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _inner_shards(whole: DTensor, dim: int) -> int:
    split = 1
    for axis, placement in enumerate(whole.placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            split *= whole.device_mesh.size(axis)
    return split


@cache  # once in a process
def _keep_complex_views_in_place() -> None:
    """Make DTensor run ``view_as_real`` on a shard in place.

    [Note: views of complex shards] Adam and others update a complex parameter through ``torch.view_as_real``, which
    DTensor treats as a split of the last dim. If that dim is sharded, as of a bias, and ranks have different numbers
    of elements, DTensor gathers them first: the view is of a copy, and the optimizer's update is lost. The gather is
    unnecessary, because both parts of a complex number are on the same rank.
    """
    run_where_shards_lie(torch.ops.aten.view_as_real.default)
