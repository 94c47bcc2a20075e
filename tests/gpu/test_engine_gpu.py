"""The whole engine on a CUDA device: exactness, graphs, run-ahead, weights."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from families import FAMILIES, VOCABULARY, build

import flatbed
from flatbed.model.steps import DeviceSteps

pytestmark = pytest.mark.gpu
NEW_TOKENS = 24


def _prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(n)] for n in lengths]


def _reference(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_float32_equals_generate(family: str) -> None:
    model = build(family).cuda()
    prompts = _prompts(7, (1, 3, 16, 17, 40, 75))
    prompts.append(list(prompts[4]))
    expected = [_reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    params = flatbed.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    for settings in ({}, {"capacity": "12 blocks", "block_size": 16, "token_budget": 13}):
        with flatbed.Engine(model, **settings) as engine:
            assert isinstance(engine._steps, DeviceSteps)
            assert [o.token_ids for o in engine.generate(prompts, params)] == expected, settings
            assert [o.token_ids for o in engine.generate(prompts, params)] == expected, "a second call"
            assert engine.memory().graphs >= 0
            engine._scheduler.check()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_graph_equals_eager_bit_for_bit(family: str) -> None:
    model = build(family).cuda().bfloat16()
    params = flatbed.SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8, seed=5)
    prompts = _prompts(1, (5, 9, 33))
    checked = 0
    with flatbed.Engine(model) as engine:
        engine._steps.depth = 1
        for prompt in prompts:
            engine.submit(prompt, params)
        engine.step()
        last = engine._runner.last_tokens
        while engine.has_work:
            before = last.clone()
            engine.step()
            (graph,) = engine._steps._graphs._graphs.values()
            logits, out, after = graph.logits.clone(), graph.out.clone(), last.clone()
            last.copy_(before)  # the step reads what it has just written over
            with torch.inference_mode():
                again_logits, again_out = graph.run_eagerly()
            rows = slice(0, len(prompts))
            assert torch.equal(logits[rows], again_logits[rows])
            assert torch.equal(out[rows], again_out[rows])
            last.copy_(after)
            checked += 1
    assert checked == 11


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_mixtures_of_experts_run_as_graphs(family: str) -> None:
    """In bfloat16, where Transformers' grouped product needs nothing of the CPU; in float32 it does."""
    model = build(family).cuda().bfloat16()
    model.set_experts_implementation("grouped_mm")
    params = flatbed.SamplingParams(max_new_tokens=12, ignore_eos=True)
    with flatbed.Engine(model) as engine:
        outputs = engine.generate(_prompts(1, (5, 9, 33)), params)
        assert [len(output.token_ids) for output in outputs] == [12] * 3
        assert engine._steps._graphs.refused is None
        assert len(engine._steps._graphs) == 1


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_mixed_precision(family: str) -> None:
    """float32 weights under bfloat16 autocast: the trainer's own log-probabilities, graphs that outlive the memory of
    the casts, and weights as they are when a call begins."""
    model = build(family).cuda()
    prompts = _prompts(3, (5, 9, 33, 70))
    params = flatbed.SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=1.0, seed=1, logprobs=True)

    def engine() -> flatbed.Engine:
        with torch.autocast("cuda", torch.bfloat16):
            return flatbed.Engine(model, prefix_cache=False)

    with engine() as made:
        fusions = made._runner.fusions
        assert fusions["decoder-layer"] == 2 or fusions["gated-mlp"] == 2
        first = made.generate(prompts, params)
        assert made.memory().casts > 0
        graphs = dict(made._steps._graphs._graphs)
        assert graphs
        made.release()
        assert made.memory().casts == 0
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        second = made.generate(prompts, params)
        assert made._steps._graphs._graphs == graphs
    with engine() as fresh:
        again = fresh.generate(prompts, params)
    assert [o.token_ids for o in second] == [o.token_ids for o in again]
    assert [o.token_ids for o in second] != [o.token_ids for o in first]
    differences = []
    for prompt, output in zip(prompts, second, strict=True):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            ids = torch.tensor([prompt + output.token_ids], device="cuda")
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float().cpu()
        theirs = logits.log_softmax(-1).gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        differences.append((theirs - torch.tensor(output.logprobs)).abs())
    assert torch.cat(differences).mean() < 0.05


def test_bfloat16_logprobs_are_within_the_models_own_spread() -> None:
    model = build("qwen2").cuda().bfloat16()
    prompts = _prompts(2, (20, 35, 50, 64, 90, 128, 11, 30))
    params = flatbed.SamplingParams(max_new_tokens=32, ignore_eos=True, temperature=1.0, logprobs=True, seed=3)
    with flatbed.Engine(model) as engine:
        outputs = engine.generate(prompts, params)

    def own(batch: list[list[int]]) -> list[torch.Tensor]:
        width = max(map(len, batch))
        ids = torch.tensor([b + [0] * (width - len(b)) for b in batch], device="cuda")
        mask = torch.tensor([[1] * len(b) + [0] * (width - len(b)) for b in batch], device="cuda")
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits.float().log_softmax(-1)
        return [logits[i, : len(b) - 1].gather(1, ids[i, 1 : len(b), None])[:, 0] for i, b in enumerate(batch)]

    whole = [p + o.token_ids for p, o in zip(prompts, outputs, strict=True)]
    alone = [own([w])[0] for w in whole]
    together = own(whole)
    exact = [
        torch.tensor(o.raw_logprobs, device="cuda") - a[len(p) - 1 :]
        for p, o, a in zip(prompts, outputs, alone, strict=True)
    ]
    spread = torch.cat([(t - a)[len(p) - 1 :] for p, t, a in zip(prompts, together, alone, strict=True)]).abs()
    ours = torch.cat(exact).abs()
    print(f"engine: mean {ours.mean():.5f} max {ours.max():.5f}")
    print(f"model between batch sizes: mean {spread.mean():.5f} max {spread.max():.5f}")
    assert ours.mean() <= max(3 * spread.mean(), torch.tensor(0.02, device="cuda"))


def test_random_workloads() -> None:
    """200 small workloads with preemption, sharing, sampling and cancellation; greedy results equal those of a request
    alone, and the books balance after every step."""
    model = build("llama").cuda()
    alone: dict[tuple[int, ...], list[int]] = {}
    draw = random.Random(11)
    pool = _prompts(5, (1, 2, 15, 16, 17, 31, 40, 60))
    with flatbed.Engine(model, capacity="64 blocks", block_size=16) as engine:
        for prompt in pool:
            output = engine.generate([prompt], flatbed.SamplingParams(max_new_tokens=40, ignore_eos=True))[0]
            alone[tuple(prompt)] = output.token_ids
    preemptions = 0
    for _ in range(40):
        settings = {
            "capacity": f"{draw.choice([7, 8, 9, 16])} blocks",
            "block_size": 16,
            "token_budget": draw.choice([3, 20, 4096]),
            "schedule": draw.choice(["fifo", "prefill_first"]),
            "max_requests": draw.choice([2, 8, 64]),
        }
        with flatbed.Engine(model, **settings) as engine:
            for _ in range(5):
                prompts = [draw.choice(pool) for _ in range(draw.randint(1, 12))]
                params = [
                    flatbed.SamplingParams(
                        max_new_tokens=draw.randint(1, 40),
                        ignore_eos=True,
                        n=draw.choice([1, 1, 2]),
                        temperature=t,
                        seed=1,
                    )
                    for t in draw.choices([0.0, 0.0, 1.0], k=len(prompts))
                ]
                victim = str(draw.randrange(len(prompts)))

                def step(engine: flatbed.Engine = engine, victim: str = victim) -> None:
                    engine._scheduler.check()
                    if draw.random() < 0.02:
                        engine.cancel(victim)

                names = [str(i) for i in range(len(prompts))]
                outputs = engine.generate(prompts, params, request_ids=names, on_step=step)
                for prompt, wanted, output in zip(prompts, params, outputs, strict=True):
                    for sample in output.samples:
                        if wanted.temperature == 0:
                            assert sample.token_ids == alone[tuple(prompt)][: len(sample.token_ids)]
                        if sample.finish_reason != "cancelled":
                            assert len(sample.token_ids) == wanted.max_new_tokens
            preemptions += engine.stats().preemptions
    assert preemptions > 50


def test_weights_are_followed() -> None:
    model = build("llama").cuda()
    prompts = _prompts(3, (20, 40))
    params = flatbed.SamplingParams(max_new_tokens=10, ignore_eos=True)
    with flatbed.Engine(model) as engine:
        engine.generate(prompts, params)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        assert [o.token_ids for o in engine.generate(prompts, params)] == [_reference(model, p, 10) for p in prompts]
        model.lm_head.weight.data[7] += 3.0
        assert [o.token_ids for o in engine.generate(prompts, params)] == [_reference(model, p, 10) for p in prompts]
        model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.randn(64, 48, device="cuda"))
        assert [o.token_ids for o in engine.generate(prompts, params)] == [_reference(model, p, 10) for p in prompts]
