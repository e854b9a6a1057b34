"""What an engine says it can do, and the error with which it refuses the rest."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

__all__ = ["Capability", "MissingMethodError", "UnsupportedError"]


class Capability(Enum):
    """One promise an adapter may make; the value is the wording that reports show."""

    REPLICATE = "replicates parameters on a 1-D mesh"
    SHARD = "shards parameters on a 1-D mesh"
    HYBRID = "shards within a group and replicates across groups (2-D mesh)"
    ACCUMULATE = "accumulates gradients locally until the last microbatch"
    UNITS = "communicates in groups of parameters that the caller chooses"
    RESHARD_POLICY = "frees or keeps gathered parameters after forward, as asked"
    REDUCE_DTYPE = "reduces gradients in the dtype asked for"
    GRADIENT_DIVIDE = "divides summed gradients by a factor that the caller chooses"


class UnsupportedError(Exception):
    """An engine refuses a plan; usual cause: the plan needs a capability that the adapter does not declare."""

    def __init__(self, missing: Iterable[Capability]) -> None:
        self.missing = tuple(missing)
        super().__init__(self.missing)

    def __str__(self) -> str:
        promises = "; ".join(f"{c.name} ({c.value})" for c in self.missing)
        return f"this engine does not declare: {promises}"


class MissingMethodError(Exception):
    """An adapter declares a capability and lacks the method behind it; implement the method named here."""

    def __init__(self, method: str, capability: Capability) -> None:
        self.method = method
        self.capability = capability
        super().__init__(method, capability)

    def __str__(self) -> str:
        return (
            f"PreparedModel.{self.method}: expected an implementation because the adapter declares "
            f"{self.capability.name}, got the default; implement it or drop the capability"
        )
