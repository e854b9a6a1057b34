"""Image models of timm at tiny sizes, in the form that `shardproof check` takes."""

from __future__ import annotations

import timm
import torch
from torch import nn


class _TimmModel:
    """Sorts images into five classes by one of the models with which timm tests itself."""

    units: tuple[str, ...] = ("stages.*",)
    name = ""
    size = 32

    def build(self) -> nn.Module:
        """Use timm's own small configuration."""
        model: nn.Module = timm.create_model(self.name, num_classes=5)
        return model

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Make images."""
        return (torch.randn(4, 3, self.size, self.size, generator=generator),)

    def loss(self, output: torch.Tensor, batch: object) -> torch.Tensor:
        """Use the third class as the target of all images."""
        return nn.functional.cross_entropy(output, torch.full((len(output),), 2, device=output.device))


class Resnet(_TimmModel):
    name = "test_resnet"
    units = ("layer1", "layer2", "layer3", "layer4")


class Efficientnet(_TimmModel):
    name = "test_efficientnet"
    units = ("blocks.*",)


class EfficientnetWithGroupNorm(_TimmModel):
    name = "test_efficientnet_gn"
    units = ("blocks.*",)


class ByobNet(_TimmModel):
    name = "test_byobnet"


class NormalizerFree(_TimmModel):
    name = "test_nfnet"


class Convnext(_TimmModel):
    name = "test_convnext"


class MambaOut(_TimmModel):
    name = "test_mambaout"


class VisionTransformer(_TimmModel):
    name = "test_vit"
    units = ("blocks.*",)

    def build(self) -> nn.Module:
        model: nn.Module = timm.create_model(self.name, num_classes=5, img_size=self.size)
        return model
