"""Checks of sampling in steps ahead of the CPU: on a CUDA device by tests/gpu, in emulation by test_graphs.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import VOCABULARY
from transformers import GenerationConfig

import flatbed
from flatbed.sampling.device import Redraw

Params = flatbed.SamplingParams
MakeEngine = Callable[..., flatbed.Engine]


def mixed(tokens: int) -> list[Any]:
    """One of every kind of request. Each draws by a seed of its own or not at all: the engine's would change from call
    to call."""
    return [
        Params(max_new_tokens=tokens, temperature=1.0, seed=1),
        Params(max_new_tokens=tokens - 1, repetition_penalty=1.6),
        Params(max_new_tokens=tokens, temperature=1.3, repetition_penalty=1.4, top_p=0.9, seed=2, n=2, logprobs=True),
        Params(max_new_tokens=tokens - 1, temperature=0.9, top_k=20, seed=3),
        Params(max_new_tokens=tokens - 1, temperature=2.0, min_p=0.05, seed=4),
        GenerationConfig(max_new_tokens=tokens - 1, no_repeat_ngram_size=2, do_sample=False, pad_token_id=0),
        Params(max_new_tokens=tokens - 2),
        Params(max_new_tokens=tokens, temperature=1.1, repetition_penalty=0.8, seed=5, logprobs=True),
    ]


def draw_prompts(count: int, longest: int, seed: int = 8) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def samples(outputs: list[flatbed.Output]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.samples] for output in outputs]


def check_draws(
    ahead: flatbed.Engine,
    behind: flatbed.Engine,
    prompts: list[list[int]],
    params: list[Any],
    after_call: Callable[[], None] = lambda: None,
) -> None:
    """Two calls of the first engine, the second of which finds the graphs, give what the torch sampler gives."""
    wanted = behind.generate(prompts, params)
    for _ in range(2):
        outputs = ahead.generate(prompts, params)
        after_call()
        assert samples(outputs) == samples(wanted)
        for output, theirs in zip(outputs, wanted, strict=True):
            for sample, other in zip(output.samples, theirs.samples, strict=True):
                if other.logprobs is not None:
                    assert sample.logprobs == pytest.approx(other.logprobs, abs=1e-4)
                    assert sample.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-4)
    ahead._scheduler.check()


def check_alone(engine: flatbed.Engine, prompts: list[list[int]], params: list[Any]) -> None:
    """A request draws the same alone and among others."""
    together = samples(engine.generate(prompts, params))
    alone = [samples(engine.generate([p], [how]))[0] for p, how in zip(prompts, params, strict=True)]
    assert together == alone


def check_graph_equals_eager(engine: flatbed.Engine, prompts: list[list[int]], tokens: int) -> None:
    """Each decode step of requests of every kind as a graph, and then launch by launch: the same bits."""
    params = [replace(p, max_new_tokens=tokens, n=1, ignore_eos=True) for p in mixed(9) if isinstance(p, Params)]
    engine._steps.depth = 1
    for prompt, how in zip(prompts, params, strict=False):
        engine.submit(prompt, how)
    engine.step()
    last, bits = engine._runner.last_tokens, engine._sampler.seen.bits
    assert bits is not None
    checked = 0
    while engine.has_work:
        before = last.clone(), bits.clone()
        engine.step()
        (graph,) = engine._steps._graphs._graphs.values()
        assert graph.processing is not None
        after = last.clone(), bits.clone()
        rows = slice(0, min(len(prompts), len(params)))
        drawn = graph.logits[rows].clone(), graph.out[rows].clone()
        with torch.inference_mode():
            last.copy_(before[0])  # the step reads what it has just written over
            bits.copy_(before[1])
            logits, out = graph.run_eagerly()
            views = graph._views
            inputs = (logits, views["temperature"], views["uniform"], views["rows"], last)
            Redraw(*inputs, graph.processing._inputs, bits)(out)
        assert torch.equal(drawn[0], logits[rows])
        assert torch.equal(drawn[1], out[rows])
        assert torch.equal(last[:-1], after[0][:-1])
        assert torch.equal(bits, after[1])
        checked += 1
    assert checked == tokens - 1


def check_penalty(engine: flatbed.Engine, wanted: Callable[[list[int]], list[int]], few: int, tokens: int) -> None:
    """Requests in two waves: what was seen outgrows the memory that graphs were captured over.

    Args:
        wanted: what `generate` makes of a prompt, with a repetition penalty of 1.5 and so many tokens.
        few: requests of the first and last wave; the second has more than eight.
    """
    prompts = draw_prompts(9 + few, 50, seed=10)
    truth = [[wanted(prompt)] for prompt in prompts]
    params = Params(max_new_tokens=tokens, ignore_eos=True, repetition_penalty=1.5)
    under_way: list[int] = []
    first = engine.generate(prompts[:few], params, on_step=lambda: under_way.append(len(engine._flights)))
    assert min(under_way[:-2]) == 1, "the next step was launched before this one was read"
    small = engine._sampler.seen.bits
    many = engine.generate(prompts, params)
    assert engine._sampler.seen.bits is not small
    again = engine.generate(prompts[:few], params)
    assert samples(first) == samples(again) == truth[:few]
    assert samples(many) == truth
