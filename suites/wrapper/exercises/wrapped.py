"""What exercises share: a model in the engine's wrapper, and what can be told of it from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fixtures.tower import Tower, rows
from shardproof import InterfaceBench

__all__ = ["GRADIENTS", "clean", "raised", "same", "takes_the_step_of", "units_of", "whole", "wrap"]

GRADIENTS = "one step is that of one process"

_PREFIX = "_fsdp_wrapped_module."  # what the wrapper puts into names, and documents


# Any: engines share no base class.
def wrap(bench: InterfaceBench, module: nn.Module, **options: Any) -> Any:
    """Wrap a module where the rank computes, parameters under their own names unless told otherwise."""
    given = {"device_id": bench.device, "use_orig_params": True, **options}
    return bench.names.FullyShardedDataParallel(module, **given)


def clean(name: str) -> str:
    """Give the name that a parameter or module had before it was wrapped."""
    return name.replace(_PREFIX, "").removesuffix(_PREFIX[:-1]).removesuffix(".")


def whole(bench: InterfaceBench, root: nn.Module) -> dict[str, torch.Tensor]:
    """Read all parameters, gathered, by their original names."""
    with bench.names.FullyShardedDataParallel.summon_full_params(root, writeback=False):
        return {clean(name): p.detach().clone() for name, p in root.named_parameters()}


def units_of(bench: InterfaceBench, root: nn.Module, plain: nn.Module) -> list[str]:
    """Name the modules that were wrapped, as the model ``plain`` called them; sorted."""
    known = {clean(name): name for name, _ in plain.named_modules()}
    units = {id(unit) for unit in bench.names.FullyShardedDataParallel.fsdp_modules(root)}
    found = {clean(name) for name, module in root.named_modules() if id(module) in units}
    return sorted(known[name] for name in found)


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Tell whether both have the same names, and the same values bit for bit."""
    return got.keys() == expected.keys() and all(
        torch.equal(tensor.cpu(), expected[name].cpu()) for name, tensor in got.items()
    )


# Any: options of the wrapper, and the wrapper.
def takes_the_step_of(bench: InterfaceBench, ranks: range, **options: Any) -> Any:
    """Take one step of a tower, compare it with that of one process with the data of ``ranks``, give the root."""
    plain = Tower()
    sum(plain(rows(rank)).sum() for rank in ranks).backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    root = wrap(bench, Tower(), **options)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.5)
    # The mean over ranks of what is multiplied with their number is a sum of whole numbers: exact.
    (root(rows(bench.rank).to(bench.device)).sum() * len(ranks)).backward()
    optimizer.step()
    bench.note(
        GRADIENTS, same(whole(bench, root), {name: p.detach() for name, p in plain.named_parameters()})
    )
    return root


def raised(action: Callable[[], object], kind: type[Exception]) -> str:
    """Call it, and say whether it was refused with this kind of error, with another, or not at all."""
    try:
        action()
    except kind:
        return kind.__name__
    except Exception as error:  # whatever it is, it is what was seen
        return f"{type(error).__name__}: {error}"
    return "nothing"
