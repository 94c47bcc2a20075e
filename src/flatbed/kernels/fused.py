"""Triton kernels that fuse what stands between the matrix products of a decoder layer.

::

      x, residual ─▶ add_norm ─▶ products (q, k, v) ─▶ rotate_write ─▶ attention ─▶ o_proj ─┐
                       ▲                               (K, V → pool)                        │
                       │                                                                    ▼
      next layer ◀─ down_proj ◀─ gated (activation(gate) * up, both products) ◀──────────────── add_norm

Rows only stand in masks: to know that they are a multiple of 16, or one, makes no faster kernel, but one more to
compile.

With PDL (programmatic dependent launch, Hopper) a kernel is launched while the one before it still runs, and waits for
its results by itself: what a launch costs is then hidden.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton's names of dtypes.
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# How a weight comes into an RMSNorm: as LlamaRMSNorm has it (what is normalised is rounded first), as Olmo2RMSNorm
# (rounded once, at the end), or as GemmaRMSNorm (likewise, and one is added to the weight).
ROUNDED_FIRST: tl.constexpr = tl.constexpr(0)
ROUNDED_LAST: tl.constexpr = tl.constexpr(1)
ADDED_TO_ONE: tl.constexpr = tl.constexpr(2)

# What a gate goes through.
SILU: tl.constexpr = tl.constexpr(0)
GELU_TANH: tl.constexpr = tl.constexpr(1)
GELU: tl.constexpr = tl.constexpr(2)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    """An activation of float32 numbers."""
    if KIND == SILU:
        return x / (1.0 + tl.exp(-x))
    if KIND == GELU_TANH:  # tanh(y) = 1 - 2 / (1 + exp(2 y)), which no y makes overflow into NaN
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    return 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))


@triton.jit
def add_norm_kernel(
    x, residual, weight, out, residual_out, size, part_stride, eps,
    PARTS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KIND: tl.constexpr, PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """residual_out = residual + x; out = weight * residual_out / rms(residual_out). A program per row of `size`.

    x is a row as it is (PARTS 0), or the sum of PARTS float32 partial products, part_stride apart. Rounded where a
    matrix product (to PRODUCT) and an RMSNorm of this KIND round: x, the sum, perhaps the normalised value, the result.
    In mixed precision the residuals and the weight are float32, and PRODUCT and out may be less.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row * size + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(x + part * part_stride + row * size + at, mask=inside, other=0.0)
    if PARTS > 0:
        value = value.to(PRODUCT)
    stream = residual_out.dtype.element_ty
    if HAS_RESIDUAL:
        value = value.to(tl.float32) + tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
    value = value.to(stream)
    if HAS_RESIDUAL or PARTS > 0:
        tl.store(residual_out + row * size + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = wide * scale
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == ROUNDED_FIRST:
        normed = normed.to(stream).to(tl.float32)
    if KIND == ADDED_TO_ONE:
        gain += 1.0
    tl.store(out + row * size + at, (normed * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def rotate_write_kernel(
    query, key, value, cos, sin, positions, query_gain, key_gain, query_out, key_pool, value_pool, slot_blocks,
    slot_offsets, tokens, query_stride, key_stride, value_stride, cos_stride, out_stride, key_block_stride,
    value_block_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, TABLE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Rotary embedding of q and k (after an RMSNorm of each head when NORM), K and V into the pool.

    A program per (TOKENS tokens, head), heads counted q, then k, then v. The two halves of a head are rotated against
    each other::

        out[:half] = a cos - b sin        out[half:] = b cos + a sin        (a, b the halves; cos, sin by position)

    cos and sin have a row for each token, or with TABLE one for each position.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    half = DIM // 2
    at = tl.arange(0, HALF_PAD)[None, :]
    present = token < tokens
    inside = present[:, None] & (at < half)
    if head < HEADS + KV_HEADS:
        is_query = head < HEADS
        if is_query:
            source = query + (token * query_stride + head * DIM)[:, None] + at
            gain = query_gain
        else:
            source = key + (token * key_stride + (head - HEADS) * DIM)[:, None] + at
            gain = key_gain
        dtype = query.dtype.element_ty
        a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
            a = (a * scale).to(dtype).to(tl.float32) * tl.load(gain + at, mask=at < half, other=0.0).to(tl.float32)
            b = (b * scale).to(dtype).to(tl.float32) * tl.load(gain + half + at, mask=at < half, other=0.0).to(
                tl.float32
            )
            kept = gain.dtype.element_ty  # in mixed precision, more than the product's
            a, b = a.to(kept).to(tl.float32), b.to(kept).to(tl.float32)
        row = token
        if TABLE:
            row = tl.load(positions + token, mask=present, other=0).to(tl.int64)
        angle = (row * cos_stride)[:, None] + at
        c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        low, high = a * c - b * s, b * c + a * s
        if is_query:
            out = query_out + (token * out_stride + head * DIM)[:, None] + at
            tl.store(out, low.to(dtype), mask=inside)
            tl.store(out + half, high.to(dtype), mask=inside)
        else:
            block = tl.load(slot_blocks + token, mask=present, other=-1).to(tl.int64)
            slot = tl.load(slot_offsets + token, mask=present, other=0).to(tl.int64)
            stored = inside & (block >= 0)[:, None]
            place = block * key_block_stride + ((head - HEADS) * BLOCK_SIZE + slot) * DIM
            out = key_pool + place[:, None] + at
            tl.store(out, low.to(key_pool.dtype.element_ty), mask=stored)
            tl.store(out + half, high.to(key_pool.dtype.element_ty), mask=stored)
    else:
        kv_head = head - HEADS - KV_HEADS
        block = tl.load(slot_blocks + token, mask=present, other=-1).to(tl.int64)
        slot = tl.load(slot_offsets + token, mask=present, other=0).to(tl.int64)
        stored = inside & (block >= 0)[:, None]
        source = value + (token * value_stride + kv_head * DIM)[:, None] + at
        place = block * value_block_stride + (kv_head * BLOCK_SIZE + slot) * DIM
        out = value_pool + place[:, None] + at
        a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        tl.store(out, a.to(value_pool.dtype.element_ty), mask=stored)
        tl.store(out + half, b.to(value_pool.dtype.element_ty), mask=stored)


@triton.jit
def activated_product_kernel(
    gate, up, out, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out = activation(gate) * up, elementwise over `count` numbers; rounded after the activation, as torch does."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + at, (_activate(g, ACTIVATION).to(dtype).to(tl.float32) * u).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def products_kernel(
    x, weight0, weight1, weight2, bias0, bias1, bias2, out, rows, size, width0, width1, width2, tiles0, tiles1,
    BIAS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [rows, width0 + width1 + width2] = x [rows, size] times each weight [width_i, size], transposed, plus bias_i.

    A program per (tile of one weight's rows, ROWS rows of x): where those are all of x, every weight is read once. The
    three weights stay where they are.
    """
    tile = tl.program_id(0)
    if tile < tiles0:
        weight, bias, width, start, first = weight0, bias0, width0, tile * TILE, 0
    elif tile < tiles0 + tiles1:
        weight, bias, width, start, first = weight1, bias1, width1, (tile - tiles0) * TILE, width0
    else:
        weight, bias, width, start, first = weight2, bias2, width2, (tile - tiles0 - tiles1) * TILE, width0 + width1
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = start + tl.arange(0, TILE)
    depth = tl.arange(0, DEPTH)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    in_rows, in_columns = row < rows, column < width
    total = tl.zeros((ROWS, TILE), tl.float32)
    for k in range(0, size, DEPTH):
        in_depth = k + depth < size
        w = tl.load(
            weight + column[:, None].to(tl.int64) * size + (k + depth)[None, :],
            mask=in_columns[:, None] & in_depth[None, :], other=0.0,
        )  # fmt: skip
        v = tl.load(
            x + row[:, None] * size + (k + depth)[None, :], mask=in_rows[:, None] & in_depth[None, :], other=0.0
        )
        total += tl.dot(v, tl.trans(w))
    if BIAS:
        total += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    all_columns = width0 + width1 + width2
    where = out + row[:, None] * all_columns + first + column[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit(do_not_specialize=["rows"])
def gated_kernel(
    x, gate_weight, up_weight, out, rows, size, width,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [rows, width] = activation(x times gate_weight transposed) * (x times up_weight transposed), for few rows."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if PDL:
        gdc_wait()
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    in_rows, in_columns = row < rows, column < width
    gate = tl.zeros((ROWS, TILE), tl.float32)
    up = tl.zeros((ROWS, TILE), tl.float32)
    for k in range(0, size, DEPTH):
        in_depth = k + depth < size
        place = column[:, None].to(tl.int64) * size + (k + depth)[None, :]
        inside = in_columns[:, None] & in_depth[None, :]
        v = tl.load(
            x + row[:, None] * size + (k + depth)[None, :], mask=in_rows[:, None] & in_depth[None, :], other=0.0
        )
        gate += tl.dot(v, tl.trans(tl.load(gate_weight + place, mask=inside, other=0.0)))
        up += tl.dot(v, tl.trans(tl.load(up_weight + place, mask=inside, other=0.0)))
    if PDL:
        # Not before: programs of the next product that wait beside these would be divided unevenly among the
        # multiprocessors. With hidden sizes of 4096 and one row it took 44 us instead of 27.
        gdc_launch_dependents()
    dtype = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    gate = _activate(gate, ACTIVATION).to(dtype).to(tl.float32)
    where = out + row[:, None] * width + column[None, :]
    tl.store(where, (gate * up).to(dtype), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit(do_not_specialize=["rows"])
def partial_product_kernel(
    x, weight, out, rows, size, width, share,
    ROWS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [parts, rows, width] float32: x [rows, size] times weight [width, size] transposed, part by part.

    A program per (tile of the weight's rows, part); a part is `share` of the inner dimension. Where the product has few
    columns that is what fills the GPU; add_norm_kernel adds the parts up.
    """
    part = tl.program_id(1)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    in_rows, in_columns = row < rows, column < width
    total = tl.zeros((ROWS, TILE), tl.float32)
    end = tl.minimum(size, (part + 1) * share)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for k in range(part * share, end, DEPTH):
        in_depth = k + depth < end
        w = tl.load(
            weight + column[:, None].to(tl.int64) * size + (k + depth)[None, :],
            mask=in_columns[:, None] & in_depth[None, :], other=0.0,
        )  # fmt: skip
        v = tl.load(
            x + row[:, None] * size + (k + depth)[None, :], mask=in_rows[:, None] & in_depth[None, :], other=0.0
        )
        total += tl.dot(v, tl.trans(w))
    where = out + part.to(tl.int64) * rows * width + row[:, None] * width + column[None, :]
    tl.store(where, total, mask=in_rows[:, None] & in_columns[None, :])
