"""The oracles of trainings: computes each once, keeps them between runs on request, and caches the last few."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardproof.engine.contract import Capability, Plan
from shardproof.harness.cases.state_form import StateForm
from shardproof.harness.cases.training import Resume, Training
from shardproof.harness.cases.user_model import UserModel
from shardproof.harness.oracle.kept_oracle import KeptOracle, kept_oracle
from shardproof.harness.oracle.oracle_answer import ask_oracle
from shardproof.harness.oracle.oracle_observation import OracleObservation
from shardproof.harness.runner.observations import Source, drop_oldest
from shardproof.harness.runner.training_request import Identities, Request

# Of the parameters as they were built; on disk a reference takes some twenty times as much.
_MOST_BYTES_OF_ORACLES = 2**30
_Key = tuple[
    str, int, str
]  # a digest of what changes the oracle, the number of ranks with data, their device


class Oracles:
    """Returns the oracle of a training, which it computes at the first request; caches the last few."""

    def __init__(self, source: Source, identities: Identities) -> None:
        self._source = source
        self._identities = identities
        self._loaded: dict[_Key, OracleObservation] = {}
        self._of_earlier_runs: dict[_Key, KeptOracle] = {}
        self._explaining: set[_Key] = set()  # those that must explain a failure

    def oracle(self, request: Request, *, limit_s: float) -> OracleObservation:
        """Return the oracle of a training."""
        arithmetic = arithmetic_of(request.without_exercises().training)
        key, device = self._key(arithmetic, request), request.cell.world.device
        if key not in self._loaded:
            kept, explains = self._kept(arithmetic, request), key in self._explaining
            if kept is not None and not explains and kept.path.exists():
                self._of_earlier_runs[key] = kept
            folder = self._own_folder()
            self._loaded[key] = ask_oracle(
                arithmetic,
                request.data_size,
                limit_s=limit_s,
                store=kept,
                folder=folder,
                explains=explains,
                device=device,
            )
            drop_oldest(self._loaded, _num_bytes, _MOST_BYTES_OF_ORACLES)
        return self._loaded[key]

    def forget(self, request: Request, *, must_explain: bool) -> bool:
        """Forget the oracle of a training if an earlier run computed it, or if it lacks a required explanation.

        Returns whether it did: the next one is computed now, and explains.
        """
        key = self._key(arithmetic_of(request.without_exercises().training), request)
        oracle, kept = self._loaded.get(key), self._of_earlier_runs.pop(key, None)
        if kept is None and (oracle is None or oracle.explains or not must_explain):
            return False
        if kept is not None:
            kept.forget()
        self._loaded.pop(key, None)
        self._explaining.add(key)
        return True

    def _key(self, arithmetic: Training, request: Request) -> _Key:
        digest = self._identities.digest(arithmetic, request.case)
        return digest, request.data_size, request.cell.world.device

    def _kept(self, arithmetic: Training, request: Request) -> KeptOracle | None:
        if self._source.oracles is None:
            return None
        digests = self._identities.digests(arithmetic, request.case).values()
        where = (str(request.data_size), request.cell.world.device)
        return kept_oracle(self._source.oracles, *where, *digests) if all(digests) else None

    def _own_folder(self) -> Path | None:
        """Return the folder below which this worker writes; None if it only reads."""
        if self._source.is_replay:
            return None
        self._source.own_folder.mkdir(parents=True, exist_ok=True)
        return self._source.own_folder


def _num_bytes(oracle: OracleObservation) -> int:
    return sum(tensor.nbytes for tensor in oracle.initial.values())


def arithmetic_of(training: Training) -> Training:
    """Keep what changes the oracle: the engine and most of the plan change neither the right result nor its noise."""
    asked = training
    scaling = asked.schedule.scaling
    # The factor is divided out, and shows only in operators of a user's that look at the size of a gradient.
    is_own = isinstance(asked.problem, UserModel)
    if scaling is not None and scaling.overflows_at is None and not is_own:
        asked = replace(asked, schedule=replace(asked.schedule, scaling=None))
    resume, origin = asked.resume, asked.origin
    if resume is not None:
        # A fresh model has no gradients, as the same one may, also those that its optimizer does not clear.
        resume = None if resume.plan is None else Resume(after_steps=resume.after_steps, plan=Plan())
    if origin is not None:
        before = None if origin.plan is None else _arithmetic_plan(origin.plan)
        origin = replace(origin, plan=before, form=StateForm.WHOLE)
    return replace(
        asked,
        plan=_arithmetic_plan(asked.plan),
        origin=origin,
        schedule=replace(asked.schedule, steps_in_backward=False),
        resume=resume,
        watch=frozenset(),
        schedules=1,
        is_by_default=False,
    )


def _arithmetic_plan(plan: Plan) -> Plan:
    """Keep those parts of a plan that set how gradients are divided, clipped and summed, and in which dtypes."""
    return Plan(
        divide_factor=plan.divide_factor,
        clip_in_step=plan.clip_in_step,
        reduce_dtype=plan.reduce_dtype,
        compute_dtype=plan.compute_dtype,
        output_dtype=plan.output_dtype,
        ignored=plan.ignored if plan.compute_dtype is not None else (),
        accumulation=plan.accumulation,
        demands=plan.demands & {Capability.REDUCE_AS_STORED},
    )
