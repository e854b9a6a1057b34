"""Models and losses that communicate are judged by a reference of all ranks at once, and never blamed on the engine."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardproof.harness.cases.sync_batch_norm import with_sync_batch_norm
from shardproof.harness.runner.user_model.read import read_model
from shardproof.harness.worlds.threads.together import together
from tests.shell import ROOT
from tests.user_model.models import Check

LOOPS = ROOT / "examples" / "models" / "loops.py"


@pytest.mark.parametrize(
    ("model", "engine", "cases"),
    [
        ("Contrast", "torch.ddp", "trains or replicas_once or other_ranks"),
        ("Contrast", "torch.fsdp2", "trains or each_unit_once or bfloat16"),
        ("Others", "torch.fsdp2", "trains"),
        ("TokenMean", "torch.fsdp2", "trains or each_unit_once"),
        ("SynchronisedNorm", "torch.ddp", "trains or replicas_once"),
        ("Centred", "torch.fsdp2", "trains or resumes or other_ranks"),
    ],
)
def test_a_right_engine_is_proven(model: str, engine: str, cases: str, check: Check) -> None:
    check(engine, "-k", cases, text=LOOPS.read_text(encoding="utf-8"), model=model)


@pytest.mark.parametrize(
    ("mutant", "cases", "words"),
    [
        ("SumsInsteadOfAveraging", "trains", "exactly 2 x the reference"),
        ("GathersOnceMoreInBackward", "each_unit_once", "all_gather"),
    ],
)
def test_a_wrong_engine_is_caught(mutant: str, cases: str, words: str, check: Check) -> None:
    text = LOOPS.read_text(encoding="utf-8")
    assert words in check(mutant, "-k", cases, text=text, model="Contrast", code=1)


@pytest.mark.parametrize(
    ("model", "call"),
    [
        ("Contrast", r"get_world_size at loops\.py:\d+, in forward"),
        ("TokenMean", r"all_reduce at loops\.py:\d+, in loss"),
        ("SynchronisedNorm", "'1' is a SyncBatchNorm"),
    ],
)
def test_the_first_call_is_named(model: str, call: str) -> None:
    assert re.fullmatch(call, read_model(f"{LOOPS}:{model}", limit_s=60)[0].facts.communicates)


def _normed(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return with_sync_batch_norm(nn.Sequential(nn.Conv1d(2, 3, 2), norm).double())


def test_normalisation_over_ranks_is_that_of_all_rows() -> None:
    rows = torch.randn(6, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def of_rank(rank: int) -> nn.Module:
        model = _normed(nn.SyncBatchNorm(3))
        model(rows[3 * rank : 3 * rank + 3]).square().sum().backward()
        return model

    whole = _normed(nn.BatchNorm1d(3))
    whole(rows).square().sum().backward()
    ranks = together(2, of_rank)
    for name, parameter in whole.named_parameters():
        gradients = [rank.get_parameter(name).grad for rank in ranks]
        torch.testing.assert_close(sum(g for g in gradients if g is not None), parameter.grad)
    for rank in ranks:
        torch.testing.assert_close(dict(rank.named_buffers()), dict(whole.named_buffers()))


def test_the_error_of_one_rank_ends_the_others() -> None:
    def of_rank(rank: int) -> None:
        if rank == 1:
            raise LookupError("only here")
        dist.barrier()

    with pytest.raises(LookupError, match="only here"):
        together(2, of_rank)
