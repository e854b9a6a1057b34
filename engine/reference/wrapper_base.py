"""What one wrapper is to everything that acts on all wrappers of a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictSettings

from engine.reference.group import Group
from engine.reference.mesh import Ranks
from engine.reference.unit import Unit
from engine.reference.wrapper_options import Ignored

__all__ = ["WrapperBase", "wrappers_in"]


class WrapperBase(nn.Module):
    """A module that stands in the place of another one, whose parameters it manages as one unit."""

    sharding_strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    ranks: Ranks
    ignored: Ignored
    compute_device: torch.device
    is_flat: bool
    """Whether the optimizer is given one flat parameter."""
    is_summoned: bool
    """Whether modules show whole parameters in the caller's hands."""
    buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype]
    """The dtypes of buffers before they were cast, by module and name."""
    state_dict_settings: StateDictSettings
    _unit: Unit
    _fsdp_wrapped_module: nn.Module

    @property
    def wrapped(self) -> nn.Module:
        """The module that this wrapper was given."""
        return self._fsdp_wrapped_module

    @property
    def groups(self) -> tuple[Group, ...]:
        """This wrapper's communication group, none where it has no parameters of its own."""
        return self._unit.groups

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that shards; for NO_SHARD that which replicates."""
        group = self.ranks.shard_group or self.ranks.replicate_group
        assert group is not None
        return group

    @property
    def is_running(self) -> bool:
        """Whether the model that this wrapper is part of is in forward or backward."""
        return self._unit.tree is not None and self._unit.tree.is_running

    # Any: attributes of the wrapped module, whatever they are.
    def __getattr__(self, name: str) -> Any:
        """Look on the wrapped module for what this one does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":  # not there yet
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """Index the wrapped module."""
        inner: Any = self._fsdp_wrapped_module
        return inner[key]


def wrappers_in(module: nn.Module) -> list[WrapperBase]:
    """List the wrappers in ``module``, itself included, outer ones first."""
    return [m for m in module.modules() if isinstance(m, WrapperBase)]
