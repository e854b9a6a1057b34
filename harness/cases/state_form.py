"""The forms of a saved state."""

from __future__ import annotations

from enum import Enum

from shardproof.engine.contract import Capability


class StateForm(Enum):
    """The form in which state goes from one model to another."""

    WHOLE = "whole tensors, on every rank"
    SHARES = "each rank's own shares"
    FILES = "files, to which each rank writes its shares"
    CHECKPOINT = "a checkpoint in the engine's own form"

    @property
    def demands(self) -> frozenset[Capability]:
        """The capabilities that it needs of an engine."""
        match self:
            case StateForm.WHOLE:
                return frozenset({Capability.STATE})
            case StateForm.SHARES | StateForm.FILES:
                return frozenset({Capability.SHARED_STATE})
            case StateForm.CHECKPOINT:
                return frozenset({Capability.CHECKPOINTS})
