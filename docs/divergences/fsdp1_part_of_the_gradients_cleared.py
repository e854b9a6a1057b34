"""NO_SHARD loses a microbatch that no_sync holds back, once an optimizer has cleared part of a unit's gradients.

torchrun --nproc-per-node 2 this_file.py. Needs torch alone; torch/distributed/fsdp/_flat_param.py.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def gradient(strategy: ShardingStrategy, *, gets_all: bool) -> float:
    """Take a step of two microbatches twice; return the gradient of a weight that the optimizer has, in the second."""
    model = FullyShardedDataParallel(
        nn.Linear(1, 1), sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu")
    )
    weight, _bias = parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters if gets_all else [weight], lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.ones(1, 1)).sum().backward()
        model(torch.full((1, 1), 10.0)).sum().backward()
    # The shard of one rank has the weight; the other rank's has no element of it.
    found = torch.zeros(()) if weight.grad is None else weight.grad.sum().detach().clone()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def main() -> None:
    """Print the gradient for inputs 1 and 10, whose sum is 11."""
    dist.init_process_group("gloo")
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for gets_all in (True, False):
            found = gradient(strategy, gets_all=gets_all)
            if dist.get_rank() == 0:
                print(strategy.name, "all parameters:" if gets_all else "the weight alone:", found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
