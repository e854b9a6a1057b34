"""Ways to wrap the model of the cases."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
from torch.distributed.fsdp import ShardingStrategy

from shardproof.suites.params import parametrize
from shardproof.suites.tower import UNITS

# The component that the wrapper adds to names; the model's own names have none such.
_WRAPPED = "_fsdp_wrapped_module"


class Form(Enum):
    """The form in which a wrapped model has its parameters for an optimizer."""

    ORIGINAL = "by name"
    FLAT = "one for each unit"

    @property
    def use_orig_params(self) -> bool:
        """Return the option of the wrapper."""
        return self is Form.ORIGINAL


EACH_FORM = parametrize("form", *Form)


def strategies(*chosen: Any) -> pytest.MarkDecorator:  # Any: strategies, or pytest.param's results
    """Parametrize a test by strategies, with their names as ids."""
    return parametrize("strategy", *chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """One of the ways to wrap a model; ``by_mesh`` passes a mesh of all ranks instead of their group."""

    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    form: Form = Form.ORIGINAL
    units: tuple[str, ...] = UNITS
    by_mesh: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks have a share each."""
        return self.strategy is not ShardingStrategy.NO_SHARD

    @property
    def name(self) -> str:
        """Return its name in the id of a case."""
        units = "-".join(self.units) or "root"
        return f"{self.strategy.name.lower()}-{self.form.name.lower()}-{units}" + "-mesh" * self.by_mesh


SHARDS, FLAT = Wrapping(), Wrapping(form=Form.FLAT)
KEPT = Wrapping(strategy=ShardingStrategy.SHARD_GRAD_OP)
WHOLE = Wrapping(strategy=ShardingStrategy.NO_SHARD)
WHOLE_FLAT = Wrapping(strategy=ShardingStrategy.NO_SHARD, form=Form.FLAT)
OTHER_UNITS = Wrapping(units=("head",))
HYBRID = Wrapping(strategy=ShardingStrategy.HYBRID_SHARD)
MESH, MESH_ROOT = Wrapping(by_mesh=True), Wrapping(by_mesh=True, units=())


def original(name: str) -> str:
    """Return the name of a parameter or module before it was wrapped."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)
