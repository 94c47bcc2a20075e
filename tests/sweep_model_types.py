"""Not a test but a sweep: every causal language model type of the installed Transformers against `generate`.

    python tests/sweep_model_types.py [TYPE ...]

Each type is built from its default config with small sizes and random weights. It must give, greedily in float32, what
`generate` gives for each prompt alone, or be refused by name and reason when the engine is built. A line a type, then
the counts; the exit status is 1 when a type differs or raises anything else. About ten minutes on one core.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import sys
import warnings
from collections import Counter
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

import flatbed

VOCABULARY, NEW_TOKENS, SECONDS = 211, 20, 90
LENGTHS = (1, 3, 16, 17, 40, 75)
_SIZES: dict[int | None, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    512: "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len",
    256: "original_max_position_embeddings",
    48: "intermediate_size ffn_dim n_inner d_ff dff decoder_ffn_dim encoder_ffn_dim d_inner dim_ff ffn_hidden_size "
    "dense_intermediate_size intermediate_size_mlp prefix_dense_intermediate_size",
    32: "hidden_size d_model n_embd dim emb_dim embedding_size embed_dim hidden_dim word_embed_proj_dim lru_width",
    16: "q_lora_rank kv_lora_rank qk_head_dim moe_intermediate_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size expert_hidden_dim shared_intermediate_size image_size",
    12: "sliding_window sliding_window_size attention_window window_size local_attention attention_chunk_size",
    8: "head_dim global_head_dim v_head_dim kv_channels dim_head swa_head_dim swa_v_head_dim qk_rope_head_dim "
    "qk_nope_head_dim o_lora_rank query_pre_attn_scalar hidden_size_per_layer_input state_size mamba_d_state "
    "index_head_dim linear_key_head_dim linear_value_head_dim patch_size mamba_n_heads mamba_d_head",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads rotary_dim "
    "swa_num_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts index_topk "
    "linear_num_value_heads",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_key_value_heads "
    "swa_num_key_value_heads num_global_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "top_k_experts zero_expert_num n_group num_expert_group index_n_heads linear_num_key_heads",
    1: "moe_num_shared_experts n_shared_experts num_shared_experts topk_group first_k_dense_replace num_dense_layers",
    None: "pad_token_id bos_token_id eos_token_id",
}
SIZES = {name: value for value, names in _SIZES.items() for name in names.split()}
# Built smaller than this or not at all.
MOST_PARAMETERS = 30_000_000
_EQUAL_HEADS = {"num_key_value_heads": 4}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What a type needs besides: heads that its own code insists on, ids that it must have, layers that fit two of them.
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v3": _EQUAL_HEADS,
    "axk1": _EQUAL_HEADS,
    "glm4_moe_lite": _EQUAL_HEADS,
    "longcat_flash": _EQUAL_HEADS,
    "minicpm3": _EQUAL_HEADS,
    "sarvam_mla": _EQUAL_HEADS,
    "youtu": _EQUAL_HEADS,
    "dots3_note_text": _EQUAL_HEADS,
    "deepseek_v2": {
        **_EQUAL_HEADS,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "blt": {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_nb_functions": 1},
    "cwm": _IDS,
    "emu3_text_model": _IDS,
    "mllama_text_model": _IDS,
    "modernbert-decoder": {**_IDS, "cls_token_id": 1, "sep_token_id": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "reformer": {"axial_pos_embds": False, "attention_head_size": 8, "attn_layers": ["local", "lsh"]},
    "lfm2_moe": {"layer_types": ["full_attention", "full_attention"]},
    "cohere_compass_text": {
        **_SLIDING,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "gemma3n_text": {**_SLIDING, "num_kv_shared_layers": 0, "activation_sparsity_pattern": None, "laurel_rank": 4},
    "gemma4_text": {**_SLIDING, "per_layer_config": {1: {"head_dim": 16}}, "pad_token_id": 0},
    "gemma4_unified_text": {**_SLIDING, "per_layer_config": {1: {"head_dim": 16}}, "pad_token_id": 0},
    "dots1": {"n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def small(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Arguments for a tiny config of this class."""
    default = kind()
    values, names = default.to_dict(), getattr(kind, "attribute_map", {})
    found: dict[str, Any] = {}
    for name, size in SIZES.items():
        if (name not in values and name not in names) or names.get(name) in SIZES:
            continue
        value = values.get(name, 1)
        plain = not isinstance(value, (bool, list, dict))
        if plain and (value is not None or size is None or name in ("vocab_size", "head_dim", "num_key_value_heads")):
            found[name] = size
    for name in getattr(kind, "sub_configs", {}):
        if values.get(name) is not None:
            found[name] = small(type(getattr(default, name)))
    return {**found, **SPECIAL.get(kind.model_type, {})}


def build(name: str) -> nn.Module:
    kind = CONFIG_MAPPING[name]
    config = kind(**small(kind))
    model_class = getattr(transformers, TYPES[name])
    text = getattr(config, "text_config", None)
    if text is not None and type(text) is model_class.config_class:
        config = text
    for one in (config, config.get_text_config()):
        if hasattr(one, "is_decoder"):
            one.is_decoder = True
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in model_class._from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters are too many")
    torch.manual_seed(0)
    model = model_class._from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.3)
            elif "sink" in key:
                parameter.normal_(0, 1)
            elif parameter.is_floating_point():
                parameter.nan_to_num_(0.5).add_(0.1 * torch.randn_like(parameter))
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model


def look(name: str) -> tuple[str, str]:
    """What became of a type, and why."""
    try:
        model: Any = build(name)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"
    try:
        engine = flatbed.Engine(model, capacity="12 blocks", block_size=16, token_budget=37)
    except flatbed.errors.UnsupportedModelError as error:
        return "refused", str(error)
    with engine:
        draw, limit = random.Random(7), engine.max_positions or 512
        prompts = [[draw.randrange(VOCABULARY) for _ in range(n)] for n in LENGTHS if n + NEW_TOKENS <= limit]
        new = NEW_TOKENS if prompts else 4
        prompts = prompts or [[5], [6, 7, 8]]
        expected = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            try:
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
                )
            except Exception as error:
                return "generate raised", f"{type(error).__name__}: {error}"
            expected.append(out[0, len(prompt) :].tolist())
        outputs = engine.generate(prompts, flatbed.SamplingParams(max_new_tokens=new, ignore_eos=True))
    if [output.token_ids for output in outputs] == expected:
        return "equal", f"{len({token for tokens in expected for token in tokens})} different tokens"
    return (
        "DIFFERENT",
        f"prompts of {[len(p) for p, o, e in zip(prompts, outputs, expected, strict=True) if o.token_ids != e]}",
    )


def _told(name: str, results: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        results.put(look(name))
    except BaseException as error:
        results.put(("RAISED", f"{type(error).__name__}: {error}"))


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    counts: Counter[str] = Counter()
    for name in names or list(TYPES):
        results = context.Queue()
        process = context.Process(target=_told, args=(name, results))
        process.start()
        try:
            status, why = results.get(timeout=SECONDS)
        except queue.Empty:
            status, why = "took too long", f"more than {SECONDS} s"
        process.kill()
        process.join()
        counts[status] += 1
        print(f"{name:<28} {status:<16} {' '.join(why.split())[:140]}", flush=True)
    print(", ".join(f"{status}: {count}" for status, count in counts.most_common()))
    return 1 if counts["DIFFERENT"] or counts["RAISED"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
