"""Models of diffusers at tiny sizes, in the form that `shardproof check` takes."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import nn


class _Denoiser:
    """Rebuilds noisy pictures."""

    shape: tuple[int, ...] = (2, 3, 16, 16)
    key = "sample"

    def batch(self, generator: torch.Generator) -> dict[str, Any]:  # Any: a flag beside tensors
        """Make pictures and the times of their noise."""
        times = torch.randint(10, (self.shape[0],), generator=generator)
        return {self.key: torch.randn(*self.shape, generator=generator), "timestep": times}

    def loss(self, output: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # Any: a ModelOutput
        """Compare the output with the input."""
        loss: torch.Tensor = (output.sample - batch[self.key]).square().mean()
        return loss


class Dit(_Denoiser):
    """The model calls the embedding of its first block itself, so that block is no unit."""

    units = ("transformer_blocks.1",)
    shape = (3, 4, 8, 8)
    key = "hidden_states"

    def build(self) -> nn.Module:
        sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
        model: nn.Module = diffusers.DiTTransformer2DModel(
            **sizes, in_channels=4, patch_size=2, num_embeds_ada_norm=10
        )
        return model

    def batch(self, generator: torch.Generator) -> dict[str, Any]:
        return {**super().batch(generator), "class_labels": torch.randint(10, (3,), generator=generator)}


class Unet(_Denoiser):
    units = ("down_blocks.*", "up_blocks.*")

    def build(self) -> nn.Module:
        model: nn.Module = diffusers.UNet2DModel(
            sample_size=16,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
            attention_head_dim=8,
            layers_per_block=1,
        )
        return model


class Autoencoder(_Denoiser):
    """A variational one: forward draws from the posterior."""

    units = ("encoder.down_blocks.*", "decoder.up_blocks.*")

    def build(self) -> nn.Module:
        model: nn.Module = diffusers.AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
            sample_size=16,
        )
        return model

    def batch(self, generator: torch.Generator) -> dict[str, Any]:
        return {"sample": super().batch(generator)["sample"], "sample_posterior": True}
