"""The planner's arithmetic, against what the engines really allocate: tiny models of many families, byte for byte."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from families import FAMILIES, build
from tiny import shared
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import cache as paged
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState
from typer.testing import CliRunner

import flatbed
from flatbed.cli import app
from flatbed.errors import ConfigError
from flatbed.lab import models
from flatbed.lab.engines.base import Setup
from flatbed.lab.plan import given_workload, make_plan
from flatbed.lab.plan_device import Device, find_device
from flatbed.lab.plan_engines import FlatbedArithmetic, TransformersArithmetic, VllmArithmetic
from flatbed.lab.plan_layers import empty_model, read_layers
from flatbed.lab.plan_verify import DOUBLE, HALF, PLANNED, verify
from flatbed.lab.workloads import make
from flatbed.model.runner import ModelRunner

FLOAT32 = 4
GIB = 2**30
# Families whose K/V Transformers' paged cache has no room for.
# Transformers' paged cache has room for what MLA keeps since 5.25.
LATENT_CACHE = tuple(map(int, tf.__version__.split(".")[:2])) >= TransformersArithmetic.LATENT_CACHE
LATENT = set() if LATENT_CACHE else {"deepseek_v3"}


def gemma4(**changes: Any) -> Any:
    """A text config with layers of two kinds; heads of one size unless `global_head_dim` says otherwise."""
    settings = {
        "vocab_size": 211,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "max_position_embeddings": 512,
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 211,
        "hidden_size_per_layer_input": 8,
    }
    return tf.Gemma4TextConfig(**{**settings, **changes})


def paged_cache(config: Any, batching: ContinuousBatchingConfig, attention: str = "sdpa") -> paged.PagedAttentionCache:
    config._attn_implementation = attention
    helper = DistributedHelper(device_mesh=None, cpu_group_timeout=None, tp_plan={})
    return paged.PagedAttentionCache(
        config, batching, torch.device("cpu"), helper, torch.float32, model_supports_logits_to_keep=True
    )


def batching(**fields: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(**{"num_blocks": 12, "page_size": 16, "max_memory_percent": 0.9, **fields})


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_read_from_the_config_are_those_that_attention_is_given(family: str) -> None:
    real = shared(family)
    runner = ModelRunner(real, 4)
    layers = read_layers(real.config).layers
    assert [(s.kv_heads, s.key_dim, s.value_dim) for s in runner.layers] == [
        (layer.kv_heads, layer.key_dim, layer.value_dim) for layer in layers
    ]
    assert [layer.window for layer in layers] == list(runner.windows)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_without_weights(family: str) -> None:
    empty = empty_model(shared(family).config)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert sum(p.numel() for p in empty.parameters()) == sum(p.numel() for p in shared(family).parameters())


@pytest.mark.parametrize(
    ("config", "parameters", "token_bytes"),
    [
        # bfloat16: 2 x layers x K/V heads x head size x 2 bytes
        (models.load_config("shape:qwen2.5-0.5b"), 494_032_768, 12_288),
        (
            tf.LlamaConfig(  # Llama 3.1 8B
                vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
            ),
            8_030_261_248, 131_072,
        ),
        (
            tf.Gemma3TextConfig(  # Gemma 3 27B
                vocab_size=262208, hidden_size=5376, intermediate_size=21504, num_hidden_layers=62,
                num_attention_heads=32, num_key_value_heads=16, head_dim=128, sliding_window=1024,
            ),
            27_009_346_304, 2 * 62 * 16 * 128 * 2,
        ),
    ],
    ids=["qwen2.5-0.5b", "llama-3.1-8b", "gemma-3-27b"],
)  # fmt: skip
def test_published_models(config: Any, parameters: int, token_bytes: int) -> None:
    assert sum(p.numel() for p in empty_model(config).parameters()) == parameters
    layers = read_layers(config)
    for arithmetic in (FlatbedArithmetic, TransformersArithmetic, VllmArithmetic):
        assert arithmetic(layers, 2).token_bytes == token_bytes


def test_deepseek_v3() -> None:
    config = tf.DeepseekV3Config()
    layers = read_layers(config)
    # Without the module for multi-token prediction, which is not a part of the language model.
    assert sum(p.numel() for p in empty_model(config).parameters()) == pytest.approx(671e9, rel=0.001)
    assert VllmArithmetic(layers, 2).token_bytes == 576 * 2 * 61
    assert FlatbedArithmetic(layers, 2).token_bytes == 61 * 128 * (192 + 128) * 2


def test_heads_that_differ_from_layer_to_layer_and_layers_that_share() -> None:
    layers = read_layers(gemma4(global_head_dim=32, num_kv_shared_layers=2))
    assert [(layer.kind, layer.key_dim, layer.shared) for layer in layers.layers] == [
        ("sliding", 16, False),
        ("full", 32, False),
        ("sliding", 16, True),
        ("full", 32, True),
    ]
    assert layers.head_dim is None
    assert len(layers.own) == 2


def test_layers_that_keep_no_kv_are_named() -> None:
    config = tf.Qwen3NextConfig(num_hidden_layers=4)
    layers = read_layers(config)
    assert layers.other == (("linear_attention", 3),)
    assert "linear_attention" in (VllmArithmetic(layers, 2).refusal or "")
    assert "linear_attention" in (TransformersArithmetic(layers, 2).refusal or "")


# ---- Flatbed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_flatbed_allocates_what_was_planned(family: str) -> None:
    model = shared(family)
    planned = FlatbedArithmetic(read_layers(model.config), FLOAT32, block_size=8)
    with flatbed.Engine(model, capacity="40 blocks", block_size=8) as engine:
        assert engine.memory().capacity == planned.allocated(40)
        engine.generate([[1, 2, 3] * 7, [5, 6] * 3], flatbed.SamplingParams(max_new_tokens=9, ignore_eos=True))
        # 21 + 9 and 6 + 9 tokens, the last of which needs no room.
        assert engine.memory().peak == planned.allocated(planned.needed({30: 1, 15: 1}))


def test_flatbed_takes_the_longest_request_that_was_planned_and_no_longer_one() -> None:
    model = shared("llama")
    longest = FlatbedArithmetic(read_layers(model.config), FLOAT32, block_size=8).longest(5)
    with flatbed.Engine(model, capacity="5 blocks", block_size=8) as engine:
        fits, longer = (
            engine.submit([1] * 4, flatbed.SamplingParams(max_new_tokens=longest - 4 + more, ignore_eos=True))
            for more in (0, 1)
        )
        assert fits.error is None
        assert isinstance(longer.error, flatbed.errors.CapacityError)


# ---- Transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 7, 12])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - LATENT))
def test_transformers_allocates_what_was_planned(family: str, blocks: int) -> None:
    config = build(family).config
    planned = TransformersArithmetic(read_layers(config), FLOAT32, page_size=16, token_budget=64, flash=False)
    cache = paged_cache(config, batching(num_blocks=blocks, max_batch_tokens=64))
    assert cache.cache_tensor.nbytes == planned.allocated(blocks)
    assert cache.num_sectors == planned.sectors(blocks)
    assert cache.bytes_per_sector == planned.sector_bytes
    assert {kind.removesuffix("_attention"): a.bytes_per_block for kind, a in cache.cache_allocators.items()} == {
        row.kind: row.block_bytes for row in planned.types()
    }


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("family", sorted({"qwen2", "gemma3", "mistral", "gpt2", "deepseek_v3"} - LATENT))
def test_transformers_buffers_are_those_of_its_own_accounting(family: str, flash: bool, logprobs: bool) -> None:
    config = build(family).config
    config._attn_implementation = "flash_attention_2" if flash else "sdpa"
    planned = TransformersArithmetic(
        read_layers(config), FLOAT32, page_size=16, token_budget=96, flash=flash, max_requests=40, logprobs=logprobs
    )
    settings = batching(
        max_batch_tokens=96,
        max_requests_per_batch=40,
        max_blocks_per_request=planned.max_blocks_per_request,
        use_async_batching=flash,
        return_logprobs=logprobs,
    )
    types = list(paged.group_layers_by_attn_type(config))
    handler = paged.PagedAttentionMemoryHandler(
        config,
        settings,
        torch.float32,
        bytes_per_sector=planned.sector_bytes,
        tokens_per_sector=max(planned.sector_bytes // row.block_bytes for row in planned.types()) * 16,
        bytes_per_block=planned.block_bytes,
        attn_types=types,
        model_supports_logits_to_keep=True,
    )
    for blocks in (1, 12, 500):
        theirs = handler.compute_memory_footprint(96, planned.sectors(blocks))
        assert planned.allocated(blocks) + planned.buffers(blocks) == theirs


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "mistral"])
def test_transformers_holds_the_requests_that_were_planned(family: str) -> None:
    config = build(family).config
    planned = TransformersArithmetic(read_layers(config), FLOAT32, page_size=16, token_budget=64, flash=False)
    draw = random.Random(0)
    for _ in range(20):
        lengths = [draw.randint(1, 200) for _ in range(draw.randint(1, 12))]
        demand = {length: lengths.count(length) for length in lengths}
        blocks = planned.needed(demand)
        for count, fits in ((blocks, True), (blocks - 1, False)):
            if count < 1:
                continue
            cache = paged_cache(config, batching(num_blocks=count, max_batch_tokens=64))
            # Sectors change hands between attention types; what is left half used by one is of no use to another.
            states = [RequestState(request_id=str(i), initial_tokens=[0]) for i in range(len(lengths))]
            held = [cache.can_store_request_tokens(s, n) for s, n in zip(states, lengths, strict=True)]
            assert all(held) == fits, (lengths, count)


def test_heads_of_two_sizes_do_not_run_on_transformers_as_is_said() -> None:
    config = gemma4(global_head_dim=32)
    assert TransformersArithmetic(read_layers(config), FLOAT32).refusal is not None
    assert not any(_batch(tf.AutoModelForCausalLM.from_config(config)))


def test_a_latent_vector_runs_on_transformers_where_that_is_said() -> None:
    config = build("deepseek_v3").config
    planned = TransformersArithmetic(read_layers(config), FLOAT32, version=tf.__version__)
    assert (planned.refusal is None) is LATENT_CACHE
    assert any(_batch(tf.AutoModelForCausalLM.from_config(config))) is LATENT_CACHE


def test_layers_that_share_kv_run_on_transformers_and_are_given_room() -> None:
    config = gemma4(num_kv_shared_layers=2)
    planned = TransformersArithmetic(read_layers(config), FLOAT32, page_size=16)
    assert planned.refusal is None
    assert paged_cache(config, batching()).cache_tensor.nbytes == planned.allocated(12)
    assert all(_batch(tf.AutoModelForCausalLM.from_config(config)))


def _batch(model: nn.Module) -> list[list[int]]:
    """What `generate_batch` makes of two prompts; a failure in it is logged and gives no tokens."""
    model.eval().set_attn_implementation("sdpa")
    outputs = model.generate_batch(
        [[1, 2, 3, 4, 5], [7, 8, 9]],
        generation_config=GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=batching(max_batch_tokens=32),
        warmup=False,
    )
    return [output.generated_tokens for output in outputs.values()]


# ---- settings to paste -----------------------------------------------------------------------------------------------


def qwen_plan(**changes: Any) -> Any:
    given: dict[str, Any] = {"device": find_device("h200", None), "workload": make("article", 151936, 32768), **changes}
    device, workload = given.pop("device"), given.pop("workload")
    return make_plan("Qwen/Qwen2.5-0.5B", models.load_config("shape:qwen2.5-0.5b"), workload, device, **given)


def test_pasted_settings_are_accepted_by_transformers_and_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    _, transformers, _ = qwen_plan(workload=make("long", 151936, 32768)).engines
    titles = {snippet.title: snippet.text for snippet in transformers.snippets}
    made = eval(titles["Transformers"], {"ContinuousBatchingConfig": ContinuousBatchingConfig})
    assert (made.num_blocks, made.max_batch_tokens) == (transformers.blocks, 8192)
    assert made.max_blocks_per_request == 128  # 32,016 tokens are 126 pages, and one is kept in hand
    for trainer in ("GRPO", "RLOO"):
        config = getattr(trl, f"{trainer}Config")
        text = titles[f"TRL, {trainer}"].replace(
            "Config(\n", 'Config(output_dir="out", bf16=False, report_to="none",\n'
        )
        settings = eval(text, {f"{trainer}Config": config})
        assert settings.use_transformers_continuous_batching
        kept = settings.transformers_continuous_batching_config
        assert ContinuousBatchingConfig(**kept).num_blocks == transformers.blocks


def test_trl_is_given_a_larger_share_where_its_own_would_not_do() -> None:
    def shares(memory: str) -> list[bool]:
        (engine,) = qwen_plan(device=find_device(None, memory), engines=["transformers"]).engines
        return ["max_memory_percent" in s.text for s in engine.snippets if s.title.startswith("TRL")]

    assert shares("80GiB") == [False, False]
    assert shares("1.5GiB") == [True, True]


def test_pasted_settings_make_a_flatbed_engine() -> None:
    model = shared("llama")
    workload = given_workload(20, 12, 4, vocab_size=211)
    made = make_plan("tiny", model.config, workload, Device("small", 16 * 2**20), dtype="float32", engines=["flatbed"])
    (engine,) = made.engines
    text = engine.snippets[0].text
    with eval(text, {"flatbed": flatbed, "model": model, "tokenizer": None}) as built:
        assert built._pool.num_blocks == engine.blocks
        assert built.config.tokens_per_step == 8192


def test_vllm_flags_say_the_bytes_of_the_blocks() -> None:
    *_, vllm = qwen_plan().engines
    server, python = (snippet.text for snippet in vllm.snippets)
    assert vllm.blocks == 709  # 708 of 16 tokens hold all 64 requests at their end, one is never used
    size = 709 * 16 * 12_288
    assert f"--kv-cache-memory-bytes {size} --block-size 16 --max-model-len 192 --max-num-seqs 64" in server
    assert f"kv_cache_memory_bytes={size}, block_size=16, max_model_len=192" in python


# ---- in words --------------------------------------------------------------------------------------------------------


def test_what_64_blocks_would_refuse_and_slow_down() -> None:
    for engine in qwen_plan(workload=given_workload(20_000, 100, 1, vocab_size=1000), capacity="64 blocks").engines:
        assert engine.tokens == 16_384
        assert "one request of 20,100 tokens is refused" in engine.says
    for engine in qwen_plan(workload=given_workload(1000, 24, 64, vocab_size=1000), capacity="64 blocks").engines:
        assert "64 requests of 1,024 tokens run 16 at a time; the others wait" in engine.says
        assert any("forward passes instead of" in said for said in engine.says)
        assert "64 blocks hold 16,384 tokens (198.0 MiB)" in engine.says or engine.engine != "transformers"


def test_capacity_texts_mean_the_same_tokens_on_every_engine() -> None:
    assert {engine.tokens for engine in qwen_plan(capacity="20480 tokens").engines} == {20_480}
    for engine in qwen_plan(capacity="1 GiB").engines:
        assert 0.98 * GIB < engine.tokens * 12_288 <= GIB
    half = qwen_plan(capacity="50%")
    for engine in half.engines:
        assert engine.tokens * 12_288 == pytest.approx(half.free / 2, rel=0.01)
    with pytest.raises(ConfigError, match="less than one block"):
        qwen_plan(capacity="1 KiB")


def test_a_pool_that_does_not_fit_is_cut_and_said_to_make_requests_wait() -> None:
    many = given_workload(2000, 100, 300, vocab_size=1000)
    made = qwen_plan(workload=many, device=find_device(None, "4GiB"))
    for engine in made.engines:
        assert engine.blocks == engine.fits < engine.needed
        assert engine.pool + engine.buffers <= 0.9 * made.free
        assert any("at a time" in said for said in engine.says)
    asked = qwen_plan(workload=many, device=find_device(None, "4GiB"), capacity="20 GiB")
    assert all(any("does not fit" in said for said in engine.says) and engine.left < 0 for engine in asked.engines[1:])


def test_training_leaves_less() -> None:
    plain, trained = qwen_plan(), qwen_plan(training="float32")
    parameters = 494_032_768
    assert plain.free == plain.device.memory - 2 * parameters
    assert trained.free == trained.device.memory - 16 * parameters
    lora = qwen_plan(training="bfloat16", trained=0.01)
    assert lora.free == lora.device.memory - 2 * parameters - 6 * round(parameters / 100)
    with pytest.raises(ConfigError, match="alone take"):
        qwen_plan(training="float32", device=find_device(None, "4GiB"))


def test_models_that_flatbed_refuses_are_told_with_its_own_words() -> None:
    workload = given_workload(10, 10, 2, vocab_size=200)
    made = make_plan("gemma4", gemma4(num_kv_shared_layers=2), workload, find_device(None, "8GiB"), dtype="float32")
    assert "share K/V" in (made.engines[0].refusal or "")
    assert made.engines[1].refusal is None
    assert any("2 layers read the K/V" in note for note in made.notes)


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_command_prints_a_plan_with_everything_to_paste() -> None:
    result = run("--model", "shape:qwen2.5-0.5b", "--workload", "article", "--device", "h200", "--training", "bfloat16")
    assert result.exit_code == 0, result.output
    for said in (
        "494,032,768 parameters in bfloat16",
        "363 blocks of 32 tokens are live at the peak",
        "ContinuousBatchingConfig(num_blocks=76, max_batch_tokens=8192)",
        "GRPOConfig(",
        "RLOOConfig(",
        "vllm serve shape:qwen2.5-0.5b --kv-cache-memory-bytes",
        "flatbed.Engine(model, tokenizer, capacity=",
    ):
        assert said in result.output


def test_the_command_as_json_says_the_same() -> None:
    given = ("--model", "shape:tiny", "--prompt-tokens", "100", "--new-tokens", "20", "--concurrency", "5")
    result = run(*given, "--memory", "1GiB", "--dtype", "float32", "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.output)
    assert [engine["engine"] for engine in made["engines"]] == ["flatbed", "transformers", "vllm"]
    assert made["engines"][2]["needed"] == 1 + 5 * 8
    assert made["workload"]["longest"] == 120


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--workload"),
        (("--workload", "article", "--prompt-tokens", "5"), "--workload"),
        (("--workload", "articles"), "articles"),
        (("--workload", "article", "--memory", "lots"), "lots"),
        (("--workload", "article", "--device", "h300"), "h300"),
        (("--workload", "article", "--memory", "8GiB", "--engine", "sglang"), "sglang"),
        (("--workload", "article", "--memory", "8GiB", "--capacity", "64 bananas"), "bananas"),
        (("--workload", "article", "--memory", "8GiB", "--dtype", "int4"), "int4"),
        (("--workload", "article", "--memory", "8GiB", "--training", "bfloat16", "--optimizer", "lion"), "lion"),
        (("--workload", "article", "--memory", "8GiB", "--token-budget", "0"), "token budget"),
        (("--prompt-tokens", "0", "--memory", "8GiB"), "--prompt-tokens"),
    ],
)
def test_what_cannot_be_planned_is_told_and_exits_with_2(arguments: tuple[str, ...], told: str) -> None:
    result = run("--model", "shape:tiny", *arguments)
    assert result.exit_code == 2
    assert told in result.output


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    result = run("--model", str(tmp_path / "none"), "--workload", "article", "--memory", "8GiB")
    assert result.exit_code == 2
    assert "none" in result.output


def test_verifying_runs_three_settings_on_three_workloads_and_says_what_held() -> None:
    from flatbed.lab.measure import InProcess
    from flatbed.lab.worker import Session

    config = models.load_config("shape:tiny")
    workload = make("article", 509, 2048, scale=0.1)
    made = make_plan(
        "shape:tiny", config, workload, Device("here", GIB), dtype="float32", engines=["flatbed"], capacity="512 tokens"
    )
    loaded = models.load("shape:tiny", "cpu", "float32")
    verdicts = verify(
        made,
        Setup("shape:tiny", "cpu", "float32"),
        workload,
        2048,
        repeats=2,
        spawn=lambda spec, settings, setup: InProcess(Session(spec, settings, setup, loaded=loaded)),
    )
    assert [(v.workload, v.setting) for v in verdicts] == [
        (name, setting)
        for name in ("article", "article, long", "article, concurrent")
        for setting in (HALF, PLANNED, DOUBLE)
    ]
    assert {v.tokens for v in verdicts} == {256, 512, 1024}
    assert all(v.seconds is not None and v.preempted == 0 for v in verdicts)


def test_verifying_tells_a_setting_that_refuses_requests() -> None:
    from flatbed.lab.measure import InProcess
    from flatbed.lab.worker import Session

    config = models.load_config("shape:tiny")
    workload = given_workload(300, 8, 2, vocab_size=509)
    made = make_plan(
        "shape:tiny", config, workload, Device("here", GIB), dtype="float32", engines=["flatbed"], capacity="256 tokens"
    )
    loaded = models.load("shape:tiny", "cpu", "float32")
    with pytest.warns(flatbed.FlatbedWarning):
        verdicts = verify(
            made,
            Setup("shape:tiny", "cpu", "float32"),
            workload,
            2048,
            repeats=2,
            spawn=lambda spec, settings, setup: InProcess(Session(spec, settings, setup, loaded=loaded)),
        )
    planned = {v.workload: v for v in verdicts if v.setting == PLANNED}
    assert not planned["given lengths"].held
    assert "incomplete" in planned["given lengths"].why[0]
    assert planned["given lengths"].seconds is None
    assert planned["given lengths, concurrent"].seconds is not None
    with pytest.raises(ConfigError, match="repeats"):
        verify(made, Setup("shape:tiny", "cpu", "float32"), workload, 2048, repeats=1)
