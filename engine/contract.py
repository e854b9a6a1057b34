"""The contract between the harness and an engine: an adapter implements one method and inherits the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardproof.engine.capability import Capability, MissingMethodError, UnsupportedError
from shardproof.engine.plan import (
    Accumulation,
    Axis,
    Buffers,
    Grouping,
    Layout,
    Offload,
    Placement,
    Plan,
    Prefetch,
    Replicas,
    Reshard,
    Roots,
    Tuning,
    UnitDtypes,
    Wire,
)
from shardproof.engine.shard import Shard, shard_of
from shardproof.engine.wrapper import BackwardGather, ComposableApi, Wrapper, WrapperNames

__all__ = [
    "Accumulation",
    "Axis",
    "BackwardGather",
    "Buffers",
    "Capability",
    "ComposableApi",
    "Copies",
    "Cut",
    "Engine",
    "Grouping",
    "Layout",
    "MissingMethodError",
    "NoGradient",
    "Offload",
    "OptimizerFactory",
    "Placement",
    "Plan",
    "Prefetch",
    "PreparedModel",
    "Replicas",
    "Reshard",
    "Roots",
    "Shard",
    "Tuning",
    "UnitDtypes",
    "UnitHandle",
    "UnsupportedError",
    "Wire",
    "Wrapper",
    "WrapperNames",
    "shard_of",
]

_WHOLE = StateDictOptions(full_state_dict=True)

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Cut(Enum):
    """Where an engine cuts a flattened group of parameters into shards."""

    EVENLY = "where an even share ends, whatever lies there; parameters are aligned to a few bytes"
    CHUNKS = (
        "at multiples of a chunk in which rows of each parameter of the group fit: some ranks may hold more"
    )
    PARAMETERS = "between parameters, of which each has its state on one rank: some ranks may hold more"


class Copies(Enum):
    """What an engine keeps a second time between steps."""

    NONE = "nothing"
    MASTERS = "this rank's share of the parameters: the optimizer updates it, and they are set from it"
    BUCKETS = "gradients: they lie in buckets of communication too, as DDP's do"


class NoGradient(Enum):
    """The gradient that an engine shows for a parameter that no loss used."""

    NONE = "None, as torch does"
    ZEROS = "zeros, as engines show whose gradients lie in one buffer"


class UnitHandle:
    """Lets the caller control one communication group; each method needs a capability and has no working default."""

    def unshard(self) -> None:
        """Gather the unit's parameters now, before or instead of a forward."""
        raise MissingMethodError("units()[...].unshard", Capability.UNIT_STATE)

    def unshard_async(self) -> Callable[[], None]:
        """Start to gather; the returned function waits for the gather, and so does the unit's forward."""
        raise MissingMethodError("units()[...].unshard_async", Capability.UNIT_STATE)

    def reshard(self) -> None:
        """Free the gathered parameters."""
        raise MissingMethodError("units()[...].reshard", Capability.UNIT_STATE)

    def is_unsharded(self) -> bool:
        """Return whether the module shows whole parameters, as in forward; never communicates."""
        raise MissingMethodError("units()[...].is_unsharded", Capability.UNIT_STATE)

    def set_gradient_sync(self, *, is_on: bool) -> None:
        """Set whether the next backwards reduce this unit's gradients; units inside it are unaffected."""
        raise MissingMethodError("units()[...].set_gradient_sync", Capability.UNIT_SYNC)

    def set_replica_sync(self, *, is_on: bool) -> None:
        """Set whether the next backwards reduce across replicas too, or only within each."""
        raise MissingMethodError("units()[...].set_replica_sync", Capability.REPLICA_SYNC)

    def set_last_backward(self, *, is_last: bool) -> None:
        """Set whether the next backward is the last of the step and has to wait for all reductions."""
        raise MissingMethodError("units()[...].set_last_backward", Capability.UNIT_SYNC)

    def set_reshard_after_forward(self, *, is_on: bool) -> None:
        """Set whether forward frees the gathered parameters."""
        raise MissingMethodError("units()[...].set_reshard_after_forward", Capability.UNIT_STATE)

    def set_reshard_after_backward(self, *, is_on: bool) -> None:
        """Set whether backward frees the gathered parameters."""
        raise MissingMethodError("units()[...].set_reshard_after_backward", Capability.KEEP_AFTER_BACKWARD)


class _InBackward(torch.optim.Optimizer):
    """One optimizer for each parameter; a hook steps it as soon as the parameter's gradient is reduced."""

    def __init__(self, parameters: Iterable[nn.Parameter], factory: OptimizerFactory) -> None:
        self._own = {parameter: factory([parameter]) for parameter in parameters}
        super().__init__(self._own, {})
        for parameter, own in self._own.items():
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())  # type: ignore[no-untyped-call]  # torch leaves it so
            self.state[parameter] = own.state[parameter]

    def step(self) -> None:  # type: ignore[override]  # no caller passes a closure
        """Do nothing: backward has already updated the parameters."""


class PreparedModel:
    """A model that an engine has prepared; the training loop drives it and the harness reads it.

    ``module`` is called for forward. ``named`` is the module that has the parameter and buffer names of the
    original model; pass it when ``module`` is a wrapper that prefixes them. Every method has a default that
    works for engines whose parameters are plain tensors or DTensors.
    """

    cut: ClassVar[Cut] = Cut.EVENLY
    """The allowed unevenness of flat pieces; does not apply to others."""

    copies: Copies = Copies.NONE
    """What memory holds beside parameters, gradients and optimizer state."""

    no_gradient: NoGradient = NoGradient.NONE
    """The value of `local_gradients` for a missing gradient; any value but this or None is wrong."""

    scaler_class: ClassVar[type[GradScaler]] = GradScaler
    """What `grad_scaler` makes."""

    wrapped_as: ClassVar[tuple[str, ...]] = ()
    """The name parts of wrappers inside the model, such as ``("module",)``; they are removed from names."""

    is_last_microbatch: bool = True
    """Whether this microbatch is the last before the optimizer step; set before each forward and backward."""

    def __init__(self, module: nn.Module, *, named: nn.Module | None = None) -> None:
        self.module = module
        self.named = module if named is None else named
        self._optimizer: torch.optim.Optimizer | None = None
        self._optimized: Mapping[str, nn.Parameter] = {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model takes and returns anything
        """Run forward on this rank's microbatch."""
        return self.module(*inputs, **named)

    def materialize(
        self, device: torch.device, state: Mapping[str, torch.Tensor], unsaved: Mapping[str, torch.Tensor]
    ) -> None:
        """Allocate a model on the meta device and fill it, with no more than a unit or two whole at any moment.

        ``state`` is the state dict of the whole model on rank 0, and empty on the other ranks. ``unsaved`` are the
        buffers that no state dict holds; they are whole on each rank, as a model's own initialization makes them.
        """
        tied = list(_tied(self.module))
        once = {name for name, _ in self.named.named_modules()}
        others = {name for name, _ in self.named.named_modules(remove_duplicate=False)} - once
        self.module.to_empty(device=device)
        for first, other in tied:  # to_empty makes each its own tensor
            parent, _, name = other.rpartition(".")
            setattr(self.module.get_submodule(parent), name, self.module.get_parameter(first))
        # torch's function loads a module under one of its names, and asks for the others: 67 in docs/what-it-found.md.
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=not others)
        named_once: dict[str, Any] = {n: t for n, t in state.items() if n.rpartition(".")[0] not in others}
        set_model_state_dict(self.module, named_once, options=options)
        with torch.no_grad():
            for name, buffer in unsaved.items():
                self.named.get_buffer(name).copy_(buffer)

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Build the optimizer over the parameters that this rank owns; may refuse the plan."""
        # Later, modules may show other parameters, for example while gathered.
        self._optimized = self._named_parameters()
        self._optimizer = factory(self._optimized.values())

    def optimizer_in_backward(self, factory: OptimizerFactory) -> None:
        """Build an optimizer for each parameter; a hook steps it in backward, and `step` then does nothing."""
        self._optimized = dict(self._named_parameters())
        self._optimizer = _InBackward((p for p in self._optimized.values() if p.requires_grad), factory)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from a scalar loss."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def backward_of_branch(self, loss: torch.Tensor) -> None:
        """Run backward from one of several losses of one forward, and keep the graph for the next loss."""
        if type(self).backward is not PreparedModel.backward:  # this method would skip the override
            raise MissingMethodError("backward_of_branch", Capability.UNIT_SYNC)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]  # as above

    def step(self) -> None:
        """Update the parameters from the gradients."""
        self.built_optimizer().step()

    def grad_scaler(self, *, init_scale: float, growth_interval: int) -> GradScaler:
        """Return the gradient scaler for this engine; loops call it with the optimizer, whose step is then `step`."""
        device = next(iter(self.owned_parameters().values())).device
        return self.scaler_class(device.type, init_scale=init_scale, growth_interval=growth_interval)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the gradients before the next step."""
        self.built_optimizer().zero_grad(set_to_none=set_to_none)

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context without gradient sync, for forward and backward of every microbatch but the last.

        In a pipeline the context is entered for each forward and each backward separately, because the microbatches
        alternate: the last backward decides what it reduces, not any forward. The default is the module's own
        ``no_sync``.
        """
        no_sync = getattr(self.module, "no_sync", None)
        if no_sync is None:
            raise MissingMethodError("accumulating", Capability.ACCUMULATE)
        context: AbstractContextManager[None] = no_sync()
        return context

    def pipelined(self) -> nn.Module | None:
        """Return a module of a class that torch's pipelining synchronises by itself, or None.

        With None, `accumulating` controls the synchronisation of a pipeline stage.
        """
        return None

    def units(self) -> Mapping[str, UnitHandle]:
        """Return a handle for each unit by its name in the plan, and for the root as ``""``."""
        raise MissingMethodError("units", Capability.UNIT_STATE)

    def part(self, name: str) -> nn.Module:
        """Return the submodule of that name, for the training loop to call."""
        return self.named.get_submodule(name)

    def wrapper(self) -> WrapperNames:
        """Return the engine's versions of the ``torch.distributed.fsdp`` API, for cases that call them."""
        raise MissingMethodError("wrapper", Capability.WRAPPER)

    def data_parallel(self) -> Any:  # Any: cases test the class's arguments
        """Return the engine's version of ``DistributedDataParallel``, for cases that call it."""
        raise MissingMethodError("data_parallel", Capability.DATA_PARALLEL)

    def composable(self) -> ComposableApi:
        """Return the engine's versions of the ``fully_shard`` API, for cases that call them."""
        raise MissingMethodError("composable", Capability.COMPOSABLE)

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the model's floating-point parameters, gradients and buffers; before `optimizer`, or as RECONVERT."""
        self.module.to(dtype)

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        """Scale gradients so that their norm over all parameters is at most ``max_norm``; return the norm before."""
        norm = nn.utils.clip_grad_norm_(self.named.parameters(), max_norm, norm_type)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @property
    def stateful_module(self) -> nn.Module:
        """Return the module to take state dicts of: ``module``, unless torch does not support its wrapper."""
        return self.module

    def full_state(self) -> dict[str, Any]:
        """Gather whole state dicts of model and optimizer, on every rank; may communicate."""
        held = self.built_optimizer()
        has_stepped = bool(held.state)
        model, optimizer = get_state_dict(self.stateful_module, held, options=_WHOLE)
        if not has_stepped:  # undo the step by which torch makes state before the first one (pytorch#164929)
            held.state.clear()
            optimizer["state"] = {}
        return {"model": model, "optimizer": optimizer}

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Load a result of `full_state` from any preparation of the same model; may communicate."""
        set_state_dict(
            self.stateful_module,
            self.built_optimizer(),
            model_state_dict=dict(state["model"]),  # it renames keys and replaces values in place
            optim_state_dict=state["optimizer"],
            options=_WHOLE,
        )

    def shared_state(self) -> dict[str, Any]:
        """Return state dicts of this rank's shares of model and optimizer, with an entry for everything loadable."""
        model, optimizer = get_state_dict(self.stateful_module, self.built_optimizer())
        return {"model": model, "optimizer": optimizer}

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Load a result of `shared_state` from a model of the same layout."""
        set_state_dict(
            self.stateful_module,
            self.built_optimizer(),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def save_checkpoint(self, folder: Path) -> None:
        """Write model and optimizer into an empty folder that all ranks share; may communicate."""
        raise MissingMethodError("save_checkpoint", Capability.CHECKPOINTS)

    def load_checkpoint(self, folder: Path) -> None:
        """Load a checkpoint once `save_checkpoint` has returned on every rank, maybe of a world of another size."""
        raise MissingMethodError("load_checkpoint", Capability.CHECKPOINTS)

    def recover(self) -> None:
        """Discard a forward that raised an exception, so that training can continue; called on every rank."""

    def close(self) -> None:
        """Release what the engine keeps of the model for itself; called where another model takes its place."""

    def shown_parameters(self) -> Mapping[str, Shard]:
        """Read every parameter as its module shows it now: whole, or this rank's shard; never communicates."""
        return {name: shard_of(p) for name, p in self._named_parameters().items()}

    def owned_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters that the optimizer updates, under the original names; the other reads use them."""
        return self._optimized or self._named_parameters()

    def local_parameters(self) -> Mapping[str, Shard]:
        """Read this rank's shard of every parameter, under the original names; never communicates."""
        return {name: shard_of(p) for name, p in self.owned_parameters().items()}

    def local_gradients(self) -> Mapping[str, Shard | None]:
        """Read this rank's shard of every gradient, or None if a parameter has none; never communicates."""
        return {
            name: None if p.grad is None else shard_of(p.grad) for name, p in self.owned_parameters().items()
        }

    def local_buffers(self) -> Mapping[str, Shard]:
        """Read this rank's buffers under the original names; never communicates."""
        return {self.original_name(name): shard_of(b) for name, b in self.named.named_buffers()}

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        """Read this rank's optimizer state as ``parameter/key``; never communicates."""
        state = self.built_optimizer().state
        return {
            f"{name}/{key}": shard_of(value)
            for name, p in self.owned_parameters().items()
            for key, value in state.get(p, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return {self.original_name(name): p for name, p in self.named.named_parameters()}

    def original_name(self, name: str) -> str:
        """Remove the wrappers' parts from a name."""
        return ".".join(part for part in name.split(".") if part not in self.wrapped_as)

    def built_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer that `optimizer` built, which loops schedule; raises RuntimeError before that."""
        if self._optimizer is None:
            raise RuntimeError(
                "PreparedModel: expected an optimizer by now, got none; an override of optimizer() ends with "
                "super().optimizer(...)"
            )
        return self._optimizer


class Engine(ABC):
    """An adapter: connects one engine to the harness."""

    name: str
    capabilities: frozenset[Capability]
    package: ClassVar[str] = "torch"
    """The distribution that contains the engine; its release is the engine's."""
    insists_on_cuda: ClassVar[bool] = False
    """Whether the engine calls torch.cuda on every device; CPU worlds replace torch.cuda by a stand-in for it."""
    needs_processes: ClassVar[bool] = False
    """Whether each rank needs a process of its own, as where globals identify ranks; not tested in threads."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules to import once for all ranks and cases, such as ``(__name__,)``; else each rank imports them."""
    known_as: ClassVar[str] = ""
    """The known engine that this one is derived from; it shares that engine's known failures."""
    call: ClassVar[Callable[..., Any] | None] = None
    """The function that wraps a model and takes the `call_options`; None if the adapter passes none on."""
    call_options: Mapping[str, Any] = MappingProxyType({})
    """The user's options of that call, which take the place of the plan's."""
    decided_by: ClassVar[Mapping[str, frozenset[Capability]]] = MappingProxyType({})
    """The capabilities that an option takes from a plan, by the option's name."""

    @abstractmethod
    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare ``model`` with the engine on this rank, according to ``plan``.

        Must raise for every request that it cannot meet: ``plan.refuse_beyond(self.capabilities)`` does so
        for every capability that the adapter does not declare.
        """

    def adopt(self, module: nn.Module, model: nn.Module, plan: Plan) -> PreparedModel:
        """Take over a model that the user's own function wrapped; ``module`` is the result, for forward."""
        raise NotImplementedError(f"{self.name} adopts no model that another function wrapped")

    def version(self) -> str:
        """Return the engine's release, for the record."""
        release = torch.__version__ if self.package == "torch" else metadata.version(self.package)
        return f"{self.package} {release}"


def _tied(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of each parameter with several: the first one, and another."""
    firsts: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = firsts.setdefault(parameter, name)
        if first != name:
            yield first, name
