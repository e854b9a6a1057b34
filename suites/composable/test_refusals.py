"""Every rank refuses what cannot be sharded, in words that name the mistake."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from shardproof import EVEN, Capability
from shardproof.suites.composable.bench import Bench, expects
from shardproof.suites.composable.refusals import NUMBERS_OF_BUFFERS, RESETS, SCENARIOS
from shardproof.suites.expect import expects_of
from shardproof.suites.params import param, parametrize

REFUSAL = "the refusal"
_with = partial(expects_of, Capability.COMPOSABLE, Bench)


pytestmark = [pytest.mark.worlds(EVEN), pytest.mark.kills("LeavesModulesAsTheyAre")]


# Any: each call receives an engine's interface.
def _each_of(scenarios: Mapping[str, Any]) -> pytest.MarkDecorator:
    return parametrize("name", *[param(name, id=name.replace(" ", "_")) for name in scenarios])


@_each_of(SCENARIOS)
@expects(REFUSAL)
def test_refuses(bench: Bench, name: str) -> None:
    scenario, words = SCENARIOS[name]
    bench.refuses(REFUSAL, lambda: scenario(bench.api), naming=words)


@_each_of(NUMBERS_OF_BUFFERS)
@_with(REFUSAL, beside=frozenset({Capability.REDUCE_BUFFERS}))
def test_refuses_numbers_of_buffers(bench: Bench, name: str) -> None:
    scenario, words = NUMBERS_OF_BUFFERS[name]
    bench.refuses(REFUSAL, lambda: scenario(bench.api), naming=words)


@_each_of(RESETS)
@_with(REFUSAL, beside=frozenset({Capability.RECOVER}))
def test_refuses_to_reset(bench: Bench, name: str) -> None:
    scenario, words = RESETS[name]
    bench.refuses(REFUSAL, lambda: scenario(bench.api), naming=words)
