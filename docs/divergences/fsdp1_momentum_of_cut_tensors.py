"""FSDP1 loads the first piece of a cut tensor's momentum on every tensor-parallel rank. Needs torch alone.

torch/distributed/fsdp/_optim_utils.py, _flatten_optim_state: pieces of a rank are read out of the whole tensor
Run: torchrun --nproc-per-node 4 fsdp1_momentum_of_cut_tensors.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

# Save the momentum of one model, load it into another, and save it again.
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
states = []
for use_orig_params in (True, False):
    for is_first in (True, False):
        layer = nn.Linear(2, 4, bias=False)
        parallelize_module(layer, mesh["tensor"], ColwiseParallel())
        options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
        root = FullyShardedDataParallel(layer, device_mesh=mesh["data"], **options)
        optimizer = torch.optim.SGD(root.parameters(), lr=0.1, momentum=0.9)
        with FullyShardedDataParallel.state_dict_type(root, StateDictType.SHARDED_STATE_DICT):
            if is_first:
                (root(torch.ones(1, 2)) * torch.tensor([1.0, 2.0]).add(2 * (rank % 2))).sum().backward()
                optimizer.step()
            else:
                try:
                    made = FullyShardedDataParallel.optim_state_dict_to_load(root, optimizer, states[-1])
                except ValueError as error:
                    print(f"use_orig_params={use_orig_params}: {error}") if rank == 0 else None
                    continue
                optimizer.load_state_dict(made)
            states.append(FullyShardedDataParallel.optim_state_dict(root, optimizer))
        rows = states[-1]["state"]["weight"]["momentum_buffer"].full_tensor()[:, 0].tolist()
        print(f"use_orig_params={use_orig_params}: {rows}") if rank == 0 else None
dist.destroy_process_group()
