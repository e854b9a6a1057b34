"""Language models of transformers at tiny sizes, in the form that `shardproof check` takes."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

_VOCABULARY, _WIDTH, _LENGTH = 64, 32, 8
_COMMON = {"vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {
    **_COMMON,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_BERT = {**_COMMON, "intermediate_size": 48, "max_position_embeddings": 32}


class Causal:
    """Predicts each token from those before it; the model computes the loss."""

    units: tuple[str, ...] = ("model.layers.*",)

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Make tokens."""
        tokens = torch.randint(2, _VOCABULARY, (3, _LENGTH), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    def loss(self, output: Any, batch: object) -> torch.Tensor:  # Any: a ModelOutput
        """Return the model's own loss."""
        loss: torch.Tensor = output.loss
        return loss


class Llama(Causal):
    def build(self) -> nn.Module:
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA))


class LlamaTied(Causal):
    def build(self) -> nn.Module:
        return hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA, tie_word_embeddings=True))


class LlamaCheckpointed(Causal):
    def build(self) -> nn.Module:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA, use_cache=False))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model


class LlamaBfloat16(Causal):
    """All in bfloat16, in which a norm's weight of 1 would hardly move: norms are frozen."""

    def build(self) -> nn.Module:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)).bfloat16()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim > 1)
        return model


class LlamaAutocast(Llama):
    def build(self) -> nn.Module:
        return _Autocast(super().build())

    units = ("model.model.layers.*",)


class _Autocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: torch.Tensor) -> Any:  # Any: a ModelOutput
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(**given)


class LlamaCompiled(Causal):
    def build(self) -> nn.Module:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA, use_cache=False))
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        return model


class Mistral(Causal):
    def build(self) -> nn.Module:
        return hf.MistralForCausalLM(hf.MistralConfig(**_LLAMA, sliding_window=4))


class Gemma2(Causal):
    def build(self) -> nn.Module:
        return hf.Gemma2ForCausalLM(hf.Gemma2Config(**_LLAMA, head_dim=8, sliding_window=4))


class Mixtral(Causal):
    def build(self) -> nn.Module:
        config = hf.MixtralConfig(
            **_LLAMA, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
        )
        return hf.MixtralForCausalLM(config)


class DeepseekV3(Causal):
    """Latent attention, and experts that a router chooses by groups."""

    def build(self) -> nn.Module:
        ranks = {"q_lora_rank": 8, "kv_lora_rank": 8}
        heads = {"num_key_value_heads": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
        experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        config = hf.DeepseekV3Config(
            **{**_LLAMA, **ranks, **heads, **experts}, num_experts_per_tok=2, first_k_dense_replace=1
        )
        return hf.DeepseekV3ForCausalLM(config)


class GptOss(Causal):
    def build(self) -> nn.Module:
        config = hf.GptOssConfig(
            **_LLAMA, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
        )
        return hf.GptOssForCausalLM(config)


class Jamba(Causal):
    """Layers of attention and of Mamba in turn, with experts in every second one."""

    def build(self) -> nn.Module:
        layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
        mamba = {"mamba_d_state": 4, "mamba_dt_rank": 4}
        config = hf.JambaConfig(
            **{**_LLAMA, "num_hidden_layers": 4, **layers, **mamba},
            expert_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
        )
        return hf.JambaForCausalLM(config)


class Mamba2(Causal):
    units = ("backbone.layers.*",)

    def build(self) -> nn.Module:
        sizes = {
            "hidden_size": _WIDTH,
            "state_size": 4,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 16,
        }
        return hf.Mamba2ForCausalLM(
            hf.Mamba2Config(vocab_size=_VOCABULARY, **sizes, n_groups=1, chunk_size=4)
        )


class Bert(Causal):
    units = ("bert.encoder.layer.*",)

    def build(self) -> nn.Module:
        return hf.BertForMaskedLM(hf.BertConfig(**_BERT))

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        mask = torch.arange(_LENGTH) < torch.randint(3, _LENGTH, (3, 1), generator=generator)
        return {**super().batch(generator), "attention_mask": mask.long()}


class Deberta(Causal):
    units = ("deberta.encoder.layer.*",)

    def build(self) -> nn.Module:
        config = hf.DebertaV2Config(**_BERT, relative_attention=True, pos_att_type=["p2c", "c2p"])
        return hf.DebertaV2ForMaskedLM(config)


class Albert(Causal):
    """One layer, called three times."""

    units = ("albert.encoder.albert_layer_groups.*",)

    def build(self) -> nn.Module:
        return hf.AlbertForMaskedLM(hf.AlbertConfig(**{**_BERT, "num_hidden_layers": 3}, embedding_size=16))


class T5Gemma(Causal):
    units = ("model.encoder.layers.*", "model.decoder.layers.*")

    def build(self) -> nn.Module:
        part = {**_LLAMA, "head_dim": 8, "sliding_window": 4}
        config = hf.T5GemmaConfig(
            encoder=part, decoder=part, vocab_size=_VOCABULARY, pad_token_id=0, bos_token_id=1
        )
        return hf.T5GemmaForConditionalGeneration(config)


class Bart(Causal):
    units = ("model.encoder.layers.*", "model.decoder.layers.*")

    def build(self) -> nn.Module:
        sizes = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48)
        layers = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads"), 2)
        config = hf.BartConfig(
            vocab_size=_VOCABULARY, d_model=_WIDTH, decoder_attention_heads=2, **sizes, **layers
        )
        return hf.BartForConditionalGeneration(config)
