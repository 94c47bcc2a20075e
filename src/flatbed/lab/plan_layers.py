"""What a model keeps of each token, read from its config.

==========  ============================================================================================
kind        what an engine has to keep for a token
==========  ============================================================================================
full        a key and a value of every K/V head, for as long as the request lives
sliding     the same, but a query sees only the last `window` tokens, so that older ones can be dropped
chunked     the same within chunks of `window` tokens: a query sees its own chunk only (Llama 4)
mla         keys and values are made from one small latent vector; an engine keeps either that or what it is
            expanded to (DeepSeek)
==========  ============================================================================================

A layer that reads the K/V of an earlier one (`shared`) needs nothing of its own. Layers that keep a state of another
sort (Mamba, linear attention) are named in `ModelLayers.other` and not counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from flatbed.errors import ConfigError

FULL, SLIDING, CHUNKED, MLA = "full", "sliding", "chunked", "mla"

# Names of `config.layer_types` that stand for attention with a key and a value for each token. `indexed_attention`
# keeps keys of an indexer besides, which are small and not counted.
_KINDS = {
    "full_attention": FULL,
    "indexed_attention": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
}


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer.

    Attributes:
        kind: `full`, `sliding`, `chunked` or `mla`.
        heads: query heads.
        kv_heads: K/V heads that attention is given.
        key_dim, value_dim: numbers in a key and in a value vector that attention is given.
        window: tokens that a query sees at the most; None sees all.
        latent: numbers that `mla` can keep instead: the latent vector and the rotary part; None elsewhere.
        rotary: numbers of a key that are rotated, in `mla`, where all heads have the same.
        shared: reads the K/V of an earlier layer.
    """

    kind: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    latent: int | None = None
    rotary: int = 0
    shared: bool = False

    @property
    def numbers(self) -> int:
        """Numbers in the keys and values of one token, as attention is given them."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class ModelLayers:
    """What planning has to know of a model.

    Attributes:
        layers: the attention layers, in order.
        other: how many layers there are of each kind that keeps no K/V.
        heads, kv_heads, head_dim: as the config states them for the whole model. Transformers' paged cache goes by
            these alone; head_dim is None where layers differ.
        hidden_size, vocab_size: of the model.
        max_positions: prompt and completion together; None is no limit.
    """

    layers: tuple[AttentionLayer, ...]
    other: tuple[tuple[str, int], ...]
    heads: int
    kv_heads: int
    head_dim: int | None
    hidden_size: int
    vocab_size: int
    max_positions: int | None

    @property
    def own(self) -> tuple[AttentionLayer, ...]:
        """Layers that keep K/V of their own."""
        return tuple(layer for layer in self.layers if not layer.shared)


def read_layers(config: Any) -> ModelLayers:
    """Reads the attention layers of a Transformers config. Raises ConfigError when it has none that are understood."""
    text = config.get_text_config()
    if not hasattr(text, "num_hidden_layers") or not hasattr(text, "num_attention_heads"):
        raise ConfigError(f"{type(config).__name__} does not say how many layers and attention heads the model has")
    single = _per_layer(text)
    layers: list[AttentionLayer] = []
    other: Counter[str] = Counter()
    shared_from = len(single) - (getattr(text, "num_kv_shared_layers", 0) or 0)
    for number, (name, one) in enumerate(zip(_layer_types(text), single, strict=True)):
        if name in _KINDS:
            layers.append(_layer(_KINDS[name], one, shared=number >= shared_from))
        else:
            other[name] += 1
    if not layers:
        raise ConfigError(f"{type(config).__name__} has no attention layers that keep K/V, only {dict(other)}")
    dims = {_head_dim(one) for one in single}
    return ModelLayers(
        layers=tuple(layers),
        other=tuple(other.items()),
        heads=single[0].num_attention_heads,
        kv_heads=_kv_heads(single[0]),
        head_dim=dims.pop() if len(dims) == 1 else None,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
    )


def empty_model(config: Any) -> Any:
    """The model of a config on the meta device: all of its modules, and no memory for weights.

    Raises ConfigError when Transformers cannot build a causal language model from this config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, ImportError, AttributeError, NotImplementedError) as error:
        name = type(config).__name__
        raise ConfigError(f"Transformers builds no causal language model of a {name}: {error}") from error


def _per_layer(text: Any) -> list[Any]:
    """The config of each layer: they differ in models with heads of several sizes (Gemma 4)."""
    found = getattr(text, "per_layer_config", None)
    return list(found) if found else [text] * text.num_hidden_layers


def _layer_types(text: Any) -> list[str]:
    named = getattr(text, "layer_types", None)
    if named:
        return list(named)
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        return ["sliding_attention"] * text.num_hidden_layers
    return ["full_attention"] * text.num_hidden_layers


def _layer(kind: str, config: Any, *, shared: bool) -> AttentionLayer:
    heads = config.num_attention_heads
    window = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}.get(kind)
    seen = None if window is None else getattr(config, window, None)
    latent = getattr(config, "kv_lora_rank", None)
    if latent and kind == FULL:
        # Every query head has a key and a value of its own; both are products of the same latent vector.
        rotary = config.qk_rope_head_dim
        key = config.qk_nope_head_dim + rotary
        dims = (key, config.v_head_dim)
        return AttentionLayer(MLA, heads, heads, *dims, latent=latent + rotary, rotary=rotary, shared=shared)
    dim = _head_dim(config)
    return AttentionLayer(kind, heads, _kv_heads(config), dim, dim, window=seen, shared=shared)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _kv_heads(config: Any) -> int:
    stated = getattr(config, "num_key_value_heads", None)
    if stated is None and getattr(config, "multi_query", False):
        return 1
    return stated or config.num_attention_heads
