"""`flatbed.install(model)`: `model.generate_batch` with Transformers' own arguments and results, on Flatbed."""

from __future__ import annotations

import copy
import gc
import pickle
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
import transformers as tf
from families import VOCABULARY, build, reference
from tiny import byte_ids, byte_tokenizer, changes, draw_prompts, expected, scripted, snapshot
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

import flatbed
from flatbed.config import from_transformers
from flatbed.errors import ConfigError, EngineClosedError, ModelForwardError

PROMPTS = draw_prompts((20, 3, 41, 1), seed=4)
NEW = 10


def installed(family: str = "llama", **settings: Any) -> Any:
    return flatbed.install(build(family), **settings)


def tokens(results: dict[str, GenerationOutput]) -> list[list[int]]:
    return [result.generated_tokens for result in results.values()]


def engine_of(model: Any) -> flatbed.Engine:
    engine = model.generate_batch._engine
    assert engine is not None
    return engine


# ---- install and uninstall -------------------------------------------------------------------------------------------


def test_install_replaces_the_method_of_this_model_alone_and_uninstall_gives_it_back() -> None:
    model, other = build("llama"), build("llama")
    own = type(model).generate_batch
    assert flatbed.install(model) is model
    assert tokens(model.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=NEW))) == expected(
        "llama", PROMPTS, NEW
    )
    assert type(model).generate_batch is own
    assert other.generate_batch.__func__ is own
    engine = engine_of(model)
    assert flatbed.uninstall(model) is model
    assert model.generate_batch.__func__ is own
    assert "generate_batch" not in vars(model)
    with pytest.raises(EngineClosedError):
        engine.step()


def test_uninstalling_a_model_without_flatbed_leaves_it_alone() -> None:
    model = build("llama")
    state = snapshot(model)
    flatbed.uninstall(flatbed.uninstall(model))
    assert changes(state, model) == []


def test_installing_again_replaces_the_settings_and_frees_the_former_engine() -> None:
    model = installed(capacity="64 blocks")
    first = engine_of(model)
    flatbed.install(model, capacity="32 blocks", block_size=8)
    assert (engine_of(model).config.capacity, engine_of(model).config.block_size) == ("32 blocks", 8)
    with pytest.raises(EngineClosedError):
        first.step()
    with pytest.raises(ConfigError):
        flatbed.install(model, capacity="plenty")
    assert engine_of(model).config.capacity == "32 blocks", "what was refused replaces nothing"


def test_an_unknown_setting_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"tokens_budget.*token_budget"):
        installed(tokens_budget=3)


def test_an_installed_model_can_be_forgotten() -> None:
    model = installed()
    model.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=2))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_generate_and_training_work_on_an_installed_model() -> None:
    model = installed().train()
    assert model.generate_batch(PROMPTS[:1], GenerationConfig(max_new_tokens=1))
    assert model.training
    ids = torch.tensor([PROMPTS[0]])
    model(ids, labels=ids).loss.backward()
    model.eval()
    assert reference(model, PROMPTS[0], NEW) == expected("llama", PROMPTS, NEW)[0]


def test_pickling_an_installed_model_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"flatbed\.uninstall"):
        pickle.dumps(installed())


# ---- results ---------------------------------------------------------------------------------------------------------


def test_results_are_those_of_transformers_own_method() -> None:
    """Keys, their order, types and greedy tokens, against its own implementation in this process."""
    config = GenerationConfig(max_new_tokens=NEW, num_return_sequences=2, do_sample=True, top_k=1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=16, page_size=16, use_cuda_graph=False, return_logprobs=True)
    model = build("llama")
    theirs = model.generate_batch(PROMPTS, config, batching, record_timestamps=True, warmup=False)
    with pytest.warns(flatbed.FlatbedWarning, match="use_cuda_graph"):
        ours = flatbed.install(model).generate_batch(PROMPTS, config, batching, record_timestamps=True, warmup=False)
    by_name = dict(sorted(theirs.items()))
    assert list(ours) == [f"req_{i}{child}" for i in range(4) for child in ("__child#0", "")]
    assert sorted(ours) == list(by_name)
    for name, result in ours.items():
        other = by_name[name]
        assert type(result) is type(other) is GenerationOutput
        for field in vars(other):
            assert type(getattr(result, field)) is type(getattr(other, field)), field
        assert (result.request_id, result.prompt_ids) == (other.request_id, other.prompt_ids)
        assert result.generated_tokens == other.generated_tokens
        assert (result.status, result.error) == (other.status, other.error) == (RequestStatus.FINISHED, None)
        assert result.is_finished()
        assert result.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert len(result.timestamps) == len(other.timestamps) == NEW


def test_results_come_in_the_order_of_the_inputs_children_first() -> None:
    model = installed()
    prompts = [PROMPTS[i % 4] for i in range(12)]
    one = model.generate_batch(prompts, GenerationConfig(max_new_tokens=2))
    assert list(one) == [f"req_{i}" for i in range(12)]
    assert [result.prompt_ids for result in one.values()] == prompts
    config = GenerationConfig(max_new_tokens=2, num_return_sequences=3, do_sample=True)
    three = model.generate_batch(prompts[:2], config)
    names = ["req_0__child#0", "req_0__child#1", "req_0", "req_1__child#0", "req_1__child#1", "req_1"]
    assert list(three) == names == [result.request_id for result in three.values()]
    assert [result.prompt_ids for result in three.values()] == [prompts[0]] * 3 + [prompts[1]] * 3


def test_times() -> None:
    before = time.perf_counter()
    results = installed().generate_batch(PROMPTS, GenerationConfig(max_new_tokens=4), record_timestamps=True)
    after = time.perf_counter()
    for result in results.values():
        start, end = result.lifespan
        assert before <= result.created_time <= start <= end <= after
        assert len(result.timestamps) == 4
        assert [start, *result.timestamps, end] == sorted([start, *result.timestamps, end])
    plain = installed().generate_batch(PROMPTS, GenerationConfig(max_new_tokens=4))
    assert {result.timestamps for result in plain.values()} == {None}


def test_logprobs_are_those_of_the_distribution_that_was_drawn_from() -> None:
    model = installed()
    config = GenerationConfig(max_new_tokens=5, do_sample=True, top_k=1)
    results = model.generate_batch(PROMPTS, config, ContinuousBatchingConfig(return_logprobs=True))
    assert [result.logprobs for result in results.values()] == [[0.0] * 5] * 4, "one token is left of each distribution"
    assert tokens(results) == [full[:5] for full in expected("llama", PROMPTS, NEW)]
    results = model.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=5))
    assert [result.logprobs for result in results.values()] == [[]] * 4, "not asked for"


def test_no_inputs_are_no_results() -> None:
    assert installed().generate_batch([]) == {}
    with pytest.raises(ConfigError, match="a list of prompts, got NoneType"):
        installed().generate_batch(None)
    assert installed().generate_batch(inputs=[]) == {}


# ---- requests that cannot be run -------------------------------------------------------------------------------------


def test_a_bad_request_is_a_result_with_an_error_and_a_warning_that_names_it() -> None:
    inputs = [PROMPTS[0], [], PROMPTS[1], [VOCABULARY], draw_prompts((600,))[0], PROMPTS[2]]
    with pytest.warns(flatbed.FlatbedWarning, match="3 of 6 requests failed: .*req_1.*req_3.*req_4"):
        results = installed().generate_batch(inputs, GenerationConfig(max_new_tokens=NEW))
    assert list(results) == [f"req_{i}" for i in range(6)]
    for i, result in enumerate(results.values()):
        if i in (1, 3, 4):
            assert (result.status, result.generated_tokens) == (RequestStatus.FAILED, [])
            assert f"req_{i}" in result.error
            assert result.is_finished()
        else:
            assert (result.status, result.error) == (RequestStatus.FINISHED, None)
    good = [result.generated_tokens for i, result in enumerate(results.values()) if i in (0, 2, 5)]
    assert good == expected("llama", PROMPTS, NEW)[:3]


def test_a_flat_list_of_ids_is_refused_prompt_by_prompt() -> None:
    with pytest.warns(flatbed.FlatbedWarning, match="got int"):
        results = installed().generate_batch([5, 6], GenerationConfig(max_new_tokens=3))
    assert [result.status for result in results.values()] == [RequestStatus.FAILED] * 2


def test_a_max_length_that_a_prompt_fills_refuses_that_request_alone() -> None:
    with pytest.warns(flatbed.FlatbedWarning, match="1 of 2 requests failed: .*req_0.*max_new_tokens"):
        full, fine = installed().generate_batch([[1] * 9, [1] * 7], GenerationConfig(max_length=9)).values()
    assert (full.generated_tokens, len(fine.generated_tokens)) == ([], 2)


def test_a_forced_eos_comes_at_the_length_that_the_keyword_sets() -> None:
    config = GenerationConfig(max_length=400, forced_eos_token_id=7)
    [result] = installed().generate_batch(PROMPTS[:1], config, max_new_tokens=4).values()
    assert result.generated_tokens == [*expected("llama", PROMPTS, NEW)[0][:3], 7]


def test_an_error_of_the_engine_is_raised() -> None:
    model = installed()
    handle = model.model.layers[1].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ModelForwardError, match="ZeroDivisionError") as raised:
        model.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=NEW))
    assert set(raised.value.request_ids) == {"req_0", "req_1", "req_2", "req_3"}
    handle.remove()
    results = model.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=NEW))
    assert tokens(results) == expected("llama", PROMPTS, NEW)


def test_unknown_keywords_are_errors_that_list_what_is_known() -> None:
    with pytest.raises(
        ConfigError, match="max_tokens, temprature; known: generation_config, continuous_batching_config"
    ):
        installed().generate_batch(PROMPTS, temprature=0.5, max_tokens=3)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"guidance_scale": 3.0}, "g"),
    ],
)
def test_what_cannot_be_had_is_raised_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        installed().generate_batch(PROMPTS, GenerationConfig(max_new_tokens=3, **fields))


# ---- configs ---------------------------------------------------------------------------------------------------------


def test_the_callers_configs_and_the_model_stay_as_they_are() -> None:
    model = build("llama").train()
    model.generation_config.top_k = 7
    state = snapshot(model)
    config = GenerationConfig(max_new_tokens=3, do_sample=True, no_repeat_ngram_size=2, stop_strings=None)
    batching = ContinuousBatchingConfig(max_memory_percent=0.5, seed=3, return_logprobs=True)
    inputs = copy.deepcopy(PROMPTS)
    before = copy.deepcopy((config.to_dict(), vars(batching)))
    flatbed.install(model)
    model.generate_batch(inputs, config, batching)
    assert (config.to_dict(), vars(batching)) == before
    assert inputs == PROMPTS
    flatbed.uninstall(model)
    assert changes(state, model) == []


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, {}),
        ({"num_blocks": 64}, {"capacity": "16384 tokens"}),
        ({"num_blocks": 64, "page_size": 32}, {"capacity": "2048 tokens"}),
        ({"num_blocks": 10, "block_size": 32}, {"capacity": "320 tokens"}),
        ({"max_memory_percent": 0.5}, {"capacity": "50%"}),
        ({"max_memory_percent": 0.125}, {"capacity": "12.5%"}),
        ({"num_blocks": 4, "max_memory_percent": 0.5}, {"capacity": "1024 tokens"}),
        ({"max_batch_tokens": 512}, {"token_budget": 512}),
        ({"max_requests_per_batch": 9}, {"max_requests": 9}),
        ({"scheduler_type": "prefill_first"}, {"schedule": "prefill_first"}),
        ({"allow_block_sharing": False}, {"prefix_cache": False}),
        ({"seed": 5}, {"seed": 5}),
    ],
    ids=str,
)
def test_the_batching_config_is_translated(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    config = ContinuousBatchingConfig(**fields)
    translation = from_transformers(config)
    assert translation.settings == {"schedule": "fifo", "prefix_cache": True, **settings}
    assert translation.without_effect == ()
    assert not translation.logprobs
    assert from_transformers(ContinuousBatchingConfig(return_logprobs=True)).logprobs
    model = installed(capacity="99 blocks", token_budget=77)
    model.generate_batch(PROMPTS[:1], GenerationConfig(max_new_tokens=1), config)
    used = engine_of(model).config
    wanted = {"capacity": "99 blocks", "token_budget": 77, **{k: v for k, v in settings.items() if k != "seed"}}
    assert {name: getattr(used, name) for name in wanted} == wanted, (
        "what the config says goes before install's settings"
    )


def test_capacity_in_their_blocks_is_room_for_as_many_tokens() -> None:
    model = installed()
    model.generate_batch(PROMPTS[:1], GenerationConfig(max_new_tokens=1), ContinuousBatchingConfig(num_blocks=3))
    engine = engine_of(model)
    assert engine.longest == min(3 * 256 + 1, 512)
    assert engine.memory().capacity == 3 * 256 // 32 * engine._pool.layout.block_bytes


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"scheduler_type": "fifoo"}, "schedule 'fifoo'; known: fifo, prefill_first"),
        ({"num_blocks": 0}, "capacity"),
        ({"max_memory_percent": 1.5}, "capacity"),
        ({"max_batch_tokens": 0}, "token_budget"),
        ({"seed": -4}, "seed"),
    ],
)
def test_values_that_make_no_sense_are_raised(fields: dict[str, Any], told: str) -> None:
    config = ContinuousBatchingConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=told):
        installed().generate_batch(PROMPTS, GenerationConfig(max_new_tokens=1), config)


def test_fields_without_effect_say_so_once_each_by_name() -> None:
    model, config = installed(), GenerationConfig(max_new_tokens=1)
    batching = ContinuousBatchingConfig(use_cuda_graph=False, safety_margin=0.2, q_padding_interval_size=64)
    with pytest.warns(flatbed.FlatbedWarning) as told:
        model.generate_batch(PROMPTS, config, batching)
    assert sorted(str(warning.message).split()[0] for warning in told) == [
        f"ContinuousBatchingConfig.{name}" for name in ("q_padding_interval_size", "safety_margin", "use_cuda_graph")
    ]
    assert {warning.filename for warning in told} == {__file__}
    model.generate_batch(PROMPTS, config, batching)  # FlatbedWarning is an error in these tests
    batching.max_queue_size = 9
    with pytest.warns(flatbed.FlatbedWarning, match="max_queue_size") as told:
        model.generate_batch(PROMPTS, config, batching)
    assert len(told) == 1


def test_the_default_config_and_every_default_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installed().generate_batch(PROMPTS, GenerationConfig(max_new_tokens=1), ContinuousBatchingConfig())


@pytest.mark.parametrize("switch", ["progress_bar", "persistent_manager", "warmup"])
def test_switches_that_change_nothing_change_nothing(switch: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, config = installed(), GenerationConfig(max_new_tokens=NEW)
    for value in (True, False):
        assert tokens(model.generate_batch(PROMPTS, config, **{switch: value})) == expected("llama", PROMPTS, NEW)
    assert ("4/4" in capsys.readouterr().err) == (switch == "progress_bar")


# ---- generation configs ----------------------------------------------------------------------------------------------


def test_the_length_comes_from_the_keyword_then_the_config_then_the_models() -> None:
    model = installed()
    model.generation_config.max_new_tokens = 3
    full = expected("llama", PROMPTS, NEW)
    config = GenerationConfig(max_new_tokens=5)
    for arguments, length in [
        ({}, 3),
        ({"max_new_tokens": 2}, 2),
        ({"generation_config": config}, 5),
        ({"generation_config": config, "max_new_tokens": 7}, 7),
    ]:
        assert tokens(model.generate_batch(PROMPTS, **arguments)) == [one[:length] for one in full]


def test_without_any_length_a_request_fills_the_room_there_is() -> None:
    model = installed(capacity="4 blocks", block_size=8)
    results = model.generate_batch(PROMPTS[:2], GenerationConfig())
    assert [len(result.generated_tokens) for result in results.values()] == [33 - 20, 33 - 3]


def test_eos_ids_of_the_config_end_a_completion_and_are_part_of_it() -> None:
    model = installed()
    full = expected("llama", PROMPTS, NEW)
    config = GenerationConfig(max_new_tokens=NEW, eos_token_id=[full[0][4], full[2][1]])
    wanted = [reference(model, prompt, NEW, eos_token_id=config.eos_token_id) for prompt in PROMPTS]
    assert wanted != full
    assert tokens(model.generate_batch(PROMPTS, config)) == wanted
    assert tokens(model.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=NEW, eos_token_id=-1))) == full


@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 1}, {"suppress_tokens": [3, 40, 88]}, {"min_new_tokens": 4}],
    ids=str,
)
def test_what_transformers_drops_is_applied(fields: dict[str, Any]) -> None:
    model = installed()
    eos = [one[1] for one in expected("llama", PROMPTS, NEW)]
    config = GenerationConfig(max_new_tokens=NEW, pad_token_id=0, eos_token_id=eos, **fields)
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        wanted.append(made[0, len(prompt) :].tolist())
    assert tokens(model.generate_batch(PROMPTS, config)) == wanted


def test_stop_strings_need_the_tokenizer_that_install_was_given() -> None:
    script = byte_ids("one two three")
    model, tokenizer = scripted(script, len(byte_tokenizer())), byte_tokenizer()
    config = GenerationConfig(max_new_tokens=len(script), stop_strings=["two"])
    flatbed.install(model, tokenizer)
    assert tokens(model.generate_batch([[5]], config)) == [byte_ids("one two")]
    flatbed.install(model)
    with pytest.warns(flatbed.FlatbedWarning, match="tokenizer"):
        results = model.generate_batch([[5]], config)
    assert results["req_0"].status == RequestStatus.FAILED


# ---- seeds -----------------------------------------------------------------------------------------------------------

SAMPLED = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=2.0, num_return_sequences=2)


def test_a_seed_in_the_config_makes_a_call_repeatable_whatever_runs_beside_it() -> None:
    model = installed()
    seeded, other = ContinuousBatchingConfig(seed=11), ContinuousBatchingConfig(seed=12)
    first = tokens(model.generate_batch(PROMPTS, SAMPLED, seeded))
    assert tokens(model.generate_batch(PROMPTS, SAMPLED, seeded)) == first
    assert tokens(model.generate_batch(PROMPTS, SAMPLED, other)) != first
    assert tokens(model.generate_batch(PROMPTS[:2], SAMPLED, seeded)) == first[:4]
    small = ContinuousBatchingConfig(seed=11, max_batch_tokens=5, num_blocks=1)
    assert tokens(model.generate_batch(PROMPTS, SAMPLED, small)) == first
    assert len({str(one) for one in first}) == 8


def test_set_seed_governs_calls_without_a_seed() -> None:
    model = installed()
    runs = []
    for seed in (1, 1, 2):
        tf.set_seed(seed)
        runs.append([tokens(model.generate_batch(PROMPTS, SAMPLED)) for _ in range(2)])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1], "the next call draws anew"


def test_a_seed_of_install_holds_for_every_call() -> None:
    model = installed(seed=5)
    first = tokens(model.generate_batch(PROMPTS, SAMPLED))
    assert tokens(model.generate_batch(PROMPTS, SAMPLED)) == first
    assert tokens(installed(seed=5).generate_batch(PROMPTS, SAMPLED)) == first
    assert tokens(installed(seed=6).generate_batch(PROMPTS, SAMPLED)) != first


# ---- from call to call -----------------------------------------------------------------------------------------------


def test_the_memory_is_given_back_after_each_call_also_after_one_that_failed() -> None:
    model = installed()
    for _ in range(2):
        model.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=NEW))
        memory = engine_of(model).memory()
        assert (memory.committed, memory.live) == (0, 0)
        assert memory.peak > 0
    handle = model.model.layers[0].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ModelForwardError):
        model.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=NEW))
    handle.remove()
    assert engine_of(model).memory().committed == 0


def test_the_engine_persists_as_long_as_the_settings_are_the_same() -> None:
    model, config = installed(), GenerationConfig(max_new_tokens=1)
    first = engine_of(model)
    model.generate_batch(PROMPTS, config)
    model.generate_batch(PROMPTS, SAMPLED, persistent_manager=True)
    assert engine_of(model) is first
    model.generate_batch(PROMPTS, config, ContinuousBatchingConfig(num_blocks=4))
    second = engine_of(model)
    assert second is not first
    with pytest.raises(EngineClosedError):
        first.step()
    model.generate_batch(PROMPTS, config, ContinuousBatchingConfig(num_blocks=4, seed=3, return_logprobs=True))
    assert engine_of(model) is second, "a seed and log-probabilities belong to the call"


def test_the_next_call_sees_new_weights_and_a_new_generation_config() -> None:
    model = installed()
    full = expected("llama", PROMPTS, NEW)
    assert tokens(model.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=NEW), persistent_manager=True)) == full
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(1)))
    changed = [reference(model, prompt, NEW) for prompt in PROMPTS]
    assert changed != full
    assert (
        tokens(model.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=NEW), persistent_manager=True)) == changed
    )
    config = GenerationConfig(max_new_tokens=NEW, repetition_penalty=1.9)
    penalised = [reference(model, prompt, NEW, repetition_penalty=1.9) for prompt in PROMPTS]
    assert penalised != changed
    assert tokens(model.generate_batch(PROMPTS, config, persistent_manager=True)) == penalised
    model.generation_config.max_new_tokens = 4
    assert tokens(model.generate_batch(PROMPTS)) == [one[:4] for one in changed]


def test_two_installed_models_are_two_engines() -> None:
    one, other = installed("llama"), installed("qwen3")
    config = GenerationConfig(max_new_tokens=NEW)
    for _ in range(2):
        assert tokens(one.generate_batch(PROMPTS, config)) == expected("llama", PROMPTS, NEW)
        assert tokens(other.generate_batch(PROMPTS, config)) == expected("qwen3", PROMPTS, NEW)


def test_a_module_that_wraps_the_model_can_be_installed_through_what_is_inside() -> None:
    model: nn.Module = build("llama")
    compiled = torch.compile(model)
    flatbed.install(compiled)
    results = compiled.generate_batch(PROMPTS, GenerationConfig(max_new_tokens=NEW))
    assert tokens(results) == expected("llama", PROMPTS, NEW)
    flatbed.uninstall(compiled)
    assert "generate_batch" not in vars(compiled)
