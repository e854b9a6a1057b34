"""One upstream test or name, and what it promises, in words that fit any engine. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UpstreamRow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamRow:
    """A test of torch's own, or a name of an interface; suites say by marks which of their tests stand for it."""

    id: str
    file: str
    test: str  # of a test the class, its common prefix left out, and the test; of an interface the name
    promise: str
    why_gpu: str = ""  # why only a GPU can show it; empty where any machine can

    @property
    def needs_gpu(self) -> bool:
        """Whether only a GPU can show it."""
        return bool(self.why_gpu)
