"""The planner's arithmetic, against numbers worked out by hand. No torch."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from flatbed.errors import ConfigError
from flatbed.lab.engines.base import EngineSpec
from flatbed.lab.plan import arithmetic_of, given_workload, lengths_of
from flatbed.lab.plan_device import CARDS, Training, find_device, known_card
from flatbed.lab.plan_engines import FlatbedArithmetic, TransformersArithmetic, VllmArithmetic
from flatbed.lab.plan_layers import FULL, MLA, SLIDING, AttentionLayer, ModelLayers
from flatbed.lab.plan_simulate import simulate
from flatbed.lab.plan_verify import DOUBLE, HALF, PLANNED, Verdict, conclusions, held, variants
from flatbed.lab.units import told_bytes
from flatbed.lab.workloads import LabRequest, Workload, make

BF16 = 2


def model(*layers: AttentionLayer, **changes: object) -> ModelLayers:
    first = layers[0]
    base: dict[str, object] = {
        "layers": layers,
        "other": (),
        "heads": first.heads,
        "kv_heads": first.kv_heads,
        "head_dim": first.key_dim,
        "hidden_size": 896,
        "vocab_size": 151936,
        "max_positions": 32768,
    }
    return ModelLayers(**{**base, **changes})  # type: ignore[arg-type]


def full(count: int, heads: int = 14, kv_heads: int = 2, dim: int = 64) -> list[AttentionLayer]:
    return [AttentionLayer(FULL, heads, kv_heads, dim, dim)] * count


def sliding(count: int, window: int, heads: int = 14, kv_heads: int = 2, dim: int = 64) -> list[AttentionLayer]:
    return [AttentionLayer(SLIDING, heads, kv_heads, dim, dim, window=window)] * count


QWEN = model(*full(24))  # Qwen2.5-0.5B
# Gemma 3 27B: 62 layers, every sixth is full, 16 K/V heads of 128.
GEMMA = model(*sliding(52, 1024, 32, 16, 128), *full(10, 32, 16, 128), max_positions=131072)
# DeepSeek-V3: 61 layers, 128 heads; keys of 128 + 64, values of 128, out of a latent vector of 512 + 64.
DEEPSEEK = model(*[AttentionLayer(MLA, 128, 128, 192, 128, latent=576, rotary=64)] * 61, head_dim=64)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_a_model_with_one_kind_of_attention_takes_the_same_bytes_a_token_in_every_engine() -> None:
    # 24 layers x 2 heads x (64 + 64) numbers x 2 bytes
    for arithmetic in (FlatbedArithmetic, TransformersArithmetic, VllmArithmetic):
        assert arithmetic(QWEN, BF16).token_bytes == 12_288
    assert FlatbedArithmetic(QWEN, BF16).block_bytes == 12_288 * 32
    assert TransformersArithmetic(QWEN, BF16).block_bytes == 12_288 * 256
    assert VllmArithmetic(QWEN, BF16).block_bytes == 12_288 * 16


def test_mla_is_expanded_by_flatbed_and_kept_as_a_latent_vector_by_others() -> None:
    assert FlatbedArithmetic(DEEPSEEK, BF16).token_bytes == 61 * 128 * (192 + 128) * 2
    vllm = VllmArithmetic(DEEPSEEK, BF16)
    assert vllm.token_bytes == 576 * 2 * 61 == 70_272
    assert vllm.block_tokens == 64
    assert vllm.block_bytes == 64 * 70_272
    transformers = TransformersArithmetic(DEEPSEEK, BF16)
    assert transformers.token_bytes == 70_272
    assert transformers.block_bytes == 256 * 70_272
    assert transformers.max_blocks_per_request == 32


def test_transformers_is_said_not_to_run_what_its_cache_has_no_room_for() -> None:
    assert "latent" in (TransformersArithmetic(DEEPSEEK, BF16, version="5.24.0").refusal or "")
    assert TransformersArithmetic(DEEPSEEK, BF16, version="5.25.0").refusal is None
    assert TransformersArithmetic(DEEPSEEK, BF16, version="6.0.0.dev0").refusal is None
    several = model(*full(2, dim=64), *full(2, dim=128), head_dim=None)
    assert "several" in (TransformersArithmetic(several, BF16).refusal or "")
    assert TransformersArithmetic(QWEN, BF16).refusal is None


def test_vllm_puts_layers_into_groups_of_equal_size_and_counts_blocks_for_each() -> None:
    # 52 sliding and 10 full layers: groups of 10, of which the full layers are one and the sliding ones ceil(52 / 10).
    vllm = VllmArithmetic(GEMMA, BF16, token_budget=8192)
    page = 16 * 16 * (128 + 128) * 2  # tokens x heads x numbers x bytes
    assert sorted(len(group) for group in vllm.groups) == [8, 8, 9, 9, 9, 9, 10]
    assert vllm.block_bytes == 10 * page
    # A short request takes a block of each group for each 16 tokens, and one block of the pool is never used.
    assert vllm.needed({100: 1}) == 1 + 7 * 7
    # A long one keeps all of the full group, and of the sliding ones (window - 1 + budget) tokens and one block.
    assert vllm.needed({32_000: 1}) == 1 + 2000 + 6 * (-(-(1023 + 8192) // 16) + 1)


def test_layers_that_differ_by_less_than_half_are_padded_to_one_group_each() -> None:
    # gpt-oss with an extra layer, as vLLM's own comment has it: 12 sliding and 13 full.
    vllm = VllmArithmetic(model(*sliding(12, 128), *full(13)), BF16)
    assert sorted(len(group) for group in vllm.groups) == [12, 13]


def test_vllm_makes_pages_of_one_size_out_of_layers_of_several() -> None:
    # Full layers of twice the size: sliding ones get blocks of twice the tokens.
    vllm = VllmArithmetic(model(*sliding(4, 64, dim=64), *full(4, dim=128), head_dim=None), BF16)
    assert {spec.block_size for group in vllm.groups for spec in group if spec.kind == SLIDING} == {32}
    assert {spec.page_bytes for group in vllm.groups for spec in group} == {16 * 2 * 256 * 2}
    odd = VllmArithmetic(model(*sliding(4, 64, dim=96), *full(4, dim=128), head_dim=None), BF16)
    assert "one size" in (odd.refusal or "")


def test_layers_that_share_kv_take_no_room_in_vllm_and_all_of_it_in_transformers() -> None:
    shared = AttentionLayer(FULL, 14, 2, 64, 64, shared=True)
    both = model(*full(2), shared, shared)
    assert VllmArithmetic(both, BF16).token_bytes == 2 * 512
    assert TransformersArithmetic(both, BF16).token_bytes == 4 * 512


def test_transformers_hands_memory_to_attention_types_in_sectors() -> None:
    # A page of 256 tokens in one layer: 2 x 16 x 128 numbers x 2 bytes x 256.
    page = 2 * 16 * 128 * 2 * 256
    hybrid = TransformersArithmetic(GEMMA, BF16)
    assert hybrid.sector_bytes == 260 * page  # lcm(52, 10) pages: 5 sliding blocks or 26 full ones
    assert hybrid.sectors(1) == 1
    assert hybrid.sectors(100) == -(-100 * 62 // 260)
    assert hybrid.allocated(100) == (24 + 2) * 260 * page
    # One request of 32,000 tokens: 125 full blocks are 5 sectors; 4 pages of window are 4 sliding blocks, one sector.
    blocks = hybrid.needed({32_000: 1})
    assert hybrid.sectors(blocks) == 6
    assert hybrid.sectors(blocks - 1) == 5


# ---- what fits -------------------------------------------------------------------------------------------------------


def test_64_blocks_hold_16384_tokens_and_16_requests_of_1024() -> None:
    for arithmetic in (FlatbedArithmetic(QWEN, BF16), TransformersArithmetic(QWEN, BF16), VllmArithmetic(QWEN, BF16)):
        blocks = arithmetic.blocks_of(64 * 256)
        assert arithmetic.tokens(blocks) == 16_384
        assert arithmetic.at_once(blocks, 1024) == 16
        assert arithmetic.needed({1024: 16}) <= blocks < arithmetic.needed({1024: 17})
        # Flatbed keeps no room for the last token, which nothing attends to.
        assert arithmetic.longest(blocks) == (16_385 if arithmetic.name == "flatbed" else 16_384)


@pytest.mark.parametrize("layers", [QWEN, GEMMA, DEEPSEEK], ids=["qwen", "gemma", "deepseek"])
@pytest.mark.parametrize("kind", [FlatbedArithmetic, TransformersArithmetic, VllmArithmetic])
def test_the_most_blocks_that_fit_do_and_one_more_does_not(kind: type, layers: ModelLayers) -> None:
    arithmetic = kind(layers, BF16)
    for memory in (10**9, 40 * 2**30, 123_456_789_012):
        blocks = arithmetic.most_blocks(memory)
        if blocks:
            assert arithmetic.allocated(blocks) + arithmetic.buffers(blocks) <= memory
        assert arithmetic.allocated(blocks + 1) + arithmetic.buffers(blocks + 1) > memory


def test_without_flash_attention_a_mask_spans_the_token_budget_and_the_whole_pool() -> None:
    flash, sdpa = (TransformersArithmetic(QWEN, BF16, token_budget=8192, flash=f) for f in (True, False))
    assert flash.mask_bytes(1000) == 0
    assert sdpa.mask_bytes(1000) == 8192 * (256_000 + 8192) * 2
    assert sdpa.most_blocks(80 * 2**30) < flash.most_blocks(80 * 2**30)
    assert any("mask" in said for said in sdpa.remarks(1000, 10))


def test_transformers_gets_the_margin_that_its_scheduler_keeps_free() -> None:
    assert TransformersArithmetic(QWEN, BF16).wanted(85) == 100
    assert VllmArithmetic(QWEN, BF16).wanted(85) == 85
    assert FlatbedArithmetic(QWEN, BF16).wanted(85) is None


# ---- workloads and the simulation ------------------------------------------------------------------------------------


def test_lengths_are_those_of_the_samples_and_of_no_more_than_run_at_once() -> None:
    prompts = Workload("some", (LabRequest([1, 2, 3], 5), LabRequest([1, 2], 6)), n=3)
    assert lengths_of(prompts) == Counter({8: 6})
    many = Workload("many", tuple(LabRequest([1] * (1 + i % 7), 4) for i in range(3000)))
    assert sum(lengths_of(many).values()) == 1024
    assert max(lengths_of(many)) == 11


def test_a_workload_of_given_lengths_has_a_different_prompt_for_each_request() -> None:
    workload = given_workload(10, 4, 50, 2, vocab_size=100)
    assert len({tuple(request.prompt) for request in workload.requests}) == 50
    assert {len(request.prompt) for request in workload.requests} == {10}
    assert all(0 <= token < 100 for request in workload.requests for token in request.prompt)
    assert workload.tokens == 50 * 4 * 2
    for bad in ((0, 4, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            given_workload(*bad, vocab_size=100)


def test_the_simulation_counts_steps_blocks_and_preemptions() -> None:
    one = Workload("one", (LabRequest([1] * 40, 10),))
    alone = simulate(one, block_size=8, token_budget=16, max_requests=4)
    assert (alone.steps, alone.live_blocks, alone.running) == (3 + 9, 7, 1)  # 49 positions: 7 blocks
    article = make("article", 151936, 32768)
    plenty = simulate(article, block_size=32, token_budget=8192, max_requests=1024)
    assert (plenty.steps, plenty.live_blocks, plenty.running) == (128, article.smallest_blocks(32), 64)
    scarce = simulate(article, block_size=32, token_budget=8192, max_requests=1024, blocks=100)
    assert scarce.live_blocks <= 100
    assert scarce.running < 64
    assert scarce.steps > plenty.steps
    short = simulate(article, block_size=32, token_budget=8192, max_requests=1024, blocks=5)
    assert short.refused == sum(len(r.prompt) + 127 > 160 for r in article.requests) > 0


def test_samples_of_a_prompt_share_its_blocks_in_the_simulation() -> None:
    rollout = make("rollout", 151936, 32768)
    shared = simulate(rollout, block_size=32, token_budget=8192, max_requests=1024)
    # 200 tokens are 6 whole blocks, shared by 16 samples; each sample has the rest of 711 positions for itself.
    assert shared.live_blocks == 8 * (6 + 16 * (-(-711 // 32) - 6))
    assert shared.live_blocks < rollout.smallest_blocks(32)


# ---- device and training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "card"),
    [
        ("H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("A100", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("L40S", "l40s"),
    ],
)
def test_cards_are_known_by_what_people_and_drivers_call_them(written: str, card: str) -> None:
    assert known_card(written) == card
    assert find_device(written, None).memory == CARDS[card] * 2**20


def test_devices_that_cannot_be_are_told() -> None:
    assert known_card("cuda:0") is None
    assert find_device(None, "80GiB").memory == 80 * 2**30
    assert find_device("my card", "80 GB").memory == 80 * 10**9
    for bad in ("80 blocks", "50%"):
        with pytest.raises(ConfigError, match="--memory"):
            find_device(None, bad)


def test_training_takes_gradients_and_two_states_in_the_dtype_of_the_weights() -> None:
    adam = Training.of(1000, "float32", "adamw", 1.0)
    assert (adam.gradients, adam.states, adam.bytes) == (4000, 8000, 12000)
    assert Training.of(1000, "bfloat16", "adamw", 1.0).bytes == 2000 + 4000
    assert Training.of(1000, "bfloat16", "adamw-8bit", 1.0).states == 2000
    assert Training.of(1000, "float32", "sgd", 1.0).states == 0
    lora = Training.of(1000, "bfloat16", "adamw", 0.01)
    assert (lora.trained, lora.bytes) == (10, 60)
    for wrong, named in ((("adam2", 1.0), "adam2"), (("adamw", 0.0), "share")):
        with pytest.raises(ConfigError, match=named):
            Training.of(1000, "bfloat16", *wrong)


def test_engines_that_cannot_be_planned_are_told() -> None:
    workload = given_workload(10, 10, 4, vocab_size=100)
    with pytest.raises(ConfigError, match="nonsense"):
        arithmetic_of(EngineSpec.parse("nonsense"), QWEN, BF16, 8192, workload)
    small = arithmetic_of(EngineSpec.parse("transformers:sdpa,page_size=64"), QWEN, BF16, 512, workload)
    assert isinstance(small, TransformersArithmetic)
    assert (small.block_tokens, small.flash, small.token_budget, small.max_requests) == (64, False, 512, 4)


# ---- --verify --------------------------------------------------------------------------------------------------------


def test_the_variants_have_about_as_many_tokens_as_the_workload() -> None:
    article = make("article", 151936, 32768)
    same, long, concurrent = variants(article, 32768)
    assert same is article
    assert (len(long.requests), len(concurrent.requests)) == (8, 256)
    assert [len(r.prompt) for r in long.requests] == [8 * len(r.prompt) for r in article.requests[:8]]
    assert max(r.new_tokens for r in concurrent.requests) == 32
    assert 0.5 < concurrent.prompt_tokens / article.prompt_tokens <= 1
    assert len({tuple(r.prompt) for r in concurrent.requests}) > 250  # no prefix cache answers one from another


def test_the_long_variant_is_cut_to_the_models_positions() -> None:
    workload = given_workload(300, 100, 16, vocab_size=500)
    assert {len(r.prompt) + r.new_tokens for r in variants(workload, 1000)[1].requests} == {1000}


def verdict(setting: str, workload: str = "w", held_: bool = True, why: tuple[str, ...] = ()) -> Verdict:
    return Verdict("flatbed", workload, setting, 1000, 1.0, 1.0, 0, held_, why)


def test_only_the_planned_setting_decides_whether_a_plan_held() -> None:
    good = [verdict(HALF, held_=False, why=("2 times",)), verdict(PLANNED), verdict(DOUBLE)]
    assert held(good)
    assert conclusions(good) == ["flatbed, 1,000 tokens: held on w"]
    mixed = [*good, verdict(PLANNED, "v", False, ("3 preempted",))]
    assert not held(mixed)
    assert conclusions(mixed) == ["flatbed, 1,000 tokens: held on w, did not hold on v (3 preempted)"]


# ---- small things ----------------------------------------------------------------------------------------------------


def test_bytes_are_told_with_a_unit_that_suits_them() -> None:
    assert [told_bytes(n) for n in (0, 1023, 1536, 3 * 2**30, -(2**21), 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "-2.0 MiB",
        "5.0 TiB",
    ]


def test_planning_from_layers_imports_no_torch() -> None:
    code = (
        "import sys, flatbed.lab.plan, flatbed.lab.plan_verify, flatbed.lab.plan_render, flatbed.lab.trace_events\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
