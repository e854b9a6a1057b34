"""The worlds of another size whose state a case starts from."""

from __future__ import annotations

from shardproof import AFTER_FEWER, AFTER_MORE, Origin, Plan, RanksBefore, StateForm
from shardproof.suites.params import param

STEPS_BEFORE = 2
WORLDS_BEFORE = [param(RanksBefore.ONE_MORE, worlds=AFTER_MORE), param(RanksBefore.HALF, worlds=AFTER_FEWER)]


def saved_by(ranks: RanksBefore, form: StateForm, plan: Plan | None = None) -> Origin:
    """Describe the state that this many ranks saved."""
    return Origin(steps=STEPS_BEFORE, ranks=ranks, form=form, plan=plan)
