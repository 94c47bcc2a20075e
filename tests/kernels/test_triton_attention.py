"""The Triton kernels against the reference backend and plain float64 attention, under Triton's interpreter.

The same features run compiled, in bfloat16 too, in tests/gpu/test_triton_attention_gpu.py.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("triton") is None:
    pytest.skip("the package triton is not installed", allow_module_level=True)
if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    # The variable counts when a kernel is defined: setting it here would take the compiler from the tests in tests/gpu.
    pytest.skip("a CUDA device is there: set TRITON_INTERPRET=1 to run the interpreter", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

from paged import Case, Paged, error

from flatbed.attention.base import AttentionSpec
from flatbed.attention.torch_reference import TorchAttention
from flatbed.attention.triton import (
    DecodePlan,
    DecodeWorkspace,
    TritonAttention,
    decode_attention,
    decode_items,
    prefill_attention,
    prefill_shape,
    prefill_tiles,
    write_kv,
)

CPU = torch.device("cpu")
# Relative error of the whole output. float16 holds 11 bits, in the weights and in the output.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
MIXED = {"lengths": [1, 16, 33, 64, 50, 40], "queries": [1, 1, 1, 1, 37, 40]}

CASES = {
    "plain": Case(**MIXED),
    "one token": Case([1], [1]),
    "decodes at block borders": Case([15, 16, 17, 31, 32, 33, 128], [1] * 7),
    "chunks at block borders": Case([16, 32, 33, 48], [16, 16, 2, 31]),
    "one-token chunks among others": Case([20, 5, 33, 1, 40], [1, 3, 1, 1, 9]),
    "short chunks after long context": Case([130, 140, 129], [2, 5, 3], block_size=32),
    "grouping 14/2": Case(**MIXED, heads=14, kv_heads=2, key_dim=64, value_dim=64),
    "grouping 9/3": Case(**MIXED, heads=9, kv_heads=3),
    "one K/V head": Case(**MIXED, heads=8, kv_heads=1),
    "one K/V head, more queries than a tile's least": Case([40, 30], [1, 9], heads=20, kv_heads=1),
    "no grouping": Case(**MIXED, heads=3, kv_heads=3),
    "keys of 192, values of 128": Case([40, 33, 50], [1, 1, 21], key_dim=192, value_dim=128),
    "values longer than keys": Case([40, 33, 50], [1, 1, 21], key_dim=32, value_dim=64),
    "heads of 80": Case([40, 33, 50], [1, 1, 21], key_dim=80, value_dim=80, block_size=32),
    "heads of 96": Case([70, 30], [1, 30], key_dim=96, value_dim=96, block_size=64),
    "heads of 128": Case([70, 90], [1, 60], key_dim=128, value_dim=128, block_size=64),
    "heads of 256": Case([40, 20], [1, 20], heads=2, kv_heads=1, key_dim=256, value_dim=256),
    "blocks of 48": Case([100, 48, 97], [1, 1, 80], block_size=48),
    "blocks of 64": Case([129, 64, 97], [1, 1, 80], block_size=64),
    "blocks of 256": Case([300, 256, 97], [1, 1, 80], block_size=256),
    "window below a block": Case(**MIXED, window=5),
    "window of one": Case([33, 20], [1, 20], window=1),
    "window of several tiles": Case([250, 64, 200, 210], [1, 1, 150, 1], window=100, block_size=32),
    "window at a tile's border": Case([129, 128, 160], [1, 1, 96], window=64, block_size=64),
    "window longer than the context": Case(**MIXED, window=1000),
    "soft-cap": Case(**MIXED, softcap=3.0),
    "soft-cap, loose": Case(**MIXED, softcap=50.0),
    "sinks": Case(**MIXED, sinks=True),
    "all at once": Case(**MIXED, heads=6, kv_heads=2, key_dim=48, window=20, softcap=4.0, sinks=True, block_size=48),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_equals_plain_attention_and_the_reference(name: str, dtype: torch.dtype) -> None:
    paged = Paged(CASES[name], dtype, CPU)
    expected = paged.expected()
    got, pool = paged.attend(TritonAttention())
    reference, reference_pool = paged.attend(TorchAttention())
    assert got.dtype == dtype
    assert error(got, expected) < TOLERANCE[dtype]
    assert error(got, reference.double()) < TOLERANCE[dtype]
    # Both have written the same slots, and the poison is where it was.
    assert torch.equal(torch.nan_to_num(pool), reference_pool)
    written = paged.batch.query_starts[-1] * paged.case.kv_heads * (paged.case.key_dim + paged.case.value_dim)
    assert int(paged.pool.isnan().sum() - pool.isnan().sum()) == written


@pytest.mark.parametrize("poison", [float("inf"), 6e4])
def test_stale_numbers_of_any_size_change_nothing(poison: float) -> None:
    case = {"lengths": [17, 40, 35], "queries": [1, 1, 30], "window": 9}
    clean = Paged(Case(**case, poison=0.0), torch.float16, CPU).attend(TritonAttention())[0]
    dirty = Paged(Case(**case, poison=poison), torch.float16, CPU).attend(TritonAttention())[0]
    assert torch.equal(clean, dirty)


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int) -> None:
    """Any mixture of features, one backend for several steps."""
    random = np.random.default_rng(seed)
    backend = TritonAttention()
    for step in range(2):
        decodes, chunks = int(random.integers(0, 5)), int(random.integers(0, 3))
        lengths = random.integers(1, 150, decodes + chunks + 1).tolist()
        queries = [1] * decodes + [int(random.integers(1, n + 1)) for n in lengths[decodes:]]
        kv_heads = int(random.integers(1, 4))
        case = Case(
            lengths,
            queries,
            heads=kv_heads * int(random.integers(1, 6)),
            kv_heads=kv_heads,
            key_dim=int(random.choice([32, 40, 64])),
            value_dim=int(random.choice([32, 48])),
            block_size=int(random.choice([16, 32, 48, 64, 128])),
            window=int(random.integers(1, 100)) if random.random() < 0.5 else None,
            softcap=5.0 if random.random() < 0.3 else None,
            sinks=bool(random.random() < 0.3),
        )
        paged = Paged(case, torch.float32, CPU, seed=10 * seed + step)
        assert error(paged.attend(backend)[0], paged.expected()) < TOLERANCE[torch.float32], case


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("features", [{}, {"window": 30}, {"window": 70, "sinks": True, "softcap": 4.0}])
def test_prefill_with_one_loop_and_with_several(features: dict[str, object], short: bool) -> None:
    paged = Paged(Case([150, 17, 100], [130, 17, 20], **features), torch.float32, CPU)
    _, pool = paged.attend(TritonAttention())
    cache = paged.cache_of(pool)
    shape = replace(prefill_shape(paged.spec, paged.case.heads, cache, 150), short=short)
    tiles = prefill_tiles(paged.batch.query_starts, paged.batch.lengths, 0, shape.queries)
    out = torch.full((167, 4, 32), torch.nan)
    tables = torch.from_numpy(paged.tables)
    prefill_attention(paged.query, cache, paged.spec, tables, torch.from_numpy(tiles), shape, out)
    assert error(out, paged.expected()) < TOLERANCE[torch.float32]


# ---- the functions that a captured graph calls -----------------------------------------------------------------------


def _plan(
    paged: Paged, rows: int, max_items: int | None = None, workspace: DecodeWorkspace | None = None
) -> DecodePlan:
    case = paged.case
    return DecodePlan(
        rows,
        case.heads,
        case.kv_heads,
        case.key_dim,
        case.value_dim,
        paged.dtype,
        CPU,
        window=case.window,
        max_items=max_items,
        workspace=workspace,
    )


def _decode(paged: Paged, plan: DecodePlan) -> torch.Tensor:
    """Decodes with a plan made for more rows than the batch has: the others are padding, of length 0."""
    rows = plan.rows
    count = len(paged.case.lengths)
    lengths, tables = torch.zeros(rows, dtype=torch.int32), torch.full((rows, paged.tables.shape[1]), 2**30)
    lengths[:count] = torch.tensor(paged.case.lengths)
    tables[:count] = torch.from_numpy(paged.tables)
    query = torch.randn(rows, *paged.query.shape[1:])
    query[:count] = paged.query
    cache = paged.cache_of(paged.pool.clone())
    slots = torch.full((rows,), -1)
    slots[:count] = paged.batch.slot_blocks
    offsets = torch.zeros(rows, dtype=torch.int64)
    offsets[:count] = paged.batch.slot_offsets
    key, value = (x.new_zeros(rows, *x.shape[1:]) for x in (paged.key, paged.value))
    key[:count], value[:count] = paged.key, paged.value
    write_kv(cache, key, value, slots, offsets)
    plan.update(lengths)
    out = torch.full((rows, paged.case.heads, paged.case.value_dim), torch.nan)
    return decode_attention(query, cache, paged.spec, tables.to(torch.int32), plan, out)


def test_one_plan_serves_growing_lengths_and_padding_rows() -> None:
    workspace = DecodeWorkspace(CPU)
    plan = None
    for lengths in ([1], [5, 700, 16], [300, 20, 1, 129, 64], [2000], [3, 3]):
        paged = Paged(Case(lengths, [1] * len(lengths), block_size=32), torch.float32, CPU)
        plan = plan or _plan(paged, rows=6, workspace=workspace)
        got = _decode(paged, plan)
        assert error(got[: len(lengths)], paged.expected()) < TOLERANCE[torch.float32]
        assert not got[len(lengths) :].any()
        assert not workspace.arrived.any()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 130, 600])
def test_long_contexts_are_split_and_combined(window: int | None, sinks: bool) -> None:
    case = Case([1100, 40, 513], [1] * 3, heads=6, kv_heads=2, window=window, sinks=sinks, block_size=64)
    paged = Paged(case, torch.float32, CPU)
    plan = _plan(paged, rows=3, max_items=40)
    plan.least = 1
    assert error(_decode(paged, plan), paged.expected()) < TOLERANCE[torch.float32]
    assert int(plan.items[:, 5].max()) > (1 if window == 130 else 4)


@pytest.mark.parametrize("seed", range(4))
def test_plans_cover_every_visible_token_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = int(random.integers(1, 150))
    lengths = random.choice([0, 1, 63, 64, 65, 500, 4000], rows)
    window = [None, 1, 100, 5000][seed]
    plan = DecodePlan(rows, 2, 1, 32, 32, torch.float16, CPU, window=window, max_items=rows + 1 + 13 * seed)
    plan.update(torch.from_numpy(lengths))
    items = plan.items.numpy()
    live = items[items[:, 5] > 0]
    assert not items[len(live) :, 5].any()
    tile = 128
    for row, length in enumerate(lengths):
        mine = live[live[:, 0] == row]
        low = 0 if window is None else max(0, length - window)
        assert (mine[:, 3] == low).all()
        assert (mine[:, 5] == len(mine)).all()
        assert len(mine) >= 1
        assert (mine[:, 4] == np.flatnonzero(live[:, 0] == row)[0]).all()
        assert mine[0, 1] == low // tile * tile
        assert mine[-1, 2] == length
        assert (mine[1:, 1] == mine[:-1, 2]).all()
        assert (mine[:, 1] % tile == 0).all()


def test_nothing_grows_with_the_capacity() -> None:
    """A plan's size follows rows and heads; the width of the tables plays no part."""
    assert decode_items(64, 2, CPU) == decode_items(64, 2, CPU)
    plan = DecodePlan(8, 4, 2, 32, 32, torch.float16, CPU)
    assert plan.items.shape[0] == decode_items(8, 2, CPU)
    paged = Paged(Case([40, 9], [1, 1]), torch.float32, CPU)
    wide = np.zeros((2, 10_000), np.int32)
    wide[:, : paged.tables.shape[1]] = paged.tables
    paged.batch.tables = wide
    backend = TritonAttention()
    got, _ = paged.attend(backend)
    assert error(got, paged.expected()) < TOLERANCE[torch.float32]
    assert backend._tables.shape == (2, 3)


def test_a_plan_for_another_shape_is_refused() -> None:
    paged = Paged(Case([40, 9], [1, 1]), torch.float32, CPU)
    plan = _plan(paged, rows=2)
    with pytest.raises(ValueError, match="not for 1"):
        decode_attention(paged.query[:1], paged.cache, paged.spec, torch.from_numpy(paged.tables), plan)
    with pytest.raises(ValueError, match="window"):
        decode_attention(paged.query, paged.cache, AttentionSpec(1.0, 7), torch.from_numpy(paged.tables), plan)
    with pytest.raises(ValueError, match="max_items"):
        _plan(paged, rows=2, max_items=2)


def test_tiles_cover_every_query_once_and_the_longest_come_first() -> None:
    random = np.random.default_rng(0)
    queries = np.array([1, 1, 40, 3, 17, 16])
    lengths = queries + random.integers(0, 50, 6)
    starts = np.concatenate([[0], np.cumsum(queries)])
    tiles = prefill_tiles(starts, lengths, 2, 16)
    tokens = np.concatenate([np.arange(first, first + count) for _, first, _, count in tiles])
    assert sorted(tokens) == list(range(2, starts[-1]))
    for sequence, first, position, count in tiles:
        assert starts[sequence] <= first < first + count <= starts[sequence + 1]
        assert position == lengths[sequence] - queries[sequence] + first - starts[sequence]
        assert 1 <= count <= 16
    ends = lengths[tiles[:, 0]]
    assert (np.diff(ends) <= 0).all()
    same = np.diff(tiles[:, 0]) == 0
    assert (np.diff(tiles[:, 2])[same] < 0).all()


def test_other_block_sizes_are_refused() -> None:
    paged = Paged(Case([40], [1], block_size=24), torch.float32, CPU)
    with pytest.raises(ValueError, match="multiple of 16"):
        paged.attend(TritonAttention())


def test_it_is_not_offered_on_the_cpu() -> None:
    availability = TritonAttention.availability(CPU)
    assert not availability.ok
    assert "CUDA" in availability.reason
