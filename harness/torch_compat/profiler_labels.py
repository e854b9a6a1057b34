"""Labels for torch's profiler that do nothing while none runs; torch's own pass the dispatcher twice each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.autograd.profiler import record_function

from shardproof.harness.torch_compat.patching import Replacement
from shardproof.harness.torch_compat.private_names import optional


# Any: a class of torch's, and the arguments and results of its methods.
def _replacements() -> Iterator[tuple[Any, str, Any]]:
    is_profiling = optional("torch.autograd:_profiler_enabled")
    if is_profiling is None:
        return
    labels: Any = record_function
    enter, leave, end_later = labels.__enter__, labels.__exit__, labels._call_end_callbacks_on_future

    def entered(label: Any) -> Any:
        if is_profiling():
            return enter(label)
        label.record = None
        return label

    def left(label: Any, *error: Any) -> Any:
        return None if label.record is None else leave(label, *error)

    def ended_later(label: Any, future: Any) -> Any:
        return future if label.record is None else end_later(label, future)

    yield labels, "__enter__", entered
    yield labels, "__exit__", left
    yield labels, "_call_end_callbacks_on_future", ended_later


idle_labels = Replacement(_replacements)
"""A context in which ``torch.profiler.record_function`` does nothing unless a profiler runs when it is entered.

FSDP and optimizers label tens of places in each step; under a dispatch mode that is a tenth of their time.
"""
