"""What cannot be sharded, or not so, is refused by every rank, in words that name what is wrong."""

from __future__ import annotations

import pytest

from shardproof import EVEN
from shardproof.suites.composable.bench import Bench, expects
from shardproof.suites.composable.refusals import SCENARIOS
from shardproof.suites.params import param, parametrize

REFUSAL = "the refusal"


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("LeavesModulesAsTheyAre")
@parametrize("name", *[param(name, id=name.replace(" ", "_")) for name in SCENARIOS])
@expects(REFUSAL)
def test_refuses(bench: Bench, name: str) -> None:
    scenario, words = SCENARIOS[name]
    bench.refuses(REFUSAL, lambda: scenario(bench.door), naming=words)
