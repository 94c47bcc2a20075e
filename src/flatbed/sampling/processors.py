"""Transformers' `GenerationConfig` → `SamplingParams`, in one place.

What the sampler does for all rows at once (temperature, top-k, top-p, min-p, repetition penalty) is translated field
by field. A config that asks for more (n-gram blocking, suppressed tokens, typical-p, ...) brings Transformers' own
processors along, which the sampler then applies to that request's row. What generation by sampling cannot do (beams,
contrastive search, ...) is refused by name.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch

from flatbed.errors import ConfigError
from flatbed.request import SamplingParams

# (field, the value that means "off"): anything else needs Transformers' own processors.
_NEEDS_PROCESSORS: tuple[tuple[str, Any], ...] = (
    ("sequence_bias", None),
    ("no_repeat_ngram_size", 0),
    ("bad_words_ids", None),
    ("min_length", 0),
    ("min_new_tokens", 0),
    ("forced_bos_token_id", None),
    ("forced_eos_token_id", None),
    ("remove_invalid_values", False),
    ("exponential_decay_length_penalty", None),
    ("suppress_tokens", None),
    ("begin_suppress_tokens", None),
    ("top_h", None),
    ("typical_p", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("watermarking_config", None),
    ("renormalize_logits", False),
)
# (field, the value that means "off", what it is): cannot be had.
_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("num_beams", 1, "beam search"),
    ("penalty_alpha", None, "contrastive search"),
    ("guidance_scale", 1, "classifier-free guidance"),
    ("constraints", None, "constrained beam search"),
    ("force_words_ids", None, "constrained beam search"),
    ("prompt_lookup_num_tokens", None, "assisted generation"),
    ("assistant_early_exit", None, "assisted generation"),
    ("dola_layers", None, "DoLa"),
    ("encoder_repetition_penalty", 1.0, "an encoder's penalty"),
    ("encoder_no_repeat_ngram_size", 0, "an encoder's n-grams"),
    ("use_mtp", False, "assisted generation"),
    ("speculation_type", None, "assisted generation"),
    ("is_assistant", False, "assisted generation"),
    ("token_healing", False, "another prompt than the one given"),
    ("max_time", None, "a limit of time (end requests by `Engine.cancel`)"),
)
# Kinds of cache that change what is computed; the others are ways to keep the same numbers.
_REFUSED_CACHES = ("quantized",)
# What `generate` makes when neither the caller nor the model sets a length.
_DEFAULT_NEW_TOKENS = 20


def merged(config: Any, model: Any) -> Any:
    """`config` as `model.generate(generation_config=config)` would read it.

    Unset fields come from the model's generation config, then from Transformers' defaults. A copy; both originals are
    only read.
    """
    prepared = copy.deepcopy(config)
    prepared.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    if prepared.max_new_tokens is None and prepared.max_length is None:
        prepared.max_new_tokens = _DEFAULT_NEW_TOKENS
    prepared.update(**prepared._get_default_generation_params(), defaults_only=True)
    return prepared


def from_generation_config(
    config: Any, model: Any, *, prompt_length: int, longest: int, logprobs: bool = False
) -> SamplingParams:
    """`config` for one prompt of `prompt_length` tokens. Unset fields are off; see `merged` for generate's defaults.

    Args:
        longest: the most tokens a sequence may have when the config sets no limit of its own.

    Raises ConfigError naming the field, for what cannot be had.
    """

    def get(name: str) -> Any:
        return getattr(config, name, None)  # fields come and go between versions

    for name, off, what in _REFUSED:
        if get(name) not in (None, off):
            raise ConfigError(f"generation_config.{name}={get(name)!r} asks for {what}, which Flatbed does not do")
    if get("cache_implementation") in _REFUSED_CACHES:
        raise ConfigError(
            f"generation_config.cache_implementation={get('cache_implementation')!r} changes what is computed, and "
            "Flatbed keeps K/V as the model makes them"
        )
    sampling = bool(get("do_sample"))
    max_new_tokens, max_length = get("max_new_tokens"), get("max_length")
    if max_new_tokens is None and max_length is None:
        max_new_tokens = max(1, longest - prompt_length)
    elif max_new_tokens is None:
        if not isinstance(max_length, int):
            raise ConfigError(f"generation_config.max_length must be a whole number, got {max_length!r}")
        max_new_tokens = max_length - prompt_length  # less than one refuses the request
    fields: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": 0.0,
        "repetition_penalty": _or(get("repetition_penalty"), 1.0),
        "n": _or(get("num_return_sequences"), 1),
        "eos_token_ids": _ids(get("eos_token_id")),
        "stop": _or(get("stop_strings"), ()),
        "logprobs": logprobs,
    }
    if sampling:
        temperature = _or(get("temperature"), 1.0)
        if temperature == 0:
            raise ConfigError("generation_config.temperature=0 with do_sample=True; say do_sample=False for greedy")
        fields |= {
            "temperature": temperature,
            "top_k": _or(get("top_k"), 0),
            "top_p": _or(get("top_p"), 1.0),
            "min_p": _or(get("min_p"), 0.0),
        }
    if any(get(name) not in (None, off) for name, off in _NEEDS_PROCESSORS):
        fields["processors"] = _Processors(config, model)
    return SamplingParams(**fields)


class _Processors:
    """Builds Transformers' processors for one prompt, as `generate` would."""

    def __init__(self, config: Any, model: Any) -> None:
        self._config = copy.deepcopy(config)
        self._model = model

    def __call__(self, prompt_length: int) -> Any:
        device = next(self._model.parameters()).device
        config = copy.deepcopy(self._config)
        eos = _ids(config.eos_token_id)
        config._eos_token_tensor = torch.tensor(eos, device=device) if eos else None
        if config.max_new_tokens is not None:  # as in `generate`, it goes before max_length
            config.max_length = prompt_length + config.max_new_tokens
        if getattr(config, "num_beams", None) is None:
            config.num_beams = 1
        return self._model._get_logits_processor(
            generation_config=config, input_ids_seq_length=prompt_length, device=str(device)
        )


def try_out(processors: Callable[[int], Any], prompt: list[int], vocabulary: int, device: torch.device) -> None:
    """Builds a request's processors and lets them process one row of zeros after its prompt.

    Raises what they raise of settings that make no sense (a token outside of the vocabulary, say): at this request's
    submission, and not in the middle of a step that it shares with others.
    """
    history = torch.tensor([prompt], device=device)
    processors(len(prompt))(history, torch.zeros(1, vocabulary, device=device))


def eos_token_ids(model: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """The tokens that end a completion: the model's generation config, else its config, else the tokenizer."""
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        ids = _ids(getattr(holder, "eos_token_id", None))
        if ids:
            return ids
    return ()


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    values = value if isinstance(value, (list, tuple)) else (value,)
    try:
        return tuple(operator.index(v) for v in values if operator.index(v) >= 0)
    except TypeError:
        raise ConfigError(f"eos_token_id must be a token id or a list of them, got {value!r}") from None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
