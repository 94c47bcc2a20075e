"""Tiny random models of every family that Flatbed promises to run, in float32.

Weights are drawn wide enough that greedy decoding wanders instead of repeating one token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

VOCABULARY = 211
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def _llama_like(model: str, config: str, **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return getattr(tf, model)(getattr(tf, config)(**{**_COMMON, **changes}))

    return build


def _other(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    base = {
        k: _COMMON[k] for k in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    }

    def build() -> nn.Module:
        return getattr(tf, model)(getattr(tf, config)(**{**base, **settings}))

    return build


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama_like("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": _llama_like("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": _llama_like("Qwen3ForCausalLM", "Qwen3Config", head_dim=16),
    "mistral": _llama_like("MistralForCausalLM", "MistralConfig", sliding_window=24),
    "gemma2": _llama_like(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
    ),
    "gemma3": _llama_like(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        head_dim=16,
        sliding_window=24,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi3": _llama_like("Phi3ForCausalLM", "Phi3Config"),
    "gpt2": _other(
        "GPT2LMHeadModel", "GPT2Config", n_embd=48, n_layer=2, n_head=4, n_positions=512, initializer_range=0.3
    ),
    "gpt_neox": _other(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.3,
    ),
    "opt": _other(
        "OPTForCausalLM",
        "OPTConfig",
        hidden_size=48,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        word_embed_proj_dim=48,
        init_std=0.3,
    ),
    "mixtral": _llama_like("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _llama_like(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=1,
    ),
    "deepseek_v3": _llama_like(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "gpt_oss": _llama_like(
        "GptOssForCausalLM",
        "GptOssConfig",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "olmo2": _llama_like("Olmo2ForCausalLM", "Olmo2Config"),
    "granite": _llama_like("GraniteForCausalLM", "GraniteConfig", attention_multiplier=0.2, logits_scaling=2.0),
    "starcoder2": _llama_like("Starcoder2ForCausalLM", "Starcoder2Config", sliding_window=24),
    "smollm3": _llama_like("SmolLM3ForCausalLM", "SmolLM3Config", no_rope_layers=[1, 0]),
    # Llama's code to the letter, but for the function that it calls to rotate.
    "ernie4_5": _llama_like("Ernie4_5ForCausalLM", "Ernie4_5Config", head_dim=12),
    "cohere": _llama_like("CohereForCausalLM", "CohereConfig", logit_scale=1.0),
}


# Families whose K/V differ from layer to layer, for which Transformers' own continuous batching cannot allocate.
UNEVEN: dict[str, Callable[[], nn.Module]] = {
    # Wider heads where a layer sees all; attention in both directions is between the tokens of images.
    "gemma4": _llama_like(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        head_dim=8,
        global_head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        use_bidirectional_attention="vision",
        pad_token_id=0,
    ),
}


def build(family: str, seed: int = 0) -> nn.Module:
    """A model of that family, in eval mode, without an EOS."""
    torch.manual_seed(seed)
    model = {**FAMILIES, **UNEVEN}[family]().eval()
    if family == "gemma2":
        # Some versions of Transformers let it default to an attention without soft-cap, which is another model.
        model.set_attn_implementation("eager")
    for holder in (model.generation_config, model.config):
        holder.eos_token_id = holder.pad_token_id = holder.bos_token_id = None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_(0.0, 1.0)
            elif "norm" in name or "ln_" in name or "layernorm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def reference(model: nn.Module, prompt: list[int], new_tokens: int, **kwargs: Any) -> list[int]:
    """What `generate` makes of one prompt alone."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "pad_token_id": 0, **kwargs}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **settings)
    return out[0, len(prompt) :].tolist()
