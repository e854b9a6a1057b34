"""SimpleFSDP computes with the dtypes of the first module of a class. Needs torch and torchtitan.

torchtitan/experiments/graph_trainer/simple_fsdp.py, _register_parametrization: the key of
_wrap_class_cache is the class and the names of its parameters
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy, data_parallel

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    data_parallel(nn.Linear(4, 4), mesh, mode="fully_shard")  # a first one, in float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    second = data_parallel(nn.Linear(4, 4), mesh, mode="fully_shard", mp_policy=policy)
    print(f"the second Linear is asked to compute in bfloat16, and computes in {second.weight.dtype}")
    dist.destroy_process_group()
