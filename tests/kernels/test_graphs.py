"""Decode steps as graphs, run ahead of the CPU: captured and replayed in emulation, under Triton's interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
sys.path.insert(0, str(Path(__file__).parent))

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a CUDA device is there: set TRITON_INTERPRET=1 to run the interpreter", allow_module_level=True)

from emulated import Graph, emulate, engine
from families import build, reference
from stepping import check_draws, check_graph_equals_eager, check_penalty, draw_prompts, mixed, samples

import flatbed


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_greedy_equals_generate(family: str) -> None:
    model = build(family)
    prompts = draw_prompts(3, 30)
    with engine(model) as made:
        outputs = made.generate(prompts, flatbed.SamplingParams(max_new_tokens=6, ignore_eos=True))
        assert len(made._steps._graphs) == 1
    assert [o.token_ids for o in outputs] == [reference(model, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize(
    "settings", [{"prefix_cache": False}, {"max_requests": 3, "capacity": "12 blocks", "token_budget": 20}]
)
def test_graphs_draw_what_the_torch_sampler_draws(settings: dict[str, Any]) -> None:
    model, prompts = build("llama"), draw_prompts(8, 30)
    made = []
    with flatbed.Engine(model, capacity="64 blocks") as behind, engine(model, **settings) as ahead:
        check_draws(ahead, behind, prompts, mixed(4), after_call=lambda: made.append(Graph.captured))
    assert made[0] == made[1], "the second call captured graphs anew"


def test_graph_equals_eager_bit_for_bit() -> None:
    with engine(build("llama")) as made:
        check_graph_equals_eager(made, draw_prompts(4, 30), 4)


def test_the_penalty_equals_generates_and_does_not_stop_the_run_ahead() -> None:
    model = build("llama")
    with engine(model) as made:
        check_penalty(made, lambda prompt: reference(model, prompt, 5, repetition_penalty=1.5), few=1, tokens=5)


def test_graphs_in_mixed_precision_see_new_weights_and_outlive_the_memory_of_their_casts() -> None:
    model, prompts = build("llama"), draw_prompts(2, 8)
    params = flatbed.SamplingParams(max_new_tokens=4, ignore_eos=True)

    def under_autocast(make: Callable[..., flatbed.Engine]) -> flatbed.Engine:
        with torch.autocast("cpu", torch.bfloat16):
            return make(model, capacity="64 blocks", prefix_cache=False)

    with under_autocast(engine) as ahead:
        first = samples(ahead.generate(prompts, params))
        ahead.release()
        assert ahead.memory().casts == 0
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        captured = Graph.captured
        second = samples(ahead.generate(prompts, params))
        assert Graph.captured == captured
    assert first != second
    with under_autocast(flatbed.Engine) as behind:
        assert samples(behind.generate(prompts, params)) == second
