"""`deterministic=True` on the CPU: a request's tokens and log-probabilities are the same bits in any company."""

from __future__ import annotations

import functools
import json
import random
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import build
from tiny import assert_idle, changes, draw_prompts, expected, shared, snapshot, tokens_of
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from typer.testing import CliRunner

import flatbed
from flatbed.attention.torch_reference import TorchAttention
from flatbed.cli import app
from flatbed.errors import BackendUnavailableError, ConfigError, UnsupportedModelError
from flatbed.model.deterministic import products as invariant_products
from flatbed.model.deterministic.attention import InvariantTorchAttention, choose_invariant
from flatbed.model.deterministic.elementwise import tail_free
from flatbed.model.deterministic.products import Products
from flatbed.sampling.sampler import Sampler

# Around the ends of tiles of 64 keys, of blocks of 16 and 32, and of the window of 24; the last is a twin.
LENGTHS = (1, 5, 17, 40, 63, 64, 65, 130)
PROMPTS = [*draw_prompts(LENGTHS, seed=8), draw_prompts(LENGTHS, seed=8)[6]]
PARAMS = [
    flatbed.SamplingParams(
        max_new_tokens=14 + i, ignore_eos=True, logprobs=True, seed=i, temperature=temperature, top_p=top_p, top_k=top_k
    )
    for i, (temperature, top_p, top_k) in enumerate(
        [
            *[(0.0, 1, 0), (1.0, 1, 0), (0.0, 1, 0), (0.7, 0.9, 0), (1.0, 1, 5)],
            *[(0.0, 1, 0), (1.0, 0.8, 0), (1.3, 1, 0), (0.0, 1, 0)],
        ]
    )
]  # fmt: skip


def bits(output: flatbed.Output) -> Any:
    """Everything of a request that must not depend on others; floats compare as they are."""
    assert output.error is None
    return [(sample.token_ids, sample.logprobs, sample.raw_logprobs) for sample in output.samples]


@functools.cache
def alone(family: str) -> list[Any]:
    """Each request by itself, in an engine with default settings."""
    with flatbed.Engine(shared(family), deterministic=True, prefix_cache=False) as engine:
        return [bits(engine.generate([prompt], one)[0]) for prompt, one in zip(PROMPTS, PARAMS, strict=True)]


def together(engine: flatbed.Engine, order: list[int]) -> list[Any]:
    """All requests in one call, in this order; results in the order of PROMPTS."""
    outputs = engine.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    found = {i: bits(output) for i, output in zip(order, outputs, strict=True)}
    return [found[i] for i in range(len(PROMPTS))]


EVERYONE = list(range(len(PROMPTS)))


FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "mixtral", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    """One batch; odd chunks, few blocks and so preemptions; the other schedule; and a second call out of the cache."""
    with flatbed.Engine(shared(family), deterministic=True) as engine:
        assert together(engine, EVERYONE) == alone(family)
        assert together(engine, EVERYONE[::-1]) == alone(family), "prompts out of the prefix cache"
        assert engine.stats().cached_tokens > sum(LENGTHS) / 2
    settings = {"block_size": 4, "capacity": "40 blocks", "token_budget": 31}
    with flatbed.Engine(shared(family), deterministic=True, **settings) as engine:
        assert together(engine, EVERYONE) == alone(family)
        assert engine.stats().preemptions > 0
        assert_idle(engine)
    settings = {"token_budget": 37, "schedule": "prefill_first", "prefix_cache": False, "max_requests": 4}
    with flatbed.Engine(shared(family), deterministic=True, **settings) as engine:
        assert together(engine, EVERYONE[::-1]) == alone(family)


@pytest.mark.parametrize("seed", range(6))
def test_random_compositions(seed: int) -> None:
    draw = random.Random(seed)
    settings = {
        "block_size": draw.choice([5, 16, 32]),
        "token_budget": draw.choice([2, 7, 50, 300]),
        "schedule": draw.choice(["fifo", "prefill_first"]),
        "prefix_cache": draw.random() < 0.5,
    }
    smallest = -(-(max(LENGTHS) + 25) // settings["block_size"])
    with flatbed.Engine(
        shared("llama"), deterministic=True, capacity=f"{smallest + draw.randrange(10)} blocks", **settings
    ) as engine:
        for _ in range(2):
            some = [draw.randrange(len(PROMPTS)) for _ in range(draw.randrange(2, 9))]
            outputs = engine.generate([PROMPTS[i] for i in some], [PARAMS[i] for i in some])
            assert [bits(output) for output in outputs] == [alone("llama")[i] for i in some], settings


def test_requests_that_come_and_go() -> None:
    """Submitted step by step beside others that are cancelled."""
    with flatbed.Engine(shared("llama"), deterministic=True, token_budget=40) as engine:
        outputs = {}
        for i in EVERYONE:
            outputs[i] = engine.submit(PROMPTS[i], PARAMS[i])
            engine.submit(PROMPTS[-1 - i], replace(PARAMS[i], max_new_tokens=50), request_id=f"victim {i}")
            engine.step()
            engine.step()
            if i % 2:
                engine.cancel(f"victim {i}")
        while engine.has_work:
            engine.step()
    assert [bits(outputs[i]) for i in EVERYONE] == alone("llama")


def test_samples_of_one_request_are_those_of_their_seed_alone() -> None:
    params = flatbed.SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=True, temperature=1.0, n=5, seed=3)
    with flatbed.Engine(shared("llama"), deterministic=True) as engine:
        first = bits(engine.generate([PROMPTS[3]], params)[0])
    with flatbed.Engine(shared("llama"), deterministic=True, token_budget=3, max_requests=2) as engine:
        assert bits(engine.generate([PROMPTS[3]], params)[0]) == first
    assert len({tuple(tokens) for tokens, _, _ in first}) > 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral"])
def test_greedy_tokens_are_those_of_generate(family: str) -> None:
    with flatbed.Engine(shared(family), deterministic=True, token_budget=50) as engine:
        outputs = engine.generate(PROMPTS, flatbed.SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert tokens_of(outputs) == expected(family, PROMPTS, 12)


# ---- that these tests can fail ---------------------------------------------------------------------------------------


def test_without_it_bits_depend_on_the_batch() -> None:
    with flatbed.Engine(shared("llama"), prefix_cache=False) as engine:
        by_itself = [bits(engine.generate([p], one)[0]) for p, one in zip(PROMPTS, PARAMS, strict=True)]
        assert together(engine, EVERYONE) != by_itself


@pytest.mark.parametrize("part", ["products", "attention"])
def test_without_one_part_bits_depend_on_the_batch(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if part == "products":
        monkeypatch.setattr(Products, "_library_rows", lambda self, x, weight: invariant_products._library(x, weight))
        with pytest.raises(UnsupportedModelError, match="other numbers in a batch of"):
            flatbed.Engine(shared("llama"), deterministic=True)
        monkeypatch.setattr("flatbed.model.runner.check_rows", lambda *args: None)
    else:
        # The reference backend within the mode: its products of two results would be refused.
        monkeypatch.setattr("flatbed.engine.choose_invariant", lambda name, device: _PausedReference())
    with flatbed.Engine(shared("llama"), deterministic=True, prefix_cache=False, token_budget=20) as engine:
        by_itself = [bits(engine.generate([p], one)[0]) for p, one in zip(PROMPTS, PARAMS, strict=True)]
        assert together(engine, EVERYONE) != by_itself


class _PausedReference(TorchAttention):
    def attend(self, *args: Any) -> torch.Tensor:
        with _disable_current_modes():
            return super().attend(*args)


# ---- what is refused -------------------------------------------------------------------------------------------------


def changed(forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    """A llama whose second MLP has another forward."""
    model = build("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = types.MethodType(forward, mlp)
    return model


REFUSED = {
    "an unknown operator": (lambda mlp, x: torch.fft.rfft(x).real.repeat(1, 1, 2)[..., :48], "aten::_fft_r2c"),
    "a product of two results": (lambda mlp, x: (x @ x.transpose(1, 2)) @ x, "aten::bmm"),
    "attention of its own": (lambda mlp, x: F.scaled_dot_product_attention(x, x, x), "aten::(bmm|_scaled_dot)"),
    "a sum over everything": (lambda mlp, x: x - x.sum(), "aten::sum"),
    "a mean over the tokens": (lambda mlp, x: x - x.mean(1, keepdim=True), "other numbers in a batch of"),
    "a cumulative sum": (lambda mlp, x: x.cumsum(1), "aten::cumsum"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_operator(name: str) -> None:
    forward, told = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=told) as raised:
        flatbed.Engine(changed(forward), deterministic=True)
    assert "LlamaForCausalLM" in str(raised.value)
    assert "deterministic=True" in str(raised.value)


def test_other_products_with_weights_are_not_refused() -> None:
    """The weights first, taken apart by einsum, in a batch of products, and copied into another dtype and back."""

    def forward(mlp: Any, x: torch.Tensor) -> torch.Tensor:
        gate = torch.mm(mlp.gate_proj.weight, x[0].t()).t()
        up = torch.einsum("bti,oi->bto", x, mlp.up_proj.weight.double().float())
        return torch.bmm(F.silu(gate) * up, mlp.down_proj.weight.t()[None])

    def greedy(model: nn.Module) -> list[list[int]]:
        with flatbed.Engine(model, deterministic=True) as engine:
            return tokens_of(engine.generate(PROMPTS[:4], flatbed.SamplingParams(max_new_tokens=6, ignore_eos=True)))

    assert greedy(changed(forward)) == greedy(shared("llama"))


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_setting_is_true_or_false(value: object) -> None:
    with pytest.raises(ConfigError, match="deterministic must be True or False"):
        flatbed.Engine(shared("llama"), deterministic=value)  # type: ignore[arg-type]


def test_backends_without_a_fixed_order_are_refused() -> None:
    assert flatbed.EngineConfig.deterministic is False
    with flatbed.Engine(shared("llama"), deterministic=True, attention="torch") as engine:
        assert isinstance(engine._backend, InvariantTorchAttention)
    with pytest.raises(BackendUnavailableError, match="CUDA"):
        flatbed.Engine(shared("llama"), deterministic=True, attention="triton")
    with pytest.raises(ConfigError, match="auto, triton or torch"):
        flatbed.Engine(shared("llama"), deterministic=True, attention="flash")
    with pytest.raises(BackendUnavailableError, match="no fixed order of operations"):
        choose_invariant("auto", torch.device("mps"))


# ---- the model, its weights, and the other ways in -------------------------------------------------------------------


def test_the_model_is_left_as_it_was_and_its_weights_are_followed() -> None:
    model = build("llama")
    before = snapshot(model)
    with flatbed.Engine(model, deterministic=True) as engine:
        assert together(engine, EVERYONE) == alone("llama")
        assert changes(before, model) == []
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        second = together(engine, EVERYONE)
    assert second != alone("llama")
    with flatbed.Engine(model, deterministic=True, token_budget=11) as engine:
        assert together(engine, EVERYONE[::-1]) == second


def test_install() -> None:
    model = build("llama")
    flatbed.install(model, deterministic=True)
    config = model.generation_config
    config.do_sample, config.max_new_tokens = False, 10
    results = model.generate_batch(PROMPTS)
    each = [next(iter(model.generate_batch([prompt]).values())) for prompt in PROMPTS]
    assert [r.generated_tokens for r in results.values()] == [r.generated_tokens for r in each]
    assert isinstance(model.generate_batch.engine({"deterministic": True})._backend, InvariantTorchAttention)
    flatbed.uninstall(model)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatbed.cli.load_model", lambda name, device, dtype: (shared("llama"), None))

    def run(name: str, prompts: list[list[int]]) -> list[Any]:
        file, out = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-out.jsonl"
        lines = [json.dumps({"id": str(prompt), "token_ids": prompt}) for prompt in prompts]
        file.write_text("\n".join(lines) + "\n")
        options = ["--model", "tiny", "--device", "cpu", "--max-new-tokens", "8", "--temperature", "1", "--logprobs"]
        result = CliRunner().invoke(
            app, ["generate", str(file), "--out", str(out), "--deterministic", "--ignore-eos", *options]
        )
        assert result.exit_code == 0, result.output
        records = {record["id"]: record for record in map(json.loads, out.read_text().splitlines())}
        return [(records[str(prompt)]["token_ids"], records[str(prompt)]["logprobs"]) for prompt in prompts]

    some = PROMPTS[2:6]
    assert run("together", some) == [run(f"alone-{i}", [prompt])[0] for i, prompt in enumerate(some)]


def test_bfloat16() -> None:
    model = build("qwen2").bfloat16()
    with flatbed.Engine(model, deterministic=True, prefix_cache=False) as engine:
        each = [bits(engine.generate([prompt], one)[0]) for prompt, one in zip(PROMPTS, PARAMS, strict=True)]
    with flatbed.Engine(model, deterministic=True, token_budget=19) as engine:
        assert together(engine, EVERYONE) == each


def test_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine = flatbed.Engine(shared("llama"), deterministic=True, prefix_cache=False, token_budget=19)
    with engine:
        each = [bits(engine.generate([prompt], one)[0]) for prompt, one in zip(PROMPTS, PARAMS, strict=True)]
        assert together(engine, EVERYONE) == each


# ---- the parts -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


WEIGHTS = {
    "linear": lambda: torch.randn(211, 48).t(),
    "conv1d": lambda: torch.randn(48, 211),
    "one expert of several": lambda: torch.randn(3, 48, 211)[1],
    "not aligned": lambda: torch.randn(211 * 48 + 1)[1:].view(211, 48).t(),
    "few columns": lambda: torch.randn(48, 4),
    "bfloat16": lambda: torch.randn(64, 300).bfloat16().t(),
}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_of_products(name: str, bias: bool) -> None:
    torch.manual_seed(0)
    weight, products = WEIGHTS[name](), Products()
    x = torch.randn(300, weight.shape[0]).to(weight.dtype)
    added = torch.randn(weight.shape[1]).to(weight.dtype) if bias else None
    whole = products.rows(x, weight, added)
    torch.testing.assert_close(whole, torch.mm(x, weight) + (0 if added is None else added), atol=0.1, rtol=1e-2)
    for start, end in ((0, 1), (299, 300), (3, 5), (7, 40), (0, 257), (150, 300)):
        assert torch.equal(products.rows(x[start:end], weight, added), whole[start:end])
    assert products.rows(x[:0], weight, added).shape == (0, weight.shape[1])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dim", [12, 64, 80])
def test_rows_of_batched_products(dim: int) -> None:
    torch.manual_seed(0)
    products = Products()
    a = torch.randn(5, 70, dim)
    for b in (torch.randn(5, dim, 64), torch.randn(5, 64, dim).transpose(1, 2)):
        whole = products.batched(a, b)
        torch.testing.assert_close(whole, torch.bmm(a, b), atol=1e-4, rtol=1e-4)
        for batch in range(5):
            for start, end in ((0, 1), (69, 70), (4, 33)):
                one = products.batched(a[batch : batch + 1, start:end].contiguous(), b[batch : batch + 1])
                assert torch.equal(one[0], whole[batch, start:end])


def test_the_question_which_row_numbers_agree_can_be_answered_with_no() -> None:
    """A library that adds up single rows in another order, and one whose rows depend on their place."""

    def by_count(count: int) -> torch.Tensor:
        return torch.full((2, 3), float(count == 1))

    assert invariant_products._agreeing_sizes(by_count, work=1) == (2, 4, 8, 16, 32, 64, 128, 256)
    x = torch.randn(2, 8)
    assert invariant_products._same_everywhere(lambda rows: rows * 2, x, 4) is not None
    assert invariant_products._same_everywhere(lambda rows: rows + torch.arange(len(rows))[:, None], x, 4) is None
    assert invariant_products._agreeing_sizes(lambda count: None if count > 1 else x, work=1) == (1,)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("function", [F.silu, F.gelu, torch.exp, torch.sigmoid, torch.tanh, torch.cos, F.softplus])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_of_single_numbers(function: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(6000)).to(dtype)
    whole = tail_free(function, x)
    torch.testing.assert_close(whole, function(x))
    for start, end in ((0, 1), (5999, 6000), (1, 12), (17, 900), (3, 5999)):
        assert torch.equal(tail_free(function, x[start:end]), whole[start:end])
    assert torch.equal(tail_free(function, x.view(60, 100)[:, :7]), whole.view(60, 100)[:, :7])


ROUNDED_ONCE = {
    "with a number": lambda x: torch.cat([x * 0.3, x / 0.3, x + 0.3, x - 0.3, 0.3 / x, torch.remainder(x, 0.3)]),
    "with each other": lambda x: torch.cat([x * x.flip(0), x / x.flip(0), x + x.flip(0), torch.maximum(x, x.flip(0))]),
    "alone": lambda x: torch.cat([x.abs().sqrt(), x.reciprocal(), x.round(), x.clamp(-0.3, 0.7), x.relu(), x**2]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROUNDED_ONCE)
def test_functions_that_are_let_pass(name: str, dtype: torch.dtype) -> None:
    """What rounds once is the same number by itself and in the middle of a vector."""
    torch.manual_seed(0)
    x = (3 * torch.randn(1024)).to(dtype)
    parts = ROUNDED_ONCE[name](x).view(-1, 1024)
    for i in range(0, 1024, 7):
        j = 1023 - i
        alone = ROUNDED_ONCE[name](torch.stack([x[i], x[j]])).view(-1, 2)
        assert torch.equal(alone[:, 0], parts[:, i])


def test_a_tie_in_top_p_does_not_depend_on_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many tokens are sorted is decided for all rows of a batch: tokens of equal probability may change places."""
    monkeypatch.setattr("flatbed.sampling.sampler._TOP_P_FIRST", 8)
    asked: list[int] = []
    sample = Sampler.sample

    def noted(self: Sampler, plan: Any, logits: torch.Tensor) -> Any:
        asked.append(len(logits))
        return sample(self, plan, logits)

    monkeypatch.setattr(Sampler, "sample", noted)
    with flatbed.Engine(shared("llama"), deterministic=True) as engine:
        each = [bits(engine.generate([p], one)[0]) for p, one in zip(PROMPTS, PARAMS, strict=True)]
        assert together(engine, EVERYONE) == each
    assert set(asked) == {1}
