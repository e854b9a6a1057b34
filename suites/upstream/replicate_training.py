"""What torch's training tests of ``replicate`` promise: R01 to R17."""

from __future__ import annotations

from suites.upstream.row import UpstreamRow

__all__ = ["ROWS"]

_FILE = "test_replicate_training.py"

ROWS = (
    UpstreamRow(
        id="R01",
        file=_FILE,
        test="ForwardInputs.test_root_move_forward_input_to_device",
        promise="inputs, nested ones included, reach a replicated module on its device",
    ),
    UpstreamRow(
        id="R02",
        file=_FILE,
        test="RegisteredParams.test_param_registration_after_forward",
        promise="after forward replicated modules show plain parameters, after a reshard distributed ones",
    ),
    UpstreamRow(
        id="R03",
        file=_FILE,
        test="RegisteredParams.test_param_registration_after_backward",
        promise="after backward replicated modules show distributed parameters again",
    ),
    UpstreamRow(
        id="R04",
        file=_FILE,
        test="CastAfterInit.test_to_float64_after_init",
        promise="a replicated model cast to float64 trains in float64, gradients too",
    ),
    UpstreamRow(
        id="R05",
        file=_FILE,
        test="1DTrainingCore.test_train_parity_single_group",
        promise="one replicated group trains like the oracle, through real updates",
    ),
    UpstreamRow(
        id="R06",
        file=_FILE,
        test="1DTrainingCore.test_train_parity_multi_groups",
        promise="several replicated groups train like the oracle, however late their reductions are",
    ),
    UpstreamRow(
        id="R07",
        file=_FILE,
        test="1DTrainingCore.test_train_parity_multi_group_cpu_offload_eager",
        promise="replicated groups offloaded to the CPU train like the oracle",
    ),
    UpstreamRow(
        id="R08",
        file=_FILE,
        test="1DTrainingCore.test_non_root_forward_backward",
        promise="a step through a replicated child alone updates that child only",
    ),
    UpstreamRow(
        id="R09",
        file=_FILE,
        test="1DTrainingCore.test_multi_forward_module",
        promise="a replicated module called twice in one forward gets both gradients",
    ),
    UpstreamRow(
        id="R10",
        file=_FILE,
        test="1DTrainingCore.test_explicit_prefetching",
        promise="prefetch lists of replicated groups never change what is learnt",
    ),
    UpstreamRow(
        id="R11",
        file=_FILE,
        test="1DTrainingCore.test_post_optim_event",
        promise="replicas see the update however late the optimizer finishes",
    ),
    UpstreamRow(
        id="R12",
        file=_FILE,
        test="TrainingCompose.test_train_parity_with_activation_checkpointing",
        promise="checkpointing replicated groups changes neither numbers nor names",
    ),
    UpstreamRow(
        id="R13",
        file=_FILE,
        test="SharedParams.test_train_parity_with_shared_params",
        promise="tied weights of a replicated model train like the oracle",
    ),
    UpstreamRow(
        id="R14",
        file=_FILE,
        test="GradientAccumulation.test_gradient_accumulation",
        promise="replicas accumulate microbatches at the promised number of reductions",
    ),
    UpstreamRow(
        id="R15",
        file=_FILE,
        test="GradientAccumulation.test_1f1b_microbatching",
        promise="overlapping microbatches of replicas reduce once, with right gradients",
    ),
    UpstreamRow(
        id="R16",
        file=_FILE,
        test="CustomForwardMethod.test_register_fsdp_forward_method",
        promise="a registered method of a replicated module counts as its forward",
    ),
    UpstreamRow(
        id="R17",
        file=_FILE,
        test="TPTraining.test_replicate_tp",
        promise="replicas of tensor-parallel parameters train like the oracle",
    ),
)
