"""SimpleFSDP over uneven tensor parallelism ends a process by a signal. Needs torch and torchtitan.

torchtitan/experiments/graph_trainer/simple_fsdp.py, _distribute_dtensor: the outer specification has the shape before
tensor parallelism, by which ranks with 3 and with 2 of 5 rows cut shards that do not fit each other
"""

import multiprocessing
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

SIZE = 4


def main(rank: int, store: str, width: int) -> None:
    """Call two layers, cut over two ranks and their shards over two more."""
    dist.init_process_group("gloo", store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(4, width, bias=False), nn.Linear(width, 4, bias=False))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    data_parallel(model, mesh["data"], mode="fully_shard")
    model(torch.ones(2, 4))
    os._exit(0)


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    for width in (8, 5):
        store = tempfile.mktemp()
        ranks = [spawn.Process(target=main, args=(rank, store, width)) for rank in range(SIZE)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
        print(f"{width} rows over two ranks: exit statuses {[rank.exitcode for rank in ranks]}")
