"""The declaration of a mutant: its fault, the report behind it, and where the fault shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.contract import Engine, Plan, PreparedModel

_E = TypeVar("_E", bound=type[Engine])


class Trace(Enum):
    """Where a fault shows, and the verdicts that show it.

    Comparing numbers cannot detect a mutant whose numbers are right.
    Verdicts are strings, not imported: engines do not depend on the harness.
    """

    NUMBERS = ("gradients, parameters or losses differ from the oracle's", ("FAILED",))
    COMMUNICATION = ("numbers are right, what crosses between ranks is not", ("FAILED",))
    STATE = ("what a rank holds or a module shows is not what the plan says", ("FAILED",))
    RACES = ("numbers are right where operators run one by one; the streams do not order them", ("FAILED",))
    REFUSAL = ("a plan that is not declared is accepted", ("UNSUPPORTED_SILENT",))
    SILENCE = ("training goes on where there is no right way to", ("FAILED",))
    CRASH = ("training raises on some rank", ("CRASHED",))
    HANG = ("ranks wait for each other for ever", ("HUNG",))

    def __init__(self, where: str, verdicts: tuple[str, ...]) -> None:
        self.where = where
        self.verdicts = verdicts

    def is_kill(self, verdict: str) -> bool:
        """Whether this verdict shows the fault; any other that is not conforming caught the mutant by accident."""
        return verdict in self.verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """An engine wrong on purpose.

    ``fault`` is the first paragraph of the class's docstring. ``thread`` is the public report of a real engine with the
    same fault, as ``owner/repository#number``. ``trace`` says where the fault shows, and ``phase``, if numbers are
    wrong, in which part of a training it begins: a value of the harness's ``FaultPhase``.
    """

    name: str
    engine_spec: str
    fault: str
    thread: str
    trace: Trace = Trace.NUMBERS
    phase: str = ""


DECLARED: list[Mutant] = []
"""The mutants of the modules imported so far; ``engine.mutants.all_mutants`` imports all."""


def mutant(*, after: str, trace: Trace = Trace.NUMBERS, phase: str = "") -> Callable[[_E], _E]:
    """Declare an engine to be a mutant, named after its class; ``after`` is its public report.

    The class's attribute ``misreads``, if any, maps each plan to the one that it prepares, and ``spoil`` changes each
    model that it has prepared. Of classes nested in it, ``Prepared`` is the prepared model, ``Unit`` the handle of each
    unit of that model, and ``Wrapper`` replaces FSDP1's ``FullyShardedDataParallel``.
    """

    def declare(engine: _E) -> _E:
        engine.name = f"mutant.{engine.__name__}"
        _use_nested_classes(engine)
        if {"misreads", "spoil"} & vars(engine).keys():
            _spoil_what_is_prepared(engine)
        entry = Mutant(
            name=engine.__name__,
            engine_spec=f"{engine.__module__}:{engine.__name__}",
            fault=_fault(inspect.getdoc(engine) or ""),
            thread=after,
            trace=trace,
            phase=phase,
        )
        DECLARED.append(entry)
        return engine

    return declare


def _use_nested_classes(engine: Any) -> None:  # Any: adapters have these attributes, the contract has not
    if "Prepared" in vars(engine):
        engine.prepared_type = engine.Prepared
    if "Unit" in vars(engine):
        engine.prepared_type = type("Prepared", (engine.prepared_type,), {"unit_type": engine.Unit})
    if "Wrapper" in vars(engine):
        engine.names = replace(engine.names, FullyShardedDataParallel=engine.Wrapper)


def _spoil_what_is_prepared(engine: Any) -> None:  # Any: as above
    honest = engine.prepare
    misreads, spoil = (vars(engine).get(name, _as_it_is) for name in ("misreads", "spoil"))

    def prepare(self: Engine, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared: PreparedModel = spoil(honest(self, model, misreads(plan), mesh))
        return prepared

    engine.prepare = prepare


def _as_it_is(given: Any) -> Any:  # Any: a plan, or a model
    return given


def _fault(text: str) -> str:
    """Return the first paragraph as a clause: no full stop, and no capital unless the word is a name."""
    clause = " ".join(text.split("\n\n")[0].split()).removesuffix(".")
    is_name = any(letter.isupper() for letter in clause.partition(" ")[0][1:])
    return clause if is_name else clause[:1].lower() + clause[1:]
