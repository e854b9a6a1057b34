"""Locates where a wrong training first went wrong: trains once more with probes, and compares with an oracle's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shardproof.harness.cases.training import Training, Watch
from shardproof.harness.cases.user_model import is_stepping
from shardproof.harness.laws.law import Evidence
from shardproof.harness.laws.location import Probed
from shardproof.harness.laws.location_text import located
from shardproof.harness.laws.parity import MatchesOracle
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.oracle.oracle_probes import ask_probes
from shardproof.harness.records.record import Located
from shardproof.harness.records.saved_result import SavedResult, probes_path
from shardproof.harness.runner.oracles import arithmetic_of
from shardproof.harness.runner.training_request import Request
from shardproof.harness.tracing.probe_point import ProbeFile


def probed(training: Training) -> Training:
    """Return a training with probes and no other watch, which need not be repeated."""
    schedule = replace(training.schedule, repeats=1)
    return replace(training, schedule=schedule, watch=frozenset({Watch.PLACES}), schedules=1)


def locate(
    request: Request,
    saved: SavedResult,
    folder: Path,
    oracle: Callable[[], OracleObservation],
    *,
    limit_s: float,
) -> Located:
    """Compare the values that the ranks of a second training left in ``folder`` with the oracle's."""
    training = request.training
    if is_stepping(training.problem):
        return Located(sentence="not located: the user's own step has no boundaries that an oracle shares")
    if not saved.ranks:
        return Located(sentence="not located: the training with probes did not end as the first one did")
    reference = oracle()
    evidence = Evidence(training=training, world_size=len(saved.ranks), ranks=saved.ranks, oracle=reference)
    with tempfile.TemporaryDirectory(prefix="probes-", dir=folder) as scratch:
        arithmetic = arithmetic_of(request.without_exercises().training)
        path, device = Path(scratch) / "oracle", request.cell.world.device
        right = ask_probes(arithmetic, request.data_size, path, limit_s=limit_s, device=device)
        files = {o.rank: ProbeFile(probes_path(folder, o.rank)) for o in saved.ranks}
        found = located(Probed(evidence=evidence, files=files, reference=right), saved.ledgers_by_rank)
    if found.phase is None and MatchesOracle().judge(evidence).record.held:
        return replace(found, sentence="not located: the training with probes did not repeat the failure")
    return found
