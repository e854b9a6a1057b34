"""The wrapper: ``FullyShardedDataParallel``, with the interface of torch's class of that name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    OffloadPolicy,
    ShardingStrategy,
)

from shardproof.engine.reference.fsdp1.clip_wrapped import clip_by_norm
from shardproof.engine.reference.fsdp1.flat import FlatLayout, FlatPiece
from shardproof.engine.reference.fsdp1.full_params import (
    FullParamsOptions,
    cast_buffers,
    clean_name,
    layout_of,
    summon_full_params,
)
from shardproof.engine.reference.fsdp1.init import (
    HYBRID,
    Ignored,
    ProcessGroups,
    WrapperPrecision,
    ignored_states,
    prepare_states,
    rank_groups,
    wrap_inside,
)
from shardproof.engine.reference.fsdp1.state_dict import Importer, default_settings
from shardproof.engine.reference.fsdp1.state_dict_methods import StateDictMethods
from shardproof.engine.reference.fsdp_state import BackwardPrefetchTime, FSDPState
from shardproof.engine.reference.fully_shard import unmanaged
from shardproof.engine.reference.param_group import FSDPParamGroup
from shardproof.engine.reference.parameter import sharded_param_of
from shardproof.engine.reference.root_state import RootState
from shardproof.engine.reference.torch_private import optimizers_in_backward

_FREED_AFTER_FORWARD = frozenset({ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD})

_PREFETCH_TIMES = {
    BackwardPrefetch.BACKWARD_PRE: BackwardPrefetchTime.FIRST,
    BackwardPrefetch.BACKWARD_POST: BackwardPrefetchTime.LAST,
    None: BackwardPrefetchTime.NEVER,
}


class FullyShardedDataParallel(StateDictMethods):
    """Shard the parameters of ``module`` that belong to no wrapper below, concatenated, as one communication group.

    Takes the arguments of ``torch.distributed.fsdp.FullyShardedDataParallel``, and uses its enums and configs. A rank
    has an interval of the flattened parameters: with ``use_orig_params`` the optimizer receives each parameter's part
    of it by name (1-D, maybe empty), else one `FlatParameter`. Build the optimizer afterwards.

    Raises ValueError, TypeError or RuntimeError for arguments that exclude each other and for parameters that cannot be
    sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroups = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            warnings.warn(
                f"FSDP will not all-gather parameters for containers that do not implement forward: {type(module)}",
                stacklevel=2,
            )
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.cpu_offload = cpu_offload or CPUOffload()
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        # Here a unit requests its own gather and the next one, never more, whatever the limit is.
        self.limit_all_gathers = limit_all_gathers
        self.is_flat = not use_orig_params
        self.state_dict_settings = default_settings()
        self.is_summoned = False
        self._known_inside: tuple[FlatPiece, ...] | None = None
        self.buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        self.ignored = _ignored(module, ignored_modules, ignored_states)
        self.sharding_strategy, self.ranks = rank_groups(
            sharding_strategy or ShardingStrategy.FULL_SHARD,
            process_group,
            device_mesh,
            is_shared=auto_wrap_policy is not None,
        )
        if auto_wrap_policy is not None:
            wrap_inside(
                type(self),
                module,
                auto_wrap_policy,
                self.ignored,
                {
                    "process_group": None
                    if device_mesh is not None
                    else self._groups_of_children(process_group),
                    "sharding_strategy": sharding_strategy,
                    "cpu_offload": cpu_offload,
                    "backward_prefetch": backward_prefetch,
                    "mixed_precision": mixed_precision,
                    "param_init_fn": param_init_fn,
                    "device_id": device_id,
                    "sync_module_states": sync_module_states,
                    "forward_prefetch": forward_prefetch,
                    "limit_all_gathers": limit_all_gathers,
                    "use_orig_params": use_orig_params,
                    "ignored_states": self.ignored.parameters,
                    "device_mesh": device_mesh,
                },
            )
        self.compute_device = prepare_states(
            module, self.ignored, param_init_fn, device_id, self._all_groups() if sync_module_states else ()
        )
        self._fsdp_state = self._make_state(module)
        self._fsdp_wrapped_module = module
        self.register_forward_pre_hook(self._begin_training, prepend=True)
        self._importer = Importer(self)

    # The module inside ------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The innermost module: the one inside a checkpoint wrapper, if that is wrapped."""
        inner: nn.Module = getattr(
            self._fsdp_wrapped_module, "_checkpoint_wrapped_module", self._fsdp_wrapped_module
        )
        return inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module on whole parameters: the unit's hooks gather and free them around this.

        Meanwhile they are the module's parameters. Afterwards they are listed as long as the strategy keeps them, and
        else the optimizer's: see `FlatPiece.leave_forward`. A forward around other wrappers may use their parameters
        once they have run, if they are whole then: see `UnseenShard`.
        """
        is_outermost = self._root_state().is_outermost(self._fsdp_state)
        inside = self._pieces_inside() if is_outermost else ()
        for piece in inside:
            piece.enter_outer_forward()
        for piece in self._pieces():
            piece.enter_forward()
        try:
            return self._fsdp_wrapped_module(*args, **kwargs)
        finally:
            is_kept = self.sharding_strategy not in _FREED_AFTER_FORWARD
            for piece in self._pieces():
                piece.leave_forward(lists_whole=is_kept and (torch.is_grad_enabled() or not is_outermost))
            for piece in inside:
                piece.leave_outer_forward()

    def _pieces(self) -> Iterator[FlatPiece]:
        return (piece for group in self.groups for piece in layout_of(group).parameters)

    def _pieces_inside(self) -> tuple[FlatPiece, ...]:
        """Return the parameters of wrappers inside that have names; these wrappers are final now."""
        if self._known_inside is None:
            inside = self.fsdp_modules(self)[1:]
            self._known_inside = tuple(p for wrapper in inside for p in wrapper._pieces() if p.is_visible)
        return self._known_inside

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the optimizer's gradients, also while modules list whole parameters."""
        for listed in self.parameters():
            parameter = sharded_param_of(listed if listed._base is None else listed._base)
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    # The tree of wrappers ---------------------------------------------------------------------------------

    def check_is_root(self) -> bool:
        """Return whether this wrapper is the outermost one; the first call decides that for all wrappers inside."""
        return self._root_state().root is self._fsdp_state

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """List the wrappers in ``module``, itself included; with ``root_only`` those inside no other one."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if not root_only:
            return found
        inner = {m for outer in found for m in outer.modules() if m is not outer}
        return [m for m in found if m not in inner]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards accumulate whole gradients on each rank; the first backward afterwards reduces them all.

        Meanwhile ``.grad`` of a parameter with an accumulated gradient is not None. If nothing was reduced before it
        has no values, and using them raises RuntimeError. Setting it to None, as ``zero_grad()`` does, drops the
        accumulated gradient too.

        Raises RuntimeError for a wrapper that is not the root.
        """
        self._expect_root("no_sync", RuntimeError)
        states = [wrapper._fsdp_state for wrapper in self.fsdp_modules(self)]
        reshards = [(state, state.reshards_after_backward) for state in states]
        reduces = [(group, group.reduces) for state in states for group in state.param_groups]
        for wrapper in self.fsdp_modules(self):
            # A strategy that keeps parameters from forward to backward keeps them from one microbatch to the next.
            wrapper._fsdp_state.reshards_after_backward = wrapper.sharding_strategy in _FREED_AFTER_FORWARD
            for group in wrapper.groups:
                group.reduces = False
        try:
            yield
        finally:
            for state, reshards_before in reshards:
                state.reshards_after_backward = reshards_before
            for group, reduces_before in reduces:
                group.reduces = reduces_before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their joint norm is at most ``max_norm``; return the norm before.

        Norms are combined in float32 at least, and returned in the gradients' dtype, or the widest of them.
        Collective. Raises RuntimeError for a wrapper that is not the root.
        """
        self._expect_root("clip_grad_norm_", RuntimeError)
        return clip_by_norm(self, float(max_norm), float(norm_type))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce the gradients of every wrapper inside by ``hook``, divisions included.

        It is called as ``hook(state, gradients, row)``: ``gradients`` (1-D) contains the equal rows of all ranks, and
        the hook writes the sum of this rank's row into ``row``; with NO_SHARD as ``hook(state, gradients)``, in place.

        Raises AssertionError for a wrapper that is not the root, has a hook, or is hybrid; ValueError if ``hook`` is
        not callable.
        """
        self._expect_root("register_comm_hook", AssertionError)
        if not callable(hook):
            raise ValueError(f"register_comm_hook: expected a callable hook, got {hook!r}")
        for wrapper in self.fsdp_modules(self):
            if wrapper.sharding_strategy in HYBRID:
                raise AssertionError(
                    f"register_comm_hook: expected no hybrid strategy, got {wrapper.sharding_strategy}: "
                    "its reductions are two; try FULL_SHARD"
                )
            if any(group.comm_hook is not None for group in wrapper.groups):
                raise AssertionError(
                    "register_comm_hook: expected no hook yet, got one; hooks are registered once"
                )
        for wrapper in self.fsdp_modules(self):
            for group in wrapper.groups:
                group.comm_hook = _with_state(hook, state)

    # Whole parameters -------------------------------------------------------------------------------------

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Register the whole parameters of the wrappers in ``module`` under their own names; see `full_params`."""
        how = FullParamsOptions(
            writeback=writeback, rank0_only=rank0_only, offloads=offload_to_cpu, with_grads=with_grads
        )
        with summon_full_params(_wrappers(module, recurse), how):
            yield

    def apply(self, fn: Callable[[nn.Module], Any]) -> FullyShardedDataParallel:
        """Call ``fn`` on all modules while their parameters are whole; its writes persist.

        Raises ValueError between forward and the end of backward.
        """
        if self.is_running:
            raise ValueError("apply: expected a model between two iterations, got one in forward or backward")
        self._root_state()
        with summon_full_params([self], FullParamsOptions(writeback=True)):
            super().apply(fn)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Name parameters; without the wrappers' prefixes while they are summoned."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield self._shown_name(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Name buffers; without the wrappers' prefixes while parameters are summoned."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._shown_name(name), buffer

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert this rank's shares; nn.Module calls this for ``to`` and ``cuda``."""
        self._fsdp_state.reshard()
        converted = super()._apply(fn, recurse)
        for group in self.groups:
            group.reset_sharded_params()
        return converted

    # ------------------------------------------------------------------------------------------------------

    def _make_state(self, module: nn.Module) -> FSDPState:
        offloads = self.cpu_offload.offload_params
        pins = offloads and self.compute_device.type != "cpu"
        found = list(unmanaged((module,), set(self.ignored.parameters)).items())
        precision = WrapperPrecision(self.mixed_precision, self._is_known_root)
        groups = []
        if found:
            flat = FlatLayout(
                found,
                self.ranks,
                home=torch.device("cpu") if offloads else self.compute_device,
                pins=pins,
                holder=self if self.is_flat else None,
            )
            policy = CPUOffloadPolicy(pin_memory=pins) if offloads else OffloadPolicy()
            groups.append(FSDPParamGroup(flat, self.ranks, self.compute_device, precision, policy))
            groups[0].shows_accumulation = True
            groups[0].keeps_reduce_dtype = self.mixed_precision.keep_low_precision_grads
        frees = None if self.sharding_strategy in _FREED_AFTER_FORWARD else False
        state = FSDPState(
            (self,), tuple(groups), device=self.compute_device, dtypes=precision, reshard_after_forward=frees
        )
        state.prefetches_in_forward = self.forward_prefetch
        state.prefetches_in_backward = _PREFETCH_TIMES[self.backward_prefetch]
        return state

    def _all_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups that together connect this rank to all others: within a replica, then across replicas."""
        groups = (self.ranks.shard_group, self.ranks.replicate_group)
        return tuple(group for group in groups if group is not None)

    def _groups_of_children(self, given: ProcessGroups) -> ProcessGroups:
        if self.sharding_strategy not in HYBRID:
            return given
        assert self.ranks.shard_group is not None
        assert self.ranks.replicate_group is not None
        return (self.ranks.shard_group, self.ranks.replicate_group)

    def _root_state(self) -> RootState[FSDPState]:
        """Make this wrapper the root of all inside, unless it has a root: the first one that runs is the root."""
        if self._fsdp_state.root_state is None:
            self._check_homogeneous()
            self._fsdp_state.lazy_init()
            cast_buffers(self)
        assert self._fsdp_state.root_state is not None
        return self._fsdp_state.root_state

    def _check_homogeneous(self) -> None:
        """Raise ValueError for wrappers inside that differ in an option of the whole tree."""
        wrappers = self.fsdp_modules(self)
        values = {
            "use_orig_params": {not wrapper.is_flat for wrapper in wrappers},
            "limit_all_gathers": {wrapper.limit_all_gathers for wrapper in wrappers},
        }
        for name, found in values.items():
            if len(found) > 1:
                raise ValueError(
                    f"{name}: Expects one homogeneous value in all wrappers of a model, got {sorted(found)}; "
                    "pass the same to each"
                )

    def _begin_training(self, *_: Any) -> None:
        self._root_state()
        for group in self.groups:
            group.check_assigned()
            flat = layout_of(group).flat_parameter
            if flat is not None and optimizers_in_backward(flat):
                raise RuntimeError(
                    "an optimizer in backward: expected use_orig_params=True, got a flat parameter; "
                    "pass use_orig_params=True, or step after backward"
                )

    def _is_known_root(self) -> bool:
        return (
            self._fsdp_state.root_state is not None and self._fsdp_state.root_state.root is self._fsdp_state
        )

    def _expect_root(self, method: str, error: type[Exception]) -> None:
        if not self.check_is_root():
            raise error(
                f"`{method}()` on inner FSDP instances is not supported: expected the root, got a wrapped "
                f"{type(self.module).__name__} inside it; call it on the outermost wrapper"
            )

    def _shown_name(self, name: str) -> str:
        return clean_name(name) if self.is_summoned else name


def _ignored(module: nn.Module, modules: Any, states: Any) -> Ignored:
    return ignored_states(module, modules, states, lambda m: isinstance(m, FullyShardedDataParallel))


def _wrappers(module: nn.Module, recurse: bool) -> list[FullyShardedDataParallel]:
    if recurse:
        return FullyShardedDataParallel.fsdp_modules(module)
    return [module] if isinstance(module, FullyShardedDataParallel) else []


def _with_state(hook: Callable[..., Any], state: object) -> Callable[..., Any]:
    def bound(*tensors: torch.Tensor) -> Any:
        return hook(state, *tensors)

    return bound
