"""Which bytes of its storage a tensor is in."""

from __future__ import annotations

import torch

from harness.tracing.races.shadow import Span

__all__ = ["is_memory", "span_of"]


def is_memory(tensor: torch.Tensor, device_type: str) -> bool:
    """Whether a tensor is a plain one with memory of such a device behind it, and any elements."""
    return tensor.device.type == device_type and tensor.layout is torch.strided and tensor.numel() > 0


def span_of(tensor: torch.Tensor) -> Span:
    """Give the bytes of its storage from a tensor's first element to its last one."""
    width = tensor.element_size()
    start = int(tensor.storage_offset()) * width
    if tensor.is_contiguous():
        return Span(start, start + tensor.numel() * width)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return Span(start, start + (int(reach) + 1) * width)
