"""Concatenated parameters: one flat parameter for each unit, of which each rank has an interval."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardproof.engine.reference.autograd_hooks import tensors_in
from shardproof.engine.reference.geometry import local_part
from shardproof.engine.reference.mesh import Ranks
from shardproof.engine.reference.param_layout import Allocate, UnshardedMemory, storage_signature
from shardproof.engine.reference.parameter import FSDPParam, ParamLocation, PendingGradient
from shardproof.engine.reference.torch_private import after_accumulation

FLAT_NAME = "_flat_param"
"""The name under which a wrapper registers its flat parameter."""

_ALIGNMENT_BYTES = 16  # the width of vectorised loads


class FlatParameter(nn.Parameter):
    """This rank's share of all parameters of one unit as one 1-D tensor: the optimizer updates it."""


class UnseenShard(nn.Parameter):
    """This rank's part of a parameter, for the forward around its wrapper: nothing with a gradient is computed from it.

    Values without gradients, as of a moving average, are read and written in the part's own memory.
    """

    whose: str

    # Any: as torch calls it.
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise RuntimeError for a result with a gradient: it would be of each rank's own part."""
        result = super().__torch_function__(func, types, args, kwargs or {})
        if any(tensor.grad_fn is not None for tensor in tensors_in(result)):
            whose = next(t.whose for t in tensors_in((args, kwargs)) if isinstance(t, cls))
            raise RuntimeError(
                f"parameter {whose!r}: expected no use with gradients in the forward around its wrapper, got "
                f"{getattr(func, '__name__', func)}: this rank has a part of it there; compute in the forward of its "
                "own module, or after that with SHARD_GRAD_OP, or wrap only the module around it"
            )
        return result


class FlatPiece(FSDPParam):
    """One parameter of a unit: from ``start`` on in the flat one; this rank has ``local_numel`` elements of it.

    Those begin ``offset`` elements into the rank's share, and ``first`` into the flattened parameter. With
    ``is_visible`` modules have them as a parameter of their own, else as a plain tensor beside the flat one.
    """

    def __init__(
        self,
        flat: FlatLayout,
        origin: nn.Parameter,
        locations: tuple[ParamLocation, ...],
        start: int,
        *,
        is_visible: bool,
    ) -> None:
        super().__init__(origin=origin, locations=locations, shape=local_part(origin).shape)
        self.start = start
        self._flat = flat
        share = flat.share_numel
        last = start + self.shape.numel()
        begin = min(max(start, flat.rank * share), last)
        end = max(min(last, (flat.rank + 1) * share), begin)
        self.local_numel = end - begin
        self.offset = begin - flat.rank * share if self.local_numel else 0
        self.first = begin - start if self.local_numel else 0
        self._visible = nn.Parameter(torch.empty(0), origin.requires_grad) if is_visible else None
        # What modules list in place of the visible parameter: now, and before and after their part of a forward.
        self._listed: torch.Tensor | None = None
        self._stand_in: torch.Tensor | None = None
        self._kept_at = 0  # where the whole parameter is that waits for its backward

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements: 1-D, or in the parameter's own shape if one rank has everything."""
        part = self._flat.memory[self.offset : self.offset + self.local_numel]
        return part.view(self.shape) if self._flat.num_ranks == 1 else part

    @property
    def is_visible(self) -> bool:
        """Whether modules have this part as a parameter."""
        return self._visible is not None

    @property
    def sharded_param(self) -> nn.Parameter:
        """The visible parameter, or the flat one."""
        if self._visible is not None:
            return self._visible
        assert self._flat.flat_parameter is not None
        return self._flat.flat_parameter

    def current(self) -> torch.Tensor:
        """Return the tensor in the modules, unless it is the whole parameter."""
        if self._visible is None:
            return self.local
        found = self.locations[0].get()
        # The wrapped parameter is a DTensor, which cannot be a part of itself.
        return self._visible if found is None or self._is_own(found) or isinstance(found, DTensor) else found

    @property
    def is_replaced(self) -> bool:
        """Whether the module has a parameter of the caller's, or one whose ``.data`` are the caller's."""
        whole = self.unsharded_param
        if self._kept_at and whole is not None and whole.data_ptr() != self._kept_at:
            return True
        return self.locations[0].get() is not self._listed and super().is_replaced

    def is_in_place(self) -> bool:
        """Whether the visible parameter is still a view of the rank's share."""
        found, local = self.current(), self.local
        is_same = found is self._visible and found.dtype == local.dtype and found.device == local.device
        return is_same and (not self.local_numel or found.data_ptr() == local.data_ptr())

    def rebind(self) -> None:
        """Make the modules' tensor a view of the rank's share again; adopts a parameter that replaced the original."""
        if self._visible is not None:
            found = self.current()
            assert isinstance(found, nn.Parameter)
            self._visible = found
            self._visible.data = self.local
        self._step_listener.attach(self.sharded_param)
        self.to_sharded()

    def to_unsharded(self) -> None:
        """Register the whole tensor in the modules: as a parameter, or as a plain attribute beside the flat one."""
        self.sync_requires_grad()
        assert self.unsharded_param is not None
        for location in self.locations:
            if self._visible is None:
                location.show(self.unsharded_param)
            else:
                location.set(self.unsharded_param)

    def enter_forward(self) -> None:
        """Let the module list the whole parameter, which may be whole from before."""
        if self._visible is not None and self.locations[0].get() is not self.unsharded_param:
            self.to_unsharded()

    def leave_forward(self, *, lists_whole: bool) -> None:
        """List the whole parameter, if that stays, or else the optimizer's, which callers clear and replace.

        Modules go on to compute with the whole one. It is listed as a view: gradients reach it, and no optimizer takes
        what is no leaf. A reduced gradient that waits for the step stays in sight: its parameter is listed.
        """
        if self._visible is None or self.unsharded_param is None:
            return
        self._kept_at = self.unsharded_param.data_ptr() if lists_whole else 0
        is_reduced = self._visible.grad is not None and not isinstance(self._visible.grad, PendingGradient)
        self._list(_view(self.unsharded_param) if lists_whole and not is_reduced else self._visible)
        for location in self.locations:
            location.module.__dict__[location.name] = self.unsharded_param

    def enter_outer_forward(self) -> None:
        """Until the module itself runs, list what the forward around it may use."""
        assert self._visible is not None
        if self._flat.is_shared and self.unsharded_param is not None:
            self._stand_in = _view(self.unsharded_param)
        else:
            unseen = UnseenShard(self._visible.detach(), self._visible.requires_grad)
            unseen.whose = self.name
            self._stand_in = unseen
        self._list(self._stand_in)

    def leave_outer_forward(self) -> None:
        """List the optimizer's parameter, unless the module has run and is whole for its backward."""
        is_idle = self._listed is self._stand_in or not torch.is_grad_enabled()
        self._stand_in = None
        if is_idle and self._visible is not None:
            self._list(self._visible)

    def show_accumulation(self) -> None:
        super().show_accumulation()
        if self._visible is not None:
            self._list(self._visible)

    def _list(self, tensor: torch.Tensor) -> None:
        """Let modules list ``tensor``, unless they have a parameter of the caller's."""
        for location in self.locations:
            if self._is_own(location.get()):
                location.module._parameters[location.name] = tensor  # type: ignore[assignment]  # as torch's wrapper
        self._listed = tensor

    def _is_own(self, found: torch.Tensor | None) -> bool:
        return found is self._visible or found is self.unsharded_param or found is self._listed

    def to_sharded(self) -> None:
        """Register this rank's elements: as a parameter, or as a plain attribute beside the flat one."""
        for location in self.locations:
            if self._visible is None:
                location.module._parameters.pop(location.name, None)
                location.show(self.local)
            else:
                location.module.__dict__.pop(location.name, None)
                location.set(self._visible)
        self._listed, self._kept_at = None, 0
        if self._stand_in is not None:
            self._list(self._stand_in)

    def show_whole(self, whole: nn.Parameter) -> None:
        """Register ``whole`` as the module's parameter, in place of the optimizer's."""
        for location in self.locations:
            location.module.__dict__.pop(location.name, None)
            location.set(whole)

    def accumulate_sharded_grad(self, local: torch.Tensor) -> None:
        """Add this rank's elements of a reduced gradient to those of the visible parameter."""
        assert self._visible is not None
        _add_gradient(self._visible, local.view(self._visible.shape))

    def _whole(self, memory: torch.Tensor) -> torch.Tensor:
        # .data: a version counter of its own, see ShardedParam.
        return self.laid_out(memory.view(self.shape).data)

    def own_part(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, along other mesh axes, of a tensor with the shape of the whole parameter."""
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if self.inner is None:
            return whole
        return distribute_tensor(
            whole, self.inner.device_mesh, self.inner.placements, src_data_rank=None
        ).to_local()

    @property
    def global_shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self.shape if self.inner is None else self.inner.shape


class FlatLayout:
    """Parameters one after the other, aligned, then cut into equal shares. Implements `ParamLayout`.

    ``parameters``: with all places of each. ``holder`` is the module that a flat parameter is registered on; None
    leaves every parameter visible under its name. Raises ValueError for parameters that one flat parameter cannot
    contain together: different dtypes, or trainable and frozen ones.
    """

    packs = False
    keeps_apart = False

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, tuple[ParamLocation, ...]]],
        ranks: Ranks,
        *,
        home: torch.device,
        pins: bool,
        holder: nn.Module | None,
    ) -> None:
        origins = [origin for origin, _ in parameters]
        _check_uniform(parameters, is_one=holder is not None)
        self.num_ranks = ranks.shard_size
        self.is_shared = False  # whether whole parameters are the shares themselves
        self.rank = ranks.shard_rank
        starts, total = _laid_out(origins, is_aligned=ranks.shard_size > 1)
        self.share_numel = -(-total // self.num_ranks)
        whole = torch.zeros(
            self.share_numel * self.num_ranks, dtype=origins[0].dtype, device=origins[0].device
        )
        for origin, start in zip(origins, starts, strict=True):
            own = local_part(origin)
            whole[start : start + own.numel()].copy_(own.reshape(-1))
        share = self.share_of(whole).clone().to(home)
        self.memory = share.pin_memory() if pins else share
        self.holder = holder
        self.flat_parameter: FlatParameter | None = None
        if holder is not None:
            self.flat_parameter = FlatParameter(self.memory, origins[0].requires_grad)
            holder.register_parameter(FLAT_NAME, self.flat_parameter)
        self.parameters = tuple(
            FlatPiece(self, origin, locations, start, is_visible=holder is None)
            for (origin, locations), start in zip(parameters, starts, strict=True)
        )
        self._rebind()

    @property
    def is_meta(self) -> bool:
        return self.memory.is_meta

    def reset_sharded_params(self) -> None:
        """Move or cast the rank's share like its parameters."""
        if self.holder is not None:
            if replaced := [piece.name for piece in self.parameters if piece.is_replaced]:
                raise RuntimeError(
                    f"parameters {replaced}: expected none beside the flat parameter that contains them, got some "
                    "assigned, which forward would not use; change values in summon_full_params"
                )
            found = self.holder._parameters[FLAT_NAME]
            assert isinstance(found, nn.Parameter)
            detached: torch.Tensor = found.detach()
            if found is self.flat_parameter and detached.data_ptr() == self.memory.data_ptr():
                return
            self.flat_parameter = found  # type: ignore[assignment]  # torch keeps a parameter's class as it likes
            self.memory = detached
        elif all(piece.is_in_place() for piece in self.parameters):
            return
        else:
            self.memory = self._collected()
        self._rebind()

    def _rebind(self) -> None:
        for piece in self.parameters:
            piece.rebind()
        self.signature = storage_signature(self.parameters, is_shared=self.num_ranks == 1)

    def init_unsharded(
        self,
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        on_gradient: Callable[[torch.Tensor], None],
        where_gathers_start: Callable[[], AbstractContextManager[object]],
    ) -> UnshardedMemory:
        """Create one tensor for all, into which gathers write; with one rank and one dtype, return its share.

        Nothing here packs itself, where gathers start or elsewhere.
        """
        dtype = dtype if dtype is not None and self.memory.is_floating_point() else self.memory.dtype
        blocks: list[torch.Tensor] = []
        flat = self.memory
        if self.num_ranks > 1 or dtype != self.memory.dtype or device != self.memory.device:
            numel = self.num_ranks * self.share_numel
            with torch.inference_mode(False):
                blocks = [torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device=device)]
                flat = blocks[0].view(dtype)
        self.is_shared = not blocks
        for piece in self.parameters:
            piece.init_unsharded_param(flat[piece.start : piece.start + piece.shape.numel()], on_gradient)
        return UnshardedMemory(
            blocks,
            [flat.view(self.num_ranks, self.share_numel)],
            numels=[self.share_numel],
            dtypes=[dtype],
            is_flat=True,
            single=flat if blocks else None,
        )

    def share_of(self, whole: torch.Tensor) -> torch.Tensor:
        """View this rank's share of a whole flat tensor."""
        return whole.view(self.num_ranks, self.share_numel)[self.rank]

    def copy_in(self, out: torch.Tensor) -> None:
        out.copy_(self.memory, non_blocking=True)

    def copy_in_gradients(
        self, parameters: Sequence[FSDPParam], gradients: list[torch.Tensor], allocate: Allocate
    ) -> torch.Tensor:
        """Lay gradients out like the parameters, with zeros for absent ones and in gaps."""
        flat = allocate(self.num_ranks * self.share_numel)
        found = dict(zip(parameters, gradients, strict=True))
        gradients.clear()
        rows, end = [], 0
        for piece in (*self.parameters, None):
            start = flat.numel() if piece is None else piece.start
            if start > end:
                rows.append(torch.zeros((), dtype=flat.dtype, device=flat.device).expand(start - end))
            if piece is None:
                break
            gradient = found.pop(piece, None)
            end = start + piece.shape.numel() if gradient is not None else start
            if gradient is not None:
                rows.append(gradient.reshape(-1))
        torch.cat(rows, out=flat)
        return flat

    def parts(
        self, parameters: Sequence[FSDPParam], reduced: torch.Tensor
    ) -> Iterator[tuple[FSDPParam, torch.Tensor]]:
        """Yield each parameter with its elements."""
        for piece in parameters:
            assert isinstance(piece, FlatPiece)
            yield piece, reduced[piece.offset : piece.offset + piece.local_numel]

    def write_gradients(self, parameters: Sequence[FSDPParam], reduced: torch.Tensor) -> None:
        """Add to the gradient of the flat parameter, or to those of the visible ones."""
        if self.flat_parameter is not None:
            _add_gradient(self.flat_parameter, reduced)
            after_accumulation(self.flat_parameter)
            return
        for piece, part in self.parts(parameters, reduced):
            piece.accumulate_sharded_grad(part)
            after_accumulation(piece.sharded_param)

    def _collected(self) -> torch.Tensor:
        """Collect the modules' current tensors in one share again."""
        found = [piece.current().detach() for piece in self.parameters]
        kinds = {(t.dtype, t.device) for t in found}
        if len(kinds) > 1:
            raise RuntimeError(
                f"parameters {[p.name for p in self.parameters]}: expected one dtype and device, as they are parts of "
                f"one flat parameter, got {sorted(map(str, kinds))}; convert the whole model"
            )
        memory = torch.zeros(self.share_numel, dtype=found[0].dtype, device=found[0].device)
        for piece, tensor in zip(self.parameters, found, strict=True):
            if tensor.numel() != piece.local_numel:
                raise RuntimeError(
                    f"parameter {piece.name!r}: expected the {piece.local_numel} elements of this rank, got "
                    f"{tensor.numel()} registered in their place; change parameters in summon_full_params"
                )
            memory[piece.offset : piece.offset + piece.local_numel].copy_(tensor.reshape(-1))
        return memory


def _view(whole: nn.Parameter) -> torch.Tensor:
    with torch.enable_grad():
        return whole.view_as(whole)


def _laid_out(origins: Sequence[nn.Parameter], *, is_aligned: bool) -> tuple[list[int], int]:
    """Return where each parameter starts, in elements, and where the last one ends.

    Replicas are not aligned: the gaps between parameters would be all-reduced with the gradients.
    """
    step = max(1, _ALIGNMENT_BYTES // origins[0].dtype.itemsize) if is_aligned else 1
    starts, end = [], 0
    for origin in origins:
        starts.append(math.ceil(end / step) * step)
        end = starts[-1] + local_part(origin).numel()
    return starts, end


def _check_uniform(
    parameters: Sequence[tuple[nn.Parameter, tuple[ParamLocation, ...]]], *, is_one: bool
) -> None:
    dtypes = {origin.dtype for origin, _ in parameters}
    names = [locations[0].name for _, locations in parameters]
    if len(dtypes) > 1:
        raise ValueError(
            f"flat parameter of {names}: Must flatten tensors with uniform dtype, got {sorted(map(str, dtypes))}; "
            "cast them, or wrap the modules of each dtype apart"
        )
    trained = sum(origin.numel() for origin, _ in parameters if origin.requires_grad)
    if not trained or all(origin.requires_grad for origin, _ in parameters):
        return
    if is_one:
        raise ValueError(
            f"flat parameter of {names}: Must flatten tensors with uniform requires_grad when use_orig_params=False, "
            "got trainable and frozen ones; wrap them apart, or try use_orig_params=True"
        )
    total = sum(origin.numel() for origin, _ in parameters)
    warnings.warn(
        f"parameters {names} of one wrapper: expected trainable or frozen ones alone, got both, so that gradients of "
        f"{total} elements are reduced for {trained} that are trained; wrap the frozen ones apart",
        stacklevel=2,
    )


def _add_gradient(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.grad is not None and not isinstance(parameter.grad, PendingGradient):
        parameter.grad.add_(gradient)
    elif gradient.dtype == parameter.dtype:
        parameter.grad = gradient
    else:  # autograd (2.13) requires a gradient of the parameter's dtype; .data accepts any other
        parameter.grad = torch.empty_like(parameter)
        parameter.grad.data = gradient
