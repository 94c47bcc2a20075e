"""The kernels of deterministic engines, under Triton's interpreter: right, and the same bits for a row in any company.

What the compiler makes of them is tested in tests/gpu/test_deterministic_gpu.py.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))

if importlib.util.find_spec("triton") is None:
    pytest.skip("the package triton is not installed", allow_module_level=True)
if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    # The variable counts when a kernel is defined: setting it here would take the compiler from the tests in tests/gpu.
    pytest.skip("a CUDA device is there: set TRITON_INTERPRET=1 to run the interpreter", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

from families import VOCABULARY, build
from paged import Case, Paged, error

import flatbed
from flatbed.attention.base import Availability
from flatbed.attention.triton import TritonAttention
from flatbed.model.deterministic import attention as invariant
from flatbed.model.deterministic import check, operators
from flatbed.model.deterministic.attention import InvariantTorchAttention, InvariantTritonAttention
from flatbed.model.deterministic.operators import _device_sum
from flatbed.model.deterministic.products import MANY_ROWS, device_product, large_tiles_agree

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])


# ---- products and sums ----------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("turned", [False, True], ids=["linear", "conv1d"])
@pytest.mark.parametrize(("size", "width"), [(48, 211), (200, 40), (7, 5)])
def test_products(size: int, width: int, turned: bool, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(70, size, dtype=dtype)
    weight = torch.randn(width, size, dtype=dtype).t() if turned else torch.randn(size, width, dtype=dtype)
    added = torch.randn(width, dtype=dtype) if bias else None
    expected = x.double() @ weight.double() + (0 if added is None else added.double())
    together = device_product(x, weight, added)
    assert together.dtype == dtype
    assert error(together, expected) < TOLERANCE[dtype]
    for at in (0, 1, 33, 69):
        assert torch.equal(device_product(x[at : at + 1], weight, added)[0], together[at])
    assert torch.equal(device_product(x[20:51], weight, added), together[20:51])
    assert device_product(x[:0], weight, added).shape == (0, width)


@DTYPES
def test_large_tiles_are_used_only_where_they_agree(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(MANY_ROWS + 3, 96, dtype=dtype), torch.randn(40, 96, dtype=dtype).t()
    together = device_product(x, weight)
    assert error(together, x.double() @ weight.double()) < TOLERANCE[dtype]
    if large_tiles_agree(CPU, dtype):
        assert torch.equal(device_product(x[5:9], weight), together[5:9])


@DTYPES
@pytest.mark.parametrize("size", [1, 64, 1500])
def test_sums_of_rows(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, size, dtype=dtype)
    together = _device_sum(x, 1, dtype)
    assert error(together, x.double().sum(1)) < TOLERANCE[dtype]
    assert torch.equal(_device_sum(x[4:5], 1, dtype), together[4:5])
    assert error(_device_sum(x, size, dtype), x.double().mean(1)) < TOLERANCE[dtype]


# ---- attention ------------------------------------------------------------------------------------------------------

MIXED = {"lengths": [1, 16, 33, 64, 50, 40], "queries": [1, 1, 1, 1, 37, 40]}
CASES = {
    "plain": Case(**MIXED),
    "grouping 14/2": Case(**MIXED, heads=14, kv_heads=2, key_dim=64, value_dim=64),
    "grouping 9/3": Case(**MIXED, heads=9, kv_heads=3),
    "more heads to a K/V head than a tile has rows": Case([40, 30], [1, 9], heads=71, kv_heads=1),
    "keys of 24, values of 12": Case([40, 33, 150], [1, 1, 121], key_dim=24, value_dim=12),
    "heads of 80": Case([40, 33, 50], [1, 1, 21], key_dim=80, value_dim=80, block_size=32),
    "window of one": Case([33, 20], [1, 20], window=1),
    "window of several tiles": Case([250, 64, 200, 210], [1, 1, 150, 1], window=100, block_size=32),
    "window at a tile's border": Case([129, 128, 160], [1, 1, 96], window=64, block_size=64),
    "soft-cap": Case(**MIXED, softcap=3.0),
    "sinks": Case(**MIXED, sinks=True),
    "all at once": Case(
        [300, 7, 260], [1, 1, 200], heads=6, kv_heads=2, key_dim=48, window=90, softcap=4.0, sinks=True, block_size=48
    ),
}
BACKENDS = {"torch": InvariantTorchAttention, "triton": InvariantTritonAttention}


@DTYPES
@pytest.mark.parametrize("split", [64, 1024])
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, split: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "SPLIT", split)
    _check("triton", CASES[name], dtype)


@DTYPES
@pytest.mark.parametrize("name", [*CASES, "blocks of 5"])
def test_attention_of_the_torch_backend(name: str, dtype: torch.dtype) -> None:
    _check("torch", CASES.get(name, Case(**MIXED, block_size=5)), dtype)


def _check(backend: str, case: Case, dtype: torch.dtype) -> None:
    """Right, and of a chunk's queries each the same bits as a decode: alone, with other block sizes and tables."""
    paged, attention = Paged(case, dtype, CPU), BACKENDS[backend]()
    together, _ = paged.attend(attention)
    assert error(together, paged.expected()) < TOLERANCE[dtype]
    for s, (length, count) in enumerate(zip(case.lengths, case.queries, strict=True)):
        for back in {0, count // 2, count - 1}:
            at = length - back  # the sequence as it was when this query was its last
            alone = Paged(replace(case, lengths=[at], queries=[1], block_size=case.block_size * 2), dtype, CPU)
            token = int(paged.batch.query_starts[s + 1]) - 1 - back
            _same_sequence(alone, paged, s, token)
            got, _ = alone.attend(attention)
            assert torch.equal(got[0], together[token]), (s, back)


def _same_sequence(alone: Paged, paged: Paged, sequence: int, token: int) -> None:
    """Gives the one sequence of `alone` the K/V of a beginning of another one, and its last query."""
    length, cache = alone.case.lengths[0], alone.cache
    for position in range(length - 1):
        block, slot = alone.tables[0, position // alone.case.block_size], position % alone.case.block_size
        cache.key[block, :, slot] = paged.keys[sequence][position]
        cache.value[block, :, slot] = paged.values[sequence][position]
    alone.query = paged.query[token : token + 1]
    alone.key = paged.keys[sequence][length - 1 : length]
    alone.value = paged.values[sequence][length - 1 : length]
    alone.spec = paged.spec


def test_stale_numbers_change_nothing() -> None:
    case = {"lengths": [17, 40, 35], "queries": [1, 1, 30], "window": 9}
    for backend in BACKENDS.values():
        clean = Paged(Case(**case, poison=0.0), torch.float16, CPU).attend(backend())[0]
        dirty = Paged(Case(**case, poison=float("nan")), torch.float16, CPU).attend(backend())[0]
        assert torch.equal(clean, dirty)


def test_rows_without_a_sequence_give_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a captured graph: lengths and tables in static tensors, some rows of length 0."""
    from flatbed.model.deterministic.graphs import InvariantStaticDecode

    for split in (128, 1024):
        for module in ("attention", "graphs"):
            monkeypatch.setattr(f"flatbed.model.deterministic.{module}.SPLIT", split)
        paged = Paged(Case([300, 40, 129], [1] * 3, sinks=True, window=200), torch.float32, CPU)
        expected, pool = paged.attend(InvariantTritonAttention())
        rows = 5
        tables = torch.full((rows, 32), 2**30, dtype=torch.int32)
        tables[:3, : paged.tables.shape[1]] = torch.from_numpy(paged.tables)
        lengths = torch.tensor([*paged.case.lengths, 0, 0], dtype=torch.int32)
        static = InvariantStaticDecode({"lengths": lengths}, tables)
        query = torch.cat([paged.query, torch.randn(2, *paged.query.shape[1:])])
        static.restart()
        got = static.attend(paged.cache_of(pool), paged.spec, query, paged.key, paged.value)
        assert torch.equal(got[:3], expected)
        assert not got[3:].any()


# ---- whole engines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_engine(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused decoders and others, with these kernels: tokens and log-probabilities in company are those alone."""
    monkeypatch.setattr(TritonAttention, "availability", classmethod(lambda cls, device: Availability(True, "a test")))
    monkeypatch.setattr(check, "_BATCHES", {"cpu": (3,)})
    # The interpreter itself copies tensors, by an operator that models have no use for.
    monkeypatch.setattr(operators, "_AS_IT_IS", operators._AS_IT_IS | {"set_"})
    model = build(family)
    draws = random.Random(3)
    prompts = [[draws.randrange(VOCABULARY) for _ in range(n)] for n in (9, 1, 5)]
    params = [
        flatbed.SamplingParams(max_new_tokens=2, ignore_eos=True, logprobs=True, temperature=t, seed=i)
        for i, t in enumerate((0.0, 1.0, 1.0))
    ]
    settings = {"attention": "triton", "block_size": 16, "deterministic": True}
    with flatbed.Engine(model, **settings) as engine:
        assert engine._runner.fusions.get("decoder-layer", 0) == (0 if family == "gemma3" else 2)
        alone = [_bits(engine.generate([prompt], one)[0]) for prompt, one in zip(prompts, params, strict=True)]
    with flatbed.Engine(model, **settings, token_budget=4, capacity="2 blocks") as engine:
        assert [_bits(output) for output in engine.generate(prompts, params)] == alone


def _bits(output: flatbed.Output) -> object:
    return [(sample.token_ids, sample.logprobs, sample.raw_logprobs) for sample in output.samples]
