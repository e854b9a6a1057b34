"""Names of parameters and buffers as the model had them before anything wrapped its modules."""

from __future__ import annotations

__all__ = ["PREFIX", "clean_name"]

PREFIX = "_fsdp_wrapped_module."
"""What a wrapper puts into the names of everything inside the module that it wraps."""

_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."  # of torch's wrapper for activation checkpointing


def clean_name(name: str) -> str:
    """Take out of a name what wrappers put in."""
    return name.replace(PREFIX, "").replace(_CHECKPOINT_PREFIX, "")
