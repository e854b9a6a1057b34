"""The mutants that ship with the suites, as targets of cases, and what earlier runs killed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardproof.engine.registry import shipped_mutants
from shardproof.harness.audit.kill_matrix import MutantStatus, Target, kill_matrix
from shardproof.harness.audit.marks import read_selection
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run


def shipped() -> tuple[Target, ...]:
    """Return the mutants that ship with the suites."""
    return tuple(
        Target(
            name=mutant.name,
            engine=mutant.engine_spec,
            fault=mutant.fault,
            trace=mutant.trace.name,
            verdicts=tuple(str(verdict) for verdict in Verdict if mutant.trace.is_kill(verdict)),
            phase=mutant.phase,
        )
        for mutant in shipped_mutants()
    )


def killed_in(folders: Sequence[Path]) -> Mapping[str, set[str]] | None:
    """Return the mutants that each case killed, from the folders of `shardproof mutants`; None without any."""
    selections = [
        (folder, selection) for folder in folders if (selection := read_selection(folder)) is not None
    ]
    killed: dict[str, set[str]] = {}
    for folder, selection in selections:
        matrix = kill_matrix(shipped(), selection, read_run(folder).records, is_whole=False)
        for result in matrix.results:
            if result.status is MutantStatus.KILLED:
                killed.setdefault(result.pair.case, set()).add(result.pair.mutant)
    return killed if selections else None
