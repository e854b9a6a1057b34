"""The list of all cases, as ``shardproof list --cases`` prints it."""

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

__all__ = ["list_cases"]


class _Cases:
    """A pytest plugin that keeps the ids of the cases collected, as records and expectations spell them."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Keep one id; every world counts, because a case may make sense in one of them alone."""
        node = Node.parse(item.nodeid)
        if node is not None:
            self.ids.append(node.case)


def list_cases() -> int:
    """Print the id of every case; returns an exit code."""
    found, said = _Cases(), io.StringIO()
    with contextlib.redirect_stdout(said):  # pytest's own listing has an engine and a world in every id
        code = call_pytest([str(SUITES), "--collect-only", "--engine=torch.ddp", "--world=threads:4"], found)
    if code:
        print(said.getvalue(), file=sys.stderr)
        return OUR_FAULT
    for case in found.ids:
        print(f"  {case}")
    return CONFORMS
