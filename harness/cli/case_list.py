"""Collecting all cases without running them, and the list that ``shardproof list --cases`` prints."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING

from shardproof.harness.cases.case_id import SUITES, Node
from shardproof.harness.cli.exit_codes import CONFORMS, OUR_FAULT
from shardproof.harness.runner.invoke import call_pytest

if TYPE_CHECKING:  # importing pytest takes a while, and not every command needs it
    import pytest


class _Cases:
    """A pytest plugin that keeps the ids of the collected cases, as in records and expectations."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Keep one id, whatever sizes of worlds suit the case."""
        node = Node.parse(item.nodeid)
        if node is not None:
            self.ids.append(node.case)


def collect_cases(plugin: object) -> int:
    """Let pytest collect every case once, for an engine and a world that are not started; returns pytest's exit code.

    The plugin sees the items. What pytest prints is shown only if that fails.
    """
    options = ["--collect-only", "--engine=torch.ddp", "--world=threads:4", "--no-expectations"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = call_pytest([str(SUITES), *options], plugin)
    if code:
        print(printed.getvalue(), file=sys.stderr)
    return code


def list_cases() -> int:
    """Print the id of every case; returns an exit code."""
    found = _Cases()
    if collect_cases(found):
        return OUR_FAULT
    for case in found.ids:
        print(f"  {case}")
    return CONFORMS
