"""What the arguments of ``FullyShardedDataParallel`` promise, one row each."""

from __future__ import annotations

from suites.upstream.row import UpstreamRow

__all__ = ["ROWS"]


def _argument(name: str, promise: str, *, id: str = "") -> UpstreamRow:
    return UpstreamRow(
        id=id or name,
        file="fully_sharded_data_parallel.py",
        test=f"FullyShardedDataParallel({name})",
        promise=promise,
    )


ROWS = (
    # "module" is the property.
    _argument("module", "the module to wrap; a bare list or dict of modules is warned of", id="init.module"),
    _argument("process_group", "ranks to shard over, or with hybrid strategies (shard, replicate) groups"),
    _argument(
        "sharding_strategy", "what is sharded between forward, backward and step; FULL_SHARD if not said"
    ),
    _argument("cpu_offload", "shards, gradients and so the optimizer live on the host"),
    _argument(
        "auto_wrap_policy", "decides from the leaves up which submodules are units with the same options"
    ),
    _argument(
        "backward_prefetch", "when backward issues the next gather: before or after gradients, or never early"
    ),
    _argument(
        "mixed_precision", "dtypes of computation, reduction and buffers, beside full-precision shards"
    ),
    _argument("ignored_modules", "modules whose parameters and buffers are left alone"),
    _argument("param_init_fn", "initialises every module with meta tensors, else reset_parameters does"),
    _argument("device_id", "where a module on the host is moved, initialised and run"),
    _argument("sync_module_states", "all ranks start with the parameters and buffers of rank 0"),
    _argument("forward_prefetch", "forward gathers the next unit before the current one runs"),
    _argument("limit_all_gathers", "no more than two gathers are in flight"),
    _argument(
        "use_orig_params", "shows the parameters by name as 1-D pieces, else one flat one for each unit"
    ),
    _argument("ignored_states", "parameters or modules that are left alone; excludes ignored_modules"),
    _argument("device_mesh", "a mesh of one axis to shard over, of two (replicate, shard); excludes groups"),
)
