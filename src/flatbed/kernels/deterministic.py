"""Triton kernels whose order of operations is fixed for each row (see model/deterministic).

Nothing here depends on how many rows there are. Where the compiler could choose whether a product and a sum become one
operation, and so whether something is rounded in between, the code says which (`tl.fma`): the same formula then gives
the same bits in every kernel that uses it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


# ---- products and sums ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x, weight, bias, out, rows, size, width, x_stride, size_stride, width_stride,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out [rows, width] = x [rows, size] times weight [size, width] (any strides) plus bias [width].

    A program per tile of out, which adds up DEPTH numbers of each row at a time, from the first to the last; no program
    shares a sum with another.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    in_rows, in_columns = row < rows, column < width
    x_at = x + row[:, None].to(tl.int64) * x_stride
    weight_at = weight + column[None, :].to(tl.int64) * width_stride
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, size, DEPTH):
        at = k + depth
        v = tl.load(x_at + at[None, :], mask=in_rows[:, None] & (at < size)[None, :], other=0.0)
        w = tl.load(
            weight_at + at[:, None].to(tl.int64) * size_stride,
            mask=(at < size)[:, None] & in_columns[None, :],
            other=0.0,
        )
        total = tl.dot(v, w, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    out_at = out + row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def row_sum_kernel(x, out, size, divisor, BLOCK: tl.constexpr):
    """out [rows] = the sum of each row of x [rows, size], over divisor; a program a row, in float32."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        total += tl.load(x + row * size + start + lane, mask=start + lane < size, other=0.0).to(tl.float32)
    tl.store(out + row, (tl.sum(total, 0) / divisor).to(out.dtype.element_ty))


# ---- attention ------------------------------------------------------------------------------------------------------


@triton.jit
def _join(top, total, mixed, other_top, other_total, other_mixed):
    """Two softmaxes over different keys as one: maximum (in units of log 2), sum, and sum of weighted values of each.

    With an empty one (maximum -inf) the other comes out unchanged to the bit.
    """
    higher = tl.maximum(top, other_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    factor, other_factor = tl.exp2(top - base), tl.exp2(other_top - base)
    total = tl.fma(other_total, other_factor, total * factor)
    mixed = tl.fma(other_mixed, tl.broadcast_to(other_factor[:, None], mixed.shape), mixed * factor[:, None])
    return higher, total, mixed


@triton.jit(do_not_specialize=["window", "table_stride"], do_not_specialize_on_alignment=["tables", "tiles"])
def attention_kernel(
    query,  # [T, KV_HEADS * GROUP, KEY_DIM], strided over tokens and heads
    key_pool,
    value_pool,
    out,  # [T, KV_HEADS * GROUP, VALUE_DIM], likewise strided
    partials,  # float32 [n, splits, KV_HEADS * GROUP, VALUE_DIM]
    stats,  # float32 [n, splits, KV_HEADS * GROUP, 2]: maximum, sum
    tables,  # int32 [sequences, ...]
    tiles,  # int32 [n, 4]: sequence, first query's token in the batch, its position, queries
    sinks,  # [KV_HEADS * GROUP]
    scale,  # times log2(e), or over the soft-cap
    softcap,
    window,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    key_block_stride,
    value_block_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,  # (query, head) pairs of a program
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TILE: tl.constexpr,  # keys at a time
    SPLIT: tl.constexpr,  # keys that make a softmax of their own; a multiple of TILE
    DIVIDED: tl.constexpr,  # a program does one split and leaves its softmax to join_kernel
):
    """One program per (tile of queries, K/V head), or per (tile of one query, K/V head, split).

    Tiles and splits of keys begin at fixed positions of the sequence, whoever asks. Every split is a softmax of its
    own, and splits are joined from the first to the last, here or in join_kernel, by the same operations::

          keys      0          64         128    ...     SPLIT                        2 SPLIT
                    ├── tile ──┼── tile ──┼── ... ──│     ├── tile ──┼── ... ──│        ├── ...
          row       ((empty ⊕ split 0) ⊕ split 1) ⊕ split 2 ...

    A query that does not see a tile that others of its program see gets nothing from it, to the bit.
    """
    head = tl.program_id(0) % KV_HEADS
    item = tl.program_id(0) // KV_HEADS
    sequence = tl.load(tiles + item * 4).to(tl.int64)
    first_token = tl.load(tiles + item * 4 + 1).to(tl.int64)
    first = tl.load(tiles + item * 4 + 2)
    count = tl.load(tiles + item * 4 + 3)

    line = tl.arange(0, ROWS)
    index = line // GROUP
    member = head * GROUP + line % GROUP
    # A tile without queries (a row of a captured graph that has nothing to do) sees nothing, and its token gets 0.
    used = index < tl.maximum(count, 1)
    # Rows without a query compute what the last query does, and are not stored.
    position = first + tl.minimum(index, tl.maximum(count - 1, 0))
    key_dim = tl.arange(0, KEY_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    at = (first_token + index) * query_token_stride + member * query_head_stride
    q = tl.load(query + at[:, None] + key_dim[None, :], mask=used[:, None] & (key_dim < KEY_DIM)[None, :], other=0.0)

    end = first + count
    begin = 0
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // TILE * TILE
    split_from, split_to = begin // SPLIT, (end + SPLIT - 1) // SPLIT
    if DIVIDED:
        split_from = tl.program_id(1)
        split_to = tl.minimum(split_to, split_from + 1)
        begin = tl.maximum(begin, split_from * SPLIT)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    if SINKS and not DIVIDED:
        top = tl.load(sinks + member).to(tl.float32) * LOG2E
        total = total + 1.0
    table = tables + sequence * table_stride
    keys = key_pool + head * (BLOCK_SIZE * KEY_DIM)
    values = value_pool + head * (BLOCK_SIZE * VALUE_DIM)
    within = tl.arange(0, TILE)
    for split in range(split_from, split_to):
        split_top = tl.full([ROWS], float("-inf"), tl.float32)
        split_total = tl.zeros([ROWS], tl.float32)
        split_mixed = tl.zeros([ROWS, VALUE_PAD], tl.float32)
        split_end = tl.minimum(end, (split + 1) * SPLIT)
        for start in range(tl.maximum(begin, split * SPLIT), split_end, TILE):
            token = start + within
            inside = token < split_end
            block = tl.load(table + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = token % BLOCK_SIZE
            k = tl.load(
                keys + (block * key_block_stride + slot * KEY_DIM)[:, None] + key_dim[None, :],
                mask=inside[:, None] & (key_dim < KEY_DIM)[None, :], other=0.0,
            )  # fmt: skip
            v = tl.load(
                values + (block * value_block_stride + slot * VALUE_DIM)[:, None] + value_dim[None, :],
                mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0,
            )  # fmt: skip
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if SOFTCAP:
                # tanh(x) = 1 - 2 / (e^2x + 1): right at both ends, where e^2x is 0 or infinite.
                scores = (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E)) + 1.0)) * (softcap * LOG2E)
            seen = token[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (token[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(split_top, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - base[:, None])
            decay = tl.exp2(split_top - base)
            split_total = tl.fma(split_total, decay, tl.sum(weights, 1))
            split_mixed = tl.dot(weights.to(v.dtype), v, split_mixed * decay[:, None], input_precision="ieee")
            split_top = higher
        top, total, mixed = _join(top, total, mixed, split_top, split_total, split_mixed)

    stored = used[:, None] & (value_dim < VALUE_DIM)[None, :]
    if DIVIDED:
        place = (item.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (KV_HEADS * GROUP) + member
        tl.store(partials + place[:, None] * VALUE_DIM + value_dim[None, :], mixed, mask=stored)
        tl.store(stats + place * 2, top, mask=used)
        tl.store(stats + place * 2 + 1, total, mask=used)
    else:
        at = (first_token + index) * out_token_stride + member * out_head_stride
        result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + at[:, None] + value_dim[None, :], result.to(out.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["window", "splits"], do_not_specialize_on_alignment=["tiles"])
def join_kernel(
    partials,
    stats,
    out,
    tiles,
    sinks,
    window,
    splits,
    out_token_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Joins the splits of tiles of one query, from the first to the last; a program per (tile, head)."""
    item, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(tiles + item * 4 + 1).to(tl.int64)
    position = tl.load(tiles + item * 4 + 2)
    value_dim = tl.arange(0, VALUE_PAD)
    inside = value_dim < VALUE_DIM
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, VALUE_PAD], tl.float32)
    if SINKS:
        top = tl.load(sinks + head + tl.arange(0, 1)).to(tl.float32) * LOG2E
        total = total + 1.0
    first = 0
    if WINDOW:
        first = tl.maximum(position - window + 1, 0) // TILE * TILE // SPLIT
    for split in range(first, position // SPLIT + 1):
        place = (item * splits + split) * HEADS + head
        stat = stats + place * 2 + tl.arange(0, 1)
        part = tl.load(partials + place * VALUE_DIM + value_dim, mask=inside, other=0.0)
        top, total, mixed = _join(top, total, mixed, tl.load(stat), tl.load(stat + 1), part[None, :])
    at = out + token * out_token_stride + head * out_head_stride + value_dim[None, :]
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside[None, :])
