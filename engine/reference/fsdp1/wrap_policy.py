"""Chooses the submodules of a model that become units, and replaces them by wrappers; independent of the wrapper class.

The policies are torch's. `enable_wrap` and `wrap` are not: torch's have one wrapper for all threads, and ranks may be
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "WrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
    "wrap_below",
]

# Any: a wrapper's keyword arguments are of any type.
Options: TypeAlias = Mapping[str, Any]
Wrap: TypeAlias = Callable[[nn.Module, Options], nn.Module]


class _PolicyObject(Protocol):
    """The common base of torch's policies that are objects; torch has no public way to call them."""

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]: ...


# A function is called with ``module``, ``recurse`` and ``nonwrapped_numel``: with ``recurse`` it returns
# whether to look below the module, else whether to wrap the module itself.
WrapPolicy: TypeAlias = "_PolicyObject | Callable[..., bool]"


def wrap_below(
    root: nn.Module,
    policy: WrapPolicy,
    *,
    wrap: Wrap,
    is_wrapped: Callable[[nn.Module], bool],
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
    also: Mapping[nn.Module, Options] | None = None,
) -> None:
    """Replace each chosen submodule of ``root`` by ``wrap(submodule, options)``, inner ones first.

    ``root`` itself is left to the caller. Ignored modules are skipped with all below them; ignored parameters do not
    count for a policy that goes by size. ``also`` names modules to wrap with these options whatever the policy returns
    for them; its options go before the policy's. A module registered in several places is wrapped once and replaced in
    all of them. Raises ValueError, before anything is replaced, if ``is_wrapped`` is true of ``root`` or a module below
    it.
    """
    _refuse_wrapped(root, is_wrapped)
    ignored = {below for module in ignored_modules for below in module.modules()}
    wanted = {m: o for m, o in (also or {}).items() if m is not root and m not in ignored}
    chosen = _choose(root, policy, ignored, ignored_parameters, wanted)
    places = _backward_positions(root)
    for module in _children_first(root):
        if module in chosen:
            wrapper = wrap(module, chosen[module])
            for parent, name in places[module]:
                setattr(parent, name, wrapper)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wrapping:
    """The arguments of ``enable_wrap``."""

    wrapper_cls: Callable[..., nn.Module]
    options: Options


# A rank thread starts with a context of its own, so that ranks do not see each other's.
_WRAPPING: ContextVar[_Wrapping | None] = ContextVar("wrapping", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Let ``wrap`` apply ``wrapper_cls`` with these options in this thread; an inner context does not inherit them."""
    before = _WRAPPING.set(_Wrapping(wrapper_cls=wrapper_cls, options=wrapper_kwargs))
    try:
        yield
    finally:
        _WRAPPING.reset(before)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap ``module`` with the options of ``enable_wrap`` and overrides; outside of it, return ``module``."""
    wrapping = _WRAPPING.get()
    if wrapping is None:
        return module
    return wrapping.wrapper_cls(module, **{**wrapping.options, **wrap_overrides})


# --- what is chosen -----------------------------------------------------------------------------------------------


def _refuse_wrapped(root: nn.Module, is_wrapped: Callable[[nn.Module], bool]) -> None:
    for name, module in root.named_modules():
        if is_wrapped(module):
            where = f"submodule {name!r}" if name else "the module itself"
            raise ValueError(
                f"auto wrapping of {type(root).__name__}: expected modules to not already have FSDP applied, "
                f"got {where} ({type(module).__name__}) wrapped; wrap by hand without auto_wrap_policy, or "
                "wrap nothing by hand"
            )


def _choose(
    root: nn.Module,
    policy: WrapPolicy,
    ignored: set[nn.Module],
    ignored_parameters: Collection[nn.Parameter],
    also: Mapping[nn.Module, Options],
) -> dict[nn.Module, Options]:
    """Call the policy on everything below ``root`` before anything is replaced."""
    chosen: dict[nn.Module, Options] = {}
    if hasattr(policy, "_run_policy"):
        chosen.update(policy._run_policy(root, ignored, {}))
    elif callable(policy):
        survey = _Survey(policy=policy, also=also, visited={root, *ignored}, claimed={*ignored_parameters})
        survey.look_below(root)
        chosen.update((module, {}) for module in survey.chosen)
    else:
        raise TypeError(
            f"auto_wrap_policy: expected a function or a policy object, got {policy!r}; "
            "try ModuleWrapPolicy({YourBlock})"
        )
    chosen.pop(root, None)
    return chosen | {module: {**chosen.get(module, {}), **options} for module, options in also.items()}


class _Survey:
    """One walk that calls a policy function, and passes it the number of elements that no unit has yet."""

    def __init__(
        self,
        *,
        policy: Callable[..., bool],
        also: Collection[nn.Module],
        visited: set[nn.Module],
        claimed: set[nn.Parameter],
    ) -> None:
        self.chosen: list[nn.Module] = []
        self._policy = policy
        self._also = also
        self._visited = visited
        self._claimed = claimed

    def look_below(self, module: nn.Module) -> bool:
        """Choose among the modules below ``module``, unless the policy stops here; return whether it did not."""
        if not self._policy(module=module, recurse=True, nonwrapped_numel=self._num_free(module)):
            return False
        for child in module.children():
            if child in self._visited:
                continue
            self._visited.add(child)
            looked = self.look_below(child)
            if (looked and self._is_wanted(child)) or child in self._also:
                self.chosen.append(child)
                self._claimed.update(child.parameters())
        return True

    def _is_wanted(self, module: nn.Module) -> bool:
        return self._policy(module=module, recurse=False, nonwrapped_numel=self._num_free(module))

    def _num_free(self, module: nn.Module) -> int:
        """Count elements outside of all units; a parameter tied to one inside a unit does not count."""
        return sum(p.numel() for p in module.parameters() if p not in self._claimed)


# --- where they are -----------------------------------------------------------------------------------------------


def _backward_positions(root: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return each module's parents with its name there; one module may have several."""
    modules = dict(root.named_modules(remove_duplicate=False))
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        place = (modules[parent], name)
        if path and place not in places.setdefault(module, []):
            places[module].append(place)
    return places


def _children_first(root: nn.Module) -> list[nn.Module]:
    """List the modules below ``root``, each module after all below it, siblings in the order of registration."""
    found: list[nn.Module] = []
    seen = {root}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in seen:
                seen.add(child)
                visit(child)
                found.append(child)

    visit(root)
    return found
