"""The FlashAttention 3 backend: what it hands to the package, against plain attention.

The package itself needs a Hopper GPU; a stand-in with its signature computes in torch what its documentation says.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("triton") is None:
    pytest.skip("the package triton is not installed", allow_module_level=True)
if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a CUDA device is there: set TRITON_INTERPRET=1 to run the interpreter", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

from paged import Case, Paged, error

from flatbed.attention import automatic, choose
from flatbed.attention.flash import FlashAttention3
from flatbed.errors import BackendUnavailableError

CPU = torch.device("cpu")
MIXED = {"lengths": [1, 16, 33, 64, 50, 40], "queries": [1, 1, 1, 1, 37, 40]}


class StandIn:
    """`flash_attn_with_kvcache` over a paged cache, for ragged queries, in float64; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> torch.Tensor:
        self.calls += 1
        assert causal
        assert page_table.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert {t.dtype for t in (cache_seqlens, page_table, cu_seqlens_q)} == {torch.int32}
        out = torch.empty_like(q)
        group = q.shape[1] // k_cache.shape[2]
        for s, length in enumerate(cache_seqlens.tolist()):
            start, end = cu_seqlens_q[s : s + 2].tolist()
            assert end - start <= max_seqlen_q
            pages = page_table[s, : -(-length // k_cache.shape[1])].long()
            k, v = (c[pages].flatten(0, 1)[:length].double() for c in (k_cache, v_cache))
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), k) * softmax_scale
            if softcap:
                scores = (scores / softcap).tanh() * softcap
            at, keys = torch.arange(length - (end - start), length)[:, None], torch.arange(length)
            seen = keys <= at
            if window_size[0] >= 0:
                seen &= keys >= at - window_size[0]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        return out


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    return stand_in


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        (Case(**MIXED), 1),
        (Case(**MIXED, heads=14, kv_heads=2, key_dim=64, value_dim=64), 1),
        (Case([40, 33], [20, 33]), 1),
        (Case(**MIXED, window=20), 1),
        (Case(**MIXED, softcap=3.0), 1),
        (Case([40, 9, 3], [1, 1, 1]), 0),
        (Case(**MIXED, sinks=True), 0),
        (Case(**MIXED, value_dim=64), 0),
    ],
    ids=["mixed", "grouped", "chunks only", "window", "soft-cap", "decodes only", "sinks", "two sizes"],
)
def test_prefill_is_the_packages_and_the_rest_tritons(package: StandIn, case: Case, calls: int) -> None:
    paged = Paged(case, torch.float16, CPU)
    assert error(paged.attend(FlashAttention3())[0], paged.expected()) < 2e-3
    assert package.calls == calls


def test_float32_is_left_to_triton(package: StandIn) -> None:
    paged = Paged(Case(**MIXED), torch.float32, CPU)
    assert error(paged.attend(FlashAttention3())[0], paged.expected()) < 2e-6
    assert package.calls == 0


def test_it_is_refused_where_it_cannot_run() -> None:
    with pytest.raises(BackendUnavailableError, match="CUDA device"):
        choose("flash_attention_3", CPU)


def test_auto_says_what_it_takes_and_why() -> None:
    kind, why = automatic(CPU)
    assert kind.name == "torch"
    assert "triton (needs a CUDA device" in why
    assert "flash_attention_3 (needs a CUDA device" in why
