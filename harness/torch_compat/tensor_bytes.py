"""The bytes of tensors, read by torch's C type: an engine can replace attributes of `torch.Tensor`, a Python class."""

from __future__ import annotations

from ctypes import string_at

import torch

# Attributes of this type cannot be set, so what is read through it is torch's own.
_TENSOR: type[torch.Tensor] = torch.Tensor.__base__  # type: ignore[assignment]  # its own name is private


def num_bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a strided tensor's elements."""
    return _TENSOR.numel(tensor) * _TENSOR.element_size(tensor)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached, contiguous tensor on the CPU with these values."""
    plain = _TENSOR.contiguous(_TENSOR.cpu(_TENSOR.detach(tensor)))
    return _TENSOR.resolve_neg(_TENSOR.resolve_conj(plain))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Copy the bytes of a tensor's elements, in order."""
    plain = on_host(tensor)
    return string_at(_TENSOR.data_ptr(plain), num_bytes_of(plain))
