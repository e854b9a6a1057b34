"""Several roots of FSDP2 with one order, in reentrant checkpoints: IndexError in backward. Needs torch alone.

torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _backward_prefetch
Run: torchrun --nproc-per-node 2 fsdp2_roots_and_reentrant_checkpoints.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard, share_comm_ctx
from torch.utils.checkpoint import checkpoint


def trained(roots: list[nn.Module], *, reentrant: bool) -> str:
    """Take two backwards through all roots, those in the middle in checkpoints; return what happened."""
    share_comm_ctx(roots)
    first, *middle, last = roots
    for number in range(2):
        rows = first(torch.ones(2, 4))
        for root in middle:
            rows = checkpoint(root, rows, use_reentrant=reentrant)
        try:
            last(rows).sum().backward()
        except IndexError as error:
            return f"IndexError in backward {number}: {error}"
    return "trains"


def main() -> None:
    """Print what five roots make of each kind of checkpoint."""
    dist.init_process_group("gloo")
    for reentrant in (False, True):
        told = trained([fully_shard(nn.Linear(4, 4)) for _ in range(5)], reentrant=reentrant)
        if dist.get_rank() == 0:
            print(f"use_reentrant={reentrant}: {told}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
