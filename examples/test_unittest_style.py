"""One training across world sizes from unittest, without pytest: the harness is called directly.

Run it from the project's folder with ``python -m unittest examples/test_unittest_style.py``.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

from parameterized import parameterized  # type: ignore[import-untyped]  # it ships no types

from shardproof import (
    Case,
    Cell,
    MatchesOracle,
    Plan,
    RanksAgree,
    Source,
    Training,
    TrialSession,
    Verdict,
    WorldSpec,
)
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_UNEVEN

ENGINE = f"{Path(__file__).parent / 'my_engine.py'}:MyEngine"
CASE = Case(
    id="examples/uneven_mlp",
    training=Training(problem=MLP_UNEVEN, optimizer=SGD, plan=Plan(units=MLP_UNEVEN.units)),
    laws=(MatchesOracle(), RanksAgree()),
)


class MyEngineTrainsTheSameModel(unittest.TestCase):
    """The same case in several worlds, one test each."""

    session: TrialSession

    @classmethod
    def setUpClass(cls) -> None:
        """Keep observations for as long as the class's tests run."""
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.session = TrialSession(Source(folder=Path(folder.name)))
        cls.addClassCleanup(cls.session.close)

    @parameterized.expand(["threads:1", "threads:2", "threads:3", "processes:2"])  # type: ignore[untyped-decorator]
    def test_in(self, world: str) -> None:
        """Judge one world; the record has more than the verdict."""
        cell = Cell(engine=ENGINE, world=WorldSpec.parse(world))
        record = self.session.run(CASE, cell, suite="examples", command="python -m unittest")
        self.assertEqual(record.verdict, Verdict.PASSED, record.headline)  # noqa: PT009 - unittest's own way


if __name__ == "__main__":
    unittest.main()
