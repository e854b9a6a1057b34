"""The parts of mutants: patches of methods, tensors and FSDP1's names, and misreadings of plans; no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters.composable import PreparedComposable
from shardproof.engine.adapters.reference import PreparedReference
from shardproof.engine.adapters.torch_fsdp1 import NAMES
from shardproof.engine.adapters.torch_fsdp2 import PreparedFullyShard
from shardproof.engine.contract import Capability, Plan, Prefetch, PreparedModel, WrapperNames

# Any, throughout: the holders are private objects of engines, which have no public types.

Options = Mapping[str, Any]  # arguments of FSDP1
Spoil = Callable[[PreparedModel], PreparedModel]
"""Changes an honestly prepared model; returns the model."""


def is_last_rank() -> bool:
    """Return whether this rank is the last of several or, in a world of one, the only one."""
    return dist.get_rank() == dist.get_world_size() - 1


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, detached from the graph."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def in_place_of(sharded: DTensor, own: torch.Tensor) -> DTensor:
    """Return a tensor like ``sharded`` in which ``own`` is this rank's part."""
    mesh, placements = sharded.device_mesh, sharded.placements
    shape, stride = sharded.shape, sharded.stride()
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)


@contextmanager
@torch.no_grad()
def unchanged(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Undo all changes of these tensors made inside."""
    kept = [(tensor, tensor.clone()) for tensor in tensors]
    yield
    for tensor, before in kept:
        tensor.copy_(before)


def after(holder: Any, method: str, fault: Callable[[Any], None]) -> None:
    """Call ``fault`` with the holder after each call of its method."""
    honest = getattr(holder, method)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = honest(*args, **kwargs)
        fault(holder)
        return result

    setattr(holder, method, both)


def before(holder: Any, method: str, fault: Callable[[Any], None]) -> None:
    """Call ``fault`` with the holder before each call of its method."""
    honest = getattr(holder, method)

    def both(*args: Any, **kwargs: Any) -> Any:
        fault(holder)
        return honest(*args, **kwargs)

    setattr(holder, method, both)


def in_each(parts: Callable[[PreparedModel], Iterable[Any]], name: str, fault: Callable[[Any], Any]) -> Spoil:
    """Replace an attribute of each part of a model by ``fault(part)``."""

    def spoil(prepared: PreparedModel) -> PreparedModel:
        for part in parts(prepared):
            setattr(part, name, fault(part))
        return prepared

    return spoil


def dividing_losses(prepared: PreparedModel, divisor: float) -> PreparedModel:
    """Divide each loss before its backward, although the reduction divides gradients."""
    honest = prepared.backward
    prepared.backward = lambda loss: honest(loss / divisor)  # type: ignore[method-assign]  # of this one
    return prepared


def holding_nothing_back(prepared: PreparedModel) -> PreparedModel:
    """Make ``accumulating`` do nothing."""
    prepared.accumulating = nullcontext  # type: ignore[method-assign]  # of this one
    return prepared


def never_updating(prepared: PreparedModel, parameters: Iterable[nn.Parameter]) -> PreparedModel:
    """Undo each step's update of these parameters."""
    honest, tensors = prepared.step, [local(parameter) for parameter in parameters]

    def step() -> None:
        with unchanged(tensors):
            honest()

    prepared.step = step  # type: ignore[method-assign]  # of this one
    return prepared


@contextmanager
def keeping_group_options(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo all changes of the options of parameter groups made inside, such as the learning rate."""
    before = [dict(group) for group in optimizer.param_groups]
    yield
    for group, options in zip(optimizer.param_groups, before, strict=True):
        set_group_options(group, options)


def set_group_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set the options of a parameter group to those of another; it keeps its parameters."""
    group.update({**options, "params": group["params"]})


def restart_count(optimizer: torch.optim.Optimizer) -> None:
    """Set the count of steps of each parameter to zero, if the optimizer has one."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.zeros_like(state["step"])


def leave_out_of_ddp(model: nn.Module, names: Sequence[str]) -> None:
    """Make DDP, which is about to wrap the model, leave these parameters out of every reduction."""
    # DDP's documented way to leave a parameter out; it has neither a public name nor types.
    leave_out = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    leave_out(model, list(names))  # type: ignore[no-untyped-call]


class Forgetful(PreparedModel):
    """Clears all gradients before each backward; a mixin."""

    def backward(self, loss: torch.Tensor) -> None:
        for parameter in self.named.parameters():
            parameter.grad = None
        super().backward(loss)


class Stale(PreparedModel):
    """Keeps the shards of two steps and swaps the older ones in while a step computes; a mixin."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._older: list[torch.Tensor] = []
        self._newest: list[torch.Tensor] = []

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if self._older and not self._newest:
            self._newest = self._copies()
            self._assign(self._older)
        return super().__call__(*inputs, **named)

    def step(self) -> None:
        # The optimizer's parameters and the reads are up to date: only forward and backward lag.
        if self._newest:
            self._assign(self._newest)
            self._newest = []
        self._older = self._copies()
        super().step()

    def _copies(self) -> list[torch.Tensor]:
        return [shard.clone() for shard in self._shards()]

    def _assign(self, values: list[torch.Tensor]) -> None:
        for shard, value in zip(self._shards(), values, strict=True):
            shard.copy_(value)

    def _shards(self) -> Iterator[torch.Tensor]:
        yield from map(local, self.owned_parameters().values())


class Keeping(PreparedComposable):
    """Has a place for memory that it should free; empty again once the optimizer has stepped, unless it grows."""

    grows = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[Any] = []

    def step(self) -> None:
        super().step()
        if not self.grows:
            self.kept.clear()


class KeepingFsdp2(Keeping, PreparedFullyShard):
    """The one of FSDP2."""


class KeepingReference(Keeping, PreparedReference):
    """The one of the reference engine."""


def with_options(change: Callable[[nn.Module, Options], Options]) -> WrapperNames:
    """Return names whose wrapper uses other options than the caller's; its units have the root's options."""

    class Changed(FullyShardedDataParallel):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **change(module, options))

    return replace(NAMES, FullyShardedDataParallel=Changed)


def leaving_out(*names: str) -> WrapperNames:
    """Return names whose wrapper ignores these options."""
    return with_options(lambda module, options: {k: v for k, v in options.items() if k not in names})


def swapping(name: str, values: Mapping[Any, Any]) -> WrapperNames:
    """Return names whose wrapper confuses one value of an option with another."""
    return with_options(
        lambda module, options: {k: values.get(v, v) if k == name else v for k, v in options.items()}
    )


def with_strategies(values: Mapping[ShardingStrategy, ShardingStrategy]) -> WrapperNames:
    """Return names whose wrapper confuses one strategy with another; FULL_SHARD is the default."""

    def change(module: nn.Module, options: Options) -> Options:
        asked = options.get("sharding_strategy") or ShardingStrategy.FULL_SHARD
        return {**options, "sharding_strategy": values.get(asked, asked)}

    return with_options(change)


# Any: fields of a plan.
def changing(**fields: Any) -> Callable[[Plan], Plan]:
    """Return a function that sets these fields of a plan."""
    return lambda plan: replace(plan, **fields)


def undemanding(capability: Capability) -> Callable[[Plan], Plan]:
    """Return a function that removes a demand from a plan."""
    return lambda plan: replace(plan, demands=plan.demands - {capability})


Lists = tuple[tuple[str, tuple[str, ...]], ...]


def changing_lists(change: Callable[[Lists, tuple[str, ...]], Lists]) -> Callable[[Plan], Plan]:
    """Return a function that changes both prefetch lists of a plan: ``change`` takes a list, and the units in order."""

    def changed(plan: Plan) -> Plan:
        if plan.prefetch is None:
            return plan
        forward = change(plan.prefetch.forward, plan.units)
        backward = change(plan.prefetch.backward, plan.units[::-1])
        return replace(plan, prefetch=Prefetch(forward=forward, backward=backward))

    return changed
