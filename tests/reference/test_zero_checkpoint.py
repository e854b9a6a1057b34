"""Checkpoints of the reference engine's ZeRO-2: an optimizer of other groups is refused before any change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardproof.engine.reference import zero_checkpoint
from shardproof.engine.reference.zero import Zero2
from shardproof.harness.worlds.rank import RankContext
from tests.reference.ranks import Ranks


def _load_into_two_groups(context: RankContext, folder: Path) -> bool:
    group = dist.group.WORLD
    assert group is not None
    engine = Zero2(nn.Linear(4, 4), group)
    pieces = [piece.own for piece in engine.pieces.values()]
    zero_checkpoint.save(engine, torch.optim.SGD(pieces, lr=0.1), folder)
    dist.barrier()
    before = [p.detach().clone() for p in engine.module.parameters()]
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(1)
    other = torch.optim.SGD([{"params": pieces[:1]}, {"params": pieces[1:]}], lr=0.2)
    with pytest.raises(ValueError, match="expected 2 parameter groups, got 1; build the optimizer as it was"):
        zero_checkpoint.load(engine, other, folder)
    kept = zip(before, engine.module.parameters(), strict=True)
    return all(torch.equal(old + 1, new) for old, new in kept) and other.param_groups[0]["lr"] == 0.2


def test_other_parameter_groups_are_refused_before_any_change(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, _load_into_two_groups, tmp_path) == [True, True]
