"""The public names of the reference engine, with their arguments and defaults, beside those of the installed torch.

What differs is listed in docs/side-by-side.md with its reason; `python -m tests.reference.test_signatures` writes
the list there.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from shardproof.engine import reference

PAGE = Path(__file__).parents[2] / "docs" / "side-by-side.md"
_BEGIN, _END = "<!-- interface -->\n", "<!-- end of interface -->\n"
_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


# What differs: from releases before this one, or why it does from all.
DIFFERING: Mapping[str, tuple[int, int] | str] = {
    "fully_shard": (2, 12),
    "replicate": (2, 12),
    "FSDPModule.set_symm_mem_for_comm": (2, 12),
    "ShardPlacementResult": (2, 12),
    "ShardPlacementResult.__init__": "takes a mesh; torch's takes a value of a private class",
    "FSDPModule.reset_iter_state": (2, 13),
    "FSDPModule.set_reduce_scatter_max_input_buffers": (2, 13),
    "FSDPModule.set_reduce_scatter_unused_params": (2, 13),
    "FSDPModule.set_separate_reduce_scatter_group": (2, 13),
    "FSDPModule.finalize_backward": (2, 15),
    "FSDPModule.set_keep_unsharded_storage": (2, 15),
    "FSDPModule.set_manual_backward_finalization": (2, 15),
    "GradientReductionHandle": (2, 15),
    "GradientReductionHandle.void": "only here: `reset_iter_state` calls it",
    "MixedPrecisionPolicy.__init__": (2, 15),
}
_HOMES = (  # of torch's counterparts; `wrap` is first because a package has that name too
    "torch.distributed.fsdp.wrap",
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch.distributed.fsdp._fully_shard._fsdp_common",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.amp",
    "torch.nn.utils",
)


def _torchs(name: str) -> Any:  # Any: a class or a function
    """Return torch's counterpart of a name, or None."""
    homes = (importlib.import_module(home) for home in _HOMES)
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)


def _public(owner: type) -> dict[str, Any]:  # Any: functions, properties and static methods
    """Return what a class adds to those of every module."""
    added = [c for c in owner.__mro__ if c not in nn.Module.__mro__]
    return {n: v for c in reversed(added) for n, v in vars(c).items() if n == "__init__" or n[0] != "_"}


def _arguments(value: Any) -> object:
    """Return names, kinds and defaults; of a property only that it is one."""
    function = getattr(value, "__func__", value)
    if not callable(function):
        return type(value)
    given = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, _shown(p.default)) for p in given]


def _shown(default: object) -> str:
    """Return a default's text; of options that are all defaults themselves only the type's name."""
    is_plain = is_dataclass(default) and not isinstance(default, type) and default == type(default)()
    return type(default).__name__ if is_plain else repr(default)


def _differing() -> Iterator[str]:
    """Yield what torch lacks or has otherwise, and what it has and the engine lacks."""
    for name in reference.__all__:
        torchs, own = _torchs(name), getattr(reference, name)
        if torchs is None:  # and with it what its members would be compared with
            yield from (name, *(listed for listed in DIFFERING if listed.startswith(f"{name}.")))
        elif isinstance(own, type) and torchs is not own:
            yield from _differing_members(torchs, own)
        elif torchs is not own and _arguments(torchs) != _arguments(own):
            yield name


def _differing_members(torchs: type, own: type) -> Iterator[str]:
    theirs, ours = _public(torchs), _public(own)
    for name in theirs.keys() | {n for n, v in ours.items() if callable(v) and not hasattr(nn.Module, n)}:
        if name in theirs and name in ours and theirs[name] is ours[name]:
            continue
        if name not in theirs or name not in ours or _arguments(theirs[name]) != _arguments(ours[name]):
            yield f"{next((c for c in own.__mro__ if name in vars(c)), own).__name__}.{name}"


def test_only_what_is_listed_differs() -> None:
    assert set(_differing()) == {
        name for name, since in DIFFERING.items() if isinstance(since, str) or since > _RELEASE
    }


def test_what_it_lacks_are_options_that_it_takes_as_torch_has_them() -> None:
    lacking = {name: getattr(torch_fsdp, name) for name in set(torch_fsdp.__all__) - {*reference.__all__}}
    assert [name for name, of in lacking.items() if not is_dataclass(of) and not issubclass(of, Enum)] == []


def test_symmetric_memory_is_refused_in_a_sentence() -> None:
    with pytest.raises(NotImplementedError, match="set_allocate_memory_from_process_group_for_comm"):
        reference.FSDPModule.set_symm_mem_for_comm(object())  # type: ignore[arg-type]  # it looks at nothing


def _rendered() -> str:
    texts = {
        name: since if isinstance(since, str) else f"as in torch {since[0]}.{since[1]} and newer"
        for name, since in DIFFERING.items()
    }
    rows = "".join(f"| `{name}` | {text} |\n" for name, text in texts.items())
    return f"{_BEGIN}| name | here |\n|---|---|\n{rows}{_END}"


def test_the_page_lists_them() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index(_BEGIN) : text.index(_END) + len(_END)] == _rendered()


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page[: page.index(_BEGIN)] + _rendered() + page[page.index(_END) + len(_END) :])
