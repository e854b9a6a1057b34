"""Image and sound models of transformers at tiny sizes, in the form that `shardproof check` takes."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_PATCHES = {**_SMALL, "image_size": 16, "patch_size": 8}


class Pictures:
    """Sorts images into five classes; the model computes the loss."""

    units: tuple[str, ...] = ("vit.layers.*",)
    size = 16

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Make images and their classes."""
        pixels = torch.randn(4, 3, self.size, self.size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(5, (4,), generator=generator)}

    def loss(self, output: Any, batch: object) -> torch.Tensor:  # Any: a ModelOutput
        """Return the model's own loss."""
        loss: torch.Tensor = output.loss
        return loss


class Swin(Pictures):
    units = ("swin.encoder.layers.*",)

    def build(self) -> nn.Module:
        config = hf.SwinConfig(
            image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
        )
        config.num_labels = 5
        return hf.SwinForImageClassification(config)


class ConvNext(Pictures):
    units = ("convnext.encoder.stages.*",)

    def build(self) -> nn.Module:
        config = hf.ConvNextConfig(
            hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2, num_labels=5
        )
        return hf.ConvNextForImageClassification(config)


class ResNet(Pictures):
    units = ("resnet.encoder.stages.*",)

    def build(self) -> nn.Module:
        config = hf.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
        )
        return hf.ResNetForImageClassification(config)


class Clip(Pictures):
    units = ("text_model.encoder.layers.*", "vision_model.encoder.layers.*")

    def build(self) -> nn.Module:
        text = hf.CLIPTextConfig(
            **_SMALL, vocab_size=64, max_position_embeddings=8, eos_token_id=1, bos_token_id=0
        )
        vision = hf.CLIPVisionConfig(**_PATCHES)
        return hf.CLIPModel(
            hf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
        )

    def batch(self, generator: torch.Generator) -> dict[str, Any]:  # Any: a flag beside tensors
        tokens = torch.randint(2, 64, (4, 8), generator=generator)
        return {
            "pixel_values": super().batch(generator)["pixel_values"],
            "input_ids": tokens,
            "return_loss": True,
        }


class MaskedAutoencoder(Pictures):
    units = ("vit.layers.*", "decoder.decoder_layers.*")

    def build(self) -> nn.Module:
        decoder = {f"decoder_{name}": size for name, size in _SMALL.items()}
        return hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**_PATCHES, **decoder, mask_ratio=0.5))

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"pixel_values": super().batch(generator)["pixel_values"]}


class Whisper(Pictures):
    units = ("model.encoder.layers.*", "model.decoder.layers.*")

    def build(self) -> nn.Module:
        both = ("layers", "attention_heads", "ffn_dim")
        sizes = {
            f"{side}_{name}": 2 if name != "ffn_dim" else 48
            for side in ("encoder", "decoder")
            for name in both
        }
        tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        lengths = {"max_source_positions": 8, "max_target_positions": 8, "num_mel_bins": 4}
        return hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(vocab_size=64, d_model=32, **sizes, **tokens, **lengths)
        )

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        sound = torch.randn(3, 4, 16, generator=generator)
        return {"input_features": sound, "labels": torch.randint(2, 64, (3, 8), generator=generator)}


class Wav2Vec2(Pictures):
    units = ("wav2vec2.encoder.layers.*",)

    def build(self) -> nn.Module:
        layers = {
            "conv_dim": (8, 8),
            "conv_stride": (4, 2),
            "conv_kernel": (4, 2),
            "num_feat_extract_layers": 2,
        }
        config = hf.Wav2Vec2Config(
            **_SMALL, **layers, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2
        )
        config.mask_time_prob, config.layerdrop, config.classifier_proj_size, config.num_labels = (
            0.0,
            0.0,
            16,
            5,
        )
        return hf.Wav2Vec2ForSequenceClassification(config)

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        sound = torch.randn(3, 160, generator=generator)
        return {"input_values": sound, "labels": torch.randint(5, (3,), generator=generator)}


class Wav2Vec2Ctc(Wav2Vec2):
    """Speech recognition, which drops layers at random: different ones on each rank."""

    def build(self) -> nn.Module:
        layers = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2), "vocab_size": 12}
        config = hf.Wav2Vec2Config(
            **_SMALL,
            **layers,
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            ctc_loss_reduction="mean",
            mask_time_prob=0.0,  # masks are drawn by NumPy, whose generator ranks cannot share
        )
        return hf.Wav2Vec2ForCTC(config)

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        sound = torch.randn(3, 400, generator=generator)
        return {"input_values": sound, "labels": torch.randint(1, 12, (3, 5), generator=generator)}


class SegmentAnything(Pictures):
    """Points in, masks out; the encoder of input masks is unused."""

    units = ("vision_encoder.layers.*", "mask_decoder.transformer.layers.*")

    def build(self) -> nn.Module:
        size = {"image_size": 32, "patch_size": 8}
        vision = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32, "mlp_dim": 48}
        config = hf.SamConfig(
            vision_config={
                **vision,
                **size,
                "output_channels": 16,
                "window_size": 2,
                "global_attn_indexes": [1],
                "num_pos_feats": 8,
            },
            prompt_encoder_config={**size, "hidden_size": 16, "mask_input_channels": 4},
            mask_decoder_config={
                "hidden_size": 16,
                "mlp_dim": 24,
                "num_attention_heads": 2,
                "iou_head_hidden_dim": 16,
            },
        )
        return hf.SamModel(config)

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        pixels = torch.randn(2, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels, "input_points": 32 * torch.rand(2, 1, 2, 2, generator=generator)}

    def loss(self, output: Any, batch: object) -> torch.Tensor:  # Any: a ModelOutput
        """Return the loss for empty masks, and of the scores predicted for them."""
        loss: torch.Tensor = output.pred_masks.sigmoid().mean() + output.iou_scores.square().mean()
        return loss


class Segformer(Pictures):
    units = ("segformer.stages.*",)

    def build(self) -> nn.Module:
        stages = {"depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3]}
        config = hf.SegformerConfig(
            **stages,
            num_encoder_blocks=2,
            strides=[2, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            num_labels=3,
        )
        return hf.SegformerForSemanticSegmentation(config)

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        pixels = super().batch(generator)["pixel_values"][:2]
        return {"pixel_values": pixels, "labels": torch.randint(3, (2, 16, 16), generator=generator)}


class Llava(Pictures):
    """A picture's patches among the tokens of a text."""

    units = ("model.language_model.layers.*", "model.vision_tower.encoder.layers.*")

    def build(self) -> nn.Module:
        text = hf.LlamaConfig(**_SMALL, vocab_size=64, num_key_value_heads=2, pad_token_id=0)
        config = hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**_PATCHES),
            text_config=text,
            image_token_id=1,
            image_seq_length=4,
            vision_feature_layer=-1,
        )
        return hf.LlavaForConditionalGeneration(config)

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        tokens = torch.randint(2, 64, (3, 8), generator=generator)
        tokens[:, :4] = 1  # placeholders for the patches
        pixels = torch.randn(3, 3, self.size, self.size, generator=generator)
        return {"input_ids": tokens, "labels": tokens, "pixel_values": pixels}


class PatchTst(Pictures):
    """Time series, cut into patches."""

    units = ("model.encoder.layers.*",)

    def build(self) -> nn.Module:
        sizes = {"d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32}
        lengths = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4}
        return hf.PatchTSTForPrediction(hf.PatchTSTConfig(num_input_channels=2, **sizes, **lengths))

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        past, future = (torch.randn(4, length, 2, generator=generator) for length in (16, 4))
        return {"past_values": past, "future_values": future}
