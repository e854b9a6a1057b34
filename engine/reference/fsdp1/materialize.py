"""Prepares a model before it is sharded: memory for meta tensors, one device, and the same values on all ranks."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

# Of one broadcast: large enough to hide latency, small compared with a model worth sharding.
_BUCKET_BYTES = 250 * 2**20


# --- memory -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def materialize(
    module: nn.Module,
    *,
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
    ignored_modules: Collection[nn.Module] = (),
) -> None:
    """Allocate on ``device``, and initialise, the meta tensors of ``module`` and of all below it except ignored ones.

    ``param_init_fn`` is called with each module that itself registers some, parents first; without one, they become
    empty and the module's ``reset_parameters`` fills them. Tensors that have memory are unchanged, and a tensor that
    several modules share stays shared. Raises before any change if no function can fill them.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(
            f"param_init_fn: expected it to be callable, got {param_init_fn!r}; try a function of one module"
        )
    names = {owner: name for name, owner in module.named_modules()}
    owners = [m for m in _breadth_first(module, ignored_modules) if _meta_names(m)]
    if param_init_fn is None:
        _refuse_without_reset(owners, names)
    ties = _meta_ties(module)
    for owner in owners:
        if _meta_names(owner):  # the function of a parent, or a tie, may have filled it
            _fill(owner, _described(owner, names), param_init_fn, device)
            _tie(ties)


def _breadth_first(root: nn.Module, ignored: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Yield ``root`` and everything below; the order decides which random values go where, and is FSDP1's."""
    seen = {below for module in ignored for below in module.modules()}
    queue = deque(() if root in seen else (root,))
    seen.add(root)
    while queue:
        module = queue.popleft()
        yield module
        for child in module.children():
            if child not in seen:
                seen.add(child)
                queue.append(child)


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that ``module`` itself registers, by each of their names."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _meta_names(module: nn.Module) -> list[str]:
    return [name for name, tensor in _own(module) if tensor.is_meta]


def _described(module: nn.Module, names: dict[nn.Module, str]) -> str:
    return f"module {names[module]!r} ({type(module).__name__})"


def _refuse_without_reset(owners: Iterable[nn.Module], names: dict[nn.Module, str]) -> None:
    for owner in owners:
        if not callable(getattr(owner, "reset_parameters", None)):
            raise AttributeError(
                f"{_described(owner, names)}: expected a method reset_parameters() to initialise {_meta_names(owner)} "
                "that are on the meta device, got none; define one, or try param_init_fn"
            )


def _fill(
    owner: nn.Module, label: str, param_init_fn: Callable[[nn.Module], None] | None, device: torch.device
) -> None:
    wanted = _meta_names(owner)
    way = "reset_parameters()" if param_init_fn is None else "param_init_fn"
    try:
        if param_init_fn is None:
            _empty(owner, device)
            owner.reset_parameters()  # type: ignore[operator]  # nn.Module types every attribute as a tensor or module
        else:
            param_init_fn(owner)
    except Exception as error:
        raise RuntimeError(
            f"{label}: expected {way} to initialise {wanted} that are on the meta device, got "
            f"{type(error).__name__}: {error}; try it alone, on the module after to_empty(device={str(device)!r})"
        ) from error
    if left := _meta_names(owner):
        raise RuntimeError(
            f"{label}: expected {way} to initialise {wanted}, got {left} still on the meta device; "
            f"try module.to_empty(device={str(device)!r}, recurse=False) in it before values are set"
        )


def _empty(module: nn.Module, device: torch.device) -> None:
    """Allocate only meta tensors; ``to_empty`` would drop the values of the module's other tensors too."""
    replaced: dict[torch.Tensor, torch.Tensor] = {}
    for name, tensor in list(_own(module)):
        if not tensor.is_meta:
            continue
        if tensor not in replaced:
            empty = torch.empty_like(tensor, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            replaced[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
            replaced[tensor].__dict__.update(tensor.__dict__)  # attributes that the user set on it
        setattr(module, name, replaced[tensor])


_Site = tuple[nn.Module, str]


def _meta_ties(root: nn.Module) -> list[list[_Site]]:
    """List the places of each meta tensor that is registered more than once, ignored modules included."""
    sites: dict[torch.Tensor, list[_Site]] = {}
    for module in _breadth_first(root, ()):
        for name, tensor in _own(module):
            if tensor.is_meta:
                sites.setdefault(tensor, []).append((module, name))
    return [places for places in sites.values() if len(places) > 1]


def _tie(ties: list[list[_Site]]) -> None:
    """Register the first tensor of each tie that has memory in the tie's other places."""
    for places in ties:
        tensors: list[torch.Tensor] = [getattr(module, name) for module, name in places]
        filled = next((tensor for tensor in tensors if not tensor.is_meta), None)
        for (module, name), tensor in zip(places, tensors, strict=True):
            if filled is not None and tensor is not filled:
                setattr(module, name, filled)


# --- device -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def move_to_device(
    module: nn.Module,
    device_id: int | torch.device | None,
    *,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
) -> torch.device:
    """Move the CPU tensors of ``module`` to ``device_id`` (None: nothing) and return the module's device.

    Gradients move too; parameters stay the same objects. Parameters of units below ``module`` may be elsewhere on
    purpose: list these units among the ignored modules. Raises ValueError for a module that is on another accelerator
    than ``device_id``, RuntimeError for one that is on several devices.
    """
    device = None if device_id is None else _with_index(device_id)
    ignored = _ignored(ignored_modules, ignored_parameters)
    parameters = [p for p in module.parameters() if p not in ignored]
    buffers = [b for b in module.buffers() if b not in ignored]
    if device is not None:
        for tensor in chain(parameters, buffers):
            if tensor.device.type == "cpu":
                _move(tensor, device)
    devices = {p.device for p in parameters} or {b.device for b in buffers}
    if device is not None and devices - {device}:
        raise ValueError(
            f"Inconsistent compute device and `device_id`: expected {type(module).__name__} on {device}, got "
            f"{_listed(devices)}; try device_id={str(min(devices - {device}, key=str))!r}, or move the module"
        )
    if len(devices) > 1:
        raise RuntimeError(
            f"{type(module).__name__}: expected a single device, got parameters on {_listed(devices)}; "
            "try device_id, which moves those on the CPU"
        )
    return next(iter(devices), torch.device("cpu") if device is None else device)


def _with_index(device_id: int | torch.device) -> torch.device:
    device = device_id if isinstance(device_id, torch.device) else torch.device(device_id)
    # By text, because torch's type of an index excludes None.
    if device.type in {"cpu", "meta"} or ":" in str(device):
        return device
    index = torch.get_device_module(device).current_device()
    warnings.warn(
        f"device_id: expected a device with an index, got {device}; the current one, {index}, is used; "
        f"try torch.device({device.type!r}, index), so that ranks cannot meet on one device",
        stacklevel=4,  # past the decorator of move_to_device
    )
    return torch.device(device.type, index)


def _ignored(modules: Collection[nn.Module], parameters: Collection[nn.Parameter]) -> set[torch.Tensor]:
    states = (tensor for module in modules for tensor in _states(module))
    return {*parameters, *states}


def _states(module: nn.Module) -> Iterator[torch.Tensor]:
    return chain(module.parameters(), module.buffers())


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    tensor.data = tensor.to(device)
    if tensor.grad is not None:
        tensor.grad.data = tensor.grad.to(device)


def _listed(devices: Iterable[torch.device]) -> str:
    return ", ".join(sorted(map(str, devices)))


# --- values -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def broadcast_states(
    module: nn.Module,
    process_group: dist.ProcessGroup,
    *,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
    bucket_bytes: int = _BUCKET_BYTES,
) -> None:
    """Overwrite parameters and buffers, except ignored ones, with those of the group's first rank.

    Every rank of the group must call this with a model of the same shapes and dtypes. Raises ValueError if the group
    has no backend for the device of some tensor.
    """
    ignored = _ignored(ignored_modules, ignored_parameters)
    tensors = [_local(tensor) for tensor in _states(module) if tensor not in ignored]
    _refuse_unreachable(tensors, process_group)
    is_source = dist.get_rank(process_group) == 0
    for bucket in _buckets([t for t in tensors if t.numel()], bucket_bytes):
        _broadcast(bucket, process_group, is_source=is_source)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``tensor`` in this rank's memory, detached from autograd."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _refuse_unreachable(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    config = dist.get_backend_config(group)
    reachable = {part.partition(":")[0] for part in config.split(",")}
    found = {tensor.device.type for tensor in tensors}
    if found <= reachable:
        return
    devices = ", ".join(name.upper() for name in sorted(found - reachable))
    raise ValueError(
        f"The module has {devices} parameters or buffers when `sync_module_states=True`: expected them on a device "
        f"of the process group's backend, got a group of {config}; try device_id, or move the module first"
    )


def _buckets(tensors: Iterable[torch.Tensor], most_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one device together, up to ``most_bytes``; a larger one alone.

    Each bucket begins with the widest dtypes: then every tensor is aligned to its own dtype.
    """
    devices: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        devices.setdefault(tensor.device.type, []).append(tensor)
    for found in devices.values():
        bucket: list[torch.Tensor] = []
        num_bytes = 0
        for tensor in sorted(found, key=torch.Tensor.element_size, reverse=True):
            if bucket and num_bytes + tensor.nbytes > most_bytes:
                yield bucket
                bucket, num_bytes = [], 0
            bucket.append(tensor)
            num_bytes += tensor.nbytes
        yield bucket


def _broadcast(bucket: list[torch.Tensor], group: dist.ProcessGroup, *, is_source: bool) -> None:
    """Send all as bytes in one message: no backend supports every dtype, and values are only copied."""
    message = torch.cat([_as_bytes(tensor) for tensor in bucket])
    dist.broadcast(message, src=dist.get_global_rank(group, 0), group=group)
    if is_source:
        return
    for tensor, part in zip(bucket, message.split([t.nbytes for t in bucket]), strict=True):
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
