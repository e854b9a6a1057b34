"""A function that chooses which parameters of a unit compute in their own dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardproof import SEVERAL, Capability, Op
from shardproof.suites.composable import bench as benches
from shardproof.suites.composable.bench import Bench, whole_gradients
from shardproof.suites.params import parametrize

pytestmark = pytest.mark.rows("T59")

expects = partial(benches.expects, beside=frozenset({Capability.PARAMETER_DTYPES}))
LOW = torch.bfloat16
SIZE = 8
FINE = 257.0  # has no form in bfloat16


class _Mixed(nn.Module):
    """Scales rows by a weight and, without rounding, by a scale that bfloat16 cannot represent."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((SIZE,), 2.0))
        self.scale = nn.Parameter(torch.full((SIZE,), FINE))
        self.seen: tuple[torch.dtype, ...] = ()

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        """Return the row scaled by both."""
        self.seen = (row.dtype, self.weight.dtype, self.scale.dtype)
        return (row * self.weight).float() * self.scale


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ComputesAlikeWithAllParameters")
@expects("asked of", "computed in", "outputs", "gradients", "gathers")
def test_parameters_keep_the_dtype_that_a_function_chooses(bench: Bench) -> None:
    model: Any = _Mixed()
    weight, scale, asked = model.weight, model.scale, []

    def own(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(parameter)
        return parameter.dtype if parameter is scale else None

    policy = bench.api.mixed_precision(LOW, torch.float32, param_dtype_override_fn=own)
    bench.api.fully_shard(model, mesh=bench.mesh(), mp_policy=policy)
    bench.same(
        "asked of", [[p is one for one in (weight, scale)] for p in asked], [[True, False], [False, True]]
    )
    row = torch.full((SIZE,), float(bench.rank + 1), device=bench.device)
    outputs = model(row)
    (outputs.sum() * bench.size).backward()
    bench.same("computed in", model.seen, (LOW, LOW, torch.float32))
    bench.same("outputs", outputs.detach(), row * 2 * FINE)
    bench.same("gathers", sum(e.op is Op.ALL_GATHER for e in bench.ledger()), 1)
    rows = sum(range(1, bench.size + 1))
    learnt = whole_gradients(model)
    bench.same("gradients", learnt["scale"], torch.full((SIZE,), 2.0 * rows))
    bench.near("gradients", learnt["weight"], torch.full((SIZE,), FINE * rows), tolerance=0.01)


@pytest.mark.kills("ComputesAlikeWithAllParameters")
@parametrize("chosen", torch.float16, "bfloat16", ids=["another_dtype", "no_dtype"])
@expects("the refusal")
def test_refuses(bench: Bench, chosen: Any) -> None:
    policy = bench.api.mixed_precision(LOW, param_dtype_override_fn=lambda _: chosen)
    shard = partial(bench.api.fully_shard, _Mixed(), mesh=bench.mesh(), mp_policy=policy)
    bench.refuses("the refusal", shard, ValueError, naming="param_dtype_override_fn")
