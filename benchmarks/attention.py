"""Attention on one GPU: decode against the memory's bandwidth, prefill against what torch ships.

    python benchmarks/attention.py [--only decode|prefill|write] [--block-size N] [--out FILE]

Decode is timed as a model runs it: one CUDA graph with many layers, each with its own K/V, so that a layer finds
nothing of its own in the L2 cache. The bound of a decode is the K/V of its tokens, read once at the bandwidth that a
large copy reaches (bytes read and written, measured here).

The rate of a prefill counts the products that a causal mask leaves: 2 (key_dim + value_dim) operations for each pair of
a query and a key. torch's SDPA runs beside it on contiguous K/V that was repeated for all heads beforehand: work that
the paged kernel does not need, and that is not counted here.

Prints a table; the last line is JSON. Needs a CUDA device with about 40 GB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatbed.attention.base import AttentionSpec, LayerCache
from flatbed.attention.triton import (
    DecodePlan,
    PrefillShape,
    decode_attention,
    prefill_attention,
    prefill_shape,
    prefill_tiles,
    write_kv,
)
from flatbed.memory.capacity import KVLayout, LayerShape

Model = tuple[int, int, int]
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
# name: query heads, K/V heads, head size
MODELS = {"14/2 x 64": (14, 2, 64), "32/8 x 128": (32, 8, 128)}
# Lengths drawn between two bounds, with the same seed everywhere; the last ones are like the workloads of DESIGN.md.
DECODES = [
    (64, 4096, 4096),
    (1, 32768, 32768),
    (8, 32768, 32768),
    (64, 100, 100),
    (256, 900, 900),
    (1024, 96, 96),
    (64, 80, 192),
    (256, 100, 2048),
]
# sequences, new tokens, tokens before them
PREFILLS = [(8, 32768, 0), (64, 40, 0), (256, 550, 0), (1, 4096, 28672)]
# A layer's K/V is read once per replay; so much of it in all that the L2 cache (60 MB) holds next to nothing.
ROTATED_BYTES = 1 << 30


def median_ms(run: Callable[[], object], repeats: int = 20, warmup: int = 3) -> float:
    """Median time of one call on the GPU, between events."""
    # An idle GPU takes some tens of milliseconds to reach its clocks.
    start = time.perf_counter()
    for done in range(1000):
        run()
        torch.cuda.synchronize()
        if done + 1 >= warmup and time.perf_counter() - start > 0.05:
            break
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def graph_of(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `run` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy on the device."""
    source = torch.randn(1 << 30, device=DEVICE).view(torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source), repeats=10) * 1e3


class Pool:
    """Random K/V of sequences of some lengths in `layers` layers, blocks in random order."""

    def __init__(self, model: Model, layers: int, lengths: Sequence[int], block_size: int) -> None:
        _, kv_heads, dim = model
        layout = KVLayout((LayerShape(kv_heads, dim, dim),) * layers, block_size, DTYPE.itemsize)
        widths = [layout.blocks_for(length) for length in lengths]
        blocks = sum(widths)
        flat = torch.empty(blocks * layout.block_elements, dtype=DTYPE, device=DEVICE).normal_()
        strides = (layout.block_elements, block_size * dim, dim, 1)
        shape = (blocks, kv_heads, block_size, dim)
        self.layers = [
            LayerCache(flat.as_strided(shape, strides, key), flat.as_strided(shape, strides, value))
            for key, value in zip(layout.key_offsets, layout.value_offsets, strict=True)
        ]
        order = np.random.default_rng(0).permutation(blocks).astype(np.int32)
        tables = np.zeros((len(lengths), max(widths)), np.int32)
        for table, part in zip(tables, np.split(order, np.cumsum(widths)[:-1]), strict=True):
            table[: len(part)] = part
        self.tables = torch.from_numpy(tables).to(DEVICE)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def draw(sequences: int, low: int, high: int) -> list[int]:
    return np.random.default_rng(0).integers(low, high, sequences, endpoint=True).tolist()


def layer_bytes(model: Model, lengths: Sequence[int]) -> int:
    """Bytes of K/V that a decode reads in one layer."""
    _, kv_heads, dim = model
    return sum(lengths) * kv_heads * dim * 2 * DTYPE.itemsize


def decode_pool(model: Model, lengths: Sequence[int], block_size: int) -> Pool:
    """A pool with so many layers that the L2 cache keeps nothing from one replay to the next."""
    return Pool(model, min(48, max(2, -(-ROTATED_BYTES // layer_bytes(model, lengths)))), lengths, block_size)


def decode_us(model: Model, pool: Pool, plan: DecodePlan) -> float:
    """Microseconds of one layer's decode."""
    heads, _, dim = model
    query = torch.randn(plan.rows, heads, dim, dtype=DTYPE, device=DEVICE)
    out = torch.empty_like(query)
    spec = AttentionSpec(dim**-0.5)
    plan.update(pool.lengths)

    def step() -> None:
        for cache in pool.layers:
            decode_attention(query, cache, spec, pool.tables, plan, out)

    return median_ms(graph_of(step).replay) / len(pool.layers) * 1e3


def plan_of(model: Model, rows: int, max_items: int | None = None) -> DecodePlan:
    heads, kv_heads, dim = model
    return DecodePlan(rows, heads, kv_heads, dim, dim, DTYPE, DEVICE, max_items=max_items)


def plan_us(plan: DecodePlan, lengths: torch.Tensor) -> float:
    """Microseconds of dividing a step's K/V, once for all layers."""

    def twenty() -> None:
        for _ in range(20):
            plan.update(lengths)

    return median_ms(graph_of(twenty).replay) / 20 * 1e3


def prefill_ms(
    model: Model,
    sequences: int,
    new: int,
    before: int,
    block_size: int,
    shape: PrefillShape | None = None,
    repeats: int = 8,
) -> float:
    """Milliseconds of one layer's prefill."""
    heads, _, dim = model
    pool = Pool(model, 1, [before + new] * sequences, block_size)
    query = torch.randn(sequences * new, heads, dim, dtype=DTYPE, device=DEVICE)
    out = torch.empty_like(query)
    spec = AttentionSpec(dim**-0.5)
    shape = shape or prefill_shape(spec, heads, pool.layers[0], before + new)
    starts = np.arange(sequences + 1, dtype=np.int64) * new
    tiles = prefill_tiles(starts, np.full(sequences, before + new, np.int64), 0, shape.queries)
    on_device = torch.from_numpy(tiles).to(DEVICE)
    return repeated_ms(
        lambda: prefill_attention(query, pool.layers[0], spec, pool.tables, on_device, shape, out), repeats
    )


def repeated_ms(run: Callable[[], object], repeats: int) -> float:
    """Median time on the GPU of one call, four of which make a graph: short ones are not held up by their launches."""

    def four() -> None:
        for _ in range(4):
            run()

    return median_ms(graph_of(four).replay, repeats, warmup=1) / 4


def operations(model: Model, sequences: int, new: int, before: int) -> float:
    """Multiplications and additions of a causal prefill."""
    heads, _, dim = model
    return 4.0 * dim * heads * sequences * (new * before + new * (new + 1) / 2)


def sdpa_ms(model: Model, sequences: int, new: int, backend: SDPBackend, repeats: int = 8) -> float | None:
    """Milliseconds of torch's attention over contiguous K/V, or None where the backend refuses."""
    heads, _, dim = model
    query, key, value = (
        torch.randn(sequences, heads, new, dim, dtype=DTYPE, device=DEVICE).requires_grad_(False) for _ in range(3)
    )
    try:
        with sdpa_kernel(backend):
            return repeated_ms(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), repeats)
    except RuntimeError:
        return None


def write_us(model: Model, tokens: int, block_size: int) -> float:
    """Microseconds of storing the K/V of `tokens` decoding sequences in one layer."""
    _, kv_heads, dim = model
    pool = Pool(model, 8, [100] * tokens, block_size)
    wide = torch.randn(tokens, 2 * kv_heads * dim, dtype=DTYPE, device=DEVICE)
    key, value = (part.view(tokens, kv_heads, dim) for part in wide.chunk(2, 1))
    blocks, offsets = pool.tables[:, -1].long(), torch.full((tokens,), 99 % block_size, device=DEVICE)

    def step() -> None:
        for cache in pool.layers:
            write_kv(cache, key, value, blocks, offsets)

    return median_ms(graph_of(step).replay) / len(pool.layers) * 1e3


def header(title: str, columns: dict[str, int]) -> None:
    print(f"\n{title:12}" + "".join(f"{name:>{width}}" for name, width in columns.items()))


def run_decode(bandwidth: float, block_size: int) -> list[dict[str, Any]]:
    """All decodes of both models; each also as a share of `bandwidth`."""
    columns = {"sequences": 10, "tokens": 11, "us": 9, "MB": 9, "TB/s": 7, "of copy": 9, "plan us": 9}
    header("decode", columns)
    rows = []
    for name, model in MODELS.items():
        for sequences, low, high in DECODES:
            lengths = draw(sequences, low, high)
            pool = decode_pool(model, lengths, block_size)
            plan = plan_of(model, sequences)
            us, planning = decode_us(model, pool, plan), plan_us(plan, pool.lengths)
            nbytes = layer_bytes(model, lengths)
            rate = nbytes / us * 1e6
            tokens = str(low) if low == high else f"{low}..{high}"
            rows.append(
                {
                    "model": name,
                    "sequences": sequences,
                    "tokens": tokens,
                    "us": round(us, 2),
                    "bytes": nbytes,
                    "tb_s": round(rate / 1e12, 3),
                    "of_copy": round(rate / bandwidth, 3),
                    "plan_us": round(planning, 2),
                }
            )
            print(
                f"{name:12}{sequences:>10}{tokens:>11}{us:>9.1f}{nbytes / 1e6:>9.1f}"
                f"{rate / 1e12:>7.2f}"
                f"{rate / bandwidth:>9.0%}{planning:>9.1f}",
                flush=True,
            )
    return rows


def run_prefill(block_size: int) -> list[dict[str, Any]]:
    """All prefills of both models, each beside torch's own where that computes the same."""
    header("prefill", {"sequences": 10, "new": 7, "before": 8, "ms": 9, "TFLOP/s": 9, "cuDNN": 8, "flash": 8})
    rows = []
    for name, model in MODELS.items():
        for sequences, new, before in PREFILLS:
            work = operations(model, sequences, new, before)
            times: dict[str, float | None] = {"cudnn": None, "flash": None}
            times["ours"] = ours = prefill_ms(model, sequences, new, before, block_size)
            if before == 0:
                times["cudnn"] = sdpa_ms(model, sequences, new, SDPBackend.CUDNN_ATTENTION)
                times["flash"] = sdpa_ms(model, sequences, new, SDPBackend.FLASH_ATTENTION)
            rates = {who: round(work / ms / 1e9, 1) if ms else None for who, ms in times.items()}
            rows.append(
                {"model": name, "sequences": sequences, "new": new, "before": before}
                | {f"{who}_ms": ms and round(ms, 4) for who, ms in times.items()}
                | {f"{who}_tflop_s": rate for who, rate in rates.items()}
            )
            beside = "".join(f"{rates[who] or '-':>8}" for who in ("cudnn", "flash"))
            print(
                f"{name:12}{sequences:>10}{new:>7}{before:>8}{ours:>9.3f}{rates['ours']:>9}" + beside,
                flush=True,
            )
    return rows


def run_write(block_size: int) -> list[dict[str, Any]]:
    """The cache write of a decode step."""
    header("write", {"tokens": 10, "us": 9})
    rows = []
    for name, model in MODELS.items():
        for tokens in (1, 64, 1024):
            us = write_us(model, tokens, block_size)
            rows.append({"model": name, "tokens": tokens, "us": round(us, 2)})
            print(f"{name:12}{tokens:>10}{us:>9.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["decode", "prefill", "write"])
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--out", type=Path, help="a file for the JSON line")
    arguments = parser.parse_args()
    size = arguments.block_size
    bandwidth = copy_bandwidth()
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "dtype": "bfloat16",
        "block_size": size,
        "copy_tb_s": round(bandwidth / 1e12, 3),
    }
    print(", ".join(f"{name} {value}" for name, value in results.items()))
    if arguments.only in (None, "decode"):
        results["decode"] = run_decode(bandwidth, size)
    if arguments.only in (None, "prefill"):
        results["prefill"] = run_prefill(size)
    if arguments.only in (None, "write"):
        results["write"] = run_write(size)
    line = json.dumps(results)
    if arguments.out:
        arguments.out.write_text(line + "\n")
    print("\n" + line)


if __name__ == "__main__":
    main()
