"""accelerate's plugin for FSDP1 ignores reshard_after_forward. Needs torch and accelerate.

accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin.__post_init__: sharding_strategy, which is deprecated in
favour of reshard_after_forward, becomes FULL_SHARD where it was not given, and accelerator.py, prepare_model, takes
"sharding_strategy or reshard_after_forward".
"""

from accelerate import FullyShardedDataParallelPlugin

if __name__ == "__main__":
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1, reshard_after_forward=strategy)
        print(
            f"asked for {strategy}, FSDP1 is given", plugin.sharding_strategy or plugin.reshard_after_forward
        )
