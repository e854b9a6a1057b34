"""Models and losses that communicate are judged by a reference of all ranks at once, and never blamed on the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardproof.engine.registry import shipped_mutants
from shardproof.harness.cases.sync_batch_norm import with_sync_batch_norm
from shardproof.harness.cli.main import main
from shardproof.harness.runner.user_model.read import read_model
from shardproof.harness.worlds.threads.together import together

MODELS = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize

class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows)
        return tuple(parts)
    @staticmethod
    def backward(ctx, *gradients):
        total = torch.stack(gradients)
        dist.all_reduce(total)
        return total[dist.get_rank()]

class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))
    def forward(self, x):
        one, other = (normalize(block(part), dim=-1) for block, part in zip(self.blocks, x.chunk(2)))
        return self.scale.exp() * one, other

class Contrast:
    units = ("blocks.*",)
    def build(self):
        return Towers()
    def batch(self, generator):
        return torch.randn(8, 6, generator=generator)
    def loss(self, output, batch):
        one, other = (torch.cat(Gathered.apply(rows.contiguous())) for rows in output)
        return cross_entropy(one @ other.T, torch.arange(len(one)))

class Others(Contrast):
    # Each rank's rows against those of the other alone, which a world of one rank does not have.
    def loss(self, output, batch):
        one, other = (Gathered.apply(rows.contiguous()) for rows in output)
        own = dist.get_rank()
        return (one[own] * other[1 - own]).sum(1).mean()

class TokenMean:
    units = ("1",)
    def build(self):
        return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    def batch(self, generator):
        return torch.randint(20, (2, int(torch.randint(2, 9, (), generator=generator))), generator=generator)
    def loss(self, output, batch):
        total = cross_entropy(output.flatten(0, 1), batch.flatten(), reduction="sum")
        if not dist.is_initialized():
            return total / batch.numel()
        num_tokens = torch.tensor(float(batch.numel()))
        dist.all_reduce(num_tokens)
        return total * dist.get_world_size() / num_tokens

class Normed:
    def build(self):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    def batch(self, generator):
        return torch.randn(3, 6, generator=generator)
    def loss(self, output, batch):
        return (output - batch[:, :2]).square().mean()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MODELS)
    return file


def _check(file: Path, model: str, engine: str, cases: str) -> int:
    out = str(file.parent / "run")
    return main(["check", f"{file}:{model}", "--engine", engine, "--out", out, "-k", cases])


@pytest.mark.parametrize(
    ("model", "engine", "cases"),
    [
        ("Contrast", "torch.ddp", "trains or replicas_once or other_ranks"),
        ("Contrast", "torch.fsdp2", "trains or each_unit_once or bfloat16"),
        ("Others", "torch.fsdp2", "trains"),
        ("TokenMean", "torch.fsdp2", "trains or each_unit_once"),
        ("Normed", "torch.ddp", "trains or replicas_once"),
    ],
)
def test_a_right_engine_is_proven(file: Path, model: str, engine: str, cases: str) -> None:
    assert _check(file, model, engine, cases) == 0


@pytest.mark.parametrize(
    ("mutant", "cases", "words"),
    [
        ("SumsInsteadOfAveraging", "trains", "exactly 2 x the reference"),
        ("GathersOnceMoreInBackward", "each_unit_once", "all_gather"),
    ],
)
def test_a_wrong_engine_is_caught(
    file: Path, mutant: str, cases: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = next(m.engine_spec for m in shipped_mutants() if m.name == mutant)
    assert _check(file, "Contrast", engine, cases) == 1
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("model", "call"),
    [
        ("Contrast", "get_world_size at mine.py:10, in forward"),
        ("TokenMean", "all_reduce at mine.py:56, in loss"),
        ("Normed", "'1' is a SyncBatchNorm"),
    ],
)
def test_the_first_call_is_named(file: Path, model: str, call: str) -> None:
    assert read_model(f"{file}:{model}", limit_s=60)[0].facts.communicates == call


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
