"""What the enums and config classes of state dicts mean to the wrapper."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fixtures.tower import Block, Tower, rows
from shardproof import InterfaceBench
from suites.wrapper.exercises.wrapped import raised, wrap

__all__ = [
    "CONFIGS",
    "forms_of_optimizer_state",
    "forms_of_parameters",
    "keeps_settings",
    "refuses_others",
    "rekeys",
]

FULL, LOCAL, SHARDED = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
)
CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    FULL: (FullStateDictConfig, FullOptimStateDictConfig),
    LOCAL: (LocalStateDictConfig, LocalOptimStateDictConfig),
    SHARDED: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


# Any: engines share no base class.
def _root(bench: InterfaceBench, **options: Any) -> Any:
    return wrap(bench, Tower(), auto_wrap_policy=bench.names.ModuleWrapPolicy({Block}), **options)


def keeps_settings(bench: InterfaceBench, kind: StateDictType) -> None:
    """Set type and configs, with nothing said of configs and with everything, and note what is told of them."""
    api, root = bench.names.FullyShardedDataParallel, _root(bench)
    of_parameters, of_optimizer = CONFIGS[kind]
    before = api.set_state_dict_type(root, kind)
    bench.note("before", before == StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig()))
    plain = StateDictSettings(kind, of_parameters(), of_optimizer())
    bench.note("by default", api.get_state_dict_type(root) == plain)
    bench.note("offloaded by default", (plain.state_dict_config.offload_to_cpu, _offloads(api, root)))
    chosen = StateDictSettings(kind, of_parameters(offload_to_cpu=True), of_optimizer(offload_to_cpu=False))
    given = api.set_state_dict_type(root, kind, chosen.state_dict_config, chosen.optim_state_dict_config)
    bench.note("returned", given == plain)
    bench.note("as chosen", api.get_state_dict_type(root) == chosen)


# Any: as above.
def _offloads(api: Any, root: nn.Module) -> bool:
    offloads: bool = api.get_state_dict_type(root).optim_state_dict_config.offload_to_cpu
    return offloads


def refuses_others(bench: InterfaceBench, kind: StateDictType) -> None:
    """Set a type with the configs of each other type, and note that none is taken and nothing is changed."""
    api, root = bench.names.FullyShardedDataParallel, _root(bench)
    own, _ = CONFIGS[kind]
    for other, (of_parameters, of_optimizer) in CONFIGS.items():
        if other is not kind:
            attempts = {
                "config of another type": (of_parameters(),),
                "optimizer's config of another type": (own(), of_optimizer()),
            }
            for subject, configs in attempts.items():
                attempt = partial(api.set_state_dict_type, root, kind, *configs)
                bench.note(subject, raised(attempt, RuntimeError))


def _elements(value: Any) -> int:  # Any: a tensor of whatever kind
    local = value.to_local() if hasattr(value, "to_local") else value
    return int(local.numel())


def _spread(bench: InterfaceBench, numbers: dict[str, int]) -> dict[str, int]:
    total = torch.tensor(list(numbers.values()), device=bench.device)
    torch.distributed.all_reduce(total)
    return dict(zip(numbers, total.tolist(), strict=True))


def forms_of_parameters(bench: InterfaceBench, kind: str) -> None:
    """Note the form of a state dict: where it is, and how much of each parameter."""
    mesh = init_device_mesh(bench.device.type, (bench.size,))
    api, root = bench.names.FullyShardedDataParallel, _root(bench, device_mesh=mesh)
    plain = {name: value.numel() for name, value in Tower().state_dict().items()}
    configs: dict[str, tuple[StateDictType, StateDictConfig]] = {
        "full": (FULL, FullStateDictConfig()),
        "full on the host": (FULL, FullStateDictConfig(offload_to_cpu=True)),
        "full on rank 0": (FULL, FullStateDictConfig(rank0_only=True)),
        "sharded": (SHARDED, ShardedStateDictConfig()),
    }
    with api.state_dict_type(root, *configs[kind]):
        got = root.state_dict()
    _note_form(bench, {name: _elements(v) for name, v in got.items() if "shift" not in name}, plain, kind)


def _note_form(bench: InterfaceBench, sizes: dict[str, int], plain: dict[str, int], kind: str) -> None:
    whole = {name: size for name, size in plain.items() if "shift" not in name}
    if kind == "full on rank 0" and bench.rank:
        bench.note("form", "as asked" if not sizes else f"not empty: {sorted(sizes)}")
    elif kind == "sharded":
        is_shared = sizes.keys() == whole.keys() and _spread(bench, sizes) == whole
        bench.note("form", "as asked" if is_shared else "not the ranks' shares")
    else:
        bench.note("form", "as asked" if sizes == whole else "not whole")


def forms_of_optimizer_state(bench: InterfaceBench, kind: str) -> None:
    """Note the form of an optimizer's state."""
    mesh = init_device_mesh(bench.device.type, (bench.size,))
    api, root = bench.names.FullyShardedDataParallel, _root(bench, device_mesh=mesh)
    optimizer = _stepped(bench, root)
    configs: dict[str, tuple[StateDictType, StateDictConfig, OptimStateDictConfig]] = {
        "full": (FULL, FullStateDictConfig(), FullOptimStateDictConfig()),
        "full on rank 0": (FULL, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)),
        "sharded": (SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
    }
    with api.state_dict_type(root, *configs[kind]):
        got = api.optim_state_dict(root, optimizer)
    sizes = {name: _elements(state["momentum_buffer"]) for name, state in got.get("state", {}).items()}
    plain = {name: value.numel() for name, value in Tower().named_parameters()}
    _note_form(bench, sizes, plain, kind)


# Any: engines share no base class.
def _stepped(bench: InterfaceBench, root: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(root.parameters(), lr=0.5, momentum=0.5)
    root(rows(bench.rank).to(bench.device)).sum().backward()
    optimizer.step()
    return optimizer


def rekeys(bench: InterfaceBench) -> None:
    """Turn an optimizer's state from names to ids, and back."""
    api, root = bench.names.FullyShardedDataParallel, _root(bench)
    optimizer = _stepped(bench, root)
    named = api.full_optim_state_dict(root, optimizer, rank0_only=False)
    names = [name for name, _ in Tower().named_parameters()]
    bench.note("keys", sorted(named["state"]) == sorted(names))
    # Ids are positions in a model that is not wrapped.
    numbered = api.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, Tower())
    bench.note("ids", sorted(numbered["state"]) == list(range(len(names))))
    again = api.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, Tower())
    is_same = again["state"].keys() == named["state"].keys() and all(
        torch.equal(state["momentum_buffer"], named["state"][name]["momentum_buffer"])
        and torch.equal(state["momentum_buffer"], numbered["state"][names.index(name)]["momentum_buffer"])
        for name, state in again["state"].items()
    )
    bench.note("values by name and id", "the same" if is_same else "others")
