"""FSDP1 has no parameters any more once a gradient was taken by its inputs. Needs torch alone.

torch/distributed/fsdp/_runtime_utils.py, _post_backward_hook: no gradient of a parameter, so it never runs
Run: torchrun --nproc-per-node 2 fsdp1_gradients_by_inputs.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

# Take the gradient of a loss by its inputs, as saliency maps and adversaries do; then count parameters.
dist.init_process_group("gloo")
rank = dist.get_rank()
for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
    model = FullyShardedDataParallel(
        nn.Linear(4, 4),
        device_id=torch.device("cpu"),
        sharding_strategy=strategy,
        use_orig_params=True,
    )
    before = len(list(model.parameters()))
    rows = torch.ones(1, 4, requires_grad=True)
    torch.autograd.grad(model(rows).sum(), rows)
    after = len(list(model.parameters()))
    model(torch.ones(1, 4)).sum().backward()
    later = len(list(model.parameters()))
    print(f"rank {rank}: {strategy.name}: {before} parameters before, {after} after, {later} a step later")
dist.destroy_process_group()
