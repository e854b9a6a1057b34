"""What a wrapper does before it cuts anything: wrap what is inside, give it memory, one device and equal values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from engine.reference.discovery import unmanaged
from engine.reference.materialize import broadcast_states, materialize, move_to_device
from engine.reference.nested import map_tensors
from engine.reference.wrapper_base import WrapperBase, wrappers_in
from engine.reference.wrapper_options import Ignored
from engine.reference.wrapping import wrap_below

__all__ = ["prepare_states", "wrap_inside"]


def wrap_inside(
    wrapper_class: Callable[..., nn.Module],
    module: nn.Module,
    policy: Any,  # torch's policies share no class
    ignored: Ignored,
    options: Mapping[str, Any],
) -> None:
    """Wrap the submodules that ``policy`` chooses with ``options``, but for what it chooses itself."""

    def wrap(inner: nn.Module, own: Mapping[str, Any]) -> nn.Module:
        return wrapper_class(inner, **{**options, **own})

    kept = _kept_precise(module, options["mixed_precision"])
    for inner in kept:
        _compute_in_float32(inner)
    wrap_below(
        module,
        policy,
        wrap=wrap,
        is_wrapped=lambda inner: isinstance(inner, WrapperBase),
        ignored_modules=ignored.modules,
        ignored_parameters=ignored.parameters,
        also={inner: {"mixed_precision": None} for inner in kept},
    )


def _kept_precise(module: nn.Module, mixed: MixedPrecision | None) -> list[nn.Module]:
    """List the modules inside whose class is exempt from mixed precision: they become units of their own."""
    if mixed is None or not mixed._module_classes_to_ignore:
        return []
    exempt = tuple(mixed._module_classes_to_ignore)
    return [inner for inner in module.modules() if inner is not module and isinstance(inner, exempt)]


def _compute_in_float32(module: nn.Module) -> None:
    """Cast what goes in to float32, and what comes out to the dtype that the first input had."""
    given: list[torch.dtype] = []

    # Any: a module takes and gives what it likes.
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        def widened(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            given.append(tensor.dtype)
            return tensor.float()

        given.clear()
        return map_tensors(widened, args), map_tensors(widened, kwargs)

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if not given:
            return output
        dtype = given[0]
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def prepare_states(
    module: nn.Module,
    ignored: Ignored,
    param_init_fn: Callable[[nn.Module], None] | None,
    device_id: int | torch.device | None,
    synchronised_by: Sequence[dist.ProcessGroup],
) -> torch.device:
    """Give memory, a device and, by broadcasts over the groups given, rank 0's values to all that is not wrapped yet.

    Gives the device. Leaves ignored states and those of wrappers inside as they are.
    """
    inside = wrappers_in(module)
    modules = {*ignored.modules, *(m for wrapper in inside for m in wrapper.modules())}
    device = torch.device("cpu") if device_id is None else torch.device(device_id)
    materialize(module, param_init_fn=param_init_fn, device=device, ignored_modules=modules)
    own_device = move_to_device(
        module, device_id, ignored_modules=modules, ignored_parameters=ignored.parameters
    )
    for group in synchronised_by:
        broadcast_states(module, group, ignored_modules=modules, ignored_parameters=ignored.parameters)
    has_own = unmanaged((module,), set(ignored.parameters))
    return own_device if has_own or not inside else inside[0].compute_device
