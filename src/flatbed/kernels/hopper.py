"""Ragged causal prefill for Hopper: FlashAttention-3's division of labour over the paged pool, written in Gluon.

Gluon is Triton's lower level: layouts, shared memory, barriers and warp groups are explicit. It is needed because what
makes attention fast on this chip (Shah et al., 2024, https://arxiv.org/abs/2407.08608) cannot be said in plain Triton::

      one warp        K 3 │ V 3 │ K 2 │ V 2 │ K 1 │ ...      bulk copies of whole blocks into a ring of buffers,
                        ▼     ▼     ▼                        as fast as the ring is emptied
      warp group 0    Q K3  softmax  P V3 │ Q K2 ...         64 rows of queries each. While one group computes its
      warp group 1       Q K3  softmax  P V3 │ Q K2 ...      softmax, the tensor cores work for another
      warp group 2          Q K3  softmax  P V3 │ ...

The keys are taken from the last tile to the first: only the first few tiles that come need a mask, and the loop over
the rest has none. Windows, soft-caps, sinks and other head sizes are left to the portable kernel in attention.py.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def rows_of(pool: torch.Tensor, box: int) -> TensorDescriptor:
    """A layer's keys or values [blocks, kv_heads, block_size, dim] as rows [n, dim], copied `box` rows at a time.

    The first row is the first block's first; blocks are a whole number of rows apart (see KVLayout).
    """
    blocks, kv_heads, block_size, dim = pool.shape
    rows = (blocks - 1) * (pool.stride(0) // dim) + kv_heads * block_size
    layout = gl.NVMMASharedLayout.get_default_for([box, dim], _DTYPES[pool.dtype])
    return TensorDescriptor(pool, [rows, dim], [dim, 1], [box, dim], layout)


# Two names that changed between Triton 3.6 and 3.9: a barrier of one partition's threads, and the bulk copy.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def _load_tile(
    rows,
    barrier,
    buffer,
    table,
    tile,
    last_block,
    block_rows,
    head_rows,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Copies the K or V of tokens tile * TILE .. to a buffer [TILE, DIM]; `barrier` completes when it is there."""
    mbarrier.expect(barrier, TILE * DIM * 2)
    if BLOCK_SIZE >= TILE:
        block = gl.load(table + tile * TILE // BLOCK_SIZE)
        row = block * block_rows + head_rows + tile * TILE % BLOCK_SIZE
        _copy(rows, [row, 0], barrier, buffer)
    else:
        for piece in gl.static_range(TILE // BLOCK_SIZE):
            # Past the last block its content comes again: finite or not, it is masked.
            index = gl.minimum(tile * (TILE // BLOCK_SIZE) + piece, last_block)
            row = gl.load(table + index) * block_rows + head_rows
            part = buffer.slice(piece * BLOCK_SIZE, BLOCK_SIZE, dim=0)
            _copy(rows, [row, 0], barrier, part)


@gluon.jit
def _produce(
    ring,
    source,
    extent,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    """Fills the ring, from the last tile of keys to the first."""
    key_rows, value_rows, table = source
    tiles, last_block, key_block_rows, value_block_rows, head_rows = extent
    key_buffers, value_buffers, key_full, key_empty, value_full, value_empty = ring
    for step in range(tiles):
        place = step % BUFFERS
        # Bit 0 of the round that a buffer is in; the first wait for an empty buffer is for the round before the first.
        phase = step // BUFFERS & 1
        tile = tiles - 1 - step
        mbarrier.wait(key_empty.index(place), phase ^ 1)
        _load_tile(
            key_rows, key_full.index(place), key_buffers.index(place), table, tile, last_block, key_block_rows,
            head_rows, DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
        mbarrier.wait(value_empty.index(place), phase ^ 1)
        _load_tile(
            value_rows, value_full.index(place), value_buffers.index(place), table, tile, last_block, value_block_rows,
            head_rows, DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip


@gluon.jit
def _weigh(
    scores, mixed, top, total, scale, position, tile, TILE: gl.constexpr, MASKED: gl.constexpr, dtype: gl.constexpr
):
    """The online softmax of one tile of scores: its weights, and what was mixed so far scaled down to match."""
    scores_layout: gl.constexpr = scores.type.layout
    mixed_layout: gl.constexpr = mixed.type.layout
    if MASKED:
        token = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, scores_layout))
        scores = gl.where(token[None, :] <= position[:, None], scores, float("-inf"))
    # The scale is positive: it may wait until after the maximum, where it is part of a fused multiply-add.
    higher = gl.maximum(top, gl.max(scores, 1) * scale)
    base = higher
    if MASKED:
        # A row may have seen no key yet: its maximum is -inf then, and -inf - -inf would be NaN.
        base = gl.where(higher == float("-inf"), 0.0, higher)
    decay = gl.exp2(top - base)
    weights = gl.exp2(scores * scale - base[:, None])
    total = total * decay + gl.sum(weights, 1)
    mixed = mixed * gl.convert_layout(decay, gl.SliceLayout(1, mixed_layout))[:, None]
    weights = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, mixed_layout, 2))
    return weights, mixed, higher, total


@gluon.jit
def _score(q, ring, step, BUFFERS: gl.constexpr, TILE: gl.constexpr, scores_layout: gl.constexpr):
    """Begins the product of the queries with the keys of `step`."""
    key_buffers, _, key_full, _, _, _ = ring
    mbarrier.wait(key_full.index(step % BUFFERS), step // BUFFERS & 1)
    keys = key_buffers.index(step % BUFFERS).permute((1, 0))
    zero = gl.zeros([64, TILE], gl.float32, scores_layout)
    return warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _mix(weights, mixed, ring, step, BUFFERS: gl.constexpr):
    """Begins the product of the weights with the values of `step`."""
    _, value_buffers, _, _, value_full, _ = ring
    mbarrier.wait(value_full.index(step % BUFFERS), step // BUFFERS & 1)
    return warpgroup_mma(weights, value_buffers.index(step % BUFFERS), mixed, is_async=True)


@gluon.jit
def _steps(
    begin,
    end,
    tiles,
    scores,
    mixed,
    top,
    total,
    q,
    position,
    scale,
    ring,
    TILE: gl.constexpr,
    BUFFERS: gl.constexpr,
    MASKED: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Tiles begin .. end - 1, counted from the last one of the keys. With AHEAD, `scores` are those of `begin` when it
    starts and of `end` when it is done; without, they are not used."""
    _, _, _, key_empty, _, value_empty = ring
    scores_layout: gl.constexpr = scores.type.layout
    for step in range(begin, end):
        if AHEAD:
            following = _score(q, ring, step + 1, BUFFERS, TILE, scores_layout)
        else:
            scores = warpgroup_mma_wait(0, deps=[_score(q, ring, step, BUFFERS, TILE, scores_layout)])
            mbarrier.arrive(key_empty.index(step % BUFFERS))
        weights, mixed, top, total = _weigh(
            scores, mixed, top, total, scale, position, tiles - 1 - step, TILE, MASKED, q.dtype
        )
        mixed = _mix(weights, mixed, ring, step, BUFFERS)
        if AHEAD:
            scores, mixed = warpgroup_mma_wait(0, deps=[following, mixed])
            mbarrier.arrive(key_empty.index((step + 1) % BUFFERS))
        else:
            mixed = warpgroup_mma_wait(0, deps=[mixed])
        mbarrier.arrive(value_empty.index(step % BUFFERS))
    return scores, mixed, top, total


@gluon.jit
def _consume(
    query,
    out,
    q,  # shared [64, DIM]
    ring,
    tile,
    scale,
    strides,
    PART: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    BUFFERS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """One warp group: rows PART * 64 .. of the tile of queries."""
    _, value_buffers, _, key_empty, value_full, _ = ring
    first_token, first, count, head = tile
    query_token_stride, query_head_stride, out_token_stride, out_head_stride = strides
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    mixed_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])

    # Queries: from their strided rows to shared memory, where the tensor cores read them.
    line = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, load_layout))
    index = line // GROUP
    at = (first_token + index) * query_token_stride + (head * GROUP + line % GROUP) * query_head_stride
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, load_layout))
    q.store(gl.load(query + at[:, None] + dim[None, :], mask=(index < count)[:, None], other=0.0))
    fence_async_shared()
    _barrier()

    line = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, scores_layout))
    # Rows without a query compute what the last query does, and are not stored.
    position = first + gl.minimum(line // GROUP, count - 1)
    end = first + count
    tiles = (end + TILE - 1) // TILE
    # Tiles from key first + 1 on have keys that the first query does not see; and keys past the end.
    masked = tiles - (first + 1) // TILE

    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, scores_layout))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, scores_layout))
    mixed = gl.zeros([64, DIM], gl.float32, mixed_layout)
    scores = gl.zeros([64, TILE], gl.float32, scores_layout)
    if AHEAD:
        scores = warpgroup_mma_wait(0, deps=[_score(q, ring, 0, BUFFERS, TILE, scores_layout)])
        mbarrier.arrive(key_empty.index(0))

    if end % TILE != 0:
        # Slots past the end may hold NaN, which a weight of 0 does not stop. All warp groups write the same here (what
        # was there, and zeros past the end), so none can disturb another.
        values = value_buffers.index(0)
        mbarrier.wait(value_full.index(0), 0)
        token = (tiles - 1) * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, load_layout))
        v = values.load(load_layout)
        values.store(gl.where((token < end)[:, None], v, gl.zeros_like(v)))
        fence_async_shared()
        _barrier()

    # With AHEAD the last tile has no following one to begin with and stays for the end.
    loops = tiles - 1 if AHEAD else tiles
    masked = gl.minimum(masked, loops)
    scores, mixed, top, total = _steps(
        0, masked, tiles, scores, mixed, top, total, q, position, scale, ring, TILE, BUFFERS, True, AHEAD
    )
    scores, mixed, top, total = _steps(
        masked, loops, tiles, scores, mixed, top, total, q, position, scale, ring, TILE, BUFFERS, False, AHEAD
    )
    if AHEAD:
        weights, mixed, top, total = _weigh(scores, mixed, top, total, scale, position, 0, TILE, True, q.dtype)
        mixed = warpgroup_mma_wait(0, deps=[_mix(weights, mixed, ring, loops, BUFFERS)])

    mixed = mixed / gl.convert_layout(total, gl.SliceLayout(1, mixed_layout))[:, None]
    line = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, mixed_layout))
    index = line // GROUP
    at = (first_token + index) * out_token_stride + (head * GROUP + line % GROUP) * out_head_stride
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, mixed_layout))
    gl.store(out + at[:, None] + dim[None, :], mixed.to(out.dtype.element_ty), mask=(index < count)[:, None])


@gluon.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tables", "tiles"])
def prefill_hopper_kernel(
    query,  # [T, KV_HEADS * GROUP, DIM], strided over tokens and heads
    key_rows,  # tensor descriptors of the pools as rows [n, DIM]
    value_rows,
    out,  # [T, KV_HEADS * GROUP, DIM], likewise strided
    tables,  # int32 [sequences, ...]
    tiles,  # int32 [n, 4]: sequence, first query's token in the batch, its position, queries
    scale,  # times log2(e)
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    key_block_rows,  # from one block to the next, in rows
    value_block_rows,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,  # keys at a time
    CONSUMERS: gl.constexpr,  # warp groups of 64 rows
    BUFFERS: gl.constexpr,  # of K, and as many of V
    AHEAD: gl.constexpr,  # multiply the queries with the next keys during the softmax; takes TILE / 2 more registers
):
    """One program per (tile of queries, K/V head), of CONSUMERS warp groups and one warp that loads."""
    head = gl.program_id(0) % KV_HEADS
    record = tiles + gl.program_id(0) // KV_HEADS * 4
    sequence = gl.load(record).to(gl.int64)
    first_token = gl.load(record + 1).to(gl.int64)
    first = gl.load(record + 2)
    count = gl.load(record + 3)

    dtype: gl.constexpr = key_rows.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, DIM], dtype)
    q = gl.allocate_shared_memory(dtype, [CONSUMERS, 64, DIM], shared)
    key_buffers = gl.allocate_shared_memory(dtype, [BUFFERS, TILE, DIM], shared)
    value_buffers = gl.allocate_shared_memory(dtype, [BUFFERS, TILE, DIM], shared)
    key_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    key_empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    value_empty = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BUFFERS):
        mbarrier.init(key_full.index(i), count=1)
        mbarrier.init(key_empty.index(i), count=CONSUMERS)
        mbarrier.init(value_full.index(i), count=1)
        mbarrier.init(value_empty.index(i), count=CONSUMERS)

    end = first + count
    ring = (key_buffers, value_buffers, key_full, key_empty, value_full, value_empty)
    tile = (first_token, first, count, head)
    strides = (query_token_stride, query_head_stride, out_token_stride, out_head_stride)
    source = (key_rows, value_rows, tables + sequence * table_stride)
    extent = ((end + TILE - 1) // TILE, (end - 1) // BLOCK_SIZE, key_block_rows, value_block_rows, head * BLOCK_SIZE)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (query, out, q.index(0), ring, tile, scale, strides, 0, GROUP, DIM, TILE, BUFFERS, AHEAD)),
                (_consume, (query, out, q.index(1), ring, tile, scale, strides, 1, GROUP, DIM, TILE, BUFFERS, AHEAD)),
                (_produce, (ring, source, extent, DIM, BLOCK_SIZE, TILE, BUFFERS)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (query, out, q.index(0), ring, tile, scale, strides, 0, GROUP, DIM, TILE, BUFFERS, AHEAD)),
                (_consume, (query, out, q.index(1), ring, tile, scale, strides, 1, GROUP, DIM, TILE, BUFFERS, AHEAD)),
                (_consume, (query, out, q.index(2), ring, tile, scale, strides, 2, GROUP, DIM, TILE, BUFFERS, AHEAD)),
                (_produce, (ring, source, extent, DIM, BLOCK_SIZE, TILE, BUFFERS)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
