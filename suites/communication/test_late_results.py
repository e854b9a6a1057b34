"""Collectives in flight are waited for and their buffers unchanged until then, in any order of ranks and results.

Every other case has these laws as well. In a world of threads results are late, so an engine that reads one without a
wait never gets it by chance, and the order of ranks is drawn from a seed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import SEVERAL, THREE_OR_MORE, LeavesBuffersAlone
from shardproof import ResultsAreWaitedFor, Trial
from shardproof.fixtures.chain import CHAIN
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

pytestmark = pytest.mark.worlds(SEVERAL)

LAWS = (LeavesBuffersAlone(), ResultsAreWaitedFor(), *PARITY)


@pytest.mark.kills("ReadsBucketsTooEarly", "ForgetsTheWorkOfANorm")
def test_waits_for_results_whatever_the_layout(trial: Trial) -> None:
    trial.holds(train(CHAIN), *LAWS)


@pytest.mark.kills("TrustsTheOrderOfArrival")
@pytest.mark.worlds(THREE_OR_MORE)
def test_learns_the_same_in_whatever_order_ranks_come(trial: Trial) -> None:
    trial.holds(replace(train(CHAIN), schedules=6), *LAWS)
