"""DeepSpeed keeps more gradients and buffers on a rank than its share. Needs torch and deepspeed.

deepspeed/runtime/zero/stage_1_and_2.py, copy_grads_in_partition: total_size adds up param_in_partition.numel(). #L653:
temp_grad_buffer_for_cpu_offload and temp_grad_buffer_for_gpu_offload have the size of the largest parameter.
deepspeed/runtime/zero/stage3.py#L791 has a flat buffer for gradients of all partitions; with offload_optimizer line
1338 makes another one for each group of copies, which stays: without it gradients of copies are dropped after a step.
deepspeed/runtime/zero/parameter_offload.py, setup_zero_stage3_hooks: appends the model to FWD_MODULE_STACK, a list of
the module from which nothing removes it.
Run: DS_ACCELERATOR=cpu torchrun --nproc-per-node 4 deepspeed_memory.py
"""

import gc
import sys
import weakref

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def trained(**zero: object) -> object:
    """Take a step with one parameter, and return the engine of ZeRO with these options."""
    model = nn.Linear(64, 64, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    engine.backward(engine(torch.ones(1, 64)).sum())
    if zero["stage"] == 3:
        engine.step()
    return engine


def is_there_after_its_end(stage: int) -> bool:
    """Return whether an engine that was destroyed, and to which nothing here refers, is in memory."""
    engine = trained(stage=stage)
    seen = weakref.ref(engine)
    engine.destroy()
    del engine
    gc.collect()
    return seen() is not None


sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
dist.init_process_group("gloo")
here = (
    f"rank {dist.get_rank()}, whose share of a parameter of 4096 elements is {4096 // dist.get_world_size()}"
)
(piece, *_) = trained(stage=2).optimizer.averaged_gradients[0]
kept = piece.untyped_storage().nbytes() // piece.element_size()
print(f"{here}: ZeRO-2 keeps {kept} elements of the gradient", flush=True)
zero2 = trained(stage=2, **OFFLOAD).optimizer
sides = (zero2.temp_grad_buffer_for_cpu_offload, zero2.temp_grad_buffer_for_gpu_offload)
print(f"{here}: with offload, buffers of {[side.numel() for side in sides]}", flush=True)
for offload in ({}, OFFLOAD):
    zero3 = trained(stage=3, stage3_param_persistence_threshold=0, **offload).optimizer
    copies = [copy.grad for copy in zero3.fp32_partitioned_groups_flat]
    left = [zero3.grad_partitions_flat_buffer, *(grad for grad in copies if grad is not None)]
    print(f"{here}: ZeRO-3, offload {bool(offload)}: gradients of {[g.numel() for g in left]}", flush=True)
for stage in (2, 3):
    print(f"{here}: ZeRO-{stage}, destroyed and still there: {is_there_after_its_end(stage)}", flush=True)
dist.barrier()
dist.destroy_process_group()
