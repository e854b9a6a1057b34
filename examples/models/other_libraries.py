"""Models of other libraries at tiny sizes, in the form that `shardproof check` takes."""

from __future__ import annotations

from typing import Any

import open_clip
import torch
import torch.distributed as dist
import zuko
from peft import PromptTuningConfig, TaskType, get_peft_model
from torch import nn
from torch_geometric.nn import GIN
from transformers import GPT2Config, GPT2LMHeadModel
from vector_quantize_pytorch import ResidualVQ
from x_transformers import XTransformer

_VOCABULARY = 96


# Any, here and below: what libraries without types return.
class PromptTuning:
    """Trains eight rows before the embedded tokens; the embedding has a second name in the tuned model."""

    def build(self) -> Any:
        config = GPT2Config(
            n_embd=32, n_layer=2, n_head=2, vocab_size=_VOCABULARY, bos_token_id=0, eos_token_id=1
        )
        tuning = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=8)
        return get_peft_model(GPT2LMHeadModel(config), tuning)

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Make sentences."""
        tokens = torch.randint(_VOCABULARY, (4, 12), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    def loss(self, output: Any, batch: object) -> Any:
        """Return the model's own loss."""
        return output.loss


class OpenClip:
    """Contrasts pictures with texts of all ranks, as open_clip trains."""

    units = ("visual.transformer.resblocks.*", "transformer.resblocks.*")

    def build(self) -> Any:
        """Use a scale with a dim, which FSDP2 needs."""
        vision = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}
        text = {"context_length": 8, "vocab_size": _VOCABULARY, "width": 32, "heads": 2, "layers": 2}
        return open_clip.CLIP(16, vision, text, nonscalar_logit_scale=True)

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Make pairs."""
        texts = torch.randint(1, _VOCABULARY, (4, 8), generator=generator)
        return {"image": torch.randn(4, 3, 16, 16, generator=generator), "text": texts}

    def loss(self, output: Any, batch: object) -> Any:
        """Gather the features of all ranks, with their gradients."""
        ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        return open_clip.ClipLoss(local_loss=True, gather_with_grad=True, **ranks)(*output)


class Translator:
    """An encoder and a decoder with one embedding, which has two names."""

    units = ("encoder.attn_layers.layers.*.1", "decoder.net.attn_layers.layers.*.1")

    def build(self) -> Any:
        sizes: dict[str, Any] = {}
        for part in ("enc", "dec"):
            sizes |= {f"{part}_num_tokens": _VOCABULARY, f"{part}_depth": 1, f"{part}_heads": 2}
            sizes |= {f"{part}_max_seq_len": 12, f"{part}_attn_dim_head": 16}
        return XTransformer(dim=32, tie_token_emb=True, **sizes)

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Make pairs of sentences."""
        return tuple(torch.randint(_VOCABULARY, (4, length), generator=generator) for length in (12, 9))

    def loss(self, output: Any, batch: object) -> Any:
        """Return the output: the wrapped model computes its loss itself."""
        return output


class _Codec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = (
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in "ed"
        )
        self.quantize = ResidualVQ(dim=16, num_quantizers=2, codebook_size=8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        quantized, _, commitment = self.quantize(self.encode(rows))
        return (self.decode(quantized) - rows).square().mean() + commitment.sum()


class Codebooks:
    """Codebooks that average the rows of all ranks: they ask for their ranks when they are built."""

    def build(self) -> nn.Module:
        return _Codec()

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        """Make rows."""
        return torch.randn(4, 6, 16, generator=generator)

    def loss(self, output: torch.Tensor, batch: object) -> torch.Tensor:
        """Return the output, which is the loss."""
        return output


class Spline:
    """Returns a distribution, which the loss evaluates: FSDP2 finds no tensors in it to hook."""

    def build(self) -> Any:
        return zuko.flows.NSF(features=3, context=2, transforms=2, hidden_features=(16, 16))

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        """Make contexts."""
        return torch.randn(8, 2, generator=generator)

    def loss(self, output: Any, batch: torch.Tensor) -> Any:
        """Return how unlikely a function of the contexts is."""
        return -output.log_prob(torch.cat([batch, batch.prod(1, keepdim=True)], 1)).mean()


class Graph:
    """A network over graphs of different sizes."""

    units = ("convs.*",)

    def build(self) -> Any:
        return GIN(
            in_channels=8, hidden_channels=16, num_layers=3, out_channels=4, dropout=0.1, norm="batch_norm"
        )

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Make a graph."""
        num_nodes = int(torch.randint(10, 20, (), generator=generator))
        edges = torch.randint(num_nodes, (2, 40), generator=generator)
        return {"x": torch.randn(num_nodes, 8, generator=generator), "edge_index": edges}

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sort nodes by the signs of their sums."""
        return nn.functional.cross_entropy(output, (batch["x"].sum(1) > 0).long())
