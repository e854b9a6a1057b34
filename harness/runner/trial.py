"""The `trial` fixture of suites: one engine in one world, which judges a training by laws."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from shardproof.engine.contract import Capability
from shardproof.harness.cases.case_id import Node, check_command
from shardproof.harness.cases.training import Training
from shardproof.harness.cases.user_model import needs_of
from shardproof.harness.errors import HarnessBug, LostHostError, UnreadableError
from shardproof.harness.laws.law import Law
from shardproof.harness.records.provenance import today
from shardproof.harness.records.record import Expectations, Record, Verdict, to_json
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.plugin import EXPECTATIONS
from shardproof.harness.runner.record_writer import LEFT_OUT_PROPERTY, NOT_JUDGED_PROPERTY, RECORD_PROPERTY
from shardproof.harness.runner.session import TrialSession
from shardproof.harness.runner.session_end import end_session
from shardproof.harness.verdicts.case import Case, Refusal
from shardproof.harness.verdicts.known_failures import containing, expected, named_defect
from shardproof.harness.verdicts.known_failures_file import read

_SHOWN_LINES = 20  # of the ranks' output; the record has more


class Trial:
    """The fixture of a suite's test: one engine in one world, which judges a training by laws."""

    def __init__(self, session: TrialSession, cell: Cell, item: pytest.Item, *, lacks: str = "") -> None:
        self._session = session
        self._cell = cell
        self._item = item
        self._lacks = lacks  # what the case needs and the world lacks
        self._expectations = item.config.stash[EXPECTATIONS]
        self._defects = _known_defects(item.path.with_name("known_defects.toml"))

    @property
    def world_size(self) -> int:
        return self._cell.world.size

    def applies(self, *, unless: str) -> None:
        """Leave the case out for this reason, unless it is empty; the run lists such cases with their reasons."""
        __tracebackhide__ = True
        if unless:
            self._item.user_properties.append((LEFT_OUT_PROPERTY, unless))
            pytest.skip(f"does not apply: {unless}")

    def holds(
        self,
        training: Training,
        *laws: Law,
        refusal: Refusal = Refusal.WRONG,
        unless: frozenset[Capability] = frozenset(),
        contains: Sequence[str] = (),
    ) -> None:
        """Judge this engine: every law must hold of the training, on every rank.

        An engine that declares a capability in ``unless`` is not judged: it has such cases of its own. One that is
        known to fail a case that this one ``contains`` may fail this one too.
        ``refusal`` decides the verdict on an engine that declares all capabilities of the plan and refuses it. Fails
        the test for every verdict that does not conform, skips it for UNSUPPORTED, and marks it as an expected failure
        for KNOWN_FAILURE; the verdict is always recorded.
        """
        __tracebackhide__ = True
        record = self._judged(training, laws, refusal, unless)
        self._report(containing(record, self._expectations, contains))

    def proves(self, training: Training, *laws: Law) -> None:
        """Judge as `holds` does; also tell how a user's model that needs options is trained by an engine's default."""
        __tracebackhide__ = True
        record = self._judged(training, laws, Refusal.WRONG)
        if needs_of(training.problem) and record.verdict is Verdict.PASSED:
            default = self._judged(replace(training, is_by_default=True), laws, Refusal.WRONG)
            if default.verdict is not Verdict.PASSED:
                told = f"{default.wrapper}: {default.verdict}: {default.headline}"
            else:
                told = "" if default.wrapper == record.wrapper else f"{default.wrapper}: {default.verdict}"
            record = replace(record, by_default=told)
        self._report(record)

    def _judged(
        self,
        training: Training,
        laws: tuple[Law, ...],
        refusal: Refusal,
        unless: frozenset[Capability] = frozenset(),
    ) -> Record:
        __tracebackhide__ = True
        node = Node.parse(self._item.nodeid)
        if node is None:
            raise HarnessBug(
                "the trial fixture",
                expected="a node id with ENGINE@WORLD",
                got=self._item.nodeid,
                hint="reporting this",
            )
        case = Case(id=node.case, training=training, laws=laws, refusal=refusal, unless=unless)
        try:
            command = self._command(node)
            judged = self._session.run(case, self._cell, suite=node.suite, command=command, lacks=self._lacks)
        except UnreadableError as error:
            self._item.user_properties.append((NOT_JUDGED_PROPERTY, error.why))
            pytest.fail(f"not judged again: {error}", pytrace=False)
        except LostHostError as error:
            end_session(str(error), pytest.ExitCode.INTERRUPTED)
        record = named_defect(expected(judged, self._expectations), self._defects)
        return (
            replace(record, located=self._session.located()) if record.verdict is Verdict.FAILED else record
        )

    def _report(self, record: Record) -> None:
        """Attach the record to the test, and end the test as the verdict asks."""
        __tracebackhide__ = True
        self._item.user_properties.append((RECORD_PROPERTY, to_json(record)))
        if record.verdict is Verdict.UNSUPPORTED:
            pytest.skip(f"UNSUPPORTED: {record.headline}")
        if record.verdict is Verdict.KNOWN_FAILURE and record.expectation is not None:
            pytest.xfail(f"KNOWN_FAILURE: {record.expectation.reason} ({record.expectation.link})")
        if not record.verdict.is_conforming:
            pytest.fail(_explain(record), pytrace=False)

    def _command(self, node: Node) -> str:
        """Return the command that repeats this case; for a user's model, with all its parameters."""
        folder = self._item.config.invocation_params.dir
        model: str | None = self._item.config.getoption("shardproof_model")
        if model is None:
            file = os.path.relpath(self._item.path, folder)
            return replace(node, nodeid="::".join((file, node.nodeid.partition("::")[2]))).command
        return check_command(model.removeprefix(f"{folder}{os.sep}"), node)


@cache
def _known_defects(file: Path) -> Expectations | None:
    """Read the defects of released engines that a suite's cases may meet, depending on the model."""
    return read(file, today=today()) if file.is_file() else None


def _explain(record: Record) -> str:
    lines = [f"{record.verdict}: {record.engine} in {record.world}: {record.case}", record.headline]
    for law in record.laws:
        if not law.held:
            lines += [f"  {law.law}: {law.summary}", *(f"    {d}" for d in law.details)]
    lines += [f"  first wrong: {record.located.sentence}"] if record.located else []
    lines += [f"  rank {o.rank} {o.kind}" for o in record.outcomes]
    if record.expectation is not None:
        lines.append(f"  {record.expectation}")
    if record.output:
        lines += ["  printed:", *(f"    {line}" for line in record.output.splitlines()[-_SHOWN_LINES:])]
    return "\n".join([*lines, f"repeat: {record.command}"])
