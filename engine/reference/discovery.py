"""Which parameters a call takes: those of its modules that no call on a module below has taken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from engine.reference.parameter import Site
from engine.reference.unit import unit_of

__all__ = ["unmanaged"]


def unmanaged(
    modules: Iterable[nn.Module], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, tuple[Site, ...]]:
    """Find the parameters that no unit below has taken, each with every place where it is registered."""
    sites: dict[nn.Parameter, list[Site]] = {}
    for module in _outside_units(modules):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in ignored:
                sites.setdefault(parameter, []).append(Site(module, name))
    return {parameter: tuple(found) for parameter, found in sites.items()}


def _outside_units(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()
    stack = list(reversed(list(modules)))
    while stack:
        module = stack.pop()
        if module in seen or unit_of(module) is not None:
            continue
        seen.add(module)
        yield module
        stack.extend(reversed(list(module.children())))
