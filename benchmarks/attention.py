"""Attention on one GPU: decode against the memory's bandwidth, prefill against what torch ships.

    python benchmarks/attention.py [--only decode|prefill|write] [--out FILE]

Decode is timed as a model runs it: one CUDA graph with many layers, each with its own K/V, so that a layer finds nothing of
its own in the L2 cache. The bound of a decode is the K/V of its tokens read once at the bandwidth that a large copy
reaches (bytes read and written, measured here). Prefill is timed launch by launch; its rate counts the products a causal
mask leaves, 2 (key_dim + value_dim) operations for each pair of query and key. torch's SDPA runs beside it on contiguous
K/V that was repeated for all heads beforehand: work that the paged kernel does not need, and that is not counted here.

Prints a table; the last line is JSON. Needs a CUDA device with about 40 GB.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
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

DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
# name: query heads, K/V heads, head size
MODELS = {"14/2 x 64": (14, 2, 64), "32/8 x 128": (32, 8, 128)}
DECODES = [(64, 4096), (1, 32768), (8, 32768), (64, 100), (256, 900), (1024, 96)]
# sequences, new tokens, tokens before them
PREFILLS = [(8, 32768, 0), (64, 40, 0), (256, 550, 0), (1, 4096, 28672)]
# A layer's K/V is read once per replay; so much of it in all that the L2 cache (60 MB) holds next to nothing.
ROTATED_BYTES = 1 << 30


def median_ms(run: Callable[[], object], repeats: int = 20, warmup: int = 3) -> float:
    """Median time of one call on the GPU, between events."""
    for _ in range(warmup):
        run()
    torch.cuda.synchronize()
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
    """Random K/V of `sequences` sequences of `length` tokens in `layers` layers, blocks in random order."""

    def __init__(self, model: tuple[int, int, int], layers: int, sequences: int, length: int, block_size: int) -> None:
        heads, kv_heads, dim = model
        self.heads, self.kv_heads, self.dim, self.block_size = heads, kv_heads, dim, block_size
        layout = KVLayout((LayerShape(kv_heads, dim, dim),) * layers, block_size, DTYPE.itemsize)
        width = layout.blocks_for(length)
        blocks = sequences * width
        flat = torch.empty(blocks * layout.block_elements, dtype=DTYPE, device=DEVICE).normal_()
        strides = (layout.block_elements, block_size * dim, dim, 1)
        shape = (blocks, kv_heads, block_size, dim)
        self.layers = [
            LayerCache(flat.as_strided(shape, strides, key), flat.as_strided(shape, strides, value))
            for key, value in zip(layout.key_offsets, layout.value_offsets, strict=True)
        ]
        order = torch.randperm(blocks, device=DEVICE).to(torch.int32)
        self.tables = order.view(sequences, width)
        self.lengths = torch.full((sequences,), length, dtype=torch.int32, device=DEVICE)
        self.layer_bytes = sequences * length * kv_heads * dim * 2 * DTYPE.itemsize


def decode_us(
    model: tuple[int, int, int],
    sequences: int,
    length: int,
    block_size: int,
    change: Callable[[DecodePlan], None] = lambda plan: None,
    max_items: int | None = None,
    pool: Pool | None = None,
) -> tuple[float, float, int]:
    """Microseconds of one layer's decode, of the plan, and bytes of K/V that a layer reads."""
    heads, kv_heads, dim = model
    pool = pool or decode_pool(model, sequences, length, block_size)
    query = torch.randn(sequences, heads, dim, dtype=DTYPE, device=DEVICE)
    out = torch.empty_like(query)
    spec = AttentionSpec(dim**-0.5)
    plan = DecodePlan(sequences, heads, kv_heads, dim, dim, DTYPE, DEVICE, max_items=max_items)
    change(plan)
    plan.update(pool.lengths)

    def step() -> None:
        for cache in pool.layers:
            decode_attention(query, cache, spec, pool.tables, plan, out)

    layers = len(pool.layers)
    decode = median_ms(graph_of(step).replay) / layers * 1e3
    update = median_ms(graph_of(lambda: [plan.update(pool.lengths) for _ in range(20)]).replay) / 20 * 1e3
    return decode, update, pool.layer_bytes


def decode_pool(model: tuple[int, int, int], sequences: int, length: int, block_size: int) -> Pool:
    _, kv_heads, dim = model
    one_layer = sequences * length * kv_heads * dim * 2 * DTYPE.itemsize
    return Pool(model, min(48, max(2, -(-ROTATED_BYTES // one_layer))), sequences, length, block_size)


def prefill_ms(
    model: tuple[int, int, int],
    sequences: int,
    new: int,
    before: int,
    block_size: int,
    shape: PrefillShape | None = None,
    repeats: int = 8,
) -> float:
    """Milliseconds of one layer's prefill."""
    heads, _, dim = model
    pool = Pool(model, 1, sequences, before + new, block_size)
    query = torch.randn(sequences * new, heads, dim, dtype=DTYPE, device=DEVICE)
    out = torch.empty_like(query)
    spec = AttentionSpec(dim**-0.5)
    shape = shape or prefill_shape(spec, heads, pool.layers[0], before + new)
    starts = np.arange(sequences + 1, dtype=np.int64) * new
    tiles = prefill_tiles(starts, np.full(sequences, before + new, np.int64), 0, shape.queries)
    on_device = torch.from_numpy(tiles).to(DEVICE)
    return median_ms(
        lambda: prefill_attention(query, pool.layers[0], spec, pool.tables, on_device, shape, out), repeats=repeats
    )


def operations(model: tuple[int, int, int], sequences: int, new: int, before: int) -> float:
    """Multiplications and additions of a causal prefill."""
    heads, _, dim = model
    return 4.0 * dim * heads * sequences * (new * before + new * (new + 1) / 2)


def sdpa_ms(
    model: tuple[int, int, int], sequences: int, new: int, backend: SDPBackend, repeats: int = 8
) -> float | None:
    """Milliseconds of torch's attention over contiguous K/V, or None where the backend refuses."""
    heads, _, dim = model
    query, key, value = (
        torch.randn(sequences, heads, new, dim, dtype=DTYPE, device=DEVICE).requires_grad_(False) for _ in range(3)
    )
    try:
        with sdpa_kernel(backend):
            return median_ms(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), repeats=repeats)
    except RuntimeError:
        return None


def write_us(model: tuple[int, int, int], tokens: int, block_size: int) -> float:
    """Microseconds of storing the K/V of `tokens` decoding sequences in one layer."""
    _, kv_heads, dim = model
    pool = Pool(model, 8, tokens, 100, block_size)
    wide = torch.randn(tokens, 2 * kv_heads * dim, dtype=DTYPE, device=DEVICE)
    key, value = (part.view(tokens, kv_heads, dim) for part in wide.chunk(2, 1))
    blocks, offsets = pool.tables[:, -1].long(), torch.full((tokens,), 99 % block_size, device=DEVICE)

    def step() -> None:
        for cache in pool.layers:
            write_kv(cache, key, value, blocks, offsets)

    return median_ms(graph_of(step).replay) / len(pool.layers) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["decode", "prefill", "write"])
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--out", type=Path)
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
        "decode": [],
        "prefill": [],
        "write": [],
    }
    print(
        f"{results['machine']}, torch {torch.__version__}, Triton {triton.__version__}; copy {bandwidth / 1e12:.2f} TB/s"
    )
    if arguments.only in (None, "decode"):
        print(f"\n{'decode':12}{'sequences':>10}{'length':>8}{'us':>9}{'MB':>9}{'TB/s':>7}{'of copy':>9}{'plan us':>9}")
        for name, model in MODELS.items():
            for sequences, length in DECODES:
                us, plan, nbytes = decode_us(model, sequences, length, size)
                rate = nbytes / us * 1e6
                row = dict(model=name, sequences=sequences, length=length, us=round(us, 2), bytes=nbytes)
                row |= dict(tb_s=round(rate / 1e12, 3), of_copy=round(rate / bandwidth, 3), plan_us=round(plan, 2))
                results["decode"].append(row)
                print(
                    f"{name:12}{sequences:>10}{length:>8}{us:>9.1f}{nbytes / 1e6:>9.1f}{rate / 1e12:>7.2f}"
                    f"{rate / bandwidth:>9.0%}{plan:>9.1f}",
                    flush=True,
                )
    if arguments.only in (None, "prefill"):
        print(
            f"\n{'prefill':12}{'sequences':>10}{'new':>7}{'before':>8}{'ms':>9}{'TFLOP/s':>9}{'cuDNN':>8}{'flash':>8}{'of cuDNN':>10}"
        )
        for name, model in MODELS.items():
            for sequences, new, before in PREFILLS:
                work = operations(model, sequences, new, before)
                ms = prefill_ms(model, sequences, new, before, size)
                peers = {}
                for peer, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
                    peers[peer] = None if before else sdpa_ms(model, sequences, new, backend)
                rates = {peer: work / time / 1e9 if time else float("nan") for peer, time in peers.items()}
                results["prefill"].append(
                    dict(model=name, sequences=sequences, new=new, before=before, ms=round(ms, 4))
                    | dict(tflop_s=round(work / ms / 1e9, 1))
                    | {f"{peer}_ms": time and round(time, 4) for peer, time in peers.items()}
                )
                print(
                    f"{name:12}{sequences:>10}{new:>7}{before:>8}{ms:>9.3f}{work / ms / 1e9:>9.0f}{rates['cudnn']:>8.0f}"
                    f"{rates['flash']:>8.0f}{work / ms / 1e9 / rates['cudnn']:>10.0%}",
                    flush=True,
                )
    if arguments.only in (None, "write"):
        print(f"\n{'write':12}{'tokens':>10}{'us':>9}")
        for name, model in MODELS.items():
            for tokens in (1, 64, 1024):
                us = write_us(model, tokens, size)
                results["write"].append(dict(model=name, tokens=tokens, us=round(us, 2)))
                print(f"{name:12}{tokens:>10}{us:>9.2f}")
    line = json.dumps(results)
    if arguments.out:
        arguments.out.write_text(line + "\n")
    print("\n" + line)


if __name__ == "__main__":
    main()
