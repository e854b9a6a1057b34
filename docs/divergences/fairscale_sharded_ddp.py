"""fairscale's ShardedDataParallel leaves gradients unreduced that OSS does not know. Needs torch and fairscale.

fairscale/nn/data_parallel/sharded_ddp.py, __init__: _all_params are those of the optimizers, and no other has a hook.
_sync_params_and_buffers, line 543: walks state_dict(), which names a tied parameter twice, and broadcasts it twice at
once. fairscale/optim/oss.py, line 654: the bucket of a rank has the dtype of the first parameter, and refuses others.
Run: torchrun --nproc-per-node 2 fairscale_sharded_ddp.py
"""

import warnings
from collections import Counter

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import nn


def wrap(model: nn.Module, parameters: list[nn.Parameter]) -> nn.Module:
    """Return the model under ShardedDataParallel, whose optimizer has these parameters."""
    return ShardedDataParallel(model, OSS(parameters, optim=torch.optim.SGD, lr=0.1), reduce_buffer_size=0)


def broadcasts(wrapped: nn.Module) -> list[int]:
    """Count for each tensor how often it is sent at once, when the model is wrapped."""
    sent: Counter[int] = Counter()
    plain = dist.broadcast

    def counting(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
        sent[tensor.data_ptr()] += bool(options.get("async_op"))
        return plain(tensor, *arguments, **options)

    dist.broadcast = counting
    wrap(wrapped, list(wrapped.parameters()))
    dist.broadcast = plain
    return list(sent.values())


# Show all three on two ranks.
warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
wrap(model, list(model[0].parameters()))(torch.full((1, 1), rank + 1.0)).sum().backward()
print(f"rank {rank}: gradient of OSS's layer {model[0].weight.grad}, of the other {model[1].weight.grad}")
tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
tied[1].weight = tied[0].weight
print(f"rank {rank}: asynchronous broadcasts of each tensor: {broadcasts(tied)}", flush=True)
dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)
mixed = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes])
try:
    wrap(mixed, list(mixed))
except AssertionError as error:
    print(f"rank {rank}: {error}", flush=True)
