"""Losses over all ranks, and training steps of one's own, in the form that `shardproof check` takes. Only torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize, softplus
from torch.utils.checkpoint import checkpoint

_VOCABULARY, _WIDTH, _ROWS = 40, 24, 6


class _Gathered(torch.autograd.Function):
    """The rows of all ranks, and for backward the sum of what all ranks' losses ask of this rank's."""

    # Any: torch's context of a function.
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = torch.stack(gradients)
        dist.all_reduce(total)
        return total[dist.get_rank()]


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_VOCABULARY, _WIDTH)
        self.text, self.image = (
            nn.Sequential(nn.Linear(_WIDTH, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor([1.0]))

    def forward(self, tokens: torch.Tensor, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        text, image = self.text(self.words(tokens).mean(1)), self.image(pixels)
        return self.scale.exp() * normalize(text, dim=-1), normalize(image, dim=-1)


class Contrast:
    """A contrastive loss over the rows of all ranks, which gradients reach."""

    units = ("text", "image")

    def build(self) -> nn.Module:
        return _Towers()

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Make pairs."""
        tokens = torch.randint(_VOCABULARY, (_ROWS, 5), generator=generator)
        return {"tokens": tokens, "pixels": torch.randn(_ROWS, _WIDTH, generator=generator)}

    def loss(self, output: tuple[torch.Tensor, torch.Tensor], batch: object) -> torch.Tensor:
        """Return the mean over all pairs, on each rank."""
        text, image = (torch.cat(self.gathered(rows)) for rows in output)
        logits, pairs = text @ image.T, torch.arange(len(text))
        return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2

    def gathered(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the rows of each rank."""
        parts: tuple[torch.Tensor, ...] = _Gathered.apply(rows)  # type: ignore[no-untyped-call]  # of torch's
        return parts


class ContrastDetached(Contrast):
    """The other ranks' rows are constants."""

    def gathered(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.detach())
        parts[dist.get_rank()] = rows
        return tuple(parts)


class Others(Contrast):
    """The rows of the first rank against those of the second, which a world of one rank does not have."""

    def loss(self, output: tuple[torch.Tensor, torch.Tensor], batch: object) -> torch.Tensor:
        text, image = (self.gathered(rows) for rows in output)
        own = dist.get_rank()
        return (text[own] * image[1 - own]).sum(1).mean()


class TokenMean:
    """The mean over the tokens of all ranks, whose batches differ in length."""

    units = ("1",)

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(_VOCABULARY, _WIDTH), nn.Linear(_WIDTH, 32), nn.GELU(), nn.Linear(32, _VOCABULARY)
        )

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        """Make sentences of one length."""
        length = int(torch.randint(3, 12, (), generator=generator))
        return torch.randint(_VOCABULARY, (2, length), generator=generator)

    def loss(self, output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Return a sum that is this rank's part of the mean, times the ranks over which engines average."""
        num_tokens = torch.tensor(float(batch.numel()))
        dist.all_reduce(num_tokens)
        total = cross_entropy(output.flatten(0, 1), batch.flatten(), reduction="sum")
        return total * dist.get_world_size() / num_tokens


class SynchronisedNorm:
    """Batch normalisation over the rows of all ranks."""

    def build(self) -> nn.Module:
        layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
        return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers))

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        """Make images."""
        return torch.randn(3, 3, 8, 8, generator=generator)

    def loss(self, output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Return the distance from means of the images."""
        return (output - batch.mean((2, 3)).repeat(1, 2)[:, :4]).square().mean()


class _Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_alone = not (dist.is_initialized() and dist.get_world_size() > 1)
        self.out = nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("was_positive", torch.zeros(6, dtype=torch.bool))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mean = rows.detach().mean(0)
        if not self.is_alone:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.mean.lerp_(mean, 0.1)
        self.was_positive |= self.mean > 0
        centred: torch.Tensor = self.out(rows - self.mean)
        return centred


class Centred:
    """Averages the rows of all ranks if there were several when it was built, as quantizers with codebooks do."""

    def build(self) -> nn.Module:
        return _Centred()

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        """Make rows."""
        return torch.randn(3, 6, generator=generator)

    def loss(self, output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Return the distance from two columns."""
        return (output - batch[:, :2]).square().mean()


class _Networks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 12))
        self.discriminator = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, noise: torch.Tensor, real: torch.Tensor, part: str) -> torch.Tensor:
        fake = self.generator(noise)
        if part == "generator":
            return softplus(-self.discriminator(fake)).mean()
        return (softplus(-self.discriminator(real)) + softplus(self.discriminator(fake.detach()))).mean()


# Any, from here on: what a step gets.
class Gan:
    """Two optimizers, two forwards and two backwards in a step."""

    units = ("generator", "discriminator")

    def build(self) -> nn.Module:
        return _Networks()

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Make noise and data."""
        return {
            "noise": torch.randn(_ROWS, 8, generator=generator),
            "real": torch.randn(_ROWS, 12, generator=generator),
        }

    def optimizers(self, model: Any) -> list[torch.optim.Optimizer]:
        """Make one for each network."""
        adam = torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        return [adam, torch.optim.SGD(model.discriminator.parameters(), lr=0.1, momentum=0.9)]

    def step(self, model: Any, batch: Any, of_generator: Any, of_discriminator: Any) -> Any:
        """Update the discriminator, then the generator."""
        loss = model(**batch, part="discriminator")
        loss.backward()
        of_discriminator.step()
        of_discriminator.zero_grad()
        other = model(**batch, part="generator")
        other.backward()
        of_generator.step()
        of_generator.zero_grad()
        of_discriminator.zero_grad()
        return {"discriminator": loss, "generator": other}


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        noisy = checkpoint(self.student, rows + 0.1 * torch.randn_like(rows), use_reentrant=False)
        return (noisy - self.teacher(rows)).square().mean() + (noisy - rows[:, :8]).square().mean()


class Distilled:
    """Weighted microbatches that are recomputed, clipping by torch, and a teacher that averages its student."""

    units = ("student.0", "student.3")

    def build(self) -> nn.Module:
        return _Pair()

    def batch(self, generator: torch.Generator) -> list[torch.Tensor]:
        """Make microbatches of different sizes."""
        return [
            torch.randn(int(n), 12, generator=generator)
            for n in torch.randint(2, 7, (3,), generator=generator)
        ]

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Make it for the student alone."""
        return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1, momentum=0.9)

    def step(self, model: Any, batch: list[torch.Tensor], optimizer: Any) -> float:
        """Take one step; each row has the same weight on a rank."""
        num_rows, total = sum(map(len, batch)), 0.0
        for rows in batch:
            loss = model(rows) * len(rows) / num_rows
            loss.backward()
            total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, parameter in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
        return total
