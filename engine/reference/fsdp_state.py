"""The state of the modules of one call, and the hooks that drive its groups in forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardproof.engine.reference.autograd_hooks import (
    PendingBackwards,
    WatchedForward,
    map_tensors,
    without_autograd,
)
from shardproof.engine.reference.comm_context import CommContext
from shardproof.engine.reference.mesh import subgroup_of
from shardproof.engine.reference.param_group import FSDPParamGroup, ShardedState
from shardproof.engine.reference.policies import DTypes
from shardproof.engine.reference.root_state import RootState
from shardproof.engine.reference.torch_private import eager, inside_backward

_ATTRIBUTE = "_sharding_unit"


class TrainingState(Enum):
    """The phase that a state's modules are in."""

    IDLE = "a forward -> FORWARD; the gradient of an output -> BACKWARD"
    FORWARD = "all its modules have run -> IDLE"
    BACKWARD = "the gradients of its inputs are there, or backward is over -> IDLE"


class BackwardPrefetchTime(Enum):
    """When a state's backward gathers the predicted next state."""

    FIRST = "before its own gradients are computed"
    LAST = "after its own gradients were computed"
    NEVER = "not at all"


class FSDPState:
    """The modules of one call of ``fully_shard`` or ``replicate``, and their communication groups.

    The modules need whole parameters from the first module's forward to the last one's, and again from the first
    gradient of an output until all inputs have their gradients.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        param_groups: tuple[FSDPParamGroup, ...],
        *,
        device: torch.device,
        dtypes: DTypes,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.modules = modules
        self.param_groups = param_groups
        self.device = device
        self.dtypes = dtypes
        self.reshard_after_forward = reshard_after_forward
        self.reshards_after_backward = True
        self.forward_prefetch: tuple[FSDPState, ...] = ()
        self.backward_prefetch: tuple[FSDPState, ...] = ()
        self.prefetches_in_forward = True
        self.prefetches_in_backward = BackwardPrefetchTime.FIRST
        self.post_optim_event: Any | None = None  # torch has a type of event for each device
        self.root_state: RootState[FSDPState] | None = None
        self.is_last_backward = True  # copied to the future root
        self.is_finalized_by_hand = False  # likewise
        self._comm_ctx = CommContext(device)
        self.share(self._comm_ctx)
        self._training_state = TrainingState.IDLE
        self._entered: set[nn.Module] = set()
        self._left: set[nn.Module] = set()
        self._is_prefetched = False
        self.backward_positions: list[int] = []
        self.num_backwards = 0
        self._backward_position = 0
        self._is_recorded = False  # whether the current forward is in the order of forwards
        self._calls = PendingBackwards(on_begin=self._pre_backward, on_end=self._inputs_done)
        for group in param_groups:
            group.gradient_arrived = self._gradient_arrived
        for module in modules:
            module.__dict__[_ATTRIBUTE] = self
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, with_kwargs=True)

    @property
    def comm_ctx(self) -> CommContext:
        """Streams and reductions in flight; all states below a root share them once the root has run."""
        return self._comm_ctx

    def share(self, comm_ctx: CommContext) -> None:
        self._comm_ctx = comm_ctx
        for group in self.param_groups:
            group.comm_ctx = comm_ctx

    def lazy_init(self) -> RootState[FSDPState]:
        """Make this the root of all states below, which are final when the first forward runs.

        Raises RuntimeError, ValueError or AssertionError if they cannot train together, and names the change needed.
        """
        if len(self.modules) > 1:
            raise RuntimeError(
                f"fully_shard requires a single root module, got {[type(m).__name__ for m in self.modules]} "
                "as the first to run; apply fully_shard to the module that contains them too"
            )
        states = states_in(self.modules[0])
        for state in states:
            if state.root_state is not None:
                raise RuntimeError(
                    f"{type(state.modules[0]).__name__} has already been lazily initialized as a root of its "
                    "own: expected the first forward to run through the root module first; "
                    f"call {type(self.modules[0]).__name__} before its submodules"
                )
            if state.is_finalized_by_hand and state is not self:
                raise RuntimeError(
                    f"set_manual_backward_finalization: expected the root module, got one inside, a "
                    f"{type(state.modules[0]).__name__}; call it on the {type(self.modules[0]).__name__}"
                )
        names = {module: name for name, module in self.modules[0].named_modules()}
        for state in states:
            for group in state.param_groups:
                group.lazy_init(names)
        root_state = RootState(self, states, self.comm_ctx)
        subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for state in states:
            state.root_state = root_state
            state.share(self.comm_ctx)
            state._choose_reshard(is_root=state is self, subgroups=subgroups)
        root_state.is_last_backward = all(state.is_last_backward for state in states)
        root_state.is_finalized_by_hand = self.is_finalized_by_hand
        return root_state

    def _choose_reshard(self, *, is_root: bool, subgroups: dict[tuple[int, ...], dist.ProcessGroup]) -> None:
        """Decide whether to free whole parameters after forward, now that the root is known.

        By default the root keeps its own, because backward needs them at once. A number of ranks needs process groups;
        ``subgroups`` collects them by their ranks.
        """
        if self.reshard_after_forward is None:
            self.reshard_after_forward = not is_root
        for group in self.param_groups:
            with without_autograd():
                group.reset_sharded_params()
            size = self.reshard_after_forward
            if not isinstance(size, bool):
                group.set_subgroup(subgroup_of(group.mesh, size, subgroups))

    # Called by the module's methods and by the root state -------------------------------------------------

    def unshard(self) -> None:
        for group in self.param_groups:
            group.unshard()

    def wait(self) -> None:
        """Wait for gathers in flight."""
        self._is_prefetched = False
        for group in self.param_groups:
            group.wait()

    def reshard(self) -> None:
        """Free whole parameters."""
        self._is_prefetched = False
        for group in self.param_groups:
            group.reshard()

    def drop_prefetch(self) -> None:
        """Free parameters that a wrong prediction gathered."""
        if self._is_prefetched:
            self.reshard()

    def end_partial_forward(self) -> None:
        """Free parameters that stayed whole because a forward did not run all modules of this state."""
        if self._training_state is TrainingState.FORWARD:
            self._training_state = TrainingState.IDLE
            self._reshard_after_forward()

    def finish_backward(self, *, frees: bool, is_last: bool) -> None:
        """Finish at the end of backward: inputs without gradients do not report the end of a module's backward."""
        if is_last:
            if any(group.state is ShardedState.GATHERING for group in self.param_groups):
                self.reshard()  # prefetched but unused
            self.forget_forwards()
            self._calls.clear()
        self._expect_another_backward()
        if frees:
            self._free_after_backward()
        self._reduce(self.param_groups)
        for group in self.param_groups:
            group.forget_backward()

    def leave_backward(self, *, frees: bool) -> None:
        """Free parameters, and hold the gradients of modules without a reported end; the caller finalizes."""
        self._expect_another_backward()
        if frees:
            self._free_after_backward()
        self._training_state = TrainingState.IDLE
        for group in self.param_groups:
            group.hold_gradients()
            group.forget_backward()

    def reset(self) -> None:
        """Discard a failed iteration."""
        self._training_state = TrainingState.IDLE
        self.forget_forwards()
        self._calls.clear()
        self.reshard()
        for group in self.param_groups:
            group.drop_gradients()

    def forget_forwards(self) -> None:
        """Expect backwards of later forwards alone."""
        self.backward_positions.clear()
        self.num_backwards = 0

    def _expect_another_backward(self) -> None:
        """Let a backward through the same graph gather ahead too; only the root's next unit may be another one then."""
        if self.root_state is not None and self.root_state.root is not self:
            self.num_backwards = 0

    def is_running(self, module: nn.Module) -> bool:
        """Whether ``module`` is between the start and the end of a forward."""
        return self._training_state is TrainingState.FORWARD and module in self._entered - self._left

    # Forward ----------------------------------------------------------------------------------------------

    @eager
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather, and return the inputs for the module."""
        root_state = self.root_state or self.lazy_init()
        recomputes = inside_backward()
        if self._training_state is TrainingState.BACKWARD and recomputes:  # backward is about to use them
            self._gather_now()
            return self._cast_inputs(args), self._cast_inputs(kwargs)
        # Entered before but not left: only some modules of this state ran, or a forward raised an exception.
        begins = self._training_state is not TrainingState.FORWARD or module in self._entered
        if begins:
            self._training_state = TrainingState.FORWARD
            self._entered.clear()
            self._left.clear()
            self._is_recorded = False
            self._calls.begin_forward()
        self._entered.add(module)
        if not recomputes:
            if begins and root_state.enter_forward(self):
                args, kwargs = self._begin_iteration(root_state, args, kwargs)
            for group in self.param_groups:
                group.refresh(begins_iteration=False)
            if any(group.state is not ShardedState.UNSHARDED for group in self.param_groups):
                root_state.record_all_gather(self)
        self._gather_now()
        if begins and not recomputes:
            self._prefetch_in_forward(root_state)
        args, kwargs = self._cast_inputs(args), self._cast_inputs(kwargs)
        return self._calls.watch_inputs(args, kwargs)

    @eager
    def after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Free parameters that are not needed until backward, and return the output for the caller."""
        recomputes = inside_backward()
        if self._training_state is TrainingState.BACKWARD and recomputes:
            return self._cast_outputs(output)
        assert self.root_state is not None
        self._left.add(module)
        output, is_hooked = self._calls.watch_outputs((args, kwargs), output)
        if is_hooked and not recomputes:
            if self._is_recorded:  # backward begins with the module that leaves forward last
                self.backward_positions.pop()
            self.root_state.record_backward(self)
            self._is_recorded = True
        if self._left.issuperset(self.modules):
            self._training_state = TrainingState.IDLE
            if not recomputes:  # else backward needs the parameters at once
                self._reshard_after_forward()
        if not recomputes:
            self.root_state.leave_forward(self)
        return self._cast_outputs(output)

    def _begin_iteration(
        self, root_state: RootState[FSDPState], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Order gathers after the optimizer step, and move inputs to the device."""
        root_state.comm_ctx.order_all_gathers(root_state.root.post_optim_event)
        root_state.root.post_optim_event = None
        if self is root_state.root:
            for state in root_state.states:
                for group in state.param_groups:
                    group.refresh(begins_iteration=True)
        if self.device.type == "cpu":
            return args, kwargs

        def to_device(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, non_blocking=True)

        return map_tensors(to_device, args), map_tensors(to_device, kwargs)

    def _gather_now(self) -> None:
        self.unshard()
        self.wait()

    def _prefetch_in_forward(self, root_state: RootState[FSDPState]) -> None:
        for state in self.forward_prefetch:
            state.unshard()
        if self.prefetches_in_forward and not self.forward_prefetch:
            predicted = root_state.next_in_forward()
            if predicted is not None:
                predicted.prefetch()

    def prefetch(self) -> None:
        """Issue the predicted gathers."""
        if all(group.is_freed for group in self.param_groups):
            self._is_prefetched = True
            self.unshard()

    def _reshard_after_forward(self) -> None:
        for group in self.param_groups:
            if self.reshard_after_forward is not False:
                group.reshard_after_forward()

    # Backward ---------------------------------------------------------------------------------------------

    @eager
    def _pre_backward(self, *_: Any) -> None:
        assert self.root_state is not None
        self.root_state.enter_backward(of_state=True)
        begins = self._training_state is not TrainingState.BACKWARD
        if begins:
            for group in self.param_groups:
                group.check_unchanged()
        self._training_state = TrainingState.BACKWARD
        for group in self.param_groups:
            if group.unshards_in_backward:
                group.unshard()
                group.wait()
        self._is_prefetched = False
        if begins:
            self.num_backwards += 1
            is_known = self.num_backwards <= len(self.backward_positions)
            self._backward_position = self.backward_positions[-self.num_backwards] if is_known else 0
            self._prefetch_in_backward(self.root_state)
        self.root_state.comm_ctx.free_buffers()

    def _prefetch_in_backward(self, root_state: RootState[FSDPState]) -> None:
        for state in self.backward_prefetch:
            state.prefetch_in_backward()
        if not self.backward_prefetch and self.prefetches_in_backward is BackwardPrefetchTime.FIRST:
            self._prefetch_next(root_state)

    def _prefetch_next(self, root_state: RootState[FSDPState]) -> None:
        predicted = root_state.next_in_backward(self._backward_position)
        if predicted is not None:
            predicted.prefetch_in_backward()

    def prefetch_in_backward(self) -> None:
        """Issue the predicted gathers, unless the caller stated that backward does not need them."""
        if all(group.unshards_in_backward for group in self.param_groups):
            self.prefetch()

    def _gradient_arrived(self, group: FSDPParamGroup) -> None:
        assert self.root_state is not None
        self.root_state.enter_backward(of_state=False)
        if not self._calls.num_watched and group.is_complete:
            # No input will report the end of backward. The parameters may still be needed: a frozen parameter's
            # module may still compute.
            group.reduce_gradients()

    def _inputs_done(self, forward: WatchedForward) -> None:
        """Free the parameters, and reduce unless another forward of this backward is pending."""
        # Each of several modules may run in its own forward and backward, as with reentrant checkpoints.
        is_part = forward.num_calls + forward.num_others < len(self.modules)
        if self._calls.end_one(forward) and not all(group.is_through for group in self.param_groups):
            if forward.is_over:
                self._end_one_forward(reduces=not is_part)
            return
        self._free_after_backward()
        if self.prefetches_in_backward is BackwardPrefetchTime.LAST and self.root_state is not None:
            # Before the reduction, so that the next state's gradients need not wait for it.
            self._prefetch_next(self.root_state)
        self._reduce(group for group in self.param_groups if not (is_part and group.awaits_gradients))

    def _end_one_forward(self, *, reduces: bool) -> None:
        """Free what the backward of an earlier forward gathers again, unless that comes next; reduce what is there.

        Gradients that are there lack nothing: autograd sums all uses of a parameter in one backward. The others may
        come from the earlier forward, or not at all, and then would keep those that are there until backward is over.
        """
        assert self.root_state is not None
        self._training_state = TrainingState.IDLE
        if self.root_state.next_in_backward(self._backward_position) is not self:
            self._reshard_after_forward()
        if reduces:
            self._reduce(group for group in self.param_groups if group.has_some)

    def _free_after_backward(self) -> None:
        """Free before reducing, because the reduction needs memory; gradients have their own."""
        for group in self.param_groups:
            if self.reshards_after_backward and group.state is not ShardedState.GATHERING:
                group.reshard()

    def _reduce(self, groups: Iterable[FSDPParamGroup]) -> None:
        self._training_state = TrainingState.IDLE
        for group in reversed(tuple(groups)):
            group.reduce_gradients()

    # ------------------------------------------------------------------------------------------------------

    def _cast_inputs(self, value: Any) -> Any:
        dtype = self.dtypes.param_dtype
        return _cast(value, dtype) if dtype is not None and self.dtypes.cast_forward_inputs else value

    def _cast_outputs(self, value: Any) -> Any:
        return value if self.dtypes.output_dtype is None else _cast(value, self.dtypes.output_dtype)


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of the call that took ``module`` itself, if any."""
    state: FSDPState | None = module.__dict__.get(_ATTRIBUTE)
    return state


def states_in(module: nn.Module) -> tuple[FSDPState, ...]:
    """Return the states of ``module`` and of all modules inside, each once."""
    found = (state_of(inside) for inside in module.modules())
    return tuple(dict.fromkeys(state for state in found if state is not None))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, value)
