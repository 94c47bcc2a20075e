"""The fused kernels against what they replace, under Triton's interpreter on the CPU (float32 and float16)."""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("triton") is None:
    pytest.skip("the package triton is not installed", allow_module_level=True)
if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    # The variable counts when a kernel is defined: setting it here would take the compiler from the tests in tests/gpu.
    pytest.skip("a CUDA device is there: set TRITON_INTERPRET=1 to run the interpreter", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

from compile_kernels import compiled
from families import VOCABULARY, build, reference
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

import flatbed
from flatbed.attention.base import Availability
from flatbed.attention.triton import TritonAttention
from flatbed.memory.pool import LayerCache
from flatbed.model import casts
from flatbed.model import cuda_ops as ops
from flatbed.model.fused_modules import fuse_modules
from flatbed.model.fusions import Linear
from flatbed.sampling.device import draw

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
DTYPES = (torch.float32, torch.float16)


def _close(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_the_kernels_compile(tmp_path: Path) -> None:
    assert compiled("fused", tmp_path) == 21


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 64, 896])
def test_add_norm(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    norm = LlamaRMSNorm(size, 1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(5, size, dtype=dtype), torch.randn(5, size, dtype=dtype)
    with torch.no_grad():
        normed, summed = ops.add_norm(x, residual, norm.weight, 1e-6)
        assert torch.equal(summed, residual + x)
        _close(normed, norm(residual + x))
        normed, summed = ops.add_norm(x, None, norm.weight, 1e-6)
        assert summed is x
        _close(normed, norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "norm"),
    [
        (ops.Norm.ROUNDED_FIRST, LlamaRMSNorm),
        (ops.Norm.ROUNDED_LAST, Olmo2RMSNorm),
        (ops.Norm.ADDED_TO_ONE, Gemma2RMSNorm),
    ],
)
def test_norms_of_each_kind(dtype: torch.dtype, kind: ops.Norm, norm: Any) -> None:
    """To the bit but for the sum, whose order is another; what is rounded where decides in float16."""
    torch.manual_seed(0)
    module = norm(72, 1e-6).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = 3 * torch.randn(40, 72, dtype=dtype)
    with torch.no_grad():
        got, expected = ops.add_norm(x, None, module.weight, 1e-6, kind)[0], module(x)
    _close(got, expected)
    assert (got == expected).float().mean() > (0.99 if dtype == torch.float16 else 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 130])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "gelu"])
def test_gates_of_each_activation(dtype: torch.dtype, rows: int, name: str) -> None:
    torch.manual_seed(0)
    x = 8 * torch.randn(rows, 72, dtype=dtype)
    gate, up = (Linear(torch.randn(100, 72, dtype=dtype) / 8, None) for _ in range(2))
    act = ACT2FN[name]
    kind = {"silu": ops.Activation.SILU, "gelu_pytorch_tanh": ops.Activation.GELU_TANH, "gelu": ops.Activation.GELU}
    expected = act(F.linear(x.float(), gate.weight.float())) * F.linear(x.float(), up.weight.float())
    tolerance = TOLERANCE[dtype]
    got = ops.gated(x, gate, up, kind[name])
    torch.testing.assert_close(got, expected.to(dtype), atol=8 * tolerance, rtol=2 * tolerance)
    wide = torch.tensor([-60.0, -9.0, -0.0, 0.0, 9.0, 60.0], dtype=dtype)
    far = ops.activated_product(wide, torch.ones_like(wide), kind[name])
    torch.testing.assert_close(far, act(wide), atol=1e-6, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dim", [16, 24, 64])
@pytest.mark.parametrize("table", [False, True])
def test_rotate_write(dtype: torch.dtype, norm: bool, dim: int, table: bool) -> None:
    torch.manual_seed(0)
    tokens, heads, kv_heads, block_size = 6, 4, 2, 16
    packed = torch.randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    query, key, value = packed.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
    angle = torch.randn(tokens, dim // 2).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    pool = torch.zeros(2, 3, kv_heads, block_size, dim, dtype=dtype)
    cache = LayerCache(pool[0], pool[1])
    blocks, offsets = torch.tensor([2, 0, 0, 1, -1, 2]), torch.tensor([15, 0, 7, 3, 4, 0])
    gains = None
    q, k, v = (x.reshape(1, tokens, -1, dim).transpose(1, 2) for x in (query, key, value))
    if norm:
        q_norm, k_norm = LlamaRMSNorm(dim, 1e-6).to(dtype), LlamaRMSNorm(dim, 1e-6).to(dtype)
        torch.nn.init.normal_(q_norm.weight)
        torch.nn.init.normal_(k_norm.weight)
        gains = (q_norm.weight.detach(), k_norm.weight.detach(), 1e-6)
        q, k = q_norm(q).detach(), k_norm(k).detach()
    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos[None], sin[None])
    angles = ops.rotary(cos, sin)
    if table:  # the same angles, at other places of a longer table
        positions = torch.tensor([7, 0, 3, 9, 1, 4])
        angles = ops.rotary(*(torch.zeros(10, dim, dtype=dtype) for _ in range(2)), positions)
        angles.cos[positions], angles.sin[positions] = cos, sin
    rotated = ops.rotate_write(query, key, value, angles, cache, blocks, offsets, gains)
    _close(rotated, expected_q[0].transpose(0, 1))
    for t in range(tokens):
        if blocks[t] >= 0:
            _close(cache.key[blocks[t], :, offsets[t]], expected_k[0, :, t])
            assert torch.equal(cache.value[blocks[t], :, offsets[t]], v[0, :, t])
    assert int((pool != 0).any(-1).sum()) == 2 * kv_heads * 5, "a token without a block was stored"


@pytest.mark.parametrize("rows", [1, 3, 17, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_products(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 200, dtype=torch.float16)
    linears = tuple(
        Linear(torch.randn(w, 200, dtype=torch.float16) / 14, torch.randn(w, dtype=torch.float16) if bias else None)
        for w in (56, 24, 20)
    )
    for got, linear in zip(ops.products(x, linears), linears, strict=True):
        _close(got, F.linear(x.float(), linear.weight.float(), linear.bias.float() if bias else None).half())


@pytest.mark.parametrize("rows", [1, 20, 64])
@pytest.mark.parametrize("shape", [(300, 40), (1000, 72)])
def test_product_in_parts_and_their_sum(rows: int, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    size, width = shape
    x = torch.randn(rows, size, dtype=torch.float16)
    linear = Linear(torch.randn(width, size, dtype=torch.float16) / 20, None)
    residual, gain = torch.randn(rows, width, dtype=torch.float16), torch.randn(width, dtype=torch.float16)
    parts = ops.product(x, linear)
    assert parts.dim() == 3
    assert len(parts) > 1
    expected = F.linear(x.float(), linear.weight.float())
    torch.testing.assert_close(parts.sum(0), expected, atol=1e-3, rtol=1e-3)
    normed, summed = ops.add_norm(parts, residual, gain, 1e-6)
    _close(summed, expected.half() + residual)
    wide = summed.float()
    _close(normed, ((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).half() * gain))
    alone, same = ops.add_norm(parts, None, gain, 1e-6)
    _close(same, expected.half())
    assert alone.dtype == torch.float16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 33, 130])
def test_gated(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 72, dtype=dtype)
    gate, up = (Linear(torch.randn(100, 72, dtype=dtype) / 8, None) for _ in range(2))
    expected = F.silu(F.linear(x.float(), gate.weight.float())) * F.linear(x.float(), up.weight.float())
    _close(ops.gated(x, gate, up), expected.to(dtype))


def test_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    torch.manual_seed(0)
    rows, vocabulary = 12, 5000
    logits = 3 * torch.randn(rows, vocabulary)
    logits[3, :4000] = -torch.inf
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.3, 0.5, 1.0] * 2)
    u = torch.rand(rows)
    u[5], u[6], u[9] = 1.0, 0.5, 1e-9
    last = torch.zeros(rows + 3, dtype=torch.int64)
    where = torch.arange(rows, dtype=torch.int32) + 1
    out = draw(logits, temperature, u, where, last)
    log_probabilities = logits.double().log_softmax(-1)
    for row in range(rows):
        token = int(out[row, 0])
        assert int(out[row, 1]) == 1
        assert last[row + 1] == token
        t = float(temperature[row])
        warm = (logits[row].double() / (t or 1.0)).log_softmax(-1)
        if t == 0:
            assert token == int(logits[row].argmax())
        else:
            cumulative = warm.exp().cumsum(-1)
            before = float(cumulative[token] - warm[token].exp())
            assert before - 1e-5 <= float(u[row]) <= float(cumulative[token]) + 1e-5
            assert warm[token] > -torch.inf
        floats = out[row, 2:].clone().view(torch.float32)
        assert float(floats[0]) == pytest.approx(float(warm[token]), abs=1e-4)
        assert float(floats[1]) == pytest.approx(float(log_probabilities[row, token]), abs=1e-4)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_draw_tells_logits_that_are_not_finite(poison: float) -> None:
    logits = torch.randn(3, 3000)
    logits[1, 2500] = poison
    logits[2] = -torch.inf
    out = draw(
        logits, torch.tensor([1.0, 1.0, 0.0]), torch.rand(3), torch.arange(3, dtype=torch.int32), torch.zeros(3).long()
    )
    assert out[:, 1].tolist() == [1, 0, 0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_fused_decoder_equals_generate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttention, "availability", classmethod(lambda cls, device: Availability(True, "a test")))
    model = build(family)
    draws = random.Random(3)
    prompts = [[draws.randrange(VOCABULARY) for _ in range(n)] for n in (1, 7, 16, 30)]
    with flatbed.Engine(model, attention="triton", block_size=16, capacity="64 blocks") as engine:
        assert engine._runner.fusions["decoder-layer"] == 2
        outputs = engine.generate(prompts, flatbed.SamplingParams(max_new_tokens=6, ignore_eos=True))
    assert [o.token_ids for o in outputs] == [reference(model, prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("parts", [0, 3])
def test_add_norm_in_mixed_precision(parts: int) -> None:
    """Products in float16; residuals and weights in float32, as autocast leaves them."""
    torch.manual_seed(0)
    norm = LlamaRMSNorm(72, 1e-6)
    torch.nn.init.normal_(norm.weight)
    residual = torch.randn(5, 72)
    x = torch.randn(parts, 5, 72) if parts else torch.randn(5, 72).half()
    whole = x.sum(0).half() if parts else x
    for dtype in (torch.float16, torch.float32):
        normed, summed = ops.add_norm(x, residual, norm.weight, 1e-6, dtype=dtype, product=torch.float16)
        with torch.no_grad():
            assert torch.equal(summed, residual + whole)
            torch.testing.assert_close(normed, norm(residual + whole).to(dtype), atol=1e-5, rtol=2e-3)
        assert normed.dtype == dtype


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_fusions_in_mixed_precision(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 weights under float16 autocast: what the fusions give is what the model under autocast gives."""
    monkeypatch.setattr(TritonAttention, "availability", classmethod(lambda cls, device: Availability(True, "a test")))
    model = build(family)
    prompts = [[5, 6, 7], [9, 3]]
    params = flatbed.SamplingParams(max_new_tokens=4, ignore_eos=True, temperature=1.0, seed=1, logprobs=True)
    with torch.autocast("cpu", torch.float16):
        engine = flatbed.Engine(model, attention="triton", block_size=16, capacity="64 blocks")
    with engine:
        found = engine._runner.fusions
        if family == "gemma3":
            assert (found["decoder-layer"], found["rms-norm"], found["gated-mlp"]) == (0, 13, 2)
        else:
            assert found["decoder-layer"] == 2
        outputs = [engine.generate(prompts, params)]
        monkeypatch.setattr(casts.Casts, "refresh", lambda self: False)  # as if there were no memory for them
        engine.release()
        outputs.append(engine.generate(prompts, params))
    for prompt, *both in zip(prompts, *outputs, strict=True):
        for output in both:
            with torch.no_grad(), torch.autocast("cpu", torch.float16):
                logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1].float()
            theirs = logits.log_softmax(-1).gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(output.logprobs), theirs, atol=0.03, rtol=0)


# Norms: two of the attention's heads, two or four of a layer, and the last.
@pytest.mark.parametrize(("family", "norms", "mlps"), [("gemma3", 2 * 6 + 1, 2), ("olmo2", 2 * 4 + 1, 2)])
def test_norms_and_mlps_of_other_decoders(family: str, norms: int, mlps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttention, "availability", classmethod(lambda cls, device: Availability(True, "a test")))
    model = build(family)
    prompts = [[5, 6, 7], [9]]
    with flatbed.Engine(model, attention="triton", block_size=16, capacity="64 blocks") as engine:
        fusions = engine._runner.fusions
        assert (fusions["decoder-layer"], fusions["rms-norm"], fusions["gated-mlp"]) == (0, norms, mlps)
        outputs = engine.generate(prompts, flatbed.SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert [o.token_ids for o in outputs] == [reference(model, prompt, 3) for prompt in prompts]


@pytest.mark.parametrize("what", ["rows", "dtype", "autocast", "hook", "activation", "patched"])
def test_modules_run_as_written_where_the_kernels_are_not_for_them(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these gives what the module itself gives, by whichever way."""
    torch.manual_seed(0)
    model = build("gemma3").half()
    layer = model.model.layers[0]
    mlp, norm = layer.mlp, layer.input_layernorm
    x = torch.randn(1, 6, 48, dtype=torch.float16)
    if what == "rows":
        x = torch.randn(1, 6, 96, dtype=torch.float16)[..., :48]  # a stride of two rows
    elif what == "dtype":
        norm.float()
        mlp.float()
    elif what == "hook":
        mlp.act_fn.register_forward_hook(lambda module, args, out: 2 * out)
    elif what == "activation":
        mlp.act_fn = torch.nn.Tanh()
    elif what == "patched":
        monkeypatch.setattr(type(norm), "_norm", lambda self, x: x)
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast")
    with torch.no_grad(), mixed:
        into = x.float() if what == "dtype" else x
        expected = norm(x), mlp(into)
        counts = fuse_modules(layer)
        assert counts["gated-mlp"] == (what not in ("hook", "activation"))
        assert (counts["rms-norm"] > 0) is (what != "patched")
        for got, wanted in zip((norm(x), mlp(into)), expected, strict=True):
            assert got.dtype == wanted.dtype
            torch.testing.assert_close(got, wanted, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("change", ["hook", "bias", "forward", "family", "kernel"])
def test_what_is_not_recognised_is_left_alone(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonAttention, "availability", classmethod(lambda cls, device: Availability(True, "a test")))
    model = build("gemma2" if change == "family" else "llama")
    if change == "hook":
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: 2 * out)
    elif change == "bias":
        model.model.layers[0].mlp.up_proj = torch.nn.Linear(48, 64)
    elif change == "forward":
        monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    elif change == "kernel":  # as `use_kernels=True` exchanges a function, in this model alone
        functions = getattr(model.model.layers[1].self_attn, "_kernel_funcs", None)
        if functions is None:
            pytest.skip("this Transformers makes no modules of functions")
        (rotary,) = functions.values()
        rotary.forward = types.MethodType(lambda self, q, k, cos, sin: (q, k), rotary)
    with flatbed.Engine(model, attention="triton", block_size=16, capacity="64 blocks") as engine:
        assert engine._runner.fusions["decoder-layer"] == 0
        prompt = [5, 6, 7]
        output = engine.generate([prompt], flatbed.SamplingParams(max_new_tokens=4, ignore_eos=True))[0]
    assert output.token_ids == reference(model, prompt, 4)
