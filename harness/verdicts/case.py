"""A case: a training, the laws that must hold of it, and what a refusal means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shardproof.engine.contract import Capability
from shardproof.harness.cases.training import Training
from shardproof.harness.laws.law import Law


class Refusal(Enum):
    """What is made of an engine that declares all that a case needs, and refuses it nevertheless."""

    WRONG = "what is declared must be honoured"
    ALLOWED = "it may refuse, as long as it does so on every rank; else every law must hold"
    REQUIRED = "there is no right way to go on, so it must refuse on every rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training and the laws that must hold of it; ``id`` names neither engine nor world.

    Engines that declare a capability in ``unless`` are not judged: they have cases of their own that ask for more.
    """

    id: str
    training: Training
    laws: tuple[Law, ...]
    refusal: Refusal = Refusal.WRONG
    unless: frozenset[Capability] = frozenset()
