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
from families import build
from stepping import check_alone, check_draws, check_graph_equals_eager, check_penalty, draw_prompts, mixed

import flatbed
from flatbed.model.steps import DeviceSteps, EagerSteps

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


@pytest.mark.parametrize(
    "settings", [{}, {"capacity": "16 blocks", "block_size": 16, "token_budget": 30}, {"max_requests": 3}]
)
def test_steps_ahead_of_the_cpu_draw_what_the_torch_sampler_draws(settings: dict[str, Any]) -> None:
    model = build("llama").cuda()
    with flatbed.Engine(model) as behind, flatbed.Engine(model, **settings) as ahead:
        behind._steps = EagerSteps(behind._runner, behind._sampler)
        assert isinstance(ahead._steps, DeviceSteps)
        check_draws(ahead, behind, draw_prompts(8, 50), mixed(30))


def test_a_request_draws_the_same_alone_and_among_others() -> None:
    with flatbed.Engine(build("qwen2").cuda()) as engine:
        check_alone(engine, draw_prompts(8, 50, seed=9), mixed(30))


def test_the_penalty_equals_generates_and_does_not_stop_the_run_ahead() -> None:
    model = build("llama").cuda()

    def wanted(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0,
            repetition_penalty=1.5,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    with flatbed.Engine(model) as engine:
        check_penalty(engine, wanted, few=3, tokens=24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_equals_eager_bit_for_bit(dtype: torch.dtype) -> None:
    with flatbed.Engine(build("llama").cuda().to(dtype)) as engine:
        check_graph_equals_eager(engine, draw_prompts(7, 50), 12)
