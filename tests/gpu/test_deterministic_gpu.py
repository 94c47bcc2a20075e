"""Deterministic engines on a CUDA device: the same bits for a row, and for a request, in any company."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 leaves nothing compiled", allow_module_level=True)

from families import VOCABULARY, build
from paged import Case, Paged, error

import flatbed
from flatbed.model.deterministic.attention import InvariantTritonAttention
from flatbed.model.deterministic.products import device_product, large_tiles_agree
from flatbed.model.steps import DeviceSteps

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("size", "width"), [(896, 4864), (4864, 896)])
def test_products(size: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(700, size, dtype=dtype, device=CUDA), torch.randn(width, size, dtype=dtype, device=CUDA)
    together = device_product(x, weight.t())
    assert error(together, x.double() @ weight.t().double()) < TOLERANCE[dtype]
    for part in (slice(0, 1), slice(699, 700), slice(5, 69), slice(100, 228), slice(100, 229), slice(0, 600)):
        assert torch.equal(device_product(x[part], weight.t()), together[part]), part
    print(f"large tiles agree in {dtype}: {large_tiles_agree(CUDA, dtype)}")


CASES = {
    "14/2 heads of 64": Case([1, 16, 3000, 700, 65, 150], [1, 1, 1, 1, 37, 129], heads=14, key_dim=64, value_dim=64),
    "32/8 heads of 128": Case([2500, 1300], [1, 600], heads=32, kv_heads=8, key_dim=128, value_dim=128, block_size=32),
    "window, sinks": Case([2500, 1300], [1, 600], heads=8, window=1100, sinks=True),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(name: str) -> None:
    """Divided among programs or not, a decode or in a chunk: the same bits."""
    case = CASES[name]
    paged = Paged(case, torch.bfloat16, CUDA)
    together, pool = paged.attend(InvariantTritonAttention())
    assert error(together, paged.expected()) < TOLERANCE[torch.bfloat16]
    lengths, queries, tables, tokens = [], [], [], []
    for s, (length, count) in enumerate(zip(case.lengths, case.queries, strict=True)):
        for back in {0, count // 2, count - 1}:
            lengths.append(length - back)
            queries.append(1)
            tables.append(paged.tables[s])
            tokens.append(int(paged.batch.query_starts[s + 1]) - 1 - back)
    decodes = Paged(replace(case, lengths=lengths, queries=queries), torch.bfloat16, CUDA)
    decodes.batch.tables[:] = 0
    width = decodes.batch.tables.shape[1]
    for row, table in enumerate(tables):
        decodes.batch.tables[row, : len(table)] = table[:width]
    backend, cache = InvariantTritonAttention(), paged.cache_of(pool)
    backend.begin(decodes.batch, case.block_size)
    at = torch.tensor(tokens, device=CUDA)
    alone = backend.attend(cache, paged.spec, paged.query[at], paged.key[at], paged.value[at])
    assert torch.equal(alone, together[at])


def _bits(output: flatbed.Output) -> object:
    assert output.error is None
    return [(sample.token_ids, sample.logprobs, sample.raw_logprobs) for sample in output.samples]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2", torch.bfloat16), ("qwen3", torch.bfloat16), ("gemma3", torch.bfloat16), ("gpt2", torch.float32),
     ("mixtral", torch.bfloat16)],
    ids=lambda value: str(value).removeprefix("torch."),
)  # fmt: skip
def test_engine(family: str, dtype: torch.dtype) -> None:
    """Batches, budgets, schedules, preemptions, prefix hits, run-ahead and graphs leave every bit as it is alone."""
    model = build(family).to(CUDA, dtype)
    draw = random.Random(5)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(n)] for n in (1, 5, 40, 64, 65, 17, 150, 33)]
    prompts.append(list(prompts[6]))
    params = [
        flatbed.SamplingParams(
            max_new_tokens=20, ignore_eos=True, logprobs=True, seed=i, temperature=draw.choice([0.0, 1.0]),
            top_p=draw.choice([1.0, 0.9]) if i < 3 else 1.0,
        )
        for i in range(len(prompts))
    ]  # fmt: skip
    with flatbed.Engine(model, deterministic=True) as engine:
        assert isinstance(engine._steps, DeviceSteps)
        alone = [_bits(engine.generate([prompt], one)[0]) for prompt, one in zip(prompts, params, strict=True)]
        engine._steps.depth = 1
        assert [_bits(output) for output in engine.generate(prompts, params)] == alone
    preemptions = 0
    for settings in (
        {"block_size": 16, "capacity": "14 blocks", "token_budget": 37},
        {"token_budget": 13, "schedule": "prefill_first", "prefix_cache": False},
    ):
        with flatbed.Engine(model, deterministic=True, **settings) as engine:
            order = list(range(len(prompts)))
            draw.shuffle(order)
            outputs = engine.generate([prompts[i] for i in order], [params[i] for i in order])
            assert [_bits(output) for output in outputs] == [alone[i] for i in order], settings
            preemptions += engine.stats().preemptions
    assert preemptions > 0
