"""What can only be checked when the first forward runs: parameters as they are then, over all units of a tree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from engine.reference.policies import CPUOffloadPolicy

if TYPE_CHECKING:
    from engine.reference.group import Group
    from engine.reference.unit import Unit

__all__ = ["check_memory", "check_parameters", "name_parameters"]


def name_parameters(root: nn.Module, units: Iterable[Unit]) -> None:
    """Give every parameter its name from the root, for messages."""
    names = {module: name for name, module in root.named_modules()}
    for unit in units:
        for group in unit.groups:
            for parameter in group.parameters:
                site = parameter.sites[0]
                prefix = names.get(site.module, "")
                parameter.name = f"{prefix}.{site.name}" if prefix else site.name


def check_parameters(units: Iterable[Unit]) -> None:
    """Raise for parameters tied across groups, still on the meta device, on a wrong device, or of mixed dtypes."""
    for unit in units:
        for group in unit.groups:
            _check_tied(group)
            check_memory(group)
            _check_dtypes(group)


def _check_tied(group: Group) -> None:
    for parameter in group.parameters:
        if parameter.is_tied_elsewhere:
            raise ValueError(
                f"parameter {parameter.name!r} is shared with a parameter already managed by another group, "
                "so the two would be trained apart; put both modules into one call: "
                "fully_shard([module_a, module_b])"
            )


def check_memory(group: Group) -> None:
    """Raise RuntimeError for parameters without memory, or not in the host memory that offloading keeps them in."""
    on_meta = [p.name for p in group.parameters if p.current().is_meta]
    if on_meta:
        raise RuntimeError(
            f"parameters should be materialized from meta device before the first forward, got {on_meta} "
            "still there; call module.to_empty(device=...) and initialise them, or load a state dict"
        )
    if not isinstance(group.offload, CPUOffloadPolicy):
        return
    elsewhere = [
        (p.name, str(p.current().device)) for p in group.parameters if p.current().device.type != "cpu"
    ]
    if elsewhere:
        raise RuntimeError(
            f"parameters should be materialized on CPU when CPU offloading is on, got {elsewhere}; "
            'load a CPU state dict or call module.to_empty(device="cpu")'
        )


def _check_dtypes(group: Group) -> None:
    dtypes = {str(p.current().dtype) for p in group.parameters if p.current().requires_grad}
    if len(dtypes) > 1:
        raise AssertionError(
            f"fully_shard expects uniform original parameter dtype in a group, got {sorted(dtypes)} among "
            f"{[p.name for p in group.parameters]}; cast them, or give each dtype a call of its own"
        )
