"""The interface of the reference engine, name for name and argument for argument, beside that of the installed torch.

What differs is listed in docs/side-by-side.md with its reason; `python -m tests.reference.test_signatures` writes
the list there.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from shardproof.engine import reference
from shardproof.engine.adapters.torch_internals import torch_replicate

PAGE = Path(__file__).parents[2] / "docs" / "side-by-side.md"
_BEGIN, _END = "<!-- interface -->\n", "<!-- end of interface -->\n"
_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


# Names that the engine has and a release of torch lacks, with the first release that has them.
ADDED: Mapping[str, tuple[int, int]] = {
    "FSDPModule.finalize_backward": (2, 15),
    "FSDPModule.set_keep_unsharded_storage": (2, 15),
    "FSDPModule.set_manual_backward_finalization": (2, 15),
}
INTERFACES: Mapping[str, tuple[type, type]] = {
    "FSDPModule": (torch_fsdp.FSDPModule, reference.FSDPModule),
    "UnshardHandle": (torch_fsdp.UnshardHandle, reference.UnshardHandle),
    "FullyShardedDataParallel": (torch_fsdp.FullyShardedDataParallel, reference.FullyShardedDataParallel),
}
FUNCTIONS: Mapping[str, tuple[Any, Any]] = {  # Any: torch's have no common type
    "fully_shard": (torch_fsdp.fully_shard, reference.fully_shard),
    "replicate": (torch_replicate(), reference.replicate),
    "register_fsdp_forward_method": (
        torch_fsdp.register_fsdp_forward_method,
        reference.register_fsdp_forward_method,
    ),
    "share_comm_ctx": (torch_fsdp.share_comm_ctx, reference.share_comm_ctx),
}


def _public(owner: type) -> dict[str, Any]:  # Any: functions, properties and static methods
    """Return what a class adds to those of every module."""
    added = [c for c in owner.__mro__ if c not in nn.Module.__mro__]
    return {n: v for c in reversed(added) for n, v in vars(c).items() if n == "__init__" or n[0] != "_"}


def _arguments(value: Any) -> object:
    """Return names, kinds and which have defaults; of a property only that it is one."""
    function = getattr(value, "__func__", value)
    if not callable(function):
        return type(value)
    given = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default is not p.empty) for p in given]


def _differing() -> Iterator[str]:
    """Yield what torch has and the engine has not, or has otherwise, and methods of modules that only it has."""
    for name, (theirs, ours) in FUNCTIONS.items():
        if _arguments(theirs) != _arguments(ours):
            yield name
    for owner, (torchs, own) in INTERFACES.items():
        theirs, ours = _public(torchs), _public(own)
        names = theirs.keys() | (ours.keys() if owner == "FSDPModule" else set())
        for name in names:
            if name not in theirs or name not in ours or _arguments(theirs[name]) != _arguments(ours[name]):
                yield f"{owner}.{name}"


def test_only_what_is_listed_differs() -> None:
    assert set(_differing()) == {name for name, since in ADDED.items() if since > _RELEASE}


def test_symmetric_memory_is_refused_in_a_sentence() -> None:
    with pytest.raises(NotImplementedError, match="set_allocate_memory_from_process_group_for_comm"):
        reference.FSDPModule.set_symm_mem_for_comm(object())  # type: ignore[arg-type]  # it looks at nothing


def _rendered() -> str:
    rows = "".join(
        f"| `{name}` | the same as in torch {major}.{minor} |\n" for name, (major, minor) in ADDED.items()
    )
    return f"{_BEGIN}| name | here |\n|---|---|\n{rows}{_END}"


def test_the_page_lists_them() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index(_BEGIN) : text.index(_END) + len(_END)] == _rendered()


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page[: page.index(_BEGIN)] + _rendered() + page[page.index(_END) + len(_END) :])
