"""What the methods, properties and contexts of ``FullyShardedDataParallel`` promise, one row each."""

from __future__ import annotations

from suites.upstream.row import UpstreamRow

__all__ = ["ROWS"]


def _method(name: str, promise: str) -> UpstreamRow:
    return UpstreamRow(
        id=name,
        file="fully_sharded_data_parallel.py",
        test=f"FullyShardedDataParallel.{name}",
        promise=promise,
    )


ROWS = (
    _method("module", "the innermost module that is wrapped, behind a checkpoint wrapper too"),
    _method("__getattr__", "attributes that the wrapper lacks are those of the wrapped module"),
    _method("__getitem__", "indexing reaches the wrapped module"),
    _method("check_is_root", "tells the outermost instance, initialising first what is done lazily"),
    _method("fsdp_modules", "lists the instances in a module, all of them or the roots"),
    _method("apply", "calls a function on every module with whole parameters, and keeps what it writes"),
    _method("forward", "casts and moves inputs, gathers, runs the module, frees"),
    _method("set_state_dict_type", "sets type and configs of all instances, and returns those before"),
    _method("get_state_dict_type", "returns the settings that all instances share"),
    _method("state_dict_type", "sets type and configs for the length of a context"),
    _method("summon_full_params", "shows whole parameters in a context, and writes changes back if asked"),
    _method("named_parameters", "original names inside summon_full_params, prefixed ones outside"),
    _method("named_buffers", "buffers under original names inside summon_full_params"),
    _method("no_sync", "reduces nothing; gradients add up locally until the next backward outside"),
    _method("clip_grad_norm_", "scales gradients by the norm over all ranks' shards, and returns it"),
    _method(
        "full_optim_state_dict", "gathers whole optimizer state by parameter name, on rank 0 unless told"
    ),
    _method("sharded_optim_state_dict", "gives optimizer state by parameter name, each value sharded"),
    _method("shard_full_optim_state_dict", "cuts whole optimizer state into what this rank can load"),
    _method("flatten_sharded_optim_state_dict", "turns sharded optimizer state into what this rank can load"),
    _method(
        "scatter_full_optim_state_dict", "sends each rank its part of the optimizer state that rank 0 has"
    ),
    _method("rekey_optim_state_dict", "exchanges names and ids as keys of optimizer state"),
    _method("optim_state_dict", "gives optimizer state in the type that was set, whole or sharded"),
    _method("optim_state_dict_to_load", "turns such a state back into what the optimizer loads"),
    _method("register_comm_hook", "lets a function of the caller's reduce gradients; root only, and once"),
    _method("state_dict", "gives parameters and buffers in the type that was set"),
    _method("load_state_dict", "takes back what state_dict gave in the same type"),
    _method("to", "converts or moves the flat storage, and the pieces that show it"),
)
