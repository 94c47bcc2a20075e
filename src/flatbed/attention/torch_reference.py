"""The reference backend: plain torch on any device. What every faster backend is tested against.

Decodes are gathered and computed together, in groups of similar length so that padding stays below a bound; each
prefill chunk is computed on its own. What is gathered is the live K/V that a layer can see (for a sliding window: the
window), one contiguous row of the pool per (block, head)::

      pool as rows [block_size * dim]:   block 0: head 0 │ head 1 │ ... │ block 1: head 0 │ ...
                                                  │                                │
      gathered [sequences * kv_heads, blocks * block_size, dim] ◀──────────────────┘    ready for a batched product
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from flatbed.attention.base import AttentionBackend, AttentionSpec, Availability, Batch, LayerCache

# A group of decodes may read up to this many times the K/V that its sequences have.
_MOST_PADDING = 1.3
# Scores of a prefill chunk are computed for at most this many (query, key) pairs per head at a time.
_MOST_PAIRS = 1 << 20


@dataclass
class _Group:
    """Decodes that are computed together: B sequences, `width` blocks each.

    Attributes:
        members: int64 [B], their indices in the batch, or None when they are all decodes in order.
        blocks: int64 [B, width], the blocks to gather.
        bias: [B, 1, width * block_size], 0 where a key is seen and -inf where not, or None when all are.
    """

    members: torch.Tensor | None
    blocks: torch.Tensor
    bias: torch.Tensor | None
    rows: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def rows_in(self, pool: torch.Tensor) -> torch.Tensor:
        """`_rows` of these blocks, the same tensor for all layers of one shape."""
        shape = (pool.stride(0), *pool.shape[1:])
        if shape not in self.rows:
            self.rows[shape] = _rows(pool, self.blocks)
        return self.rows[shape]


class TorchAttention(AttentionBackend):
    """Plain torch; float32 scores and softmax for every input type."""

    name: ClassVar[str] = "torch"
    needs_clean_blocks: ClassVar[bool] = True
    reads_pool: ClassVar[bool] = False

    @classmethod
    def availability(cls, device: torch.device) -> Availability:
        return Availability(True, "plain torch runs on every device")

    def __init__(self) -> None:
        self._block_size = 0
        self._batch: Batch | None = None
        self._groups: dict[int | None, list[_Group]] = {}
        self._slots: dict[tuple[int, ...], torch.Tensor] = {}

    def begin(self, batch: Batch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self._groups = {}
        self._slots = {}

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        for pool, new in ((cache.key, key), (cache.value, value)):
            dim = pool.shape[-1]
            _as_rows(pool, dim).index_copy_(0, self._slot_rows(pool), new.reshape(-1, dim).to(pool.dtype))

    def _slot_rows(self, pool: torch.Tensor) -> torch.Tensor:
        """Which rows of `dim` numbers the step's tokens take, int64 [T * kv_heads]; the same tensor for all layers of
        one shape."""
        shape = (pool.stride(0), *pool.shape[1:])
        if shape not in self._slots:
            batch = self._current
            _, kv_heads, size, dim = pool.shape
            first = batch.slot_blocks * (pool.stride(0) // dim) + batch.slot_offsets
            self._slots[shape] = (first[:, None] + size * torch.arange(kv_heads, device=first.device)).reshape(-1)
        return self._slots[shape]

    def attend(
        self, cache: LayerCache, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        batch = self._current
        out = query.new_empty(query.shape[0], query.shape[1], cache.value.shape[-1])
        if batch.decodes:
            for group in self._decode_groups(spec.window):
                if group.members is None:
                    out[: batch.decodes] = self._decode(cache, spec, query[: batch.decodes], group)
                else:
                    mixed = self._decode(cache, spec, query.index_select(0, group.members), group)
                    out.index_copy_(0, group.members, mixed)
        for s in range(batch.decodes, len(batch.lengths)):
            first, end = int(batch.query_starts[s]), int(batch.query_starts[s + 1])
            before = int(batch.lengths[s]) - (end - first)
            if before:
                low = 0 if spec.window is None else max(0, before - spec.window + 1) // self._block_size
                keys, values = self._gather_one(cache, s, low)
                before -= low * self._block_size
            else:
                keys, values = key[first:end].transpose(0, 1), value[first:end].transpose(0, 1)
            out[first:end] = _prefill(spec, query[first:end], keys, values, before)
        return out

    @property
    def _current(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("attention was called outside of a step")
        return self._batch

    # ---- decode -----------------------------------------------------------------------------------------------------

    def _decode_groups(self, window: int | None) -> list[_Group]:
        """The groups for one window size; made in the first layer that asks, shared by all others."""
        if window not in self._groups:
            self._groups[window] = self._make_groups(window)
        return self._groups[window]

    def _make_groups(self, window: int | None) -> list[_Group]:
        batch, size = self._current, self._block_size
        lengths = batch.lengths[: batch.decodes]
        first_seen = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
        first_block = first_seen // size
        widths = -(-lengths // size) - first_block
        groups: list[_Group] = []
        for members in _split(widths):
            whole = len(members) == batch.decodes
            members = np.arange(batch.decodes) if whole else members
            width = int(widths[members].max())
            columns = np.minimum(first_block[members, None] + np.arange(width), batch.tables.shape[1] - 1)
            blocks = np.take_along_axis(batch.tables[members], columns, axis=1)
            # Where a sequence has fewer blocks its own last one is read again (and masked), never a neighbour's.
            beyond = np.arange(width) >= widths[members, None]
            blocks = np.where(beyond, blocks[np.arange(len(members)), widths[members] - 1][:, None], blocks)
            positions = first_block[members, None] * size + np.arange(width * size)
            seen = (positions < lengths[members, None]) & (positions >= first_seen[members, None])
            bias = None
            if not seen.all():
                masked = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
                bias = torch.from_numpy(masked).to(batch.device)
            groups.append(
                _Group(
                    None if whole else torch.from_numpy(members).to(batch.device),
                    torch.from_numpy(blocks.astype(np.int64)).to(batch.device),
                    bias,
                )
            )
        return groups

    def _decode(self, cache: LayerCache, spec: AttentionSpec, query: torch.Tensor, group: _Group) -> torch.Tensor:
        """query [B, heads, key_dim] → [B, heads, value_dim]."""
        count, heads, _ = query.shape
        kv_heads = cache.key.shape[1]
        packed = query.reshape(count * kv_heads, heads // kv_heads, -1)
        keys, values = (_gather(pool, group.rows_in(pool), group.blocks.shape[1]) for pool in (cache.key, cache.value))
        if keys.dtype != torch.float32:
            packed, keys, values = packed.float(), keys.float(), values.float()
        bias = group.bias
        if bias is not None and kv_heads > 1:
            bias = bias.repeat_interleave(kv_heads, 0)
        if spec.softcap is None and bias is not None:
            scores = torch.baddbmm(bias, packed, keys.transpose(1, 2), alpha=spec.scale)
        else:
            scores = _capped(torch.bmm(packed, keys.transpose(1, 2)) * spec.scale, spec.softcap)
            if bias is not None:
                scores = scores + bias
        sinks = None if spec.sinks is None else spec.sinks.view(kv_heads, -1).repeat(count, 1)
        mixed = torch.bmm(_softmax(scores, sinks), values)
        return mixed.view(count, heads, -1).to(query.dtype)

    # ---- prefill ----------------------------------------------------------------------------------------------------

    def _gather_one(self, cache: LayerCache, sequence: int, low: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one sequence from block `low` on: [kv_heads, length, dim] each."""
        batch = self._current
        length = int(batch.lengths[sequence])
        table = batch.tables[sequence, low : -(-length // self._block_size)]
        blocks = torch.from_numpy(table.astype(np.int64))[None].to(batch.device)
        rest = length - low * self._block_size
        keys, values = (_gather(pool, _rows(pool, blocks), len(table))[:, :rest] for pool in (cache.key, cache.value))
        return keys, values


def _rows(pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Which rows of block_size * dim numbers, counted from the pool's own beginning, hold `blocks` [B, width]; int64
    [B * kv_heads * width]. Blocks are a whole number of such rows apart (see KVLayout)."""
    row = pool.shape[2] * pool.shape[3]
    heads = torch.arange(pool.shape[1], device=blocks.device)
    return (blocks[:, None] * (pool.stride(0) // row) + heads[:, None]).reshape(-1)


def _as_rows(pool: torch.Tensor, length: int) -> torch.Tensor:
    """pool [blocks, kv_heads, block_size, dim] and what lies between its blocks, as rows of `length` numbers."""
    _, kv_heads, size, dim = pool.shape
    count = (pool.shape[0] - 1) * (pool.stride(0) // length) + kv_heads * size * dim // length
    return pool.as_strided((count, length), (length, 1), pool.storage_offset())


def _gather(pool: torch.Tensor, rows: torch.Tensor, width: int) -> torch.Tensor:
    """Copies those rows of pool [blocks, kv_heads, block_size, dim]; [B * kv_heads, width * block_size, dim]."""
    _, _, size, dim = pool.shape
    source = _as_rows(pool, size * dim)
    return source.index_select(0, rows).view(-1, width * size, dim)


def _prefill(
    spec: AttentionSpec, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, before: int
) -> torch.Tensor:
    """Causal attention of query [n, heads, key_dim], which stand at positions before .. before + n - 1, over
    keys [kv_heads, m, key_dim] and values [kv_heads, m, value_dim]; returns [n, heads, value_dim]."""
    queries, heads, _ = query.shape
    kv_heads, length, _ = keys.shape
    groups = heads // kv_heads
    plain = spec.softcap is None and spec.sinks is None and (spec.window is None or spec.window >= length)
    if plain and before == 0 and keys.shape[-1] == values.shape[-1]:
        if groups > 1:
            keys, values = (x.repeat_interleave(groups, 0) for x in (keys, values))
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], is_causal=True, scale=spec.scale
        )
        return out[0].transpose(0, 1)
    keys, values = keys.float(), values.float()
    step = max(1, _MOST_PAIRS // length)
    out = query.new_empty(queries, heads, values.shape[-1])
    key_at = torch.arange(length, device=query.device)
    for start in range(0, queries, step):
        part = query[start : start + step].float()
        at = before + start + torch.arange(len(part), device=query.device)
        seen = key_at <= at[:, None]
        if spec.window is not None:
            seen &= key_at > at[:, None] - spec.window
        # [kv_heads, groups, n, dim]: the queries that share a K/V head side by side
        packed = part.transpose(0, 1).reshape(kv_heads, groups, len(part), -1)
        scores = _capped(torch.matmul(packed, keys[:, None].transpose(2, 3)) * spec.scale, spec.softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        sinks = None if spec.sinks is None else spec.sinks.view(kv_heads, groups, 1).expand(-1, -1, len(part))
        mixed = torch.matmul(_softmax(scores, sinks), values[:, None])
        out[start : start + step] = mixed.reshape(heads, len(part), -1).transpose(0, 1).to(out.dtype)
    return out


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dimension; `sinks` (scores' shape without it) take part and are dropped again."""
    if sinks is None:
        return scores.softmax(-1)
    with_sinks = torch.cat([scores, sinks.to(scores.dtype).unsqueeze(-1)], dim=-1)
    return with_sinks.softmax(-1)[..., :-1]


def _split(widths: np.ndarray) -> list[np.ndarray]:
    """Splits sequences into groups such that padding each group to its widest reads at most _MOST_PADDING times what
    the sequences hold. Returns index arrays, the widest sequences first."""
    order = np.argsort(-widths, kind="stable")
    groups: list[np.ndarray] = []
    start = 0
    while start < len(order):
        ordered = widths[order[start:]]
        counts = np.arange(1, len(ordered) + 1)
        fits = counts * ordered[0] <= _MOST_PADDING * np.cumsum(ordered) + ordered[0]
        stop = start + (len(ordered) if fits.all() else int(np.argmin(fits)))
        groups.append(order[start:stop])
        start = stop
    return groups
