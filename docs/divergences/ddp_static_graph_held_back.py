"""DDP cannot hold back the first microbatch of a static graph. Needs torch alone.

torch/nn/parallel/distributed.py, _post_forward: a static graph's first backward asks the reducer to finalize it, also
under no_sync, where forward has not prepared the reducer for a backward
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    rows = torch.ones(2, 3)
    for is_static in (False, True):
        model = DistributedDataParallel(nn.Linear(3, 1), static_graph=is_static)
        try:
            with model.no_sync():
                model(rows).sum().backward()
            model(rows).sum().backward()
            print(f"static_graph={is_static}: trained")
        except RuntimeError as error:
            print(f"static_graph={is_static}: {str(error).splitlines()[0]}")
    dist.destroy_process_group()
