"""The methods that a sharded module gains, and the handle of an asynchronous gather."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn

from shardproof.engine.reference.collectives import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    GroupAllGather,
    GroupReduceScatter,
    ReduceScatter,
)
from shardproof.engine.reference.comm_context import GradientReductionHandle
from shardproof.engine.reference.fsdp_state import FSDPState, state_of, states_in
from shardproof.engine.reference.mesh import subgroup_of
from shardproof.engine.reference.param_group import FSDPParamGroup
from shardproof.engine.reference.root_state import RootState
from shardproof.engine.reference.torch_private import sets_grad_dtype


class UnshardHandle:
    """A gather in flight."""

    def __init__(self, state: FSDPState) -> None:
        self._fsdp_state: FSDPState | None = state

    def wait(self) -> None:
        """Wait until the module's parameters are whole and registered; a second call does nothing."""
        if self._fsdp_state is not None:
            self._fsdp_state.wait()
            self._fsdp_state.comm_ctx.free_buffers()
            self._fsdp_state = None


class FSDPModule:
    """What ``fully_shard`` adds to the class of a module.

    Methods with ``recurse`` act on every sharded module below too; the others state what they act on.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the original class: indexing a container builds a part of it, which is not a sharded module."""
        original = next(c for c in cls.__mro__ if not issubclass(c, FSDPModule))
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raise AssertionError: a copy would train the original's shards."""
        raise AssertionError(
            f"fully_shard does not support deepcopy of {type(self).__name__}: its hooks and shards belong to "
            "this module; copy the model before sharding it"
        )

    # Gathering --------------------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Free this module's whole parameters and register its shards."""
        _fsdp_state(self).reshard()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters, before a forward or instead of one.

        With ``async_op`` returns at once: ``wait()`` on the handle, or the module's forward, waits for the rest.
        """
        state = _fsdp_state(self)
        state.comm_ctx.order_all_gathers()  # shards may have been written just before
        state.unshard()
        handle = UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether to free parameters after forward; overrides the root's default too."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward: expected a bool, got {type(reshard_after_forward).__name__} "
                f"{reshard_after_forward!r}; a number of ranks is chosen in fully_shard(...)"
            )
        for state in _fsdp_states(self, recurse=recurse):
            state.reshard_after_forward = reshard_after_forward
            for group in state.param_groups:
                group.set_subgroup(None)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether to free parameters after backward; False keeps them between microbatches."""
        for state in _fsdp_states(self, recurse=recurse):
            state.reshards_after_backward = reshard_after_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Choose whether whole parameters keep their memory, and so their addresses, while modules show shards."""
        for group in _param_groups(self, recurse=recurse):
            group.keeps_storage = keep

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether this module's backward needs its parameters; an embedding's does not."""
        for group in _param_groups(self):
            group.unshards_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather ``modules`` in this order when this module's forward starts, in place of the prediction."""
        _fsdp_state(self).forward_prefetch = _prefetched(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather ``modules`` in this order when this module's backward starts, in place of the prediction."""
        _fsdp_state(self).backward_prefetch = _prefetched(modules)

    def set_post_optim_event(self, event: Any) -> None:
        """Make the next forward's gathers wait for ``event`` and not for all work issued so far; used once."""
        state = _fsdp_state(self)
        (state if state.root_state is None else state.root_state.root).post_optim_event = event

    # Gradients --------------------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether gradients must be ready when the coming backwards end; acts on all below the root."""
        state = _fsdp_state(self)
        if state.root_state is None:  # only the first forward determines the root
            state.is_last_backward = is_last_backward
        else:
            state.root_state.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose whether the caller ends backwards by ``finalize_backward``; call on the root, between iterations."""
        state = _fsdp_state(self)
        root_state = _root_state_of(self, "set_manual_backward_finalization")
        if root_state is None:  # only the first forward determines the root
            state.is_finalized_by_hand = enabled
            return
        if root_state.is_finalized_by_hand == enabled:
            return
        if root_state.is_running or root_state.awaits_finalization:
            raise RuntimeError(
                "set_manual_backward_finalization: expected to be called between iterations, got one under way; "
                "call finalize_backward or reset_iter_state first"
            )
        root_state.is_finalized_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the remaining gradients and end the iteration; with ``async_op``, gradients are ready after a wait.

        Raises RuntimeError inside backward, if backwards end by themselves, and if an all-reduce over replicas waits.
        """
        root_state = _root_state_of(self, "finalize_backward")
        if root_state is None:  # no forward has run
            return GradientReductionHandle(None) if async_op else None
        if not root_state.is_finalized_by_hand or root_state.is_running:
            raise RuntimeError(
                "finalize_backward: expected the caller to end backwards, after they have run, got "
                f"{'one under way' if root_state.is_running else 'a module that ends them by itself'}; "
                "call set_manual_backward_finalization(True) before the iteration"
            )
        root_state.comm_ctx.check_finished("finalize_backward")
        root_state.finalize()
        if not async_op:
            root_state.comm_ctx.finish()
            return None
        root_state.comm_ctx.unfinished = GradientReductionHandle(root_state.comm_ctx, root_state)
        return root_state.comm_ctx.unfinished

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backward reduces gradients or accumulates them whole on this rank."""
        for group in _param_groups(self, recurse=recurse):
            group.reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether to sum reduced shards over replicas at once, or to accumulate them until later."""
        for group in _param_groups(self, recurse=recurse):
            group.all_reduces = requires_all_reduce

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Choose whether parameters without a gradient add zeros, as needed when ranks use different parameters."""
        for group in _param_groups(self, recurse=recurse):
            group.reduces_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Limit the reductions that hold their inputs at once; the largest number below the root applies."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"set_reduce_scatter_max_input_buffers: expected an int, got {max_input_buffers!r}; try 1 or 2"
            )
        if max_input_buffers < 1:
            raise ValueError(
                f"set_reduce_scatter_max_input_buffers: expected at least 1, got {max_input_buffers}; "
                "1 holds the least memory"
            )
        for group in _param_groups(self, recurse=recurse):
            group.most_in_flight = max_input_buffers
        root_state = _fsdp_state(self).root_state
        if root_state is not None:
            root_state.choose_most_in_flight()

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce-scatter in a process group apart from the gathers', so that a backend can run both at once.

        Collective over the ranks of each shard group.
        """
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in _param_groups(self, recurse=recurse):
            if not enable or group.mesh.shard_group is None:
                group.scatter_group = None
            elif group.scatter_group is None:
                group.scatter_group = subgroup_of(group.mesh, group.mesh.shard_size, made)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's summed gradients by ``factor`` and not by the number of data-parallel ranks."""
        for group in _param_groups(self):
            group.divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`, which this is an older name of."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Choose whether this module's collectives use SUM alone, with divisions apart."""
        for group in _param_groups(self):
            group.only_sums = enable

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook`` with this module's reduced gradients (1-D, this rank's), to change them in place.

        Raises ValueError for ``stream`` where replicas are reduced natively: that has a stream of its own.
        """
        for group in _param_groups(self):
            if stream is not None and group.mesh.is_replicated:
                raise ValueError(
                    "set_all_reduce_hook: expected no stream for a mesh with a replicate axis, whose all-reduce "
                    f"runs on a stream already, got {stream}; leave it out"
                )
            group.all_reduce_hook = hook if stream is None else _on_stream(hook, stream)

    def reset_iter_state(self) -> None:
        """Recover from an exception in forward or backward: wait, free, and drop the iteration's gradients."""
        root_state = _root_state_of(self, "reset_iter_state")
        (_fsdp_state(self) if root_state is None else root_state).reset()

    # Communication ----------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's parameters with ``comm``."""
        self._only_group("set_custom_all_gather").all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce-scatter this module's gradients with ``comm``."""
        self._only_group("set_custom_reduce_scatter").reduce_scatter = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Choose whether the process group allocates this module's buffers, so that it may send without a copy.

        Raises AssertionError beside `set_custom_all_gather` and `set_custom_reduce_scatter`, which allocate themselves.
        """
        for group in _param_groups(self):
            _expect_default(group.all_gather, (DefaultAllGather, GroupAllGather))
            _expect_default(group.reduce_scatter, (DefaultReduceScatter, GroupReduceScatter))
            shards = group.mesh.shard_group
            if enable and shards is not None:
                group.all_gather, group.reduce_scatter = GroupAllGather(shards), GroupReduceScatter(shards)
            else:
                group.all_gather, group.reduce_scatter = DefaultAllGather(), DefaultReduceScatter()

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> NoReturn:
        """Raise NotImplementedError: no buffers are made in symmetric memory here."""
        raise NotImplementedError(
            f"set_symm_mem_for_comm: expected no symmetric memory, which this engine does not allocate, got "
            f"{backend!r}; try set_allocate_memory_from_process_group_for_comm(True)"
        )

    def _only_group(self, method: str) -> FSDPParamGroup:
        param_groups = _fsdp_state(self).param_groups
        if len(param_groups) != 1:
            raise ValueError(
                f"{method}: expected a module with one communication group, got {len(param_groups)}; "
                "shard parameters of different meshes in calls of their own"
            )
        return param_groups[0]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Convert shards, never whole parameters: nn.Module comes here for ``to``, ``cuda``, ``to_empty``.

        A failed conversion keeps the gradients: nn.Module removes a DTensor's gradient while it converts it. Gradients
        keep a dtype that their parameter sets.
        """
        self.reshard()
        for group in _param_groups(self):
            group.layout.reset_sharded_params()  # nn.Module loses the parameters' grad_dtype
        held = [p for group in _param_groups(self) for p in group.parameters]
        kept = [(p, p.sharded_param.grad) for p in held if sets_grad_dtype(p.sharded_param)]
        gradients = [(p, p.grad) for p in cast("nn.Module", self).parameters() if p.grad is not None]
        for param, _ in kept:
            param.sharded_param.grad = None
        try:
            converted = cast("Any", super())._apply(fn, recurse)
        except BaseException:
            for parameter, gradient in gradients:
                parameter.grad = gradient.to(parameter.grad_dtype or gradient.dtype)
            raise
        for group in _param_groups(self):
            group.adopt_converted()
        for param, own in kept:
            param.sharded_param.grad = None if own is None else own.to(param.local.device)
        return converted


class ReplicateModule(FSDPModule):
    """What ``replicate`` adds to the class of a module: the same methods, but parameters stay whole after forward."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> NoReturn:
        """Raise AssertionError: replicated parameters are whole already."""
        raise AssertionError(
            "set_reshard_after_forward: expected a module under fully_shard, got one under replicate, "
            "whose parameters are never sharded; leave the call out"
        )


def managed_class(original: type[nn.Module], base: type[FSDPModule]) -> type[nn.Module]:
    """Return the managed class for modules of class ``original``; it is made once and cached on ``original``."""
    key = f"_managed_by_{base.__name__}"
    if key not in original.__dict__:
        prefix = "FSDP" if base is FSDPModule else "Replicate"
        setattr(original, key, type(f"{prefix}{original.__name__}", (base, original), {}))
    made: type[nn.Module] = original.__dict__[key]
    return made


def _fsdp_state(module: Any) -> FSDPState:
    state = state_of(module)
    if state is None:
        raise RuntimeError(
            f"{type(module).__name__}: expected a module that fully_shard or replicate was applied to, "
            "got one without a state; was it copied or unpickled?"
        )
    return state


def _root_state_of(module: Any, method: str) -> RootState[FSDPState] | None:
    """Return a root's state, or None before its first forward; raises RuntimeError for a module inside a root."""
    state = _fsdp_state(module)
    if state.root_state is not None and state.root_state.root is not state:
        raise RuntimeError(
            f"{method}: expected the root module, got {type(module).__name__}; "
            f"call it on the {type(state.root_state.root.modules[0]).__name__}"
        )
    return state.root_state


def _fsdp_states(module: Any, *, recurse: bool) -> tuple[FSDPState, ...]:
    return states_in(module) if recurse else (_fsdp_state(module),)


def _param_groups(module: Any, *, recurse: bool = False) -> Iterator[FSDPParamGroup]:
    for state in _fsdp_states(module, recurse=recurse):
        yield from state.param_groups


def _prefetched(modules: Iterable[Any]) -> tuple[FSDPState, ...]:
    states = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"modules to prefetch: expected modules under fully_shard (FSDPModule), "
                f"got {type(module).__name__}; apply fully_shard to it first"
            )
        states.append(_fsdp_state(module))
    return tuple(dict.fromkeys(states))


def _expect_default(comm: object, classes: tuple[type, ...]) -> None:
    if not isinstance(comm, classes):
        raise AssertionError(
            "set_allocate_memory_from_process_group_for_comm: expected no custom collective, got a "
            f"{type(comm).__name__}, which allocates its buffers itself; leave one of the two out"
        )


def _on_stream(hook: Callable[[torch.Tensor], None], stream: Any) -> Callable[[torch.Tensor], None]:
    def on_stream(reduced: torch.Tensor) -> None:
        module: Any = torch.get_device_module(reduced.device.type)
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            hook(reduced)
        module.current_stream().wait_stream(stream)

    return on_stream
