"""FSDP1's flat parameters outlive the model. Needs torch alone.

torchrun --nproc-per-node 2 this_file.py
"""

import gc
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def trained(*, use_orig_params: bool) -> list[weakref.ref[torch.UntypedStorage]]:
    """Train a model for one backward; return references to the storages of its parameters."""
    device = torch.device("cpu")
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=device, use_orig_params=use_orig_params)
    model(torch.ones(2, 4)).sum().backward()
    return [weakref.ref(p.untyped_storage()) for p in model.parameters()]


def main() -> None:
    """Delete a model of each kind."""
    dist.init_process_group("gloo")
    for use_orig_params in (True, False):
        references = trained(use_orig_params=use_orig_params)
        gc.collect()
        num_alive = sum(reference() is not None for reference in references)
        if dist.get_rank() == 0:
            print(f"use_orig_params={use_orig_params}: {num_alive} storages of parameters are alive")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
