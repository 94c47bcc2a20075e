"""Triton kernels of attention over the paged pool: write, decode (with its plan) and ragged causal prefill.

All of them read K/V where it lies: of one layer, block b and K/V head h hold one contiguous run of block_size * dim
numbers, and blocks are `block_stride` elements apart::

      key ─▶ block 0: │ head 0: [block_size, dim] │ head 1 │ ...   (other layers)  │ block 1: │ head 0 │ ...
             ├──────────────────────────── block_stride ──────────────────────────▶│

The queries that share a K/V head are rows of one tile, so that K/V is read once for all of them::

      decode    rows of a tile = the `GROUP` query heads of one token, padded to 16 for the tensor cores
      prefill   rows of a tile = (query, head in the group):   q0h0 q0h1 q0h2 │ q1h0 q1h1 q1h2 │ ...

Softmax is the online one of FlashAttention (Dao et al., 2022, https://arxiv.org/abs/2205.14135, algorithm 1) with
base-2 exponentials; scores, sums and accumulators are float32 for every input type. float32 inputs are multiplied
exactly (`input_precision="ieee"`), not in tf32.

What is beyond a sequence's tokens is never multiplied, not even by zero: a NaN that a former owner left in a slot
stays there. Block ids are widened to int64 before they meet a stride: a pool may have more than 2**31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


# Compiling takes a second or so: what changes from step to step, or lies anywhere in a larger buffer, must not lead to
# new kernels.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slot_blocks", "slot_offsets"])
def write_kernel(
    key,  # [T, KV_HEADS, KEY_DIM], strided over tokens and heads
    value,  # [T, KV_HEADS, VALUE_DIM], likewise
    key_pool,
    value_pool,
    slot_blocks,  # [T]; a negative block stands for nothing to store
    slot_offsets,  # [T]
    tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    value_block_stride,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # (token, head) pairs of a program
    PADDED: tl.constexpr,  # the larger dim, a power of two
):
    """Stores K/V of T tokens into their slots; pairs of (token, head) are divided among programs."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = pair // KV_HEADS
    head = pair % KV_HEADS
    inside = token < tokens
    block = tl.load(slot_blocks + token, mask=inside, other=-1).to(tl.int64)
    offset = tl.load(slot_offsets + token, mask=inside, other=0).to(tl.int64)
    stored = (inside & (block >= 0))[:, None]
    dim = tl.arange(0, PADDED)[None, :]
    slot = head * BLOCK_SIZE + offset

    mask = stored & (dim < KEY_DIM)
    new = tl.load(key + (token * key_token_stride + head * key_head_stride)[:, None] + dim, mask=mask)
    tl.store(key_pool + (block * key_block_stride + slot * KEY_DIM)[:, None] + dim, new, mask=mask)
    mask = stored & (dim < VALUE_DIM)
    new = tl.load(value + (token * value_token_stride + head * value_head_stride)[:, None] + dim, mask=mask)
    tl.store(value_pool + (block * value_block_stride + slot * VALUE_DIM)[:, None] + dim, new, mask=mask)


@triton.jit
def _blocks(table, at, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The blocks of tokens at .. at + TILE - 1: one for all where tiles do not cross blocks, or one for each."""
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + at // BLOCK_SIZE, mask=at < end, other=0)
    else:
        token = at + tl.arange(0, TILE)
        block = tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0)
    return block


@triton.jit
def _slots(block, at, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Block ids, wide enough for a product with a stride, and places in the block, [TILE], of one tile."""
    if BLOCK_SIZE % TILE == 0:
        slot = at % BLOCK_SIZE + tl.arange(0, TILE)
    else:
        slot = (at + tl.arange(0, TILE)) % BLOCK_SIZE
    return block.to(tl.int64), slot


@triton.jit
def _softcapped(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scaled (and capped) scores, in units of log 2; `scale` then holds scale * log2(e), or scale / softcap."""
    scores = scores * scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (e^2x + 1): right at both ends, where e^2x is 0 or infinite.
        scores = (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E)) + 1.0)) * (softcap * LOG2E)
    return scores


# ---- decode ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "max_items", "window", "least"], do_not_specialize_on_alignment=["lengths"])
def plan_kernel(
    lengths,  # int [rows]
    items,  # int32 [max_items, 8], see decode_kernel
    rows,
    max_items,
    window,  # 0: none
    least,  # fewest tiles worth a program of their own
    TILE: tl.constexpr,
    ROWS: tl.constexpr,  # rows, rounded up to a power of two
):
    """Divides the live K/V of a batch into at most `max_items` pieces of about equal size.

    One program per row writes the items of its row; one more marks the items that are left over as empty. With T
    tiles alive, a piece has `share` = ceil(T / (max_items - rows)) tiles, so that the sum over rows of ceil(tiles /
    share) is at most rows + T / share <= max_items. Every row has at least one item, so that its output is written.
    """
    row = tl.program_id(0)
    at = tl.arange(0, ROWS)
    length = tl.load(lengths + at, mask=at < rows, other=0).to(tl.int32)
    low = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    first = low // TILE * TILE
    tiles = (length - first + TILE - 1) // TILE
    share = tl.maximum(least, (tl.sum(tiles) + max_items - rows - 1) // (max_items - rows))
    count = tl.maximum((tiles + share - 1) // share, 1)
    part = tl.maximum((tiles + count - 1) // count, 1)  # even pieces, of at most `share` tiles
    count = tl.where(at < rows, tl.maximum((tiles + part - 1) // part, 1), 0)
    lane = tl.arange(0, 64)
    if row < rows:
        mine = at == row
        my_length = tl.sum(tl.where(mine, length, 0))
        my_low = tl.sum(tl.where(mine, low, 0))
        my_first = tl.sum(tl.where(mine, first, 0))
        my_part = tl.sum(tl.where(mine, part, 0)) * TILE
        my_tiles = tl.sum(tl.where(mine, tiles, 0))
        my_count = tl.sum(tl.where(mine, count, 0))
        # Programs start in the order of the items: long ones first, so that the last to run are short.
        start = tl.sum(tl.where((tiles > my_tiles) | ((tiles == my_tiles) & (at < row)), count, 0))
        for done in range(0, my_count, 64):
            item = done + lane
            inside = item < my_count
            to = items + (start + item) * 8
            begin = my_first + item * my_part
            tl.store(to, tl.zeros([64], tl.int32) + row, mask=inside)
            tl.store(to + 1, begin, mask=inside)
            tl.store(to + 2, tl.minimum(begin + my_part, my_length), mask=inside)
            tl.store(to + 3, tl.zeros([64], tl.int32) + my_low, mask=inside)
            tl.store(to + 4, tl.zeros([64], tl.int32) + start, mask=inside)
            tl.store(to + 5, tl.zeros([64], tl.int32) + my_count, mask=inside)
    else:
        for done in range(tl.sum(count), max_items, 64):
            tl.store(items + (done + lane) * 8 + 5, tl.zeros([64], tl.int32), mask=done + lane < max_items)


@triton.jit
def _sum_of_ways(x, WAYS: tl.constexpr, DIM: tl.constexpr):
    """Sum of x [WAYS, 16, DIM] over the first dimension. `tl.sum` would do it with a shuffle and two trips through
    shared memory for every number; here each thread fetches the numbers that it adds, in one trip."""
    if WAYS == 1:
        x = tl.reshape(x, [16, DIM])
    else:
        x = tl.permute(x, (1, 2, 0))
        if WAYS == 8:
            a, b = tl.split(tl.reshape(x, [16, DIM, 4, 2]))
            x = a + b
        if WAYS >= 4:
            a, b = tl.split(tl.reshape(x, [16, DIM, 2, 2]))
            x = a + b
        a, b = tl.split(x)
        x = a + b
    return x


@triton.jit
def _joined(
    partials,
    stats,
    place,  # of the first of `count` partial results, which lie one behind the other
    count,
    line,  # [LINES_PAD]
    used,  # [LINES_PAD]
    value_dim,  # [VALUE_PAD]
    LINES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LINES_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    JOIN: tl.constexpr,
):
    """The result [LINES_PAD, VALUE_PAD] that partial results make together, JOIN of them at a time."""
    lane = tl.arange(0, JOIN)
    top = tl.full([LINES_PAD], float("-inf"), tl.float32)
    total = tl.zeros([LINES_PAD], tl.float32)
    mixed = tl.zeros([LINES_PAD, VALUE_PAD], tl.float32)
    for done in range(0, count, JOIN):
        at = place + done + lane
        mask = ((done + lane) < count)[:, None] & used[None, :]
        stat = stats + (at * (2 * LINES))[:, None] + line[None, :]
        part = partials + ((at * LINES)[:, None] + line[None, :])[:, :, None] * VALUE_DIM + value_dim[None, None, :]
        # Read past L1, which the stores of other programs do not reach.
        tops = tl.load(stat, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stat + LINES, mask=mask, other=0.0, cache_modifier=".cg")
        mask = mask[:, :, None] & (value_dim < VALUE_DIM)[None, None, :]
        parts = tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        factor = tl.exp2(tops - base[None, :])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(totals * factor, 0)
        mixed = mixed * decay[:, None] + tl.sum(parts * factor[:, :, None], 0)
        top = higher
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["max_items", "table_stride"], do_not_specialize_on_alignment=["tables"])
def decode_kernel(
    query,  # [rows, KV_HEADS * GROUP, KEY_DIM], strided over rows and heads
    key_pool,
    value_pool,
    out,  # [rows, KV_HEADS * GROUP, VALUE_DIM], strided over rows and heads
    tables,  # int32 [rows, ...]
    items,  # int32 [max_items, 8]: row, first token, end, first token seen, the row's first item, its items (0: none)
    partials,  # float32 [KV_HEADS * PARTS, max_items, LINES, VALUE_DIM]
    stats,  # float32 [KV_HEADS * PARTS, max_items, 2, LINES]: running maximum, sum
    arrived,  # int32 [rows, KV_HEADS * PARTS], zero between launches
    sinks,  # [KV_HEADS * GROUP]
    scale,
    softcap,
    max_items,
    query_row_stride,
    query_head_stride,
    out_row_stride,
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
    PARTS: tl.constexpr,  # programs among which the query heads of one K/V head are divided
    LINES: tl.constexpr,  # query heads of a program, at most 16
    KEY_PAD: tl.constexpr,  # KEY_DIM, rounded up to a power of two
    VALUE_PAD: tl.constexpr,
    WAYS: tl.constexpr,  # softmaxes side by side: one for each warp, or 1 where products are not on the tensor cores
    TOKENS: tl.constexpr,  # that each reads at a time; divides BLOCK_SIZE
    JOIN: tl.constexpr,  # partial results that are combined at a time
    LINES_PAD: tl.constexpr,  # LINES, rounded up to a power of two
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,  # launched while the kernel before it still runs
    PDL: tl.constexpr,  # lets the kernel after it be launched while it runs
):
    """One program per (item, K/V head, part of its query heads): attention of one token over a piece of its K/V.

    The warps of a program take turns at the tokens, and each keeps a softmax of its own; their results meet at the end.
    Written as a product with a batch dimension, which the compiler gives to the warps: in the loop they exchange
    nothing::

          tokens    at + 0 .. 15 │ 16 .. 31 │ 32 .. 47 │ 48 .. 63 │ next step ...
                    warp 0         warp 1     warp 2     warp 3

    A row that is one item is written at once. Otherwise each program leaves its partial result (Flash-Decoding,
    https://pytorch.org/blog/flash-decoding/), and the one that arrives last combines them; a second launch would cost
    more than that, since a step runs this once a layer.
    """
    column = tl.program_id(0) % (KV_HEADS * PARTS)
    item = tl.program_id(0) // (KV_HEADS * PARTS)
    # All at once: what follows waits for one trip to memory, not for several.
    record = items + item * 8
    row = tl.load(record).to(tl.int64)
    begin = tl.load(record + 1)
    end = tl.load(record + 2)
    low = tl.load(record + 3)
    start = tl.load(record + 4)
    count = tl.load(record + 5)
    if count == 0:
        return
    begin = tl.maximum(begin, low // (WAYS * TOKENS) * (WAYS * TOKENS))

    head = column // PARTS
    line = tl.arange(0, 16)
    member = column % PARTS * LINES + line
    used = (line < LINES) & (member < GROUP)
    member = head * GROUP + member
    way = tl.arange(0, WAYS)
    within = tl.arange(0, TOKENS)
    key_dim = tl.arange(0, KEY_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    table = tables + row * table_stride
    following = tl.load(table + (begin + way * TOKENS) // BLOCK_SIZE, mask=begin + way * TOKENS < end, other=0)
    if EARLY:
        # Items and tables were made long before this launch; queries and the step's own K/V have to be waited for.
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    query_mask = used[:, None]
    if KEY_PAD != KEY_DIM:
        query_mask = query_mask & (key_dim < KEY_DIM)[None, :]
    q = tl.load(
        query + row * query_row_stride + member[:, None] * query_head_stride + key_dim[None, :],
        mask=query_mask,
        other=0.0,
    )
    q = tl.broadcast_to(q[None, :, :], [WAYS, 16, KEY_PAD])

    top = tl.full([WAYS, 16], float("-inf"), tl.float32)
    total = tl.zeros([WAYS, 16], tl.float32)
    if SINKS:
        # A sink is one more key with no value; the first warp of the row's first item counts it.
        sink = tl.load(sinks + member, mask=used, other=0.0).to(tl.float32) * LOG2E
        counts = (item == start) & (way == 0)[:, None]
        top = tl.where(counts, sink[None, :], top)
        total = tl.where(counts, 1.0, total)
    mixed = tl.zeros([WAYS, 16, VALUE_PAD], tl.float32)

    keys = key_pool + head * (BLOCK_SIZE * KEY_DIM)
    values = value_pool + head * (BLOCK_SIZE * VALUE_DIM)
    key_in_tile = within[None, :, None] * KEY_DIM + key_dim[None, None, :]
    value_in_tile = within[None, :, None] * VALUE_DIM + value_dim[None, None, :]
    for at in tl.range(begin, end, WAYS * TOKENS, num_stages=STAGES):
        first = at + way * TOKENS
        token = first[:, None] + within[None, :]
        seen = (token < end) & (token >= low)
        # The ids of the next tile's blocks are carried to it: were they loaded together with the blocks, the compiler
        # would spend its pipeline stages on them.
        block = following.to(tl.int64)
        slot = first % BLOCK_SIZE
        following = tl.load(table + (first + WAYS * TOKENS) // BLOCK_SIZE, mask=first + WAYS * TOKENS < end, other=0)
        key_mask = seen[:, :, None]
        value_mask = seen[:, :, None]
        if KEY_PAD != KEY_DIM:
            key_mask = key_mask & (key_dim < KEY_DIM)[None, None, :]
        if VALUE_PAD != VALUE_DIM:
            value_mask = value_mask & (value_dim < VALUE_DIM)[None, None, :]
        key_at = keys + (block * key_block_stride + slot * KEY_DIM)[:, None, None] + key_in_tile
        value_at = values + (block * value_block_stride + slot * VALUE_DIM)[:, None, None] + value_in_tile
        k = tl.load(key_at, mask=key_mask, other=0.0)
        v = tl.load(value_at, mask=value_mask, other=0.0)
        scores = tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision="ieee")
        scores = tl.where(seen[:, None, :], _softcapped(scores, scale, softcap, SOFTCAP), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 2))
        # A warp may have seen nothing yet: then the maximum is -inf, and -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, :, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 2)
        mixed = mixed * decay[:, :, None]
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision="ieee")
        top = higher

    higher = tl.max(top, 0)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    factor = tl.exp2(top - base[None, :])
    total_of_all = tl.sum(total * factor, 0)
    mixed_of_all = _sum_of_ways(mixed * factor[:, :, None], WAYS, VALUE_PAD)

    out_row = out + row * out_row_stride
    if count == 1:
        # A row of length 0 (padding of a captured graph) has seen nothing: its output is 0.
        result = mixed_of_all / tl.where(total_of_all == 0.0, 1.0, total_of_all)[:, None]
        tl.store(
            out_row + member[:, None] * out_head_stride + value_dim[None, :],
            result.to(out.dtype.element_ty),
            mask=used[:, None] & (value_dim < VALUE_DIM)[None, :],
        )
        return

    place = column * max_items + item
    tl.store(
        partials + ((place * LINES + line) * VALUE_DIM)[:, None] + value_dim[None, :],
        mixed_of_all,
        mask=used[:, None] & (value_dim < VALUE_DIM)[None, :],
    )
    tl.store(stats + place * (2 * LINES) + line, higher, mask=used)
    tl.store(stats + place * (2 * LINES) + LINES + line, total_of_all, mask=used)
    # All threads have stored before one of them tells: the barrier and the release together order the stores.
    tl.debug_barrier()
    arrival = arrived + row * (KV_HEADS * PARTS) + column
    before = tl.atomic_add(arrival, 1, sem="acq_rel")
    if before != count - 1:
        return
    tl.store(arrival, 0)

    line = tl.arange(0, LINES_PAD)
    member = column % PARTS * LINES + line
    used = (line < LINES) & (member < GROUP)
    result = _joined(
        partials, stats, column * max_items + start, count, line, used, value_dim,
        LINES, VALUE_DIM, LINES_PAD, VALUE_PAD, JOIN,
    )  # fmt: skip
    tl.store(
        out_row + (head * GROUP + member)[:, None] * out_head_stride + value_dim[None, :],
        result.to(out.dtype.element_ty),
        mask=used[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


# ---- prefill --------------------------------------------------------------------------------------------------------


@triton.jit
def _prefill_tiles(
    mixed,
    top,
    total,
    q,
    position,  # [ROWS], of each row's query
    begin,
    end,  # keys begin .. end - 1; begin is a multiple of TILE
    table,
    keys,
    values,
    scale,
    softcap,
    window,
    key_block_stride,
    value_block_stride,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,  # some row of the tile does not see all keys (or keys end inside a tile)
    STAGES: tl.constexpr,
):
    """Online softmax of a tile of queries over some tiles of keys."""
    key_dim = tl.arange(0, KEY_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    within = tl.arange(0, TILE)
    following = _blocks(table, begin, end, BLOCK_SIZE, TILE)
    for at in tl.range(begin, end, TILE, num_stages=STAGES):
        token = at + within
        block, slot = _slots(following, at, BLOCK_SIZE, TILE)
        following = _blocks(table, at + TILE, end, BLOCK_SIZE, TILE)
        key_at = keys + (block * key_block_stride + slot * KEY_DIM)[:, None] + key_dim[None, :]
        value_at = values + (block * value_block_stride + slot * VALUE_DIM)[:, None] + value_dim[None, :]
        if MASKED:
            inside = (token < end)[:, None]
            k = tl.load(key_at, mask=inside & (key_dim < KEY_DIM)[None, :], other=0.0)
            v = tl.load(value_at, mask=inside & (value_dim < VALUE_DIM)[None, :], other=0.0)
        elif KEY_PAD != KEY_DIM or VALUE_PAD != VALUE_DIM:
            k = tl.load(key_at, mask=(key_dim < KEY_DIM)[None, :], other=0.0)
            v = tl.load(value_at, mask=(value_dim < VALUE_DIM)[None, :], other=0.0)
        else:
            k = tl.load(key_at)
            v = tl.load(value_at)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            scores = _softcapped(scores, scale, softcap, SOFTCAP)
        if MASKED:
            # Keys from `end` on are later than every query of the tile.
            seen = token[None, :] <= position[:, None]
            if WINDOW:
                seen = seen & (token[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        if SOFTCAP:
            higher = tl.maximum(top, tl.max(scores, 1))
        else:
            # The scale is positive: it may wait until after the maximum, where it becomes part of a fused multiply-add.
            higher = tl.maximum(top, tl.max(scores, 1) * scale)
        base = higher
        if MASKED:
            base = tl.where(higher == float("-inf"), 0.0, higher)
        if SOFTCAP:
            weights = tl.exp2(scores - base[:, None])
        else:
            weights = tl.exp2(scores * scale - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        mixed = mixed * decay[:, None]
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision="ieee")
        top = higher
    return mixed, top, total


@triton.jit(do_not_specialize=["window", "table_stride"], do_not_specialize_on_alignment=["tables", "tiles"])
def prefill_kernel(
    query,  # [T, KV_HEADS * GROUP, KEY_DIM], strided over tokens and heads
    key_pool,
    value_pool,
    out,  # [T, KV_HEADS * GROUP, VALUE_DIM], likewise strided
    tables,  # int32 [sequences, ...]
    tiles,  # int32 [n, 4]: sequence, first query's token in the batch, its position, queries
    sinks,  # [KV_HEADS * GROUP]
    scale,
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
    TILE: tl.constexpr,
    SHORT: tl.constexpr,  # one loop, with masks: where tiles are few, filling a second pipeline takes longer
    STAGES: tl.constexpr,
):
    """One program per (tile of queries, K/V head).

    Of the keys that a tile sees, those in the middle are seen by all its queries and need no mask::

          keys      │ begin ── masked (window) ──│────── all queries see these ──────│── masked (diagonal) ── end │
          queries                                                                    first position ... last position
    """
    head = tl.program_id(0) % KV_HEADS
    record = tiles + tl.program_id(0) // KV_HEADS * 4
    sequence = tl.load(record).to(tl.int64)
    first_token = tl.load(record + 1).to(tl.int64)
    first = tl.load(record + 2)
    count = tl.load(record + 3)

    line = tl.arange(0, ROWS)
    index = line // GROUP
    member = head * GROUP + line % GROUP
    used = index < count
    # Rows without a query compute what the last query does, and are not stored.
    position = first + tl.minimum(index, count - 1)
    key_dim = tl.arange(0, KEY_PAD)
    value_dim = tl.arange(0, VALUE_PAD)
    mask = used[:, None]
    if KEY_PAD != KEY_DIM:
        mask = mask & (key_dim < KEY_DIM)[None, :]
    at = (first_token + index) * query_token_stride + member * query_head_stride
    q = tl.load(query + at[:, None] + key_dim[None, :], mask=mask, other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        top = tl.load(sinks + member).to(tl.float32) * LOG2E
        total = total + 1.0
    mixed = tl.zeros([ROWS, VALUE_PAD], tl.float32)

    end = first + count
    begin = 0
    all_from = 0
    all_to = (first + 1) // TILE * TILE
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // TILE * TILE
        # The last query sees the fewest of the early keys.
        all_from = (tl.maximum(end - window, 0) + TILE - 1) // TILE * TILE
        all_from = tl.minimum(all_from, (end + TILE - 1) // TILE * TILE)
        all_to = tl.maximum(all_to, all_from)
    table = tables + sequence * table_stride
    keys = key_pool + head * (BLOCK_SIZE * KEY_DIM)
    values = value_pool + head * (BLOCK_SIZE * VALUE_DIM)
    if SHORT:
        all_from, all_to = begin, begin
    if WINDOW and not SHORT:
        mixed, top, total = _prefill_tiles(
            mixed, top, total, q, position, begin, tl.minimum(all_from, end), table, keys, values,
            scale, softcap, window, key_block_stride, value_block_stride,
            KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, BLOCK_SIZE, TILE, SOFTCAP, WINDOW, True, 2,
        )  # fmt: skip
    if not SHORT:
        mixed, top, total = _prefill_tiles(
            mixed, top, total, q, position, all_from, all_to, table, keys, values,
            scale, softcap, window, key_block_stride, value_block_stride,
            KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, BLOCK_SIZE, TILE, SOFTCAP, WINDOW, False, STAGES,
        )  # fmt: skip
    mixed, top, total = _prefill_tiles(
        mixed, top, total, q, position, all_to, end, table, keys, values,
        scale, softcap, window, key_block_stride, value_block_stride,
        KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, BLOCK_SIZE, TILE, SOFTCAP, WINDOW, True, STAGES if SHORT else 2,
    )  # fmt: skip

    at = (first_token + index) * out_token_stride + member * out_head_stride
    tl.store(
        out + at[:, None] + value_dim[None, :],
        (mixed / total[:, None]).to(out.dtype.element_ty),
        mask=used[:, None] & (value_dim < VALUE_DIM)[None, :],
    )
