"""Puts the reference engine, or a mutant, behind the names that torch's own tests call."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.testing._internal import common_fsdp

from shardproof.engine import reference as reference_engine
from shardproof.engine.adapters import reference, reference_wrapper, torch_fsdp1, torch_fsdp2
from shardproof.engine.contract import ComposableApi, Engine, Plan, PreparedModel, WrapperNames
from shardproof.engine.mutants.all_mutants import MUTANTS
from shardproof.engine.registry import resolve

HONEST = {"torch": "torch.fsdp2", "reference": "reference"}
"""Torch's own engines and the reference engine, each with all its interfaces, and the engine that mutants override."""

_ADAPTERS = {"torch": torch_fsdp2, "reference": reference}

CONTROL = "adopted."
"""The beginning of an honest engine's name if tests override what it prepares, as they do for mutants."""

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}

STUBBED = ("_assert_state",)
"""Private methods of FSDP1 that helpers of torch's tests call in passing; they do nothing on the reference engine."""

_CARRIED = {"__init__", "backward", "step", "composable"}
"""The methods of a prepared model that a mutant may override with effect on callers of ``fully_shard``."""


class Bridge(threading.local):
    """Puts an engine behind the names of torch's, and a mutant's faults into each root before it first runs.

    Each rank thread has one of its own.
    """

    def __init__(self, name: str, unreachable: Path) -> None:
        self._unreachable = unreachable  # exists as soon as the mutant's fault turns out to need a plan
        # Any: adapters have a type for prepared models, the contract has none.
        honest = HONEST.get(name.removeprefix(CONTROL), "")
        self.engine: Any = resolve(BY_NAME[name].engine_spec if name in BY_NAME else honest)
        self.base = base_of(self.engine)
        self.is_adopting = name not in HONEST
        self.adopted: list[tuple[PreparedModel, set[Any]]] = []  # with the graph nodes of all its outputs
        self._is_inside = False

    def install(self, modules: Sequence[types.ModuleType]) -> None:
        """Replace the names in the modules that tests use, once."""
        new = self._new_names()
        if self.base == "reference":
            for name in STUBBED:
                setattr(reference_engine.FullyShardedDataParallel, name, lambda wrapper, *_: None)
        if self.is_adopting:
            shard = torch.distributed.fsdp.fully_shard
            new[shard] = self._adopting(new.get(shard, shard))
        for module in (*modules, common_fsdp, torch.distributed.fsdp, torch.distributed.fsdp.wrap):
            for name, value in list(vars(module).items()):
                if isinstance(value, type | types.FunctionType) and value in new:
                    setattr(module, name, new[value])
        if self.is_adopting:
            setattr(_ADAPTERS[self.base], "apply_plan", self._opened)  # noqa: B010 - typed
            self._follow_backward_and_steps()

    def _new_names(self) -> dict[Any, Any]:
        """Return what takes the place of each of torch's public classes and functions."""
        api, torch_api = self._api(), torch_fsdp2.FSDP2_API
        new = {getattr(torch_api, f.name): getattr(api, f.name) for f in fields(ComposableApi)}
        new[replicate_with_fsdp.replicate] = new.pop(torch_api.replicate)
        if self.base == "torch":
            del new[replicate_with_fsdp.replicate]  # an adapter's, without attributes
            return new
        wrappers = torch_fsdp1.NAMES, reference_wrapper.NAMES
        new |= {getattr(wrappers[0], f.name): getattr(wrappers[1], f.name) for f in fields(WrapperNames)}
        return new | {
            replicate_with_fsdp.ReplicateModule: reference_engine.ReplicateModule,
            torch.distributed.fsdp.UnshardHandle: reference_engine.UnshardHandle,
        }

    def _api(self) -> Any:
        apis = (reference.REFERENCE_API,) if self.base == "reference" else ()
        return self.engine.prepared_type(nn.Module(), Plan(), *apis).composable()

    def _adopting(self, fully_shard: Any) -> Any:
        @functools.wraps(fully_shard)
        def call(module: Any, **options: Any) -> Any:
            module = fully_shard(module, **options)
            if self.is_adopting:
                for one in module if isinstance(module, list) else [module]:
                    one.register_forward_pre_hook(lambda root, _: self._adopt(root), prepend=True)
                    one.register_forward_hook(self._remember)
            return module

        return call

    def _opened(self, api: Any, model: nn.Module, plan: Plan, *_: Any) -> None:
        if plan != self._plan:
            self._unreachable.write_text("unreachable")

    def _adopt(self, root: nn.Module) -> None:
        if any(root in set(prepared.module.modules()) for prepared, _ in self.adopted):
            return
        api = self._api()
        units = [name for name, m in root.named_modules() if name and isinstance(m, api.sharded_module)]
        mesh = next((p.device_mesh for p in root.parameters() if hasattr(p, "device_mesh")), None)
        self._plan = Plan(units=tuple(units))
        try:
            prepared = self.engine.prepare(root, self._plan, mesh)
        except Exception:  # in code of the mutant for other meshes or modules
            self._unreachable.write_text("skipped")
            raise
        if not _CARRIED.issuperset(n for n in vars(prepared) if callable(getattr(PreparedModel, n, None))):
            self._unreachable.write_text("unreachable")
        self.adopted.append((prepared, set()))

    def _remember(self, root: nn.Module, _: Any, output: Any) -> None:
        for prepared, nodes in self.adopted:
            if prepared.module is root:
                tensors = torch.utils._pytree.tree_leaves(output)
                nodes.update(t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn)

    def _follow_backward_and_steps(self) -> None:
        """Replace ``loss.backward()`` and ``optimizer.step()`` by those of the prepared model."""
        backward: Any = torch.Tensor.backward
        optimizer: Any = torch.optim.Optimizer
        construct = optimizer.__init__

        def new_backward(loss: torch.Tensor, *args: Any, **named: Any) -> None:
            found = [p for p, nodes in self.adopted if nodes & set(_graph_of(loss))]
            if self._is_inside or args or named or len(found) != 1:
                backward(loss, *args, **named)
                return
            self._inside(lambda: found[0].backward(loss))

        def new_init(self_: Any, parameters: Any, *args: Any, **named: Any) -> None:
            construct(self_, parameters, *args, **named)
            step = self_.step
            owned = {p for group in self_.param_groups for p in group["params"]}

            def new_step(_: Any, *args: Any, **named: Any) -> Any:
                found = [p for p, _ in self.adopted if owned & set(p.module.parameters())]
                if self._is_inside or args or named or len(found) != 1:
                    return step(*args, **named)
                found[0].optimizer(lambda _: self_)
                return self._inside(found[0].step)

            self_.step = types.MethodType(new_step, self_)  # schedulers look for a method

        setattr(torch.Tensor, "backward", new_backward)  # noqa: B010 - typed
        optimizer.__init__ = new_init

    def _inside(self, call: Any) -> Any:
        self._is_inside = True
        try:
            return call()
        finally:
            self._is_inside = False


def _graph_of(loss: torch.Tensor) -> Iterator[Any]:
    seen: set[Any] = {None}
    open_: list[Any] = [loss.grad_fn]
    while open_:
        if (node := open_.pop()) not in seen:
            seen.add(node)
            yield node
            open_ += (following for following, _ in node.next_functions)


def base_of(engine: Engine) -> str:
    """Return the name of the engine from which a mutant derives."""
    modules = {c.__module__ for c in type(engine).__mro__}
    return next((name for name, api in _ADAPTERS.items() if api.__name__ in modules), "")
