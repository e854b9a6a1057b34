"""One unit: the module, or list of modules, of one call, and the hooks that drive its groups as it runs."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from engine.reference.autograd_hooks import PendingBackwards, map_tensors
from engine.reference.comm_context import Lanes
from engine.reference.mesh import part_group
from engine.reference.param_group import Group, GroupState
from engine.reference.policies import DTypes
from engine.reference.root_state import Tree
from engine.reference.torch_private import eager, inside_backward

__all__ = ["BackwardGuess", "Unit", "unit_of"]

_ATTRIBUTE = "_sharding_unit"


class UnitState(Enum):
    """What a unit is doing."""

    IDLE = "a forward -> FORWARD; the gradient of an output -> BACKWARD"
    FORWARD = "all its modules have run -> IDLE"
    BACKWARD = "the gradients of its inputs are there, or backward is over -> IDLE"


class BackwardGuess(Enum):
    """When a unit's backward gathers the unit that is predicted to come next."""

    FIRST = "before its own gradients are computed"
    LAST = "after its own gradients were computed"
    NEVER = "not at all"


class Unit:
    """The modules of one call of ``fully_shard`` or ``replicate``, and their communication groups.

    Whole parameters are needed from the first module's forward to the last one's, and again from the first
    gradient of an output until the gradients of all inputs are there.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: tuple[Group, ...],
        *,
        device: torch.device,
        dtypes: DTypes,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.modules = modules
        self.groups = groups
        self.device = device
        self.dtypes = dtypes
        self.reshard_after_forward = reshard_after_forward
        self.reshards_after_backward = True
        self.forward_prefetch: tuple[Unit, ...] = ()
        self.backward_prefetch: tuple[Unit, ...] = ()
        self.guesses_in_forward = True
        self.guesses_in_backward = BackwardGuess.FIRST
        self.post_optim_event: Any | None = None  # torch types each device's events apart
        self.tree: Tree | None = None
        self.is_last_backward = True  # of the tree to come
        self._lanes = Lanes(device)
        self.share(self._lanes)
        self._state = UnitState.IDLE
        self._entered: set[nn.Module] = set()
        self._left: set[nn.Module] = set()
        self._guess = False
        self._places: list[int] = []
        self._place = 0
        self._calls = PendingBackwards(on_begin=self._pre_backward, on_end=self._inputs_done)
        for group in groups:
            group.gradient_arrived = self._gradient_arrived
        for module in modules:
            module.__dict__[_ATTRIBUTE] = self
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, with_kwargs=True)

    @property
    def lanes(self) -> Lanes:
        """Streams and reductions in flight, shared by all units of a tree once the root has run."""
        return self._lanes

    def share(self, lanes: Lanes) -> None:
        """Communicate over ``lanes``."""
        self._lanes = lanes
        for group in self.groups:
            group.lanes = lanes

    def choose_reshard(self, *, is_root: bool, part_groups: dict[tuple[int, ...], dist.ProcessGroup]) -> None:
        """Settle what becomes of whole parameters after forward, now that it is known who is the root.

        By default the root keeps its own: backward needs them at once. A number of ranks needs process groups,
        which ``part_groups`` collects by their ranks.
        """
        if self.reshard_after_forward is None:
            self.reshard_after_forward = not is_root
        for group in self.groups:
            group.take_over()
            size = self.reshard_after_forward
            if not isinstance(size, bool):
                group.keep_parts_in(part_group(group.mesh, size, part_groups))

    # Called by the module's methods and by the tree -------------------------------------------------------

    def unshard(self) -> None:
        """Issue the gathers."""
        for group in self.groups:
            group.unshard()

    def wait(self) -> None:
        """Wait for gathers under way."""
        self._guess = False
        for group in self.groups:
            group.wait()

    def reshard(self) -> None:
        """Free whole parameters."""
        self._guess = False
        for group in self.groups:
            group.reshard()

    def drop_guesses(self) -> None:
        """Free what was gathered on a prediction that did not come true."""
        if self._guess:
            self.reshard()

    def end_partial_forward(self) -> None:
        """Free what a forward left whole because not all modules of this unit ran in it."""
        if self._state is UnitState.FORWARD:
            self._state = UnitState.IDLE
            self._reshard_after_forward()

    def forget_places(self) -> None:
        """Forget where in the order of forwards this unit stood: its next backwards prefetch nothing."""
        self._places.clear()

    def finish_backward(self, *, frees: bool, is_last: bool) -> None:
        """Do what is left at the end of backward: inputs that need no gradient did not say that they are done."""
        if is_last:
            if any(group.state is GroupState.GATHERING for group in self.groups):
                self.reshard()  # prefetched, and not used
            self._places.clear()
            self._calls.clear()
        if frees:
            self._free_after_backward()
        self._reduce()
        for group in self.groups:
            group.forget_backward()

    def reset(self) -> None:
        """Forget an iteration that failed."""
        self._state = UnitState.IDLE
        self._places.clear()
        self._calls.clear()
        self.reshard()
        for group in self.groups:
            group.drop_gradients()

    def is_running(self, module: nn.Module) -> bool:
        """Whether ``module`` is between the start and the end of a forward."""
        return self._state is UnitState.FORWARD and module in self._entered - self._left

    # Forward ----------------------------------------------------------------------------------------------

    @eager
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather, and give the inputs as the module shall see them."""
        tree = self.tree or self.become_root()
        recomputes = inside_backward()
        if self._state is UnitState.BACKWARD and recomputes:  # what backward is about to use
            self._gather_now()
            return self._cast_inputs(args), self._cast_inputs(kwargs)
        # Entered before and not done: modules of this unit ran in part, or a forward ended with an exception.
        begins = self._state is not UnitState.FORWARD or module in self._entered
        if begins:
            self._state = UnitState.FORWARD
            self._entered.clear()
            self._left.clear()
        self._entered.add(module)
        if not recomputes:
            if begins and tree.enter_forward(self):
                args, kwargs = self._begin_iteration(tree, args, kwargs)
            for group in self.groups:
                group.refresh(begins_iteration=False)
            if any(group.state is not GroupState.UNSHARDED for group in self.groups):
                tree.note_gather(self)
        self._gather_now()
        if begins and not recomputes:
            self._prefetch_in_forward(tree)
        tree.lanes.forget_buffer()
        args, kwargs = self._cast_inputs(args), self._cast_inputs(kwargs)
        return self._calls.watch_inputs(args, kwargs)

    @eager
    def after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Free what is not needed until backward, and give the output as the caller shall see it."""
        if self._state is UnitState.BACKWARD and inside_backward():
            return self._cast_outputs(output)
        assert self.tree is not None
        self._left.add(module)
        if self._calls.watch_outputs((args, kwargs), output) and not inside_backward():
            self._places.append(self.tree.expect_backward(self))
        if self._left.issuperset(self.modules):
            self._state = UnitState.IDLE
            if not inside_backward():  # else backward needs the parameters at once
                self._reshard_after_forward()
        if not inside_backward():
            self.tree.leave_forward(self)
        return self._cast_outputs(output)

    def _begin_iteration(
        self, tree: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Order gathers after the optimizer step, and bring inputs to the device."""
        tree.lanes.gather_after(tree.root.post_optim_event)
        tree.root.post_optim_event = None
        if self is tree.root:
            for unit in tree.units:
                for group in unit.groups:
                    group.refresh(begins_iteration=True)
        if self.device.type == "cpu":
            return args, kwargs

        def to_device(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, non_blocking=True)

        return map_tensors(to_device, args), map_tensors(to_device, kwargs)

    def _gather_now(self) -> None:
        self.unshard()
        self.wait()

    def _prefetch_in_forward(self, tree: Tree) -> None:
        for unit in self.forward_prefetch:
            unit.unshard()
        if not self.guesses_in_forward:
            return
        if not self.forward_prefetch and (guess := tree.next_in_forward()) is not None:
            guess.guess()

    def guess(self) -> None:
        """Issue the gathers on a prediction."""
        if all(group.state in {GroupState.SHARDED, GroupState.KEPT} for group in self.groups):
            self._guess = True
            self.unshard()

    def _reshard_after_forward(self) -> None:
        for group in self.groups:
            if self.reshard_after_forward is not False:
                group.keep_part()  # all of it is freed where no smaller group was chosen

    # Backward ---------------------------------------------------------------------------------------------

    @eager
    def _pre_backward(self, *_: Any) -> None:
        assert self.tree is not None
        self.tree.enter_backward(of_unit=True)
        begins = self._state is not UnitState.BACKWARD
        if begins:
            for group in self.groups:
                group.check_unchanged()
        self._state = UnitState.BACKWARD
        for group in self.groups:
            if group.unshards_in_backward:
                group.unshard()
                group.wait()
        self._guess = False
        if begins:
            self._place = self._places.pop() if self._places else 0
            self._prefetch_in_backward(self.tree)
        self.tree.lanes.forget_buffer()

    def _prefetch_in_backward(self, tree: Tree) -> None:
        for unit in self.backward_prefetch:
            unit.guess_in_backward()
        if not self.backward_prefetch and self.guesses_in_backward is BackwardGuess.FIRST:
            self._guess_next(tree)

    def _guess_next(self, tree: Tree) -> None:
        guess = tree.next_in_backward(self._place)
        if guess is not None:
            guess.guess_in_backward()

    def guess_in_backward(self) -> None:
        """Issue the gathers on a prediction, unless the caller said that backward does without."""
        if all(group.unshards_in_backward for group in self.groups):
            self.guess()

    def _gradient_arrived(self, group: Group, is_complete: bool) -> None:
        assert self.tree is not None
        self.tree.enter_backward(of_unit=False)
        if is_complete and not self._calls.num_watched:
            # No input will say that backward is through. The parameters themselves may be needed further: a
            # frozen one's module may still compute.
            group.reduce_gradients()

    def _inputs_done(self) -> None:
        """Free the parameters unless another forward of this backward still waits for its turn."""
        if self._calls.end_one() and not all(group.is_complete for group in self.groups):
            return
        self._free_after_backward()
        if self.guesses_in_backward is BackwardGuess.LAST and self.tree is not None:
            self._guess_next(
                self.tree
            )  # before the reduction: the next unit's gradients need not wait for that
        self._reduce()

    def _free_after_backward(self) -> None:
        """Free before reducing: the reduction needs memory, and the gradients have their own."""
        for group in self.groups:
            if self.reshards_after_backward and group.state is not GroupState.GATHERING:
                group.reshard()

    def _reduce(self) -> None:
        self._state = UnitState.IDLE
        for group in reversed(self.groups):
            group.reduce_gradients()

    # ------------------------------------------------------------------------------------------------------

    def _cast_inputs(self, value: Any) -> Any:
        dtype = self.dtypes.param_dtype
        return _cast(value, dtype) if dtype is not None and self.dtypes.cast_forward_inputs else value

    def _cast_outputs(self, value: Any) -> Any:
        return value if self.dtypes.output_dtype is None else _cast(value, self.dtypes.output_dtype)

    def become_root(self) -> Tree:
        """Make the tree of all units below: those are final when the first forward runs."""
        if len(self.modules) > 1:
            raise RuntimeError(
                f"fully_shard requires a single root module, got {[type(m).__name__ for m in self.modules]} "
                "as the first to run; apply fully_shard to the module that contains them too"
            )
        found = (unit_of(module) for module in self.modules[0].modules())
        return Tree.plant(self, tuple(dict.fromkeys(unit for unit in found if unit is not None)))


def unit_of(module: nn.Module) -> Unit | None:
    """Give the unit that ``module`` belongs to by a call on itself, if any."""
    unit: Unit | None = module.__dict__.get(_ATTRIBUTE)
    return unit


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, value)
