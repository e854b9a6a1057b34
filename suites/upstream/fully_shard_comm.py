"""What torch's communication tests of ``fully_shard`` promise: C01 to C30."""

from __future__ import annotations

from suites.upstream.row import UpstreamRow

__all__ = ["ROWS"]

_FILE = "test_fully_shard_comm.py"

ROWS = (
    UpstreamRow(
        id="C01",
        file=_FILE,
        test="CollectiveOps.test_all_gather_fp32",
        promise="gathered parameters are the originals, on the whole mesh and on a smaller one",
    ),
    UpstreamRow(
        id="C02",
        file=_FILE,
        test="CollectiveOps.test_reduce_scatter_fp32",
        promise="each rank's shard of the reduced gradient is its part of the mean",
    ),
    UpstreamRow(
        id="C03",
        file=_FILE,
        test="CollectiveOps.test_reduce_scatter_fp16",
        promise="a float16 reduction divides before and after the sum and loses nothing",
    ),
    UpstreamRow(
        id="C04",
        file=_FILE,
        test="ChunkCatMixedDtypeCPU.test_numerics_cpu",
        promise="packing gradients of mixed dtypes for a reduction changes no bit",
    ),
    UpstreamRow(
        id="C05",
        file=_FILE,
        test="ChunkCatMixedDtypeCPU.test_kernels_cpu",
        promise="packing gradients of mixed dtypes is fused into two kernels",
        why_gpu="what is counted are CUDA kernels",
    ),
    UpstreamRow(
        id="C06",
        file=_FILE,
        test="Communication.test_fully_shard_communication_count",
        promise="gathers and reductions per group are as many as the reshard policy says",
    ),
    UpstreamRow(
        id="C07",
        file=_FILE,
        test="Communication.test_manual_reshard_with_reshard_after_forward_false",
        promise="groups resharded by hand after forward are gathered again in backward",
    ),
    UpstreamRow(
        id="C08",
        file=_FILE,
        test="Communication.test_set_reduce_scatter_divide_factor",
        promise="gradients are divided by the factor set, only in the groups it was set on",
    ),
    UpstreamRow(
        id="C09",
        file=_FILE,
        test="Communication.test_set_reduce_scatter_max_input_buffers",
        promise="a cap on reductions in flight does not change the result",
    ),
    UpstreamRow(
        id="C10",
        file=_FILE,
        test="Communication.test_reduce_scatter_max_input_buffers_resolves_to_max",
        promise="groups with different caps share the largest",
    ),
    UpstreamRow(
        id="C11",
        file=_FILE,
        test="Communication.test_set_reduce_scatter_max_input_buffers_validation",
        promise="a cap that is no positive integer is refused",
    ),
    UpstreamRow(
        id="C12",
        file=_FILE,
        test="Communication.test_set_reshard_after_forward",
        promise="changing the reshard policy later changes the gathers, recursively or not as asked",
    ),
    UpstreamRow(
        id="C13",
        file=_FILE,
        test="Prefetch.test_fully_shard_backward_prefetch",
        promise="backward gathers a group before its turn, in reverse order of forward",
    ),
    UpstreamRow(
        id="C14",
        file=_FILE,
        test="Prefetch.test_set_modules_to_forward_prefetch",
        promise="a forward prefetch list decides which gathers start early, and their order",
    ),
    UpstreamRow(
        id="C15",
        file=_FILE,
        test="Prefetch.test_set_modules_to_backward_prefetch",
        promise="a backward prefetch list decides which gathers start early, and their order",
    ),
    UpstreamRow(
        id="C16",
        file=_FILE,
        test="Prefetch.test_set_modules_to_backward_prefetch_inside_ac",
        promise="prefetch lists hold inside checkpointed blocks, recomputation included",
    ),
    UpstreamRow(
        id="C17",
        file=_FILE,
        test="Prefetch.test_fully_shard_multi_module_backward_prefetch",
        promise="groups of several modules prefetch in backward like single ones",
    ),
    UpstreamRow(
        id="C18",
        file=_FILE,
        test="Prefetch.test_fully_shard_multi_module_unused_module",
        promise="a group with an unused module is gathered, reduced and resharded all the same",
    ),
    UpstreamRow(
        id="C19",
        file=_FILE,
        test="Prefetch.test_backward_misprefetch",
        promise="a wrong prefetch costs time, never correctness",
    ),
    UpstreamRow(
        id="C20",
        file=_FILE,
        test="UnshardMultiProcess.test_unshard_async",
        promise="asynchronous unshards between other collectives deadlock nothing and stay right",
    ),
    UpstreamRow(
        id="C21",
        file=_FILE,
        test="UnshardMultiThread.test_unshard_no_param_group",
        promise="unsharding a module without parameters gives a handle that can be waited for",
    ),
    UpstreamRow(
        id="C22",
        file=_FILE,
        test="UnshardMultiThread.test_unshard_without_lazy_init",
        promise="unsharding before the first forward shows the original parameters",
    ),
    UpstreamRow(
        id="C23",
        file=_FILE,
        test="AllocFromPG.test_fully_shard_alloc_from_pg",
        promise="buffers come from the process group's own memory once asked for",
        why_gpu="only NCCL's log shows a buffer registered",
    ),
    UpstreamRow(
        id="C24",
        file=_FILE,
        test="AllocFromPG.test_exception_when_used_together_with_comm_hooks",
        promise="a custom gather and memory from the process group exclude each other",
    ),
    UpstreamRow(
        id="C25",
        file=_FILE,
        test="SymmMem.test_fully_shard_symm_mem_sum_reduction_True",
        promise="a step over symmetric memory with sums forced runs",
        why_gpu="symmetric memory needs GPUs that are peers",
    ),
    UpstreamRow(
        id="C26",
        file=_FILE,
        test="SymmMem.test_fully_shard_symm_mem_sum_reduction_False",
        promise="a step over symmetric memory runs",
        why_gpu="symmetric memory needs GPUs that are peers",
    ),
    UpstreamRow(
        id="C27",
        file=_FILE,
        test="ForceSumReduction.test_fully_shard_force_sum_reduce_scatter",
        promise="reduce-scatters sum instead of averaging once that is forced",
    ),
    UpstreamRow(
        id="C28",
        file=_FILE,
        test="ForceSumReduction.test_fully_shard_force_sum_both_reductions",
        promise="under a hybrid layout both reductions sum once that is forced",
    ),
    UpstreamRow(
        id="C29",
        file=_FILE,
        test="ReduceOpWorldSize1.test_singleton_copy_division",
        promise="one rank divides its gradients only by a factor other than one",
    ),
    UpstreamRow(
        id="C30",
        file=_FILE,
        test="ReduceOpWorldSize1.test_size1_reduceop",
        promise="one rank trains like the oracle, and reduces by sum",
    ),
)
