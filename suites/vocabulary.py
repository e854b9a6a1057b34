"""Names for the laws and selections of many cases: laws that belong together, and selections of collectives."""

from __future__ import annotations

from shardproof import MatchesOracle, Op, Phase, RanksAgree, Select, SendsItsGradients

PARITY = (MatchesOracle(), RanksAgree())
"""The engine trains like one process, and its collectives match on all ranks."""

TRAINS = (*PARITY, SendsItsGradients())
"""The same, and what it shows has crossed between the ranks."""

IN_FORWARD = Select(phases=(Phase.FORWARD,))
IN_BACKWARD = Select(phases=(Phase.BACKWARD,))

GATHERS = Select(ops=(Op.ALL_GATHER,))
GATHERS_IN_FORWARD = Select(ops=(Op.ALL_GATHER,), phases=(Phase.FORWARD,))
GATHERS_IN_BACKWARD = Select(ops=(Op.ALL_GATHER,), phases=(Phase.BACKWARD,))

REDUCTIONS = Select(ops=(Op.ALL_REDUCE, Op.REDUCE_SCATTER), phases=(Phase.BACKWARD,))
ALL_REDUCES = Select(ops=(Op.ALL_REDUCE,), phases=(Phase.BACKWARD,))
REDUCE_SCATTERS = Select(ops=(Op.REDUCE_SCATTER,), phases=(Phase.BACKWARD,))
ACROSS_REPLICAS = Select(ops=(Op.ALL_REDUCE,), axis="replicate", phases=(Phase.BACKWARD,))
