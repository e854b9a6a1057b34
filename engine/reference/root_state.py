"""What the FSDPStates below one root share: in which order they run, and when a forward or backward begins and ends."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from shardproof.engine.reference.comm_context import CommContext
from shardproof.engine.reference.param_group import FSDPParamGroup
from shardproof.engine.reference.torch_private import at_end_of_backward, inside_backward

# More forwards than any pipeline schedule has in flight before the first backward.
_MOST_FORWARDS_AHEAD = 1024


class SharedState(Protocol):
    """What a `RootState` asks of each state that shares it."""

    backward_positions: list[int]
    """Where the state stands in the order of forwards, for each backward that is still to come."""

    @property
    def param_groups(self) -> tuple[FSDPParamGroup, ...]:
        """The communication groups of the state."""

    def drop_prefetch(self) -> None:
        """Free what was gathered on a prediction that did not come true."""

    def end_partial_forward(self) -> None:
        """Free what a forward left whole because not all modules of the state ran in it."""

    def finish_backward(self, *, frees: bool, is_last: bool) -> None:
        """Do what is left at the end of backward."""

    def leave_backward(self, *, frees: bool) -> None:
        """Do what is left at the end of a backward that the caller finalizes."""

    def reset(self) -> None:
        """Forget an iteration that failed."""


State = TypeVar("State", bound=SharedState)


class RootState(Generic[State]):
    """The states of one root, and the order in which they run; made when the root first runs.

    [Note: recorded order] In forward the next gather is predicted from the root's last forward, as long as the
    present one follows it. In backward states run in the reverse of the order in which they left forward.
    A wrong prediction costs a gather, never a result.
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
        """Let as many reductions hold their inputs as the most generous group was given."""
        self.comm_ctx.most_in_flight = max(
            (group.most_in_flight for state in self.states for group in state.param_groups), default=1
        )

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward runs."""
        return self._outermost is not None or self._backward_runs

    # Forward ----------------------------------------------------------------------------------------------

    def enter_forward(self, state: State) -> bool:
        """Record that ``state`` starts to run; return whether it is the outermost one, so that a forward begins."""
        begins = self._outermost in {None, state}
        if begins:
            self.comm_ctx.check_finished("forward")
            self._outermost = state
            self._backward_runs = False  # where an exception ended one
            self._this_forward = []
            self._follows = state is self.root
            self._forget_old_forwards()
            self._left_forward.append(None)  # nothing is prefetched across two forwards
        return begins

    def _forget_old_forwards(self) -> None:
        """Keep the order from growing where forwards are run with autograd and never a backward."""
        if len(self._left_forward) > _MOST_FORWARDS_AHEAD * (len(self.states) + 1):
            self._left_forward.clear()
            for state in self.states:
                state.backward_positions.clear()

    def record_all_gather(self, state: State) -> None:
        """Record that ``state`` needs a gather: those come in one order on all ranks, as collectives must."""
        self._follows = self.next_in_forward() is state
        self._this_forward.append(state)

    def next_in_forward(self) -> State | None:
        """Predict which state gathers next, if anything is known."""
        position = len(self._this_forward)
        is_known = self._follows and position < len(self._recorded_forward)
        return self._recorded_forward[position] if is_known else None

    def leave_forward(self, state: State) -> None:
        """Record that ``state`` has run; where it was the outermost one, the forward is over."""
        if state is not self._outermost:
            return
        self._outermost = None
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

        The states inside a state left forward before it did, yet their backward is over by the end of its own.
        """
        if position >= len(self._left_forward):
            return None
        for earlier in reversed(range(position)):
            state = self._left_forward[earlier]
            if state is None or earlier in state.backward_positions:
                return state
        return None

    def enter_backward(self, *, of_state: bool) -> None:
        """Queue ``_leave_backward`` for the end of the running backward, once for each.

        ``of_state``: a state's own backward starts, which ends what forward left whole. Without one, a gradient
        came from a module that ran on parameters that its state keeps whole for a backward still to come.
        """
        if not inside_backward():
            return
        self._frees_after_backward |= of_state
        if not self._backward_runs:
            self._backward_runs = True
            at_end_of_backward(self._leave_backward)

    def _leave_backward(self) -> None:
        self._backward_runs = False
        frees, self._frees_after_backward = self._frees_after_backward, False
        if frees:
            self._outermost = None  # where modules of one state ran in part
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
        """Reduce what backwards have left, and end the iteration; the reductions are still to be waited for."""
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
