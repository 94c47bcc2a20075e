"""The Triton kernels, compiled, against float64 attention: bfloat16, float16 and float32 on a CUDA device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 leaves nothing compiled", allow_module_level=True)

from paged import Case, Paged, error

from flatbed.attention.triton import (
    DecodePlan,
    TritonAttention,
    decode_attention,
    prefill_attention,
    prefill_shape,
    prefill_tiles,
)

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
# Relative error of the whole output: bfloat16 holds 8 bits and float16 11, in the weights and in the output.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MIXED = {"lengths": [1, 16, 133, 700, 65, 150, 40], "queries": [1, 1, 1, 1, 37, 129, 40]}

CASES = {
    "14/2 heads of 64": Case(**MIXED, heads=14, key_dim=64, value_dim=64, block_size=32),
    "32/8 heads of 128": Case(**MIXED, heads=32, kv_heads=8, key_dim=128, value_dim=128, block_size=64),
    "9/3 heads of 64": Case(**MIXED, heads=9, kv_heads=3, key_dim=64, value_dim=64),
    "one K/V head of 256": Case(**MIXED, heads=8, kv_heads=1, key_dim=256, value_dim=256),
    "71 queries to one K/V head": Case(**MIXED, heads=71, kv_heads=1, key_dim=64, value_dim=64),
    "keys of 192, values of 128": Case(**MIXED, heads=4, kv_heads=4, key_dim=192, value_dim=128, block_size=128),
    "heads of 80": Case(**MIXED, key_dim=80, value_dim=80, block_size=32),
    "heads of 96, blocks of 48": Case(**MIXED, key_dim=96, value_dim=96, block_size=48),
    "heads of 32, blocks of 256": Case(**MIXED, block_size=256),
    "window of 50": Case(**MIXED, heads=8, key_dim=64, value_dim=64, window=50),
    "window of 128, sinks": Case(**MIXED, heads=16, key_dim=64, value_dim=64, window=128, sinks=True, block_size=64),
    "soft-cap, window of 4000": Case(**MIXED, key_dim=128, value_dim=128, softcap=20.0, window=4000, block_size=64),
}
LONG = {"lengths": [1500, 2700, 1283], "queries": [1500, 600, 3]}
HOPPER = {
    "14/2 heads of 64, blocks of 32": Case(**LONG, heads=14, key_dim=64, value_dim=64, block_size=32),
    "14/2 heads of 64, blocks of 16": Case(**LONG, heads=14, key_dim=64, value_dim=64, block_size=16),
    "8/8 heads of 64, blocks of 128": Case(**LONG, heads=8, kv_heads=8, key_dim=64, value_dim=64, block_size=128),
    "32/8 heads of 128, blocks of 64": Case(**LONG, heads=32, kv_heads=8, key_dim=128, value_dim=128, block_size=64),
    "9/3 heads of 128, blocks of 32": Case(**LONG, heads=9, kv_heads=3, key_dim=128, value_dim=128, block_size=32),
    "one K/V head of 128, blocks of 256": Case(**LONG, heads=8, kv_heads=1, key_dim=128, value_dim=128, block_size=256),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_equals_float64_attention(name: str, dtype: str) -> None:
    paged = Paged(CASES[name], DTYPES[dtype], CUDA)
    got, _ = paged.attend(TritonAttention())
    assert error(got, paged.expected()) < TOLERANCE[DTYPES[dtype]]


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="for Hopper")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", HOPPER)
def test_long_prefill_on_hopper_equals_float64_attention(name: str, dtype: str) -> None:
    paged = Paged(HOPPER[name], DTYPES[dtype], CUDA)
    shape = prefill_shape(paged.spec, paged.case.heads, paged.cache, max(paged.case.lengths))
    assert shape.hopper
    got, pool = paged.attend(TritonAttention())
    expected = paged.expected()
    assert error(got, expected) < TOLERANCE[DTYPES[dtype]]
    # The portable kernel, over the pool that was just filled.
    portable = prefill_shape(paged.spec, paged.case.heads, paged.cache, 1)
    assert not portable.hopper
    tiles = prefill_tiles(paged.batch.query_starts, paged.batch.lengths, 0, portable.queries)
    out = torch.full_like(got, torch.nan)
    tables = torch.from_numpy(paged.tables).to(CUDA)
    on_device = torch.from_numpy(tiles).to(CUDA)
    prefill_attention(paged.query, paged.cache_of(pool), paged.spec, tables, on_device, portable, out)
    assert error(out, expected) < TOLERANCE[DTYPES[dtype]]


@pytest.mark.parametrize("sinks", [False, True])
def test_a_captured_decode_stays_right_for_other_lengths_and_tables(sinks: bool) -> None:
    rows, width = 5, 300
    plan = DecodePlan(rows, 14, 2, 64, 64, torch.bfloat16, CUDA)
    lengths = torch.zeros(rows, dtype=torch.int32, device=CUDA)
    tables = torch.zeros(rows, width, dtype=torch.int32, device=CUDA)
    query = torch.zeros(rows, 14, 64, dtype=torch.bfloat16, device=CUDA)
    out = torch.full_like(query, torch.nan)
    sequences = [[1], [5, 5000, 16], [300, 2000, 1, 4097, 64], [9000], [3, 3]]
    longest = Paged(Case([9000, 5000], [1, 1], 14, 2, 64, 64, 32, sinks=sinks), torch.bfloat16, CUDA)
    pool = torch.full((700 * longest.layout.block_elements,), torch.nan, dtype=torch.bfloat16, device=CUDA)
    spec = longest.spec
    graph = torch.cuda.CUDAGraph()
    cache = longest.cache_of(pool)
    plan.update(lengths)
    decode_attention(query, cache, spec, tables, plan, out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        plan.update(lengths)
        decode_attention(query, cache, spec, tables, plan, out)
    for seed, live in enumerate(sequences):
        paged = Paged(Case(live, [1] * len(live), 14, 2, 64, 64, 32, sinks=sinks), torch.bfloat16, CUDA, seed)
        paged.spec = spec
        count = len(live)
        pool.fill_(torch.nan)
        written = paged.cache_of(paged.pool)
        for s in range(count):
            for p in range(live[s] - 1, live[s]):
                block, offset = int(paged.tables[s, p // 32]), p % 32
                written.key[block, :, offset] = paged.key[s]
                written.value[block, :, offset] = paged.value[s]
        pool[: paged.pool.numel()] = paged.pool
        lengths.zero_()
        lengths[:count] = torch.from_numpy(paged.batch.lengths)
        tables.fill_(2**30)
        tables[:count, : paged.tables.shape[1]] = torch.from_numpy(paged.tables)
        query.normal_()
        query[:count] = paged.query
        out.fill_(torch.nan)
        graph.replay()
        first = out.clone()
        assert error(out[:count], paged.expected()) < TOLERANCE[torch.bfloat16]
        assert not out[count:].any()
        graph.replay()
        assert torch.equal(out, first)
        assert not plan.workspace.arrived.any()


def test_what_is_past_2_31_elements_is_reached() -> None:
    """A pool of 5 GB, read and written at its end."""
    case = Case([70, 40], [1, 40], 2, 2, 64, 64, 64)
    paged = Paged(case, torch.bfloat16, CUDA)
    blocks = 2**31 // paged.layout.block_elements + 100
    small = paged.pool.view(-1, paged.layout.block_elements)
    pool = torch.empty(blocks, paged.layout.block_elements, dtype=torch.bfloat16, device=CUDA)
    offset = blocks - len(small)
    pool[offset:] = small
    paged.pool = pool.view(-1)
    paged.batch.tables = np.where(np.arange(paged.tables.shape[1]) < 2, paged.tables + offset, 0).astype(np.int32)
    paged.batch.slot_blocks += offset
    got, _ = paged.attend(TritonAttention())
    assert error(got, paged.expected()) < TOLERANCE[torch.bfloat16]
