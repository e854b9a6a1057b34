"""accelerate leaves out its FSDP plugin on a CPU, silently, and FSDP2 some policies. Needs torch and accelerate.

accelerate/state.py, AcceleratorState: the branch that takes fsdp_plugin lists DistributedType.MULTI_GPU and others, not
MULTI_CPU. accelerate/utils/fsdp_utils.py, fsdp2_prepare_auto_wrap_policy: a callable policy is returned as None.
"""

import functools
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy


def units(accelerator: Accelerator) -> str:
    """Prepare two layers and name what they have become."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    num = sum(isinstance(module, FSDPModule) for module in prepared.modules())
    return f"{accelerator.distributed_type}, {type(prepared).__name__}, {num} units"


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    print("asked for FSDP2, got:", units(Accelerator(cpu=True, fsdp_plugin=plugin)))

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    plugin.auto_wrap_policy = functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.Linear)
    )
    accelerator.state.fsdp_plugin = plugin
    print("FSDP2 forced, each Linear asked for (3 units with the root), got:", units(accelerator))
    dist.destroy_process_group()
