"""The wrapper's methods around state dicts of models and optimizers, with torch's names and arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    OptimStateDictConfig,
    OptimStateKeyType,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardproof.engine.reference.fsdp1.init import WrapperBase, wrappers_in
from shardproof.engine.reference.fsdp1.optim_state import (
    NamedState,
    broadcast_from_first,
    groups_of,
    loadable,
    local_state,
    rekeyed,
    sharded_state,
    whole_state,
)
from shardproof.engine.reference.fsdp1.state_dict import export_states, settings_for

Group = dist.ProcessGroup | None


class StateDictMethods(WrapperBase):
    """State dicts of a wrapper; the static methods accept any module with wrappers in it.

    Optimizer states are named states, see `engine.reference.fsdp1.optim_state`. ``optim_input`` are the
    parameters of an optimizer that is not passed; beside one it is ignored.
    """

    # Any: values of state dicts are tensors, numbers, and other types of optimizers.
    def state_dict(  # type: ignore[override]  # torch spells the two forms apart
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the model's state in the form of ``set_state_dict_type``. Collective."""
        save: Callable[..., Any] = super().state_dict
        return export_states(self, save, destination, prefix, keep_vars)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the form of state dicts for every wrapper in ``module``; return the previous settings.

        Raises RuntimeError for a config of another type, AssertionError if wrappers had different settings.
        """
        chosen = settings_for(state_dict_type, state_dict_config, optim_state_dict_config)
        before = StateDictMethods.get_state_dict_type(module)
        for wrapper in wrappers_in(module):
            wrapper.state_dict_settings = chosen
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the form of state dicts of the wrappers in ``module``; raises AssertionError if they differ."""
        found = [wrapper.state_dict_settings for wrapper in wrappers_in(module)]
        if not found:
            raise AssertionError(
                f"state dict type: expected a module with wrappers, got {type(module).__name__}"
            )
        for settings in found:
            if settings != found[0]:
                raise AssertionError(
                    "All FSDP modules must have the same state dict settings: expected "
                    f"{found[0]} on every wrapper, got {settings} on one; call set_state_dict_type on the root"
                )
        return found[0]

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Choose the form of state dicts within a context, which always restores the previous settings."""
        before = StateDictMethods.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper in wrappers_in(module):
                wrapper.state_dict_settings = before

    # Optimizer --------------------------------------------------------------------------------------------

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Group = None,
    ) -> NamedState:
        """Return the optimizer's state (or ``optim_state_dict``, a state dict of it) in the chosen form. Collective."""
        settings = StateDictMethods.get_state_dict_type(model)
        config = settings.optim_state_dict_config
        states = optim.state_dict() if optim_state_dict is None else optim_state_dict
        match settings.state_dict_type:
            case StateDictType.FULL_STATE_DICT:
                whole = whole_state(model, optim, states, offloads=config.offload_to_cpu)
                return {} if getattr(config, "rank0_only", False) and dist.get_rank(group) else whole
            case StateDictType.SHARDED_STATE_DICT:
                return sharded_state(model, optim, states, offloads=config.offload_to_cpu)
            case StateDictType.LOCAL_STATE_DICT:
                return local_state(model, optim, states)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: NamedState,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Group = None,
    ) -> dict[str, Any]:
        """Convert a result of ``optim_state_dict``, also of another wrapping, for ``optim`` to load. Collective."""
        settings = StateDictMethods.get_state_dict_type(model)
        if getattr(settings.optim_state_dict_config, "rank0_only", False):
            optim_state_dict = broadcast_from_first(optim_state_dict, group)
        is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
        made = loadable(
            model, optim.param_groups, optim_state_dict, is_local=is_local, by_name=is_named_optimizer
        )
        if load_directly:
            optim.load_state_dict(made)
        return made

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: object = None,
        rank0_only: bool = True,
        group: Group = None,
    ) -> NamedState:
        """Gather the whole state to the host; by default only on rank 0. Collective."""
        whole = whole_state(model, optim, optim.state_dict(), offloads=True)
        return {} if rank0_only and dist.get_rank(group) else whole

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: Group = None
    ) -> NamedState:
        """Return the state as DTensors, sharded on dim 0. Collective."""
        return sharded_state(model, optim, optim.state_dict(), offloads=False)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: NamedState,
        model: nn.Module,
        optim_input: Iterable[Any] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert a whole state, which every rank has, into one that this rank's optimizer loads."""
        groups = groups_of(model, optim, optim_input)
        return loadable(model, groups, full_optim_state_dict, is_local=False, by_name=False)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: NamedState, model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Convert a state of DTensors into one that this rank's optimizer loads. Collective."""
        return loadable(model, optim.param_groups, sharded_optim_state_dict, is_local=False, by_name=False)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: NamedState | None,
        model: nn.Module,
        optim_input: Iterable[Any] | None = None,
        optim: torch.optim.Optimizer | None = None,
        group: Group = None,
    ) -> dict[str, Any]:
        """Convert a whole state on rank 0 into one that each rank's optimizer loads. Collective."""
        received = broadcast_from_first(full_optim_state_dict, group)
        groups = groups_of(model, optim, optim_input)
        return loadable(model, groups, received, is_local=False, by_name=False)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: Mapping[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Iterable[nn.Parameter] | list[dict[str, Any]] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Use indices or names for the parameters of a state; ``model`` is not wrapped.

        Indices are in the order of ``optim``; without it, of ``optim_input``, or of ``model.parameters()``.
        """
        groups = groups_of(model, optim, optim_input)
        return rekeyed(optim_state_dict, optim_state_key_type, model, groups)
