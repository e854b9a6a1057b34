"""What torch's training tests of ``fully_shard`` promise: T01 to T39."""

from __future__ import annotations

from suites.upstream.row import UpstreamRow

__all__ = ["ROWS"]

_FILE = "test_fully_shard_training.py"

ROWS = (
    UpstreamRow(
        id="T01",
        file=_FILE,
        test="ForwardInputs.test_root_move_forward_input_to_device",
        promise="inputs, nested ones included, reach the module on the device that computes",
    ),
    UpstreamRow(
        id="T02",
        file=_FILE,
        test="ForwardInputs.test_root_no_forward_inputs",
        promise="a forward without arguments trains like any other",
    ),
    UpstreamRow(
        id="T03",
        file=_FILE,
        test="RegisteredParams.test_param_registration_after_forward",
        promise="after forward, modules show whole or sharded parameters as the reshard policy says",
    ),
    UpstreamRow(
        id="T04",
        file=_FILE,
        test="RegisteredParams.test_param_registration_after_backward",
        promise="after backward every parameter is shown sharded again, whatever the policy",
    ),
    UpstreamRow(
        id="T05",
        file=_FILE,
        test="RegisteredParams.test_modules_to_run_forward_empty_for_single_module",
        promise="a step over one-module groups leaves no trace in the group's state",
    ),
    UpstreamRow(
        id="T06",
        file=_FILE,
        test="CastAfterInit.test_to_float64_after_init",
        promise="a model cast to float64 after being sharded trains in float64, gradients too",
    ),
    UpstreamRow(
        id="T07",
        file=_FILE,
        test="1DTrainingCore.test_train_parity_single_group_shard_dim0",
        promise="one group trains like the oracle, dims smaller than the world included",
    ),
    UpstreamRow(
        id="T08",
        file=_FILE,
        test="1DTrainingCore.test_train_parity_single_group_shard_largest_dim",
        promise="one group sharded on the largest dim trains like the oracle",
    ),
    UpstreamRow(
        id="T09",
        file=_FILE,
        test="1DTrainingCore.test_train_parity_multi_group",
        promise="several groups train like the oracle, however late their gathers and reductions are",
    ),
    UpstreamRow(
        id="T10",
        file=_FILE,
        test="1DTrainingCore.test_train_parity_multi_group_cpu_offload_eager",
        promise="with parameters offloaded to the CPU several groups train like the oracle",
    ),
    UpstreamRow(
        id="T11",
        file=_FILE,
        test="1DTrainingCore.test_train_parity_multi_group_unshard_async_op",
        promise="with gathers issued asynchronously several groups train like the oracle",
    ),
    UpstreamRow(
        id="T12",
        file=_FILE,
        test="1DTrainingCore.test_non_root_forward_backward",
        promise="a step through a child alone updates that child and leaves the others as they were",
    ),
    UpstreamRow(
        id="T13",
        file=_FILE,
        test="1DTrainingCore.test_multi_forward_module",
        promise="a module called twice in one forward gets the sum of both gradients",
    ),
    UpstreamRow(
        id="T14",
        file=_FILE,
        test="1DTrainingCore.test_explicit_prefetching",
        promise="explicit prefetch lists change when gathers start, never what is learnt",
    ),
    UpstreamRow(
        id="T15",
        file=_FILE,
        test="1DTrainingCore.test_post_optim_event",
        promise="the next forward sees the update however late the optimizer finishes",
    ),
    UpstreamRow(
        id="T16",
        file=_FILE,
        test="1DTrainingCompose.test_train_parity_with_activation_checkpointing",
        promise="activation checkpointing changes neither numbers nor parameter names",
    ),
    UpstreamRow(
        id="T17",
        file=_FILE,
        test="1DTrainingCompose.test_partial_group_forward_then_standalone",
        promise="a group run partly with the trunk, partly alone, accumulates every chunk's gradient",
    ),
    UpstreamRow(
        id="T18",
        file=_FILE,
        test="1DTrainingCompose.test_grouped_module_cast_forward_inputs",
        promise="each module of a group has its own inputs cast to the compute dtype",
    ),
    UpstreamRow(
        id="T19",
        file=_FILE,
        test="1DTrainingCompose.test_partial_group_forward_grad_accum_chunked",
        promise="chunks and microbatches accumulate alike, modules grouped or not",
    ),
    UpstreamRow(
        id="T20",
        file=_FILE,
        test="1DTrainingCompose.test_partial_group_reshard_toggle",
        promise="reshard flags hold between chunks, and an explicit reshard takes effect",
    ),
    UpstreamRow(
        id="T21",
        file=_FILE,
        test="1DTrainingCompose.test_reset_iter_state_after_exception",
        promise="after a forward that raised, and a reset, training goes on with all gradients",
    ),
    UpstreamRow(
        id="T22",
        file=_FILE,
        test="1DTrainingCompose.test_double_forward_with_nested_fsdp_and_checkpoint",
        promise="two checkpointed forwards through nested groups, one backward: every gradient is there",
    ),
    UpstreamRow(
        id="T23",
        file=_FILE,
        test="1DTrainingCompose.test_double_partial_forward_then_backward",
        promise="two forwards that stop before the head end without a hang or a gradient for it",
    ),
    UpstreamRow(
        id="T24",
        file=_FILE,
        test="ShardPlacementFnMultiProcess.test_train_parity_shard_placement_fn_shard_largest_dim",
        promise="a dim chosen for each parameter shards a transformer that trains like the oracle",
    ),
    UpstreamRow(
        id="T25",
        file=_FILE,
        test="ShardPlacementFnMultiThread.test_shard_placement_fn_contiguous_params_grads",
        promise="parameters, shards and gradients are contiguous whichever dim is sharded",
    ),
    UpstreamRow(
        id="T26",
        file=_FILE,
        test="SharedParams.test_train_parity_with_shared_params",
        promise="tied weights train like the oracle, checkpointed or not",
    ),
    UpstreamRow(
        id="T27",
        file=_FILE,
        test="SharedParams.test_train_shared_params_uneven_shard",
        promise="every row of an unevenly sharded tied weight is updated",
    ),
    UpstreamRow(
        id="T28",
        file=_FILE,
        test="SharedParams.test_shared_params_separate_fsdp_groups_error",
        promise="a weight tied across two groups is refused by name",
    ),
    UpstreamRow(
        id="T29",
        file=_FILE,
        test="SharedParams.test_layer_by_layer_shard_no_false_positive",
        promise="blocks built, sharded and freed one by one are not mistaken for tied ones",
    ),
    UpstreamRow(
        id="T30",
        file=_FILE,
        test="GradientAccumulation.test_gradient_accumulation",
        promise="accumulation over microbatches has the oracle's gradients at the promised communication",
    ),
    UpstreamRow(
        id="T31",
        file=_FILE,
        test="GradientAccumulation.test_1f1b_microbatching",
        promise="microbatches that overlap forward and backward reduce once, with right gradients",
    ),
    UpstreamRow(
        id="T32",
        file=_FILE,
        test="NDTraining.test_2d_mlp_with_nd_mesh",
        promise="data-parallel shards of tensor-parallel parameters train like the oracle",
    ),
    UpstreamRow(
        id="T33",
        file=_FILE,
        test="NDTraining.test_shard_placement_fn_tp_ep",
        promise="experts sharded over their own mesh train like the oracle beside the dense weights",
    ),
    UpstreamRow(
        id="T34",
        file=_FILE,
        test="HSDP3DTraining.test_3d_mlp_with_nd_mesh",
        promise="replicas of shards of tensor-parallel parameters train like the oracle",
    ),
    UpstreamRow(
        id="T35",
        file=_FILE,
        test="HSDPTraining.test_train_parity_hsdp",
        promise="a hybrid layout trains like the oracle, reducing every microbatch or only the last",
    ),
    UpstreamRow(
        id="T36",
        file=_FILE,
        test="CustomForwardMethod.test_register_fsdp_forward_method",
        promise="a method registered as a forward gathers its parameters as forward does",
    ),
    UpstreamRow(
        id="T37",
        file=_FILE,
        test="ShareCommContext.test_share_comm_context",
        promise="roots that share a communication context use one lane each way and stay right",
    ),
    UpstreamRow(
        id="T38",
        file=_FILE,
        test="WorldSize1.test_train_parity_single_worldsize1",
        promise="a world of one rank trains like the oracle without a single collective",
    ),
    UpstreamRow(
        id="T39",
        file=_FILE,
        test="CudaGraph.test_two_layer_fully_shard_cudagraph",
        promise="a captured step, replayed on new inputs, equals the eager one bit for bit",
        why_gpu="CUDA graphs exist on CUDA alone",
    ),
)
