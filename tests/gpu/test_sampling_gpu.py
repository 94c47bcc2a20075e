"""Sampling on a CUDA device: compiled kernels, graphs, run-ahead. The features one by one: tests/kernels."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from drawing import Rows, check, processed, random_rows
from families import VOCABULARY, build
from transformers import GenerationConfig

import flatbed
from flatbed.model.steps import DeviceSteps, EagerSteps
from flatbed.sampling.device import Redraw

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _by_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceSteps, "processes", True)


Params = flatbed.SamplingParams
LARGE = 151_936
# Sums over a large vocabulary in float32.
TOLERANCE = 1e-4


# ---- the kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocabulary", [33, 5003, LARGE])
def test_rows_of_mixed_parameters(vocabulary: int, dtype: torch.dtype) -> None:
    rows = random_rows(40, vocabulary, seed=vocabulary, dtype=dtype, device="cuda")
    check(rows, rows.on_device(), rows.uniform(), TOLERANCE)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = random_rows(33, LARGE, seed=1, dtype=torch.bfloat16, device="cuda")
    together = rows.on_device()
    order = list(range(33))
    random.Random(0).shuffle(order)
    shuffled = Rows(rows.logits[order], [rows.params[i] for i in order], [rows.prompts[i] for i in order])
    assert torch.equal(shuffled.on_device(), together[order])
    for i in range(0, 33, 4):
        alone = Rows(rows.logits[i : i + 1], [rows.params[i]], [rows.prompts[i]])
        assert torch.equal(alone.on_device()[0], together[i]), rows.params[i]


def test_rows_that_ask_for_nothing_are_drawn_by_the_plain_kernels_alone() -> None:
    rows = random_rows(20, LARGE, seed=2, dtype=torch.bfloat16, device="cuda")
    plain = list(range(0, 20, 2))
    for i in plain:
        rows.params[i] = Params(temperature=i % 3 / 2, seed=i)
    mixed = Rows(rows.logits, rows.params, rows.prompts).on_device()
    only = Rows(rows.logits[plain], [rows.params[i] for i in plain], [rows.prompts[i] for i in plain])
    assert torch.equal(only.on_device(), mixed[plain])


@pytest.mark.parametrize(
    "params",
    [
        Params(temperature=1.0),
        Params(temperature=1.3, top_k=40, min_p=0.01),
        Params(temperature=1.0, top_p=0.9),
        Params(temperature=1.5, top_p=0.95, repetition_penalty=1.3),
        Params(temperature=1.0, repetition_penalty=0.7),
    ],
)
def test_draws_come_in_proportion_to_their_probability(params: Params) -> None:
    count, vocabulary = 20_000, 3000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)).to("cuda") * 2
    rows = Rows(
        logits[None].expand(count, vocabulary).contiguous(),
        [replace(params, seed=i) for i in range(count)],
        [[3]] * count,
    )
    seen = np.bincount(rows.on_device()[:, 0].cpu().numpy(), minlength=vocabulary).astype(float)
    wanted = processed(rows, 0).exp().numpy() * count
    assert seen[wanted == 0].sum() == 0
    often = wanted >= 5
    freedom = int(often.sum()) - 1
    statistic = float(((seen - wanted)[often] ** 2 / wanted[often]).sum())
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_end_their_row_alone(poison: float) -> None:
    rows = random_rows(12, LARGE, seed=4, dtype=torch.bfloat16, device="cuda")
    rows.logits = torch.randn(12, LARGE, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    alone = rows.on_device()
    bad, fine = [1, 4, 5, 8, 11], [0, 2, 3, 6, 7, 9, 10]
    broken = random_rows(12, LARGE, seed=4, dtype=torch.bfloat16, device="cuda")
    broken.logits = rows.logits.clone()
    for at in bad:
        broken.logits[at, slice(None) if poison == -torch.inf else 12_345 * at] = poison
    out = broken.on_device()
    assert out[bad, :2].tolist() == [[0, 0]] * len(bad)
    assert torch.equal(out[fine], alone[fine])


# ---- the engine ------------------------------------------------------------------------------------------------------

MIXED: list[Any] = [
    Params(max_new_tokens=40, temperature=1.0, seed=1),
    Params(max_new_tokens=30, repetition_penalty=1.6),
    Params(max_new_tokens=40, temperature=1.3, repetition_penalty=1.4, top_p=0.9, seed=2, n=3, logprobs=True),
    Params(max_new_tokens=35, temperature=0.9, top_k=20, seed=3),
    Params(max_new_tokens=35, temperature=2.0, min_p=0.05, seed=4),
    GenerationConfig(max_new_tokens=25, no_repeat_ngram_size=2, do_sample=True, temperature=1.5, pad_token_id=0),
    Params(max_new_tokens=20),
    Params(max_new_tokens=30, temperature=1.1, repetition_penalty=0.8, seed=5, logprobs=True),
]


def _prompts(count: int, seed: int = 8) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 50))] for _ in range(count)]


def _samples(outputs: list[flatbed.Output]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.samples] for output in outputs]


@pytest.mark.parametrize(
    "settings", [{}, {"capacity": "16 blocks", "block_size": 16, "token_budget": 30}, {"max_requests": 3}]
)
def test_steps_ahead_of_the_cpu_draw_what_the_torch_sampler_draws(settings: dict[str, Any]) -> None:
    model = build("llama").cuda()
    prompts = _prompts(len(MIXED))
    with flatbed.Engine(model) as behind:
        behind._steps = EagerSteps(behind._runner, behind._sampler)
        wanted = behind.generate(prompts, MIXED)
    with flatbed.Engine(model, **settings) as ahead:
        assert isinstance(ahead._steps, DeviceSteps)
        for _ in range(2):  # the second call finds the graphs
            outputs = ahead.generate(prompts, MIXED)
            assert _samples(outputs) == _samples(wanted)
        ahead._scheduler.check()
    for output, theirs in zip(outputs, wanted, strict=True):
        for sample, other in zip(output.samples, theirs.samples, strict=True):
            if other.logprobs is not None:
                assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-4)
                assert sample.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-4)


def test_a_request_draws_the_same_alone_and_among_others() -> None:
    model = build("qwen2").cuda()
    prompts = _prompts(len(MIXED), seed=9)
    with flatbed.Engine(model) as engine:
        together = _samples(engine.generate(prompts, MIXED))
        alone = [_samples(engine.generate([p], [how]))[0] for p, how in zip(prompts, MIXED, strict=True)]
    assert together == alone


def test_the_penalty_equals_generates_and_does_not_stop_the_run_ahead() -> None:
    """Twenty requests in two waves: what was seen outgrows the memory that graphs were captured over."""
    model = build("llama").cuda()
    prompts = _prompts(20, seed=10)
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0,
            repetition_penalty=1.5,
        )  # fmt: skip
        wanted.append(out[0, len(prompt) :].tolist())
    params = Params(max_new_tokens=24, ignore_eos=True, repetition_penalty=1.5)
    under_way: list[int] = []
    with flatbed.Engine(model) as engine:
        few = engine.generate(prompts[:3], params, on_step=lambda: under_way.append(len(engine._flights)))
        assert min(under_way[:-2]) == 1, "the next step was launched before this one was read"
        small = engine._sampler.seen.bits
        many = engine.generate(prompts, params)
        assert engine._sampler.seen.bits is not small
        again = engine.generate(prompts[:3], params)
    assert _samples(few) == _samples(again) == [[tokens] for tokens in wanted[:3]]
    assert _samples(many) == [[tokens] for tokens in wanted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_equals_eager_bit_for_bit(dtype: torch.dtype) -> None:
    model = build("llama").cuda().to(dtype)
    params = [replace(p, max_new_tokens=12, n=1, ignore_eos=True) for p in MIXED if isinstance(p, Params)]
    checked = 0
    with flatbed.Engine(model) as engine:
        engine._steps.depth = 1
        for prompt, how in zip(_prompts(len(params)), params, strict=True):
            engine.submit(prompt, how)
        engine.step()
        last, bits = engine._runner.last_tokens, engine._sampler.seen.bits
        assert bits is not None
        while engine.has_work:
            before = last.clone(), bits.clone()
            engine.step()
            (graph,) = engine._steps._graphs._graphs.values()
            assert graph.processing is not None
            after = last.clone(), bits.clone()
            with torch.inference_mode():
                last.copy_(before[0])  # the step reads what it has just written over
                bits.copy_(before[1])
                logits, out = graph.run_eagerly()
                views = graph._views
                inputs = (logits, views["temperature"], views["uniform"], views["rows"], last)
                Redraw(*inputs, graph.processing._inputs, bits)(out)
            rows = slice(0, len(params))
            assert torch.equal(graph.logits[rows], logits[rows])
            assert torch.equal(graph.out[rows], out[rows])
            assert torch.equal(last[:-1], after[0][:-1])
            assert torch.equal(bits, after[1])
            checked += 1
    assert checked == 11
