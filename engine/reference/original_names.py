"""Names of parameters and buffers as the model had them before anything wrapped its modules."""

from __future__ import annotations

__all__ = ["PREFIX", "clean_name", "name_in"]

PREFIX = "_fsdp_wrapped_module."
"""What a wrapper puts into the names of everything inside the module that it wraps."""

_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."  # of torch's wrapper for activation checkpointing


def clean_name(name: str) -> str:
    """Take out of a name what wrappers put in."""
    return name.replace(PREFIX, "").replace(_CHECKPOINT_PREFIX, "")


def name_in(path: str, name: str) -> str:
    """Name what is called ``name`` in the module at ``path``, itself maybe the root, as the model did."""
    return clean_name(f"{path}.{name}" if path else name)
