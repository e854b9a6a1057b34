"""FSDP1 leaves shards on the accelerator that are to be saved on the host. Needs torch and any accelerator.

torch/distributed/fsdp/_shard_utils.py, _create_chunk_sharded_tensor: a group that can also reduce on the host is taken
for one of the host, so the shards are said to be there, and ShardedTensor.cpu() returns them as they are
Run: torchrun --nproc-per-node 2 fsdp1_offloaded_shards.py
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

warnings.simplefilter("ignore")

# Save a layer, with backends for both devices, and print where the shard is and where it is said to be.
found = torch.accelerator.current_accelerator(check_available=True)
if found is None:
    raise SystemExit("expected an accelerator, found none; try a machine that has one")
dist.init_process_group(f"cpu:gloo,{found.type}:{dist.get_default_backend_for_device(found)}")
rank = dist.get_rank()
device = torch.device(found.type, rank % torch.accelerator.device_count())
torch.accelerator.set_device_index(device)
model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=device, use_orig_params=True)
to_host = ShardedStateDictConfig(offload_to_cpu=True)
with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, to_host):
    saved = model.state_dict()["weight"]
said = {str(shard.placement.device()) for shard in saved.metadata().shards_metadata}
(shard,) = saved.local_shards()
print(f"rank {rank}: a shard on {shard.tensor.device}; all are said to be on {said}", flush=True)
dist.destroy_process_group()
