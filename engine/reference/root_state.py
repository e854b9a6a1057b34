"""One tree of units: who is its root, in which order units run, and when a forward or backward begins and ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from engine.reference.comm_context import Lanes
from engine.reference.param_group import Group, check_memory
from engine.reference.torch_private import at_end_of_backward, inside_backward

if TYPE_CHECKING:
    from engine.reference.state import Unit

__all__ = ["Tree"]

# More forwards than any pipeline schedule has in flight before the first backward.
_MOST_FORWARDS_AHEAD = 1024


class Tree:
    """What the units of one root share; made when the root first runs.

    [Note: learnt orders] In forward the next unit is predicted from the root's last forward, as long as the
    present one follows it. In backward units run in the reverse of the order in which they left forward.
    A wrong prediction costs a gather, never a result.
    """

    def __init__(self, root: Unit, units: tuple[Unit, ...], lanes: Lanes) -> None:
        self.root = root
        self.units = units
        self.lanes = lanes
        self.is_last_backward = True
        self._outermost: Unit | None = None
        self._last_forward: list[Unit] = []
        self._this_forward: list[Unit] = []
        self._follows = False
        self._left_forward: list[Unit | None] = []
        self._backward_runs = False
        self._frees_after_backward = False

    @classmethod
    def plant(cls, root: Unit, units: tuple[Unit, ...]) -> Tree:
        """Make ``root`` the root of ``units`` (itself among them), after checking that they can train together.

        Raises RuntimeError or ValueError with what to change.
        """
        for unit in units:
            if unit.tree is not None:
                raise RuntimeError(
                    f"{type(unit.modules[0]).__name__} has already been lazily initialized as a root of its "
                    "own: expected the first forward to run through the root module first; "
                    f"call {type(root.modules[0]).__name__} before its submodules"
                )
        _name_parameters(root.modules[0], units)
        _check_parameters(units)
        tree = cls(root, units, root.lanes)
        part_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for unit in units:
            unit.tree = tree
            unit.share(root.lanes)
            unit.choose_reshard(is_root=unit is root, part_groups=part_groups)
        tree.is_last_backward = all(unit.is_last_backward for unit in units)
        tree.choose_most_in_flight()
        return tree

    def choose_most_in_flight(self) -> None:
        """Let as many reductions hold their inputs as the most generous group was given."""
        self.lanes.most_in_flight = max(
            (group.most_in_flight for unit in self.units for group in unit.groups), default=1
        )

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward runs."""
        return self._outermost is not None or self._backward_runs

    # Forward ----------------------------------------------------------------------------------------------

    def enter_forward(self, unit: Unit) -> bool:
        """Note that ``unit`` starts to run; say whether it is the outermost one, so that a forward begins."""
        begins = self._outermost in {None, unit}
        if begins:
            self._outermost = unit
            self._backward_runs = False  # where an exception ended one
            self._this_forward = []
            self._follows = unit is self.root
            self._forget_old_forwards()
            self._left_forward.append(None)  # nothing is prefetched across two forwards
        return begins

    def _forget_old_forwards(self) -> None:
        """Keep the order from growing where forwards are run with autograd and never a backward."""
        if len(self._left_forward) > _MOST_FORWARDS_AHEAD * (len(self.units) + 1):
            self._left_forward.clear()
            for unit in self.units:
                unit.forget_places()

    def note_gather(self, unit: Unit) -> None:
        """Note that ``unit`` needs a gather: those come in one order on all ranks, as collectives must."""
        position = len(self._this_forward)
        self._this_forward.append(unit)
        self._follows &= position < len(self._last_forward) and self._last_forward[position] is unit

    def next_in_forward(self) -> Unit | None:
        """Predict which unit gathers next, if anything is known."""
        position = len(self._this_forward)
        return self._last_forward[position] if self._follows and position < len(self._last_forward) else None

    def leave_forward(self, unit: Unit) -> bool:
        """Note that ``unit`` has run; say whether it was the outermost one, so that the forward is over."""
        if unit is not self._outermost:
            return False
        self._outermost = None
        if unit is self.root:
            self._last_forward = self._this_forward
        for other in self.units:
            other.drop_guesses()
            if other is not unit:
                other.end_partial_forward()
        return True

    # Backward ---------------------------------------------------------------------------------------------

    def expect_backward(self, unit: Unit) -> int:
        """Note that ``unit`` left forward and will run in backward; gives its place in that order."""
        self._left_forward.append(unit)
        return len(self._left_forward) - 1

    def next_in_backward(self, place: int) -> Unit | None:
        """Give the unit that left forward just before the one at ``place``."""
        return self._left_forward[place - 1] if 0 < place < len(self._left_forward) else None

    def enter_backward(self, *, of_unit: bool) -> None:
        """Have ``_leave_backward`` called when the running backward is over; once for each.

        ``of_unit``: a unit's own backward starts, which ends what forward left whole. Without one, a gradient
        came from a module that ran on parameters that its unit keeps whole for a backward still to come.
        """
        if not inside_backward():
            return
        self._frees_after_backward |= of_unit
        if not self._backward_runs:
            self._backward_runs = True
            at_end_of_backward(self._leave_backward)

    def _leave_backward(self) -> None:
        self._backward_runs = False
        frees, self._frees_after_backward = self._frees_after_backward, False
        if frees:
            self._outermost = None  # where modules of one unit ran in part
        is_last = self.is_last_backward and frees
        for unit in reversed(self.units):
            unit.finish_backward(frees=frees, is_last=is_last)
        if is_last:
            self._left_forward.clear()
        if self.is_last_backward:
            self.lanes.finish()

    # ------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget an iteration that failed: wait for what is in flight, free what is gathered, drop gradients."""
        self._outermost = None
        self._backward_runs = False
        self._follows = False
        self._left_forward.clear()
        for unit in self.units:
            unit.reset()
        self.lanes.finish()


def _name_parameters(root: nn.Module, units: Iterable[Unit]) -> None:
    """Give every parameter its name from the root, for messages."""
    names = {module: name for name, module in root.named_modules()}
    for unit in units:
        for group in unit.groups:
            for parameter in group.parameters:
                site = parameter.sites[0]
                prefix = names.get(site.module, "")
                parameter.name = f"{prefix}.{site.name}" if prefix else site.name


def _check_parameters(units: Iterable[Unit]) -> None:
    """Raise for parameters tied across groups, still on the meta device, on a wrong device, or of mixed dtypes."""
    for unit in units:
        for group in unit.groups:
            _check_tied(group)
            check_memory(group)
            _check_dtypes(group)


def _check_tied(group: Group) -> None:
    for parameter in group.parameters:
        if parameter.is_tied_elsewhere:
            raise ValueError(
                f"parameter {parameter.name!r} is shared with a parameter already managed by another group, "
                "so the two would be trained apart; put both modules into one call: "
                "fully_shard([module_a, module_b])"
            )


def _check_dtypes(group: Group) -> None:
    dtypes = {str(p.current().dtype) for p in group.parameters if p.current().requires_grad}
    if len(dtypes) > 1:
        raise AssertionError(
            f"fully_shard expects uniform original parameter dtype in a group, got {sorted(dtypes)} among "
            f"{[p.name for p in group.parameters]}; cast them, or give each dtype a call of its own"
        )
