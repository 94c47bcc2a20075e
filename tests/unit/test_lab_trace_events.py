"""A trace's arithmetic, on synthetic events with times that can be added up in the head. No torch."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import flatbed
from flatbed.lab.trace_events import (
    DECODE,
    PREFILL,
    Event,
    Recording,
    Span,
    Timeline,
    break_down,
    innermost,
    read_trace,
    recording,
)
from flatbed.lab.trace_names import (
    ATTENTION,
    CACHE,
    COPIES,
    DECODE_ATTENTION,
    IDLE,
    PREFILL_ATTENTION,
    PRODUCTS,
    READS,
    REST,
    SAMPLING,
    UNKNOWN,
    WRITES,
    ZEROING,
    category_of,
)

# ---- spans -----------------------------------------------------------------------------------------------------------


def test_of_spans_in_one_another_the_innermost_counts() -> None:
    spans = [Span(0, 100, "a"), Span(10, 50, "b"), Span(20, 30, "c"), Span(60, 60, "empty"), Span(70, 80, "b")]
    assert innermost(spans) == [
        Span(0, 10, "a"),
        Span(10, 20, "b"),
        Span(20, 30, "c"),
        Span(30, 50, "b"),
        Span(50, 70, "a"),
        Span(70, 80, "b"),
        Span(80, 100, "a"),
    ]
    assert innermost([]) == []


def test_spans_of_two_threads_need_not_lie_in_one_another() -> None:
    assert innermost([Span(0, 10, "a"), Span(5, 20, "b"), Span(18, 19, "c")]) == [
        Span(0, 5, "a"),
        Span(5, 18, "b"),
        Span(18, 19, "c"),
        Span(19, 20, "b"),
    ]
    # One that began later and ended first uncovers the one before, if that still runs.
    assert innermost([Span(0, 30, "a"), Span(5, 10, "b"), Span(6, 20, "c")]) == [
        Span(0, 5, "a"),
        Span(5, 6, "b"),
        Span(6, 20, "c"),
        Span(20, 30, "a"),
    ]


def test_pieces_never_overlap_and_cover_what_the_spans_cover() -> None:
    draw = random.Random(0)
    for _ in range(200):
        spans = [Span(a := draw.randint(0, 50), a + draw.randint(0, 20), str(i)) for i in range(draw.randint(0, 12))]
        pieces = innermost(spans)
        for before, after in pairwise(pieces):
            assert before.end <= after.start
        for moment in range(80):
            covering = [s for s in spans if s.start <= moment < s.end]
            latest = max((s.start for s in covering), default=None)
            label = Timeline(spans).at(moment)
            assert (label is None) == (latest is None)
            assert label is None or int(label) in [int(s.label) for s in covering if s.start == latest]


def test_a_stretch_is_shared_out_among_labels() -> None:
    timeline = Timeline([Span(10, 20, "a"), Span(30, 40, "b")])
    assert timeline.shares(0, 50) == [(None, 10), ("a", 10), (None, 10), ("b", 10), (None, 10)]
    assert timeline.shares(15, 35) == [("a", 5), (None, 10), ("b", 5)]
    assert timeline.shares(41, 45) == [(None, 4)]
    assert timeline.shares(12, 13) == [("a", 1)]


# ---- the trace file --------------------------------------------------------------------------------------------------


def complete(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": args.pop("tid", 1), "args": args}


def test_kernels_are_joined_to_their_launches_and_graphs_are_told() -> None:
    recorded = recording(
        [
            {"ph": "M", "name": "process_name"},
            complete("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=1),
            complete("kernel", "gemm", 10, 4, correlation=1),
            complete("cuda_runtime", "cudaGraphLaunch", 12, 2, correlation=2),
            complete("kernel", "flash_fwd", 20, 3, correlation=2),
            complete("kernel", "draw_kernel", 23, 1, correlation=2),
            complete("cuda_driver", "cuLaunchKernelEx", 13, 1, correlation=3),
            complete("kernel", "write_kernel", 24, 1, correlation=3),
            complete("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2, 1, correlation=9),
            complete("cpu_op", "aten::mm", 4, 3),
        ],
        base=1000.0,
    )
    assert recorded.on_device
    assert recorded.unlaunched == 1
    assert recorded.events == [
        Event("Memcpy HtoD (Pinned -> Device)", 1002, 1003, 1002),
        Event("gemm", 1010, 1014, 1005),
        Event("flash_fwd", 1020, 1023, 1012, graph=True),
        Event("draw_kernel", 1023, 1024, 1012, graph=True),
        Event("write_kernel", 1024, 1025, 1013),
    ]


def test_without_a_gpu_time_is_that_of_the_innermost_operator_of_each_thread() -> None:
    recorded = recording(
        [
            complete("cpu_op", "aten::linear", 0, 10),
            complete("cpu_op", "aten::addmm", 2, 6),
            complete("cpu_op", "aten::fill_", 3, 4, tid=2),
            complete("user_annotation", "flatbed trace: decode", 0, 100),
        ]
    )
    assert not recorded.on_device
    assert [(e.name, e.start, e.end) for e in recorded.events] == [
        ("aten::linear", 0, 2),
        ("aten::addmm", 2, 8),
        ("aten::fill_", 3, 7),
        ("aten::linear", 8, 10),
    ]


def test_a_file_is_read_with_its_own_base_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [complete("kernel", "gemm", 10, 4, correlation=1)]
    path.write_text(json.dumps({"baseTimeNanoseconds": 5_000_000, "traceEvents": events}))
    assert read_trace(path).events == [Event("gemm", 5010, 5014, 5010)]


# ---- the accounting --------------------------------------------------------------------------------------------------


def test_every_microsecond_goes_to_one_category_and_one_phase() -> None:
    phases = [Span(0, 100, "construction"), Span(100, 180, PREFILL), Span(200, 300, DECODE), Span(300, 340, DECODE)]
    kinds = [Span(100, 180, PREFILL), Span(200, 300, DECODE), Span(300, 340, DECODE)]
    events = [
        Event("fill_kernel", 40, 60, launched=30),
        Event("flash_fwd", 130, 150, launched=110),
        Event("Memcpy HtoD (Pinned -> Device)", 140, 170, launched=120),  # 10 of its 30 beside the kernel before
        Event("gemm", 190, 230, launched=179),  # launched in prefill, computed when the host was further
        Event("flash_fwd", 230, 260, launched=210, graph=True),
    ]
    result = break_down(Recording(events, True), phases, kinds, [], marked=True, rest="between")
    assert (result.start, result.end) == (0, 340)
    assert result.by_phase == {
        "construction": {IDLE: 40 + 40, ZEROING: 20},
        # idle 100 - 130, and 170 - 180 while the host was still in the pass; 20 of the copy cost time
        PREFILL: {IDLE: 30 + 10, PREFILL_ATTENTION: 20, COPIES: 20, PRODUCTS: 40},
        "between": {IDLE: 10},
        DECODE: {DECODE_ATTENTION: 30, IDLE: 40 + 40},
    }
    assert sum(sum(phase.values()) for phase in result.by_phase.values()) == 340
    copies = result.names["Memcpy HtoD (Pinned -> Device)", COPIES]
    assert (copies.microseconds, copies.count) == (30, 1)  # by name, in full
    assert result.names["flash_fwd", PREFILL_ATTENTION].microseconds == 20
    assert result.names["flash_fwd", DECODE_ATTENTION].microseconds == 30


def test_idle_is_the_gaps_in_the_union_of_kernels() -> None:
    draw = random.Random(1)
    for _ in range(100):
        events = [Event("gemm", a := draw.randint(0, 90), a + draw.randint(1, 15), a) for _ in range(20)]
        events.sort(key=lambda event: event.start)
        result = break_down(Recording(events, True), [Span(0, 120, "x")], [], [], marked=False, rest="rest")
        busy = {moment for event in events for moment in range(int(event.start), int(event.end))}
        assert result.category(PRODUCTS) == len(busy)
        assert result.category(IDLE) == 120 - len(busy)


def test_what_lies_outside_of_all_marks_has_a_phase_of_its_own() -> None:
    result = break_down(
        Recording([Event("gemm", 50, 60, 50)], True), [Span(10, 20, "a")], [], [], marked=False, rest="r"
    )
    assert result.by_phase == {"a": {IDLE: 10}, "r": {IDLE: 30, PRODUCTS: 10}}
    empty = break_down(Recording([], False), [], [], [], marked=False, rest="r")
    assert (empty.window, empty.by_phase) == (0, {})


def test_attention_of_no_known_kind_is_called_by_its_name_alone() -> None:
    result = break_down(
        Recording([Event("flash_fwd", 0, 10, 0)], True), [Span(0, 10, "a")], [], [], marked=False, rest="r"
    )
    assert result.by_phase == {"a": {ATTENTION: 10}}


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("decode_kernel", DECODE_ATTENTION),
        ("prefill_hopper_kernel", PREFILL_ATTENTION),
        ("rotate_write_kernel", WRITES),
        ("gated_kernel", PRODUCTS),
        ("draw_kernel", SAMPLING),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Mainloop", ATTENTION),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bf", ATTENTION),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64, 64, 256, 4>>", DECODE_ATTENTION),
        ("void flash::flash_fwd_splitkv_combine_kernel<...>", DECODE_ATTENTION),
        ("flash::prepare_varlen_num_blocks_kernel(int, int, int, int const*)", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0", ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat", ATTENTION),
        ("nvjet_tst_128x64_64x8_1x2_h_bz_TNT", PRODUCTS),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1", PRODUCTS),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", PRODUCTS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>", PRODUCTS),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128>", PRODUCTS),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<unsigned char>>", ZEROING),
        ("Memset (Device)", ZEROING),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int>", READS),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long)", READS),
        ("void at::native::index_elementwise_kernel<128, 4, at::native::index_copy_kernel_impl", WRITES),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>", WRITES),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>", SAMPLING),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>", SAMPLING),
        ("Memcpy HtoD (Pinned -> Device)", COPIES),
        ("Memcpy DtoH (Device -> Pinned)", COPIES),
        ("Memcpy DtoD (Device -> Device)", REST),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>", REST),
        ("triton_poi_fused_mul_silu_0", REST),
        ("aten::addmm", PRODUCTS),
        ("mkldnn::_linear_pointwise", PRODUCTS),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
        ("aten::index_select", READS),
        ("aten::index_copy_", WRITES),
        ("aten::zero_", ZEROING),
        ("aten::argmax", SAMPLING),
        ("aten::rms_norm", REST),
        ("some_vendors_secret_kernel", UNKNOWN),
    ],
)  # fmt: skip
def test_names_of_kernels_and_operators(name: str, category: str) -> None:
    assert category_of(name) == category


def test_every_kernel_of_ours_is_known_by_name() -> None:
    names = set()
    for path in (Path(flatbed.__file__).parent / "kernels").glob("*.py"):
        names |= set(re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE))
    assert len(names) > 8
    assert {name for name in names if category_of(name) == UNKNOWN} == set()


def test_a_region_says_on_whose_behalf_a_plain_operation_runs() -> None:
    assert category_of("aten::bmm", ATTENTION) == ATTENTION
    assert category_of("aten::index_select", ATTENTION) == READS  # gathers K/V for it
    assert category_of("aten::copy_", CACHE) == WRITES
    assert category_of("aten::index_select", CACHE) == READS
    assert category_of("aten::fill_", CACHE) == ZEROING
    assert category_of("aten::copy_", ZEROING) == ZEROING
    assert category_of("aten::gather", SAMPLING) == SAMPLING
    assert category_of("Memcpy DtoH (Device -> Pinned)", SAMPLING) == COPIES
    # Where all regions are marked, a gather outside of them is an embedding and none of the cache's.
    assert category_of("aten::index_select", None, marked=True) == REST
    assert category_of("aten::index_select", None, marked=False) == READS
