"""The contract between the harness and an engine: one method to write, defaults for the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from importlib import metadata
from pathlib import Path
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
from shardproof.engine.composable_api import ComposableApi
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
from shardproof.engine.wrapper import BackwardGather, Wrapper, WrapperNames

__all__ = [
    "Accumulation",
    "Axis",
    "BackwardGather",
    "Buffers",
    "Capability",
    "ComposableApi",
    "Cut",
    "Engine",
    "Grouping",
    "Layout",
    "Masters",
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
    """Where an engine that lays a group of parameters one after the other cuts them for the ranks."""

    EVENLY = "where an even share ends, whatever lies there; parameters are aligned to a few bytes"
    CHUNKS = (
        "at multiples of a chunk in which rows of each parameter of the group fit: some ranks may hold more"
    )
    PARAMETERS = "between parameters, of which each has its state on one rank: some ranks may hold more"


class Masters(Enum):
    """Whether the optimizer updates the parameters themselves."""

    NONE = "it does"
    SHARE = "it updates a copy of this rank's share, from which the parameters are set"


class NoGradient(Enum):
    """What an engine shows of a parameter that no loss reached."""

    NONE = "None, as torch does"
    ZEROS = "zeros, as engines show whose gradients lie in one buffer"


class UnitHandle:
    """One communication group in the caller's hands; each method belongs to a capability and is right for none."""

    def unshard(self) -> None:
        """Gather the unit's parameters now, before a forward or instead of one."""
        raise MissingMethodError("units()[...].unshard", Capability.UNIT_STATE)

    def unshard_async(self) -> Callable[[], None]:
        """Start to gather; the function returned waits, and so does the unit's forward."""
        raise MissingMethodError("units()[...].unshard_async", Capability.UNIT_STATE)

    def reshard(self) -> None:
        """Free the gathered parameters."""
        raise MissingMethodError("units()[...].reshard", Capability.UNIT_STATE)

    def is_unsharded(self) -> bool:
        """Return whether the module shows whole parameters, as forward needs them; never communicates."""
        raise MissingMethodError("units()[...].is_unsharded", Capability.UNIT_STATE)

    def set_gradient_sync(self, *, is_on: bool) -> None:
        """Set whether the next backwards reduce this unit's gradients; units inside it are unaffected."""
        raise MissingMethodError("units()[...].set_gradient_sync", Capability.UNIT_SYNC)

    def set_replica_sync(self, *, is_on: bool) -> None:
        """Set whether the next backwards reduce across replicas too, or within each alone."""
        raise MissingMethodError("units()[...].set_replica_sync", Capability.REPLICA_SYNC)

    def set_last_backward(self, *, is_last: bool) -> None:
        """Set whether the next backward ends the step, so that all reductions must be waited for."""
        raise MissingMethodError("units()[...].set_last_backward", Capability.UNIT_SYNC)

    def set_reshard_after_forward(self, *, is_on: bool) -> None:
        """Set whether forward frees the gathered parameters."""
        raise MissingMethodError("units()[...].set_reshard_after_forward", Capability.UNIT_STATE)

    def set_reshard_after_backward(self, *, is_on: bool) -> None:
        """Set whether backward frees the gathered parameters."""
        raise MissingMethodError("units()[...].set_reshard_after_backward", Capability.KEEP_AFTER_BACKWARD)


class _InBackward(torch.optim.Optimizer):
    """An optimizer of each parameter's own, stepped by a hook as soon as the parameter's gradient is reduced."""

    def __init__(self, parameters: Iterable[nn.Parameter], factory: OptimizerFactory) -> None:
        self._own = {parameter: factory([parameter]) for parameter in parameters}
        super().__init__(self._own, {})
        for parameter, own in self._own.items():
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())  # type: ignore[no-untyped-call]  # torch leaves it so
            self.state[parameter] = own.state[parameter]

    def step(self) -> None:  # type: ignore[override]  # no closure is ever given
        """Do nothing: backward has."""


class PreparedModel:
    """A model in an engine's hands: what the training loop drives and what the harness reads.

    ``module`` is called for forward. ``named`` is the module whose parameter and buffer names are those
    of the original model; give it when ``module`` is a wrapper that prefixes them. Every method has a
    default that is right for engines whose parameters are plain tensors or DTensors.
    """

    cut: ClassVar[Cut] = Cut.EVENLY
    """What flat pieces may be uneven by; says nothing of others."""

    masters: Masters = Masters.NONE
    """Whether memory holds a copy of this rank's share of the parameters beside its optimizer state."""

    no_gradient: NoGradient = NoGradient.NONE
    """What `local_gradients` shows where there is no gradient; anything but that, or None, is wrong."""

    wrapped_as: ClassVar[tuple[str, ...]] = ()
    """What wrappers that stand inside the model are called in names, as ``("module",)``: left out of them."""

    is_last_microbatch: bool = True
    """Whether the microbatch at hand is the last before the optimizer step; set before each forward and backward."""

    def __init__(self, module: nn.Module, *, named: nn.Module | None = None) -> None:
        self.module = module
        self.named = module if named is None else named
        self._optimizer: torch.optim.Optimizer | None = None
        self._given: Mapping[str, nn.Parameter] = {}

    def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model takes and returns what it likes
        """Run forward on this rank's microbatch, with the arguments that the model takes."""
        return self.module(*inputs, **named)

    def materialize(self, device: torch.device, state: Mapping[str, torch.Tensor]) -> None:
        """Allocate the memory of a model without any, and load the first rank's state; other ranks get none."""
        self.module.to_empty(device=device)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.module, dict(state), options=options)

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Build the optimizer over the parameters that this rank owns; what cannot be honoured may be refused here."""
        # Afterwards modules may show others, as while gathered.
        self._given = self._named_parameters()
        self._optimizer = factory(self._given.values())

    def optimizer_in_backward(self, factory: OptimizerFactory) -> None:
        """Build an optimizer for each parameter, which a hook steps in backward; `step` then has nothing to do."""
        self._given = dict(self._named_parameters())
        self._optimizer = _InBackward((p for p in self._given.values() if p.requires_grad), factory)

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from a scalar loss."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def backward_of_branch(self, loss: torch.Tensor) -> None:
        """Run backward from one of several losses of one forward, and keep the graph for the next."""
        if type(self).backward is not PreparedModel.backward:  # what was changed there would be left out here
            raise MissingMethodError("backward_of_branch", Capability.UNIT_SYNC)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]  # as above

    def step(self) -> None:
        """Update the parameters from the gradients."""
        self.built_optimizer().step()

    def grad_scaler(self, *, init_scale: float, growth_interval: int) -> GradScaler:
        """Return the scaler for training by this engine; it unscales the gradients of `owned_parameters`."""
        device = next(iter(self.owned_parameters().values())).device
        return GradScaler(device.type, init_scale=init_scale, growth_interval=growth_interval)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clear the gradients before the next step."""
        self.built_optimizer().zero_grad(set_to_none=set_to_none)

    def accumulating(self) -> AbstractContextManager[None]:
        """Return a context around forward and backward of every microbatch but the last: no gradient sync.

        In a pipeline it is around each forward and each backward by itself, since those of several microbatches
        take turns: what the last backward reduces is decided by that backward, not by any forward. The default is
        the module's own ``no_sync``.
        """
        no_sync = getattr(self.module, "no_sync", None)
        if no_sync is None:
            raise MissingMethodError("accumulating", Capability.ACCUMULATE)
        context: AbstractContextManager[None] = no_sync()
        return context

    def pipelined(self) -> nn.Module | None:
        """Return the module whose class torch's pipelining knows and synchronises by itself; None if it has none.

        Then a stage of a pipeline is driven by `accumulating`.
        """
        return None

    def units(self) -> Mapping[str, UnitHandle]:
        """Return a handle for each unit of the plan, by its name there, and for the root as ``""``."""
        raise MissingMethodError("units", Capability.UNIT_STATE)

    def part(self, name: str) -> nn.Module:
        """Return the submodule of that name as the training loop may call it."""
        return self.named.get_submodule(name)

    def wrapper(self) -> WrapperNames:
        """Return the engine's own things behind the names of ``torch.distributed.fsdp``, for cases that call them."""
        raise MissingMethodError("wrapper", Capability.WRAPPER)

    def data_parallel(self) -> Any:  # Any: the class's arguments are what is put to the test
        """Return the engine's own class behind the name of ``DistributedDataParallel``, for cases that call it."""
        raise MissingMethodError("data_parallel", Capability.DATA_PARALLEL)

    def composable(self) -> ComposableApi:
        """Return the engine's own things behind the names of ``fully_shard``, for cases that call them."""
        raise MissingMethodError("composable", Capability.COMPOSABLE)

    def convert(self, dtype: torch.dtype) -> None:
        """Convert the model's floating-point parameters, gradients and buffers; before `optimizer`, or as RECONVERT."""
        self.module.to(dtype)

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        """Scale gradients so that their norm over all parameters is at most ``max_norm``; return it before that."""
        norm = nn.utils.clip_grad_norm_(self.named.parameters(), max_norm, norm_type)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @property
    def stateful_module(self) -> nn.Module:
        """Return the module whose state dicts are taken: ``module``, unless its wrapper is none that torch knows."""
        return self.module

    def full_state(self) -> dict[str, Any]:
        """Gather whole state dicts of model and optimizer, on every rank; may communicate."""
        model, optimizer = get_state_dict(self.stateful_module, self.built_optimizer(), options=_WHOLE)
        return {"model": model, "optimizer": optimizer}

    def load_full_state(self, state: dict[str, Any]) -> None:
        """Take what `full_state` of any prepared model of the same model gave; may communicate."""
        set_state_dict(
            self.stateful_module,
            self.built_optimizer(),
            model_state_dict=dict(state["model"]),  # it renames keys and replaces values in place
            optim_state_dict=state["optimizer"],
            options=_WHOLE,
        )

    def shared_state(self) -> dict[str, Any]:
        """Return state dicts of this rank's shares of model and optimizer, with room for all that may be loaded."""
        model, optimizer = get_state_dict(self.stateful_module, self.built_optimizer())
        return {"model": model, "optimizer": optimizer}

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Take what `shared_state` of a model of the same layout gave."""
        set_state_dict(
            self.stateful_module,
            self.built_optimizer(),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def save_checkpoint(self, folder: Path) -> None:
        """Write model and optimizer into an empty folder, all ranks the same one; may communicate."""
        raise MissingMethodError("save_checkpoint", Capability.CHECKPOINTS)

    def load_checkpoint(self, folder: Path) -> None:
        """Take what `save_checkpoint` of the ranks of some world wrote, all of which have returned."""
        raise MissingMethodError("load_checkpoint", Capability.CHECKPOINTS)

    def recover(self) -> None:
        """Forget a forward that an exception ended, so that training can go on; called on every rank."""

    def shown_parameters(self) -> Mapping[str, Shard]:
        """Read every parameter as its module shows it now, whole or this rank's shard; never communicates."""
        return {name: shard_of(p) for name, p in self._named_parameters().items()}

    def owned_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return what the optimizer updates, under the original names: what the other reads look at."""
        return self._given or self._named_parameters()

    def local_parameters(self) -> Mapping[str, Shard]:
        """Read this rank's shard of every parameter, under the original names; never communicates."""
        return {name: shard_of(p) for name, p in self.owned_parameters().items()}

    def local_gradients(self) -> Mapping[str, Shard | None]:
        """Read this rank's shard of every gradient, None where there is none; never communicates."""
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
        """Leave out of a name what wrappers put there."""
        return ".".join(part for part in name.split(".") if part not in self.wrapped_as)

    def built_optimizer(self) -> torch.optim.Optimizer:
        """Return what `optimizer` has built; RuntimeError before that."""
        if self._optimizer is None:
            raise RuntimeError(
                "PreparedModel: expected an optimizer by now, got none; an override of optimizer() ends with "
                "super().optimizer(...)"
            )
        return self._optimizer


class Engine(ABC):
    """An adapter: the few lines that plug an engine in."""

    name: str
    capabilities: frozenset[Capability]
    package: ClassVar[str] = "torch"
    """The distribution that the engine is part of, whose release is the engine's."""
    insists_on_cuda: ClassVar[bool] = False
    """Whether the engine calls torch.cuda wherever it is: in worlds of a CPU a stand-in is put there for it."""
    needs_processes: ClassVar[bool] = False
    """Whether each rank needs a process to itself, as where globals identify ranks: not judged in threads."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that are imported once for all ranks and cases, such as ``(__name__,)``; else each rank does so anew."""
    known_as: ClassVar[str] = ""
    """The known engine that this one is derived from, whose known failures it shares."""

    @abstractmethod
    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Put ``model`` in the engine's hands on this rank, as ``plan`` asks.

        Must refuse, by raising, whatever it cannot honour: ``plan.refuse_beyond(self.capabilities)`` does so
        for every capability that the adapter does not declare.
        """

    def version(self) -> str:
        """Name the engine's release, for the record."""
        release = torch.__version__ if self.package == "torch" else metadata.version(self.package)
        return f"{self.package} {release}"
