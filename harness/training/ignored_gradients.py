"""What a caller does for the trained parameters that a plan ignores: it averages their gradients over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardproof.engine.contract import PreparedModel
from shardproof.harness.cases.training import ALIKE, IGNORED_GRADIENTS, OF_EACH_RANK
from shardproof.harness.records.observation import Fact


def average_ignored(prepared: PreparedModel, names: Iterable[str]) -> Iterator[Fact]:
    """Average the gradients of ignored parameters, as their owner does; yield whether each rank had its own.

    Ranks have different batches, so before that only gradients that an engine has reduced are alike.
    """
    parameters = {prepared.original_name(name): p for name, p in prepared.owned_parameters().items()}
    for name in names:
        parameter = parameters[name]
        # It may be frozen for a while; and an engine that shards one synchronises it too.
        if not parameter.requires_grad or isinstance(parameter, DTensor):
            continue
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, own)
        is_alike = len(of_ranks) > 1 and all(torch.equal(own, other) for other in of_ranks)
        parameter.grad = own.copy_(torch.stack(of_ranks).mean(0))
        yield Fact(moment=name, subject=IGNORED_GRADIENTS, value=ALIKE if is_alike else OF_EACH_RANK)
