"""One communication group: the parameters that are gathered together and whose gradients are reduced together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist

from engine.reference.collectives import (
    AllGather,
    CommHook,
    DefaultAllGather,
    DefaultReduceScatter,
    Division,
    Partial,
    ReduceScatter,
    ReductionPlan,
    cut,
    division,
    keep,
    reduction,
)
from engine.reference.comm_context import Lanes
from engine.reference.mesh import Ranks
from engine.reference.param_layout import Arrangement, Unsharded, whereabouts
from engine.reference.parameter import ManagedParameter, promise
from engine.reference.policies import CPUOffloadPolicy, DTypes, OffloadPolicy

__all__ = ["Group", "GroupState", "check_memory"]


class GroupState(Enum):
    """Where the group's parameters are."""

    SHARDED = "every rank holds its shard; unshard() -> GATHERING"
    GATHERING = "the gather is under way; wait() -> UNSHARDED"
    UNSHARDED = "modules see whole parameters; reshard() -> SHARDED, or keep_part() -> KEPT"
    KEPT = "this rank holds a larger part, gathered from fewer ranks; unshard() -> GATHERING"


@dataclass(frozen=True, slots=True, eq=False)
class _Gather:
    """A gather under way. No work: there is nothing to wait for.

    ``kept`` is what its input was copied from: memory of another stream, which must not be given away before.
    """

    output: torch.Tensor
    work: dist.Work | None
    kept: torch.Tensor | None = None


class Group:
    """Parameters of one call of ``fully_shard`` or ``replicate`` on one mesh.

    The knobs are plain attributes, set through the methods of the sharded module.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        mesh: Ranks,
        device: torch.device,
        dtypes: DTypes,
        offload: OffloadPolicy,
    ) -> None:
        self.arrangement = arrangement
        self.parameters = tuple(arrangement.parameters)
        self.mesh = mesh
        self.offload = offload
        self.state = GroupState.SHARDED
        self.lanes = Lanes(device)
        self.reduces = True
        self.all_reduces = True
        self.divide_factor: float | None = None
        self.only_sums = False
        self.reduces_unused = False
        self.most_in_flight = 1
        self.scatter_group: dist.ProcessGroup | None = None
        self.unshards_in_backward = True
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.comm_hook: CommHook | None = None
        self.keeps_reduce_dtype = False
        self.shows_accumulation = False
        self.all_gather: AllGather = DefaultAllGather()
        self.reduce_scatter: ReduceScatter = DefaultReduceScatter()
        self.gradient_arrived: Callable[[Group, bool], None] = _ignored
        self.is_complete = False
        self._is_reduced = False
        self._was_reduced = False
        self.device = device
        self._dtypes = dtypes
        self._home = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else device
        self._whereabouts: tuple[object, ...] = ()
        self._unsharded: Unsharded | None = None
        self._gather: _Gather | None = None
        self._kept: torch.Tensor | None = None
        self._part_group: dist.ProcessGroup | None = None
        self._is_stale = False
        self._partial = Partial(arrangement)
        self._shown: list[ManagedParameter] = []
        self._arrived: set[int] = set()
        for parameter in self.parameters:
            parameter.watch_writes(self.shards_were_written)

    # Parameters -------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Issue the gather, unless parameters are whole or on their way already."""
        if self.state in {GroupState.GATHERING, GroupState.UNSHARDED}:
            return
        with torch.inference_mode(False), torch.no_grad():
            if self.state is GroupState.SHARDED:
                self.take_over()
                if any(p.local.is_meta for p in self.parameters):
                    check_memory(self)
                self._is_stale = False
                self._was_reduced = False
            self._gather = self._issue_gather()
        self.state = GroupState.GATHERING

    def wait(self) -> None:
        """Wait for a gather under way and let modules see whole parameters."""
        if self.state is not GroupState.GATHERING:
            return
        assert self._unsharded is not None
        gathered = self._gathered()
        with torch.inference_mode(False), torch.no_grad():
            self._unsharded.fill(gathered)
        self.lanes.gather_after()  # the next gather may be given the memory that this one was copied out of
        if not self._unsharded.is_in(gathered) and isinstance(self.all_gather, DefaultAllGather):
            self.lanes.give_back(gathered)
        for parameter in self.parameters:
            parameter.register_unsharded()
        self.state = GroupState.UNSHARDED

    def reshard(self) -> None:
        """Free whole parameters and let modules see the shards; a gather under way is waited for and dropped."""
        if self.state is GroupState.GATHERING:
            self._gathered()
            self.lanes.gather_after()  # as above
        self._kept = None
        if self.state is not GroupState.SHARDED:
            self._free()
        self.state = GroupState.SHARDED

    def keep_part(self) -> None:
        """Free whole parameters but for this rank's part of the smaller group (see ``keep_parts_in``)."""
        if self.state is not GroupState.UNSHARDED or self._part_group is None:
            self.reshard()
            return
        assert self._unsharded is not None
        with torch.inference_mode(False), torch.no_grad():
            self._kept = self._unsharded.part(self._part_group.rank(), self._part_group.size())
        self.lanes.gather_after()  # the next gather sends this part
        self._free()
        self.state = GroupState.KEPT

    def keep_parts_in(self, group: dist.ProcessGroup | None) -> None:
        """Choose the ranks among which whole parameters are split between forward and backward; None: all."""
        self._part_group = group

    def shards_were_written(self) -> None:
        """Note that whole parameters, if there are any, are not those of the shards any more."""
        self._is_stale = True

    def refresh(self, *, begins_iteration: bool) -> None:
        """Give up whole parameters of before an optimizer step, and accumulated gradients that were cleared.

        Decided by what every rank does alike, as a gather is collective: torch's optimizers tell of their steps,
        and before a new iteration whoever else updates parameters has had the reduced gradients.
        """
        if self._is_stale or (begins_iteration and self._was_reduced):
            self.reshard()
        for parameter in self._shown:
            if parameter.owned.grad is None:
                parameter.drop_gradient()
        self._shown.clear()

    def check_unchanged(self) -> None:
        """Raise RuntimeError if backward would compute with other values than forward did.

        Gathered parameters are copies. Those that share the shards' memory are not, and autograd cannot see a
        write to the shards.
        """
        if self._unsharded is None or not self._unsharded.is_shared or self.state is not GroupState.UNSHARDED:
            return
        if self._is_stale:
            raise RuntimeError(
                f"parameters {[p.name for p in self.parameters]}: expected them as they were in forward, got "
                "them changed by an optimizer before backward; step after the backward of every forward"
            )

    def take_over(self) -> None:
        """Adopt parameters that were replaced, moved or cast, as by loading."""
        self.arrangement.adopt()
        whereabouts = self._whereabouts_that_matter()
        if self._unsharded is None or whereabouts != self._whereabouts:
            self._whereabouts = whereabouts
            self._unsharded = self.arrangement.whole(
                dtype=self._dtypes.param_dtype, device=self.device, on_gradient=self._count
            )

    # Gradients --------------------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Start the reduction of what gradients there are, or hold them if the next backward shall add to them."""
        self._arrived.clear()
        self.is_complete = False
        if not any(p.has_gradient or self._adds_zeros(p) for p in self.parameters):
            return
        if not self.reduces:
            for parameter in self.parameters:
                parameter.hold_gradient(self._reduce_dtype)
            if self.shows_accumulation:
                self._show_accumulation()
            return
        chosen = [p for p in self.parameters if p.has_gradient or self._adds_zeros(p)]
        self._is_reduced = True
        self._was_reduced |= self.all_reduces or not self.mesh.is_replicated
        gradients = [p.take_gradient(self._reduce_dtype) for p in chosen]
        plan = self._reduction_plan(self._reduce_dtype or gradients[0].dtype)
        with torch.no_grad():
            if plan.is_alone:
                keep(chosen, gradients, plan)
                return
            self.lanes.make_room()
            flat = cut(chosen, gradients, plan)
            self._partial.expect(chosen, all_reduces=plan.all_reduces)
            self.lanes.reduce(flat, reduction(chosen, flat, plan))

    def _show_accumulation(self) -> None:
        """Let what the optimizer owns have a gradient while one accumulates, so that it shows when that is cleared."""
        self._shown = [p for p in self.parameters if p.has_gradient]
        for parameter in self._shown:
            if parameter.owned.grad is None:
                parameter.owned.grad = promise(parameter.owned)

    def forget_backward(self) -> None:
        """Note that a backward is over: what arrives next belongs to another one."""
        self._arrived.clear()
        self.is_complete = False
        self._is_reduced = False

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced."""
        self.forget_backward()
        self._partial.clear()
        for parameter in self.parameters:
            parameter.drop_gradient()

    # ------------------------------------------------------------------------------------------------------

    @property
    def _reduce_dtype(self) -> torch.dtype | None:
        return self._dtypes.reduce_dtype or self._dtypes.param_dtype

    def _adds_zeros(self, parameter: ManagedParameter) -> bool:
        """Whether a parameter without a gradient takes part: other ranks may have one, or microbatches before."""
        if not self.reduces or parameter.unsharded is None or not parameter.unsharded.requires_grad:
            return False
        return (self.reduces_unused and not self._is_reduced) or (
            self.all_reduces and parameter in self._partial
        )

    def _reduction_plan(self, dtype: torch.dtype) -> ReductionPlan:
        return ReductionPlan(
            arrangement=self.arrangement,
            mesh=self.mesh,
            division=self._division(dtype),
            dtype=dtype,
            final_dtype=dtype if self.keeps_reduce_dtype else self.parameters[0].local.dtype,
            home=self._home,
            scatter=self.reduce_scatter,
            scatter_group=self.scatter_group or self.mesh.shard_group,
            all_reduces=self.all_reduces,
            hook=self.all_reduce_hook,
            comm_hook=self.comm_hook,
            partial=self._partial,
        )

    def _division(self, dtype: torch.dtype) -> Division:
        if self.comm_hook is not None:
            return Division()  # the hook divides
        return division(
            dtype=dtype,
            shard_size=self.mesh.shard_size,
            replicate_size=self.mesh.replicate_size,
            factor=self.divide_factor,
            only_sums=self.only_sums,
        )

    def _issue_gather(self) -> _Gather:
        """Have this rank's part of the output filled, and then the rest by the gather."""
        assert self._unsharded is not None
        numel, dtype = self._unsharded.wire_numel, self._unsharded.wire_dtype
        group = self.mesh.shard_group if self._kept is None else self._part_group
        if self.mesh.shard_size == 1 or group is None:
            return _Gather(self._own_copy(), None)
        kept, self._kept = self._kept, None
        with self.lanes.gathering():
            direct = self._unsharded.direct()
            output = self._gather_buffer(self.mesh.shard_size * numel, dtype) if direct is None else direct
            source = output.chunk(group.size())[group.rank()] if output.numel() else output
            if kept is None:
                self.arrangement.pack(source)
            else:
                source.copy_(kept)
            work = None
            if source.numel():
                work = self.all_gather(output_tensor=output, input_tensor=source, group=group, async_op=True)
        return _Gather(output, work, kept)

    def _own_copy(self) -> torch.Tensor:
        """Give what a gather among one rank would: nothing, if whole parameters are the shards themselves."""
        assert self._unsharded is not None
        if self._unsharded.is_shared:
            return torch.empty(0)
        direct = self._unsharded.direct()
        if direct is None:
            numel, dtype = self._unsharded.wire_numel, self._unsharded.wire_dtype
            direct = torch.empty(numel, dtype=dtype, device=self.device)
        self.arrangement.pack(direct)
        return direct

    def _whereabouts_that_matter(self) -> tuple[object, ...]:
        """Where the shards are, if whole parameters are the same memory; else only what they are."""
        if self.mesh.shard_size == 1:
            return whereabouts(self.parameters)
        return tuple((p.local.dtype, p.local.is_meta) for p in self.parameters)

    def _gathered(self) -> torch.Tensor:
        """Wait for the gather under way and give its output."""
        assert self._gather is not None
        gather, self._gather = self._gather, None
        if gather.work is not None:
            gather.work.wait()
        return gather.output

    def _gather_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(self.all_gather, DefaultAllGather):
            return self.lanes.buffer(numel, dtype, self.device)
        return self.all_gather.allocate((numel,), dtype=dtype, device=self.device)

    def _free(self) -> None:
        for parameter in self.parameters:
            parameter.register_sharded()
        assert self._unsharded is not None
        if self._unsharded.is_direct:
            self.lanes.gather_after()  # the next gather may be given this memory
        self._unsharded.free()

    def _count(self, unsharded: torch.Tensor) -> None:
        """Count gradients that are whole; when every trainable parameter has its own, they may be reduced.

        Autograd sums all uses of a parameter before this is called, so a module that ran twice before
        backward is reduced once.
        """
        self._arrived.add(id(unsharded))
        # Where ranks may use different parameters, only the end of the module's backward is common to all.
        if not self.reduces_unused:
            self.is_complete = self._arrived.issuperset(
                id(p.unsharded)
                for p in self.parameters
                if p.unsharded is not None and p.unsharded.requires_grad
            )
        self.gradient_arrived(self, self.is_complete)


def _ignored(_: Group, __: bool) -> None:
    return None


def check_memory(group: Group) -> None:
    """Raise RuntimeError for parameters without memory, or not in the host memory that offloading keeps them in."""
    on_meta = [p.name for p in group.parameters if p.current().is_meta]
    if on_meta:
        raise RuntimeError(
            f"parameters should be materialized from meta device before the first forward, got {on_meta} "
            "still there; call module.to_empty(device=...) and initialise them, or load a state dict"
        )
    if not isinstance(group.offload, CPUOffloadPolicy):
        return
    elsewhere = [
        (p.name, str(p.current().device)) for p in group.parameters if p.current().device.type != "cpu"
    ]
    if elsewhere:
        raise RuntimeError(
            f"parameters should be materialized on CPU when CPU offloading is on, got {elsewhere}; "
            'load a CPU state dict or call module.to_empty(device="cpu")'
        )
