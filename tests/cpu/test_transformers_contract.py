"""What Flatbed relies on in Transformers. When a test fails after an upgrade, the code named beside it must follow."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
import transformers as tf
from families import FAMILIES, build
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig, PreTrainedConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import flatbed
from flatbed.config import _TRANSLATED
from flatbed.integrations.transformers import GenerateBatch
from flatbed.model import interface
from flatbed.sampling import processors

# ---- generate_batch (integrations/transformers.py) -------------------------------------------------------------------


def test_the_parameters_of_generate_batch() -> None:
    theirs = inspect.signature(tf.LlamaForCausalLM.generate_batch).parameters
    assert list(theirs) == [
        "self",
        "inputs",
        "generation_config",
        "continuous_batching_config",
        "record_timestamps",
        "progress_bar",
        "persistent_manager",
        "warmup",
        "kwargs",
    ]
    ours = inspect.signature(GenerateBatch.__call__).parameters
    for name, parameter in theirs.items():
        if name not in ("self", "kwargs"):
            assert ours[name].default == parameter.default, name
    assert list(ours)[: len(theirs) - 1] == list(theirs)[:-1], "they can be passed by position"


def test_the_fields_of_generation_output() -> None:
    assert [field.name for field in dataclasses.fields(GenerationOutput)] == [
        "request_id",
        "prompt_ids",
        "generated_tokens",
        "logprobs",
        "error",
        "status",
        "created_time",
        "lifespan",
        "timestamps",
    ]
    assert GenerationOutput("x", status=RequestStatus.FAILED).is_finished()
    assert GenerationOutput("x", status=RequestStatus.FINISHED).is_finished()
    assert not GenerationOutput("x").is_finished()


def test_request_status() -> None:
    assert {status.name: int(status) for status in RequestStatus} == {
        "PENDING": 0,
        "PREFILLING": 1,
        "DECODING": 2,
        "FINISHED": 3,
        "FAILED": 4,
    }


# ---- ContinuousBatchingConfig (config.py) ----------------------------------------------------------------------------


def test_the_fields_of_the_batching_config_that_are_translated_exist() -> None:
    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    assert names >= _TRANSLATED
    config = ContinuousBatchingConfig()
    assert (config.page_size, config.scheduler_type, config.allow_block_sharing) == (256, "fifo", True)
    for unset in (
        "num_blocks",
        "max_memory_percent",
        "max_batch_tokens",
        "max_requests_per_batch",
        "seed",
        "block_size",
    ):
        assert getattr(config, unset) is None, unset
    assert config.return_logprobs is False


def test_every_other_field_of_the_batching_config_is_known() -> None:
    """A new field needs a decision: translate it, or say that it has no effect (which happens by itself)."""
    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig) if not field.name.startswith("_")}
    without_effect = {
        "auto_switch_to_flash",
        "cpu_group_timeout",
        "cpu_offload_space",
        "cpu_offload_space_safety_threshold",
        "decode_compile_config",
        "default_compile_level",
        "disable_nccl_graph_mixing",
        "drop_unsupported_processors",
        "kv_padding_interval_size",
        "max_blocks_per_request",
        "max_cached_graphs",
        "max_queue_size",
        "per_request_processors",
        "q_padding_interval_size",
        "safety_margin",
        "use_async_batching",
        "use_cuda_graph",
        "use_default_compile_configs",
        "varlen_compile_config",
    }
    assert names - _TRANSLATED - without_effect == set()


# ---- attention (model/interface.py, model/shadow.py) -----------------------------------------------------------------


def test_our_attention_is_registered_and_has_the_interfaces_signature() -> None:
    assert isinstance(inspect.getattr_static(AttentionInterface, "register"), (classmethod, staticmethod))
    assert ALL_ATTENTION_FUNCTIONS[interface.NAME] is interface.attention
    theirs = inspect.signature(ALL_ATTENTION_FUNCTIONS["sdpa"]).parameters
    ours = inspect.signature(interface.attention).parameters
    assert list(ours)[:5] == list(theirs)[:5] == ["module", "query", "key", "value", "attention_mask"]
    assert "scaling" in theirs
    assert ours["kwargs"].kind is inspect.Parameter.VAR_KEYWORD


def test_attention_functions_are_found_by_the_configs_implementation() -> None:
    seen: list[str] = []

    def spy(module: Any, query: torch.Tensor, key: Any, value: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
        seen.append(type(module).__name__)
        assert mask is None, "no mask is made for an implementation that registers none"
        assert query.shape[:1] + query.shape[2:] == (1, 3, 12)
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register("flatbed_contract_spy", spy)
    try:
        model = build("llama")
        model.config._attn_implementation_internal = "flatbed_contract_spy"
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3]]), use_cache=False)
        assert seen == ["LlamaAttention", "LlamaAttention"]
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop("flatbed_contract_spy")


def test_no_mask_is_made_for_an_attention_that_registers_none() -> None:
    """The early exit of masking_utils: otherwise every step would build a mask over all its tokens."""
    assert interface.NAME not in ALL_MASK_ATTENTION_FUNCTIONS
    for family, make in (("llama", create_causal_mask), ("mistral", create_sliding_window_causal_mask)):
        config = build(family).config
        arguments = {
            "inputs_embeds": torch.zeros(1, 5, 48),
            "attention_mask": None,
            "cache": None,
            "past_key_values": None,  # its former name
            "position_ids": torch.tensor([[0, 1, 0, 1, 2]]),
        }
        names = inspect.signature(make).parameters
        if "cache" in names:
            del arguments["past_key_values"]
        arguments = {name: value for name, value in arguments.items() if name in names}
        config._attn_implementation_internal = "sdpa"
        assert make(config=config, **arguments) is not None, "packed sequences, which sdpa needs a mask for"
        config._attn_implementation_internal = interface.NAME
        assert make(config=config, **arguments) is None


def test_the_attention_of_a_config_is_one_attribute() -> None:
    config = tf.LlamaConfig()
    config._attn_implementation_internal = "eager"
    assert config._attn_implementation == "eager"
    assert "_attn_implementation_internal" not in config.to_dict()
    assert isinstance(config, PreTrainedConfig)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_supported_family_says_what_the_runner_asks(family: str) -> None:
    """`logits_to_keep` takes a tensor of places; positions and cache are keywords; the limits are in the config."""
    model = build(family)
    assert model._supports_attention_backend
    assert not getattr(model, "_is_stateful", False)
    parameters = inspect.signature(model.forward).parameters
    assert {"input_ids", "position_ids", "use_cache"} <= set(parameters)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        whole = model(ids, position_ids=torch.arange(5)[None], use_cache=False).logits
        if "logits_to_keep" in parameters:
            places = torch.tensor([0, 3])
            some = model(ids, position_ids=torch.arange(5)[None], use_cache=False, logits_to_keep=places).logits
            assert some.shape == (1, 2, whole.shape[-1])
            torch.testing.assert_close(some, whole[:, places])
            assert model(ids, use_cache=False, logits_to_keep=1).logits.shape[1] == 1
    limit = getattr(model.config, "max_position_embeddings", None) or getattr(model.config, "n_positions", None)
    assert limit == 512
    assert model.get_input_embeddings().weight.shape[0] == whole.shape[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_alone_say_where_a_token_stands(family: str) -> None:
    """A run that is packed behind another one, with its own positions, is what the engine makes of every batch."""
    model = build(family)
    with flatbed.Engine(model, token_budget=64) as engine:
        outputs = engine.generate([[5, 6, 7], [9, 8]], flatbed.SamplingParams(max_new_tokens=1, logprobs=True))
    for output, prompt in zip(outputs, ([5, 6, 7], [9, 8]), strict=True):
        with torch.no_grad():
            alone = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
        assert output.token_ids == [int(alone.argmax())]
        assert output.logprobs[0] == pytest.approx(alone.max().item(), abs=1e-5)


# ---- generation configs (sampling/processors.py) ---------------------------------------------------------------------


def test_the_fields_of_a_generation_config_that_are_read() -> None:
    config = GenerationConfig()
    known = set(vars(config)) | set(config._get_default_generation_params())
    read = {name for name, _ in processors._NEEDS_PROCESSORS}
    read |= {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_return_sequences"}
    read |= {"eos_token_id", "stop_strings", "max_new_tokens", "max_length", "num_beams", "penalty_alpha"}
    assert read - known == set()


def test_the_defaults_of_generate() -> None:
    defaults = GenerationConfig()._get_default_generation_params()
    wanted = {"max_length": 20, "do_sample": False, "num_beams": 1, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
    wanted |= {"repetition_penalty": 1.0, "num_return_sequences": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0}
    assert {name: defaults[name] for name in wanted} == wanted


def test_every_processor_that_generate_can_build_is_translated_brought_along_or_refused() -> None:
    """`_get_logits_processor` reads these fields of the config; one that is new needs a decision."""
    source = inspect.getsource(tf.LlamaForCausalLM._get_logits_processor)
    fields = {
        word.split("generation_config.")[1]
        for word in "".join(c if c.isalnum() or c in "._" else " " for c in source).split()
        if word.startswith("generation_config.")
    }
    translated = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample", "num_return_sequences"}
    decided = (
        translated | {name for name, _ in processors._NEEDS_PROCESSORS} | {name for name, *_ in processors._REFUSED}
    )
    decided |= {"_eos_token_tensor", "max_length", "use_cache"}
    assert {field.split(".")[0] for field in fields} - decided == set()


def test_the_processors_can_be_built_for_one_request() -> None:
    parameters = inspect.signature(tf.LlamaForCausalLM._get_logits_processor).parameters
    assert {"generation_config", "input_ids_seq_length", "device"} <= set(parameters)
