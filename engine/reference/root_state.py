"""State shared by the FSDPStates below one root: their order, and the start and end of forward and backward."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from shardproof.engine.reference.comm_context import CommContext
from shardproof.engine.reference.param_group import FSDPParamGroup
from shardproof.engine.reference.torch_private import at_end_of_backward, inside_backward

# More forwards than any pipeline schedule has in flight before the first backward.
_MOST_FORWARDS_AHEAD = 1024


class SharedState(Protocol):
    """The interface that `RootState` needs of each state that shares it."""

    backward_positions: list[int]
    """The state's positions in the order of forwards, one for each forward since the last backward of a step."""

    num_backwards: int
    """How many of them, from the end, backward has reached."""

    @property
    def param_groups(self) -> tuple[FSDPParamGroup, ...]:
        """The communication groups of the state."""

    def drop_prefetch(self) -> None:
        """Free parameters that a wrong prediction gathered."""

    def end_partial_forward(self) -> None:
        """Free parameters that stayed whole because a forward did not run all modules of the state."""

    def forget_forwards(self) -> None:
        """Expect backwards of later forwards alone."""

    def finish_backward(self, *, frees: bool, is_last: bool) -> None:
        """Finish at the end of backward."""

    def leave_backward(self, *, frees: bool) -> None:
        """Finish at the end of a backward that the caller finalizes."""

    def reset(self) -> None:
        """Forget an iteration that failed."""


State = TypeVar("State", bound=SharedState)


class RootState(Generic[State]):
    """The states of one root, and the order in which they run; created when the root first runs.

    [Note: recorded order] In forward the root's last forward predicts the next gather, as long as the current
    forward follows the same order. In backward, states run in the reverse of the order in which they left forward.
    A wrong prediction costs a gather, but does not change results.
    """

    def __init__(self, root: State, states: tuple[State, ...], comm_ctx: CommContext) -> None:
        self.root = root
        self.states = states
        self.comm_ctx = comm_ctx
        self.is_last_backward = True
        self.is_finalized_by_hand = False
        self.awaits_finalization = False  # whether a backward has run since the last one
        self._outermost: State | None = None
        self._recorded_forward: list[State] = []
        self._this_forward: list[State] = []
        self._follows = False
        self._left_forward: list[State | None] = []
        self._backward_runs = False
        self._frees_after_backward = False
        self.choose_most_in_flight()

    def choose_most_in_flight(self) -> None:
        """Limit the reductions that hold their inputs by the largest limit of any group."""
        self.comm_ctx.most_in_flight = max(
            (group.most_in_flight for state in self.states for group in state.param_groups), default=1
        )

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward runs."""
        return self._outermost is not None or self._backward_runs

    # Forward ----------------------------------------------------------------------------------------------

    def is_outermost(self, state: State) -> bool:
        """Whether ``state`` began the forward that runs."""
        return self._outermost is state

    def enter_forward(self, state: State) -> bool:
        """Record that ``state`` starts to run; return whether it is the outermost one, which begins a forward."""
        begins = self._outermost in {None, state}
        if begins:
            self.comm_ctx.check_finished("forward")
            self._outermost = state
            self._backward_runs = False  # an exception may have ended one
            self._this_forward = []
            self._follows = state is self.root
            self._forget_old_forwards()
            self._left_forward.append(None)  # no prefetch across two forwards
        return begins

    def _forget_old_forwards(self) -> None:
        """Limit the recorded order when forwards run with autograd but never a backward."""
        if len(self._left_forward) > _MOST_FORWARDS_AHEAD * (len(self.states) + 1):
            self._left_forward.clear()
            for state in self.states:
                state.forget_forwards()

    def record_all_gather(self, state: State) -> None:
        """Record that ``state`` needs a gather; like all collectives, gathers have the same order on all ranks."""
        self._follows = self.next_in_forward() is state
        self._this_forward.append(state)

    def next_in_forward(self) -> State | None:
        """Predict which state gathers next, or return None."""
        position = len(self._this_forward)
        is_known = self._follows and position < len(self._recorded_forward)
        return self._recorded_forward[position] if is_known else None

    def leave_forward(self, state: State) -> None:
        """Record that ``state`` has run; if it is the outermost one, the forward is over."""
        if state is not self._outermost:
            return
        self._outermost = None
        self.comm_ctx.free_buffers()
        if state is self.root:
            self._recorded_forward = self._this_forward
        for other in self.states:
            other.drop_prefetch()
            if other is not state:
                other.end_partial_forward()

    # Backward ---------------------------------------------------------------------------------------------

    def record_backward(self, state: State) -> None:
        """Record that ``state`` left forward and will run in backward."""
        state.backward_positions.append(len(self._left_forward))
        self._left_forward.append(state)

    def next_in_backward(self, position: int) -> State | None:
        """Return the last state before ``position`` in the order of forwards whose backward is still to come.

        Nested states leave forward before their parent, but their backward ends before their parent's.
        """
        if position >= len(self._left_forward):
            return None
        for earlier in reversed(range(position)):
            state = self._left_forward[earlier]
            if state is None:
                return None
            pending = len(state.backward_positions) - state.num_backwards
            if earlier in state.backward_positions[: max(0, pending)]:
                return state
        return None

    def enter_backward(self, *, of_state: bool) -> None:
        """Queue ``_leave_backward`` for the end of the running backward, once for each.

        ``of_state``: a state's own backward starts, which ends partial forwards. Otherwise a gradient came from a
        module that ran on parameters that its state keeps whole for a later backward.
        """
        if not inside_backward():
            return
        self._frees_after_backward |= of_state
        if not self._backward_runs:
            self._backward_runs = True
            at_end_of_backward(self._leave_backward)

    def _leave_backward(self) -> None:
        self._backward_runs = False
        self.comm_ctx.free_buffers()
        frees, self._frees_after_backward = self._frees_after_backward, False
        if frees:
            self._outermost = None  # only some modules of one state may have run
        if self.is_finalized_by_hand:
            self.awaits_finalization = True
            for state in reversed(self.states):
                state.leave_backward(frees=frees)
            return
        is_last = self.is_last_backward and frees
        for state in reversed(self.states):
            state.finish_backward(frees=frees, is_last=is_last)
        if is_last:
            self._left_forward.clear()
        if self.is_last_backward:
            self.comm_ctx.finish()

    def finalize(self) -> None:
        """Reduce the remaining gradients, and end the iteration; the caller waits for the reductions."""
        for state in self.states:
            for group in state.param_groups:
                group.check_reduces_wholly()
        for state in reversed(self.states):
            state.finish_backward(frees=True, is_last=True)
        self._left_forward.clear()
        self.awaits_finalization = False

    # ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget an iteration that failed: wait for what is in flight, free what is gathered, drop gradients."""
        if self.comm_ctx.unfinished is not None:
            if self.comm_ctx.unfinished.owner is not self:
                self.comm_ctx.check_finished("reset_iter_state")
            self.comm_ctx.unfinished.void()
            self.comm_ctx.unfinished = None
        self.awaits_finalization = False
        self._outermost = None
        self._backward_runs = False
        self._follows = False
        self._left_forward.clear()
        for state in self.states:
            state.reset()
        self.comm_ctx.finish()
