"""What is known of a user's model without building it again: its groups of parameters, what does not apply."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitParameters:
    """The parameters of one unit of a plan, each once however often registered, by its first name.

    ``shapes`` are whole.
    """

    unit: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes_per_element: int

    @property
    def num_bytes(self) -> int:
        """Count the bytes of the parameters themselves."""
        return sum(map(prod, self.shapes)) * self.bytes_per_element

    def padded_bytes(self, num_ranks: int) -> int:
        """Count bytes where the first dim of each parameter is rounded up to a multiple of the ranks."""
        rounded = (-(-s[0] // num_ranks) * num_ranks * prod(s[1:]) if s else num_ranks for s in self.shapes)
        return sum(rounded) * self.bytes_per_element


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The groups that the units of a model make, and why closed forms or bfloat16 do not apply to it, if so.

    ``trained`` are the groups of the parameters that require a gradient, ``used`` those of the ones that had one in
    every pass that was looked at. Empty where nobody looked.
    """

    groups: tuple[UnitParameters, ...] = ()
    trained: tuple[UnitParameters, ...] = ()
    used: tuple[UnitParameters, ...] = ()
    uncounted: str = ""
    not_in_bfloat16: str = ""
