"""One communication group: parameters that are gathered together and reduced together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardproof.engine.reference.autograd_hooks import without_autograd
from shardproof.engine.reference.collectives import (
    AllGather,
    CommHook,
    DefaultAllGather,
    DefaultReduceScatter,
    Division,
    PartialReduction,
    PendingAllGather,
    ReduceScatter,
    ReductionPlan,
    copy_own_shards,
    division,
    foreach_all_gather,
    foreach_reduce,
    reduce_alone,
    reduce_scatter_copy_in,
)
from shardproof.engine.reference.comm_context import CommContext
from shardproof.engine.reference.mesh import Ranks
from shardproof.engine.reference.param_layout import ParamLayout, UnshardedMemory
from shardproof.engine.reference.parameter import FSDPParam
from shardproof.engine.reference.policies import DTypes


class ShardedState(Enum):
    """Where the group's parameters are."""

    SHARDED = "every rank holds its shard; unshard() -> GATHERING"
    GATHERING = "the gather is under way; wait() -> UNSHARDED"
    UNSHARDED = (
        "modules see whole parameters; reshard() -> SHARDED, or reshard_after_forward() -> PARTIALLY_SHARDED"
    )
    PARTIALLY_SHARDED = "this rank holds a larger part, gathered from fewer ranks; unshard() -> GATHERING"


class FSDPParamGroup:
    """Parameters of one call of ``fully_shard`` or ``replicate`` on one mesh."""

    def __init__(
        self,
        layout: ParamLayout,
        mesh: Ranks,
        device: torch.device,
        dtypes: DTypes,
        offload: OffloadPolicy,
    ) -> None:
        self.layout = layout
        self.parameters = tuple(layout.parameters)
        self.mesh = mesh
        self.offload = offload
        self.state = ShardedState.SHARDED
        self.device = device
        self.comm_ctx = CommContext(device)
        self.gradient_arrived: Callable[[FSDPParamGroup], None] = _ignored
        # Options, set through the methods of the sharded module, and by the wrapper:
        self.reduces = True  # False: whole gradients accumulate on this rank
        self.all_reduces = True  # False: reduced shards wait for their sum over replicas
        self.divide_factor: float | None = None  # the sum's divisor; None: the number of data-parallel ranks
        self.only_sums = False  # collectives use SUM alone, with divisions apart
        self.reduces_unused = False  # parameters without a gradient add zeros
        self.most_in_flight = 1  # how many reductions may hold their inputs at once
        self.scatter_group: dist.ProcessGroup | None = None  # None: that of the gathers
        self.unshards_in_backward = True  # False: backward does not need the parameters
        self.keeps_storage = False  # whole parameters keep their memory while modules show shards
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = (
            None  # sees this rank's reduced gradients
        )
        self.comm_hook: CommHook | None = None  # reduces in place of the engine, divisions included
        self.keeps_reduce_dtype = False  # reduced gradients stay in the dtype of the reduction
        self.shows_accumulation = False  # clearing the optimizer's gradients drops what accumulates
        self.all_gather: AllGather = DefaultAllGather()  # allocates for gathers, and issues them
        self.reduce_scatter: ReduceScatter = DefaultReduceScatter()  # the same for reduce-scatters
        self._dtypes = dtypes
        self._home = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else device
        # Whole parameters, and the gather that fills them.
        self._signature: tuple[object, ...] = ()
        self._unsharded: UnshardedMemory | None = None
        self._pending_gather: PendingAllGather | None = None
        self._kept_shard: torch.Tensor | None = None
        self._subgroup: dist.ProcessGroup | None = None
        self._is_stale = False
        # Gradients in flight.
        self._is_reduced = False
        self._was_reduced = False
        self._partial = PartialReduction(layout)
        self._shown: list[FSDPParam] = []
        self._arrived: set[int] = set()
        for parameter in self.parameters:
            parameter.listen_to_steps(self.mark_stale)

    def lazy_init(self, names: Mapping[nn.Module, str]) -> None:
        """Name the parameters for messages, by the modules' names, and run the checks that need the first forward.

        Raises ValueError for parameters tied across groups, RuntimeError or AssertionError for parameters that
        `_check_memory` or the reduction do not support.
        """
        for parameter in self.parameters:
            parameter.name = parameter.locations[0].name_from(names)
        _check_tied(self.parameters)
        _check_memory(self.parameters, self.offload)
        _check_dtypes(self.parameters)

    # Parameters -------------------------------------------------------------------------------------------

    @property
    def is_freed(self) -> bool:
        """Whether whole parameters are neither there nor on their way."""
        # No set of members: a member's hash is computed in Python.
        return self.state is ShardedState.SHARDED or self.state is ShardedState.PARTIALLY_SHARDED

    def unshard(self) -> None:
        """Issue the gather, unless parameters are whole or being gathered."""
        if self.state is ShardedState.UNSHARDED:
            for parameter in self.parameters:
                parameter.sync_requires_grad()
        if not self.is_freed:
            return
        with without_autograd():
            if self.state is ShardedState.SHARDED:
                self.reset_sharded_params(gathers=True)
                if self.layout.is_meta:
                    _check_memory(self.parameters, self.offload)
                self._is_stale = False
                self._was_reduced = False
            self._pending_gather = self._issue_all_gather()
        self.state = ShardedState.GATHERING

    def wait(self) -> None:
        """Wait for a gather in flight and let modules see whole parameters."""
        if self.state is not ShardedState.GATHERING:
            return
        assert self._unsharded is not None
        gathered = self._wait_for_all_gather()
        with without_autograd():
            self._unsharded.copy_out(gathered)
            for parameter in self.parameters:
                parameter.return_to_gathered()
        # The next gather may reuse the buffer that this one was copied out of.
        self.comm_ctx.order_all_gathers()
        if not self._unsharded.is_in(gathered) and isinstance(self.all_gather, DefaultAllGather):
            self.comm_ctx.recycle(gathered)
        for parameter in self.parameters:
            parameter.to_unsharded()
        self.state = ShardedState.UNSHARDED

    def reshard(self) -> None:
        """Free whole parameters and let modules see the shards; waits for a gather in flight and drops it."""
        if self.state is ShardedState.GATHERING:
            self._wait_for_all_gather()
            self.comm_ctx.order_all_gathers()  # as above
        self._kept_shard = None
        if self.state is not ShardedState.SHARDED:
            self._free()
        self.state = ShardedState.SHARDED

    def reshard_after_forward(self) -> None:
        """Free whole parameters, except for this rank's part of the smaller group if one is set (`set_subgroup`)."""
        if self.state is not ShardedState.UNSHARDED or self._subgroup is None:
            self.reshard()
            return
        assert self._unsharded is not None
        with without_autograd():
            self._kept_shard = self._unsharded.part(self._subgroup.rank(), self._subgroup.size())
        self.comm_ctx.order_all_gathers()  # the next gather sends this part
        self._free()
        self.state = ShardedState.PARTIALLY_SHARDED

    def set_subgroup(self, group: dist.ProcessGroup | None) -> None:
        """Choose the ranks among which whole parameters are split between forward and backward; None: all."""
        if self.state is ShardedState.PARTIALLY_SHARDED:
            self.reshard()  # the kept part belongs to the former ranks
        self._subgroup = group

    def mark_stale(self) -> None:
        """Record that any whole parameters are stale; see [Note: stale parameters]."""
        self._is_stale = True

    def refresh(self, *, begins_iteration: bool) -> None:
        """Free whole parameters from before an optimizer step, and accumulated gradients that were cleared.

        A gather is collective, so the decision uses only events common to all ranks: torch's optimizers report their
        steps, and before a new iteration any other optimizer has received the reduced gradients.
        """
        if self._is_stale or (begins_iteration and self._was_reduced):
            self.reshard()
        for parameter in self._shown:
            if parameter.sharded_param.grad is None:
                parameter.drop_unsharded_grad()
        self._shown.clear()

    def check_unchanged(self) -> None:
        """Raise RuntimeError if backward would compute with other values than forward did.

        Gathered parameters are copies. Parameters that share the shards' memory are not, and autograd does not detect a
        write to the shards.
        """
        self.check_assigned()
        if self.state is not ShardedState.UNSHARDED:
            return
        if self._unsharded is not None and self._unsharded.is_shared and self._is_stale:
            raise RuntimeError(
                f"parameters {[p.name for p in self.parameters]}: expected them as they were in forward, got "
                "them changed by an optimizer before backward; step after the backward of every forward"
            )

    def check_assigned(self) -> None:
        """Raise RuntimeError if the caller has replaced whole parameters: gradients would go to the former ones."""
        if self.state is ShardedState.UNSHARDED and (
            replaced := [p.name for p in self.parameters if p.is_replaced]
        ):
            raise RuntimeError(
                f"parameters {replaced}: expected none assigned while whole ones are kept for a backward, got others "
                "in their place; change values after the backward that reduces"
            )

    def reset_sharded_params(self, *, gathers: bool = False) -> None:
        """Adopt parameters that were replaced, moved or cast, as by loading; ``gathers`` says that a gather follows."""
        self.layout.reset_sharded_params()
        packs = self.layout.packs
        if packs and not gathers:
            return  # one packing for each gather
        signature = (packs, self.layout.signature)
        if self._unsharded is None or signature != self._signature:
            self._signature = signature
            self._unsharded = self.layout.init_unsharded(
                dtype=self._dtypes.param_dtype,
                device=self.device,
                on_gradient=self._count,
                where_gathers_start=self._where_gathers_start,
            )

    def adopt_converted(self) -> None:
        """Adopt shards that were moved or cast, by a user who may convert them back in the middle of a step.

        Whole parameters stay as they are until the next gather, for graphs that are open have them. Those that are the
        shards themselves take the new memory once it has their dtype again.
        """
        self.layout.reset_sharded_params()
        is_shared = self._unsharded is not None and self._unsharded.is_shared
        wholes = [(p.unsharded_param, p.local) for p in self.parameters]
        if is_shared and all(whole is None or whole.dtype == local.dtype for whole, local in wholes):
            self.reset_sharded_params()

    # Gradients --------------------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Start to reduce the existing gradients, or hold them if the next backward is to add to them."""
        self._arrived.clear()
        chosen = [p for p in self.parameters if p.has_unsharded_grad or self._adds_zeros(p)]
        if not chosen:
            return
        if not self.reduces:
            self.hold_gradients()
            return
        if self.reduces_unused:
            self._check_zeros()
        self._is_reduced = True
        self._was_reduced |= self.all_reduces or not self.mesh.is_replicated
        gradients = [p.pop_unsharded_grad(self._accumulation_dtype(p)) for p in chosen]
        plan = self._reduction_plan(chosen, self._dtype_of(chosen, gradients))
        with without_autograd():
            if plan.is_alone:
                reduce_alone(chosen, gradients, plan)
                return
            self.comm_ctx.reserve()
            allocate = partial(self._reduction_buffer, plan.dtype, gradients[0].device)
            flat = reduce_scatter_copy_in(chosen, gradients, plan, allocate)
            self._partial.expect(chosen, plan)
            self.comm_ctx.reduce(flat, foreach_reduce(chosen, flat, plan))

    def hold_gradients(self) -> None:
        """Keep the existing gradients for a later reduction."""
        for parameter in self.parameters:
            parameter.hold_unsharded_grad(self._accumulation_dtype(parameter))
        if self.shows_accumulation:
            self._show_accumulation()

    def check_reduces_wholly(self) -> None:
        """Raise RuntimeError if a reduction would leave gradients to be reduced across replicas."""
        is_pending = self.reduces and any(p.has_unsharded_grad for p in self.parameters)
        if self.mesh.is_replicated and not self.all_reduces and (is_pending or self._partial):
            raise RuntimeError(
                f"finalize_backward: expected the all-reduce across replicas (HSDP or replicate) to be on, got it off "
                f"for {[p.name for p in self.parameters]}; call set_requires_all_reduce(True) first"
            )

    def _show_accumulation(self) -> None:
        """Set pending gradients on the optimizer's parameters while gradients accumulate, to detect clearing."""
        self._shown = [p for p in self.parameters if p.has_unsharded_grad]
        for parameter in self._shown:
            parameter.show_accumulation()

    def forget_backward(self) -> None:
        """Record that a backward is over: later gradients belong to another one."""
        self._arrived.clear()
        self._is_reduced = False

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced."""
        self.forget_backward()
        self._partial.clear()
        for parameter in self.parameters:
            parameter.drop_unsharded_grad()

    # ------------------------------------------------------------------------------------------------------

    def _accumulation_dtype(self, parameter: FSDPParam) -> torch.dtype | None:
        """Return the dtype of held whole gradients, equal on all ranks; None means the dtype in which they arrive."""
        return self._dtypes.reduce_dtype or parameter.grad_dtype

    def _dtype_of(self, chosen: Sequence[FSDPParam], gradients: Sequence[torch.Tensor]) -> torch.dtype:
        """Choose the dtype of one reduction, including the partial sums that wait for its all-reduce."""
        if self._dtypes.reduce_dtype is not None:
            return self._dtypes.reduce_dtype
        pairs = zip(chosen, gradients, strict=True)
        dtypes = {p.grad_dtype or gradient.dtype for p, gradient in pairs} | self._partial.dtypes
        return reduce(torch.promote_types, dtypes)

    def _check_zeros(self) -> None:
        """Raise ValueError if zeros for unused parameters would have no dtype, on all ranks, because else some hang."""
        trained = [p for p in self.parameters if p.sharded_param.requires_grad]
        names = [p.name for p in trained if self._accumulation_dtype(p) is None]
        if names:
            raise ValueError(
                f"set_reduce_scatter_unused_params: expected a dtype for zeros of {names}, got grad_dtype=None; "
                "set a grad_dtype, or MixedPrecisionPolicy.reduce_dtype"
            )

    def _adds_zeros(self, parameter: FSDPParam) -> bool:
        """Whether a parameter without a gradient takes part, since other ranks or earlier microbatches may have one."""
        whole = parameter.unsharded_param
        if not self.reduces or whole is None or not whole.requires_grad:
            return False
        is_missing = self.reduces_unused and not self._is_reduced
        return is_missing or (self.all_reduces and parameter in self._partial)

    def _reduction_plan(self, chosen: Sequence[FSDPParam], dtype: torch.dtype) -> ReductionPlan:
        finals = {dtype} if self.keeps_reduce_dtype else {p.grad_dtype or dtype for p in chosen}
        return ReductionPlan(
            layout=self.layout,
            mesh=self.mesh,
            division=self._division(dtype),
            dtype=dtype,
            final_dtype=finals.pop() if len(finals) == 1 else dtype,  # the rest are cast one by one
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

    def _issue_all_gather(self) -> PendingAllGather:
        """Gather the shards over all ranks, or the kept parts over the subgroup."""
        assert self._unsharded is not None
        if self.mesh.shard_size == 1:
            return copy_own_shards(self.layout, self._unsharded, self.device)
        kept, self._kept_shard = self._kept_shard, None
        group = self.mesh.shard_group if kept is None else self._subgroup
        assert group is not None
        with self._where_gathers_start():
            output = self._unsharded.direct()
            if output is None:
                numel, dtype = self.mesh.shard_size * self._unsharded.wire_numel, self._unsharded.wire_dtype
                output = self._gather_buffer(numel, dtype)
            return foreach_all_gather(self.layout, output, group, self.all_gather, kept)

    def _where_gathers_start(self) -> AbstractContextManager[object]:
        """Return a context that issues work on the stream that packs and copies shards for a gather."""
        return nullcontext() if self.mesh.shard_size == 1 else self.comm_ctx.on_all_gather_stream()

    def _wait_for_all_gather(self) -> torch.Tensor:
        """Wait for the gather in flight and return its output."""
        assert self._pending_gather is not None
        gather, self._pending_gather = self._pending_gather, None
        if gather.work is not None:
            gather.work.wait()
        return gather.output

    def _gather_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(self.all_gather, DefaultAllGather):
            return self.comm_ctx.all_gather_buffer(numel, dtype, self.device)
        return self.all_gather.allocate((numel,), dtype=dtype, device=self.device)

    def _reduction_buffer(self, dtype: torch.dtype, device: torch.device, numel: int) -> torch.Tensor:
        if isinstance(self.reduce_scatter, DefaultReduceScatter):
            return self.comm_ctx.reduction_buffer(numel, dtype, device)
        return self.reduce_scatter.allocate((numel,), dtype=dtype, device=device)

    def _free(self) -> None:
        for parameter in self.parameters:
            parameter.to_sharded()
        assert self._unsharded is not None
        if self._unsharded.is_direct:
            self.comm_ctx.order_all_gathers()  # the next gather may reuse this memory
        if not self.keeps_storage:
            self._unsharded.free()

    def _count(self, unsharded: torch.Tensor) -> None:
        """Record the arrival of a whole gradient.

        Autograd sums all uses of a parameter before this is called, so a module that ran twice before
        backward is reduced once.
        """
        self._arrived.add(id(unsharded))
        self.gradient_arrived(self)

    @property
    def is_complete(self) -> bool:
        """Whether every trainable parameter has its gradient of this backward, so that they can be reduced."""
        # If ranks use different parameters, only the end of the module's backward is common to all.
        return self.has_some and self._have_all_arrived

    @property
    def is_through(self) -> bool:
        """Whether this backward needs no parameter any more: a frozen one's module may compute after all gradients."""
        return self.is_complete and all(p.sharded_param.requires_grad for p in self.parameters)

    @property
    def has_some(self) -> bool:
        """Whether some parameter has its gradient of this backward, as it has on every rank then."""
        return not self.reduces_unused and bool(self._arrived)

    @property
    def awaits_gradients(self) -> bool:
        """Whether this backward may have gradients to come, without which a reduction now would be one of two.

        Ranks that hold gradients of earlier microbatches, and ranks that hold none, must decide alike.
        """
        # As above: if ranks use different parameters, another rank may have no such gradient to wait for.
        return not self.reduces_unused and not self._have_all_arrived

    @property
    def _have_all_arrived(self) -> bool:
        trained = (p.unsharded_param for p in self.parameters)
        return all(
            id(whole) in self._arrived for whole in trained if whole is not None and whole.requires_grad
        )


def _ignored(_: FSDPParamGroup) -> None:
    return None


def _check_tied(parameters: Sequence[FSDPParam]) -> None:
    for parameter in parameters:
        if parameter.is_tied_elsewhere:
            raise ValueError(
                f"parameter {parameter.name!r} is shared with a parameter already managed by another group, "
                "so the two would be trained apart; put both modules into one call: "
                "fully_shard([module_a, module_b])"
            )


def _check_memory(parameters: Sequence[FSDPParam], offload: OffloadPolicy) -> None:
    """Raise RuntimeError for parameters without memory, or for offloaded parameters that are not on the host."""
    on_meta = [p.name for p in parameters if p.current().is_meta]
    if on_meta:
        raise RuntimeError(
            f"parameters should be materialized from meta device before the first forward, got {on_meta} "
            "still there; call module.to_empty(device=...) and initialise them, or load a state dict"
        )
    if not isinstance(offload, CPUOffloadPolicy):
        return
    elsewhere = [(p.name, str(p.current().device)) for p in parameters if p.current().device.type != "cpu"]
    if elsewhere:
        raise RuntimeError(
            f"parameters should be materialized on CPU when CPU offloading is on, got {elsewhere}; "
            'load a CPU state dict or call module.to_empty(device="cpu")'
        )


def _check_dtypes(parameters: Sequence[FSDPParam]) -> None:
    dtypes = {str(p.current().dtype) for p in parameters if p.current().requires_grad}
    if len(dtypes) > 1:
        raise AssertionError(
            f"fully_shard expects uniform original parameter dtype in a group, got {sorted(dtypes)} among "
            f"{[p.name for p in parameters]}; cast them, or give each dtype a call of its own"
        )
