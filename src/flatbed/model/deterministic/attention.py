"""Attention with tiles of keys at fixed positions, by one code for decode and prefill.

A query at position p sees keys 0 .. p (or its window of them). They are taken a tile at a time, and tiles begin at
multiples of the same number of positions, whoever asks; the softmax goes from tile to tile (FlashAttention's online
one). Queries are handled in blocks of one sequence, and a query that does not see a tile that another one of its block
sees gets exactly nothing from it::

      position    0         64        128       192              maximum   max(m, -inf) = m
      tiles       ├─────────┼─────────┼─────────┤                sum       s * exp(0) + 0 = s
      query 70    ██████████ ██▒▒▒▒▒▒▒                           values    v * exp(0) + 0 * V = v
      query 130   ██████████ ██████████ █▒▒▒▒▒▒▒▒   ▒ masked

So a query's result is the same bits as a decode, in a chunk of any size, and beside any other. Block size and block
table do not matter either: a tile is gathered by position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import _disable_current_modes

from flatbed.attention.base import AttentionBackend, AttentionSpec, Availability, Batch, LayerCache
from flatbed.attention.torch_reference import TorchAttention
from flatbed.attention.triton import TritonAttention, prefill_tiles, write_kv
from flatbed.errors import BackendUnavailableError, ConfigError
from flatbed.memory.capacity import power_of_two
from flatbed.memory.transfer import upload
from flatbed.model.deterministic.elementwise import tail_free
from flatbed.model.deterministic.products import Products


def choose_invariant(name: str, device: torch.device) -> AttentionBackend:
    """The deterministic backend for `device`: attention `torch` on the CPU, `triton` on CUDA, or `auto` for either.

    Raises ConfigError for a name that has no deterministic form, BackendUnavailableError for one that has none on this
    device.
    """
    kinds: dict[str, type[AttentionBackend]] = {
        TritonAttention.name: InvariantTritonAttention,
        TorchAttention.name: InvariantTorchAttention,
    }
    if name != "auto" and name not in kinds:
        raise ConfigError(
            f"attention {name!r} adds up in an order that depends on the batch; with deterministic=True attention can "
            f"be auto, {' or '.join(kinds)}"
        )
    tried = kinds.values() if name == "auto" else [kinds[name]]
    found = [(kind, kind.availability(device)) for kind in tried]
    for kind, availability in found:
        if availability.ok:
            return kind()
    reasons = "; ".join(f"{kind.name}: {availability.reason}" for kind, availability in found)
    raise BackendUnavailableError(f"deterministic=True cannot be had on {device} with attention {name!r}: {reasons}")


# ---- CPU ------------------------------------------------------------------------------------------------------------

# Keys of a tile.
_TILE = 64
# (query, head) pairs of a block of queries, about.
_ROWS = 64


@dataclass
class _Tile:
    """The next tile of keys of the first blocks of queries, those that have one more.

    Attributes:
        pool_blocks, offsets: int64 [blocks, _TILE], where each key lies; beyond a block's last position, that again.
        hidden: bool [blocks, queries, _TILE], the keys that a query does not see, or None when it sees all.
    """

    pool_blocks: torch.Tensor
    offsets: torch.Tensor
    hidden: torch.Tensor | None


@dataclass
class _Queries:
    """Blocks of queries, those with the most tiles first.

    Attributes:
        tokens: int64 [blocks, queries], places in the batch; where a block is not full, its last again.
        real: int64 [n], which of the blocks * queries are no repetition.
        tiles: in order of positions; of each block its first is the first.
    """

    tokens: torch.Tensor
    real: torch.Tensor
    tiles: list[_Tile]


class InvariantTorchAttention(TorchAttention):
    """On the CPU, in float32, by products that `Products` found to treat rows alike."""

    # Only keys that a sequence has are gathered, so that nothing stale is ever multiplied.
    needs_clean_blocks: ClassVar[bool] = False

    @classmethod
    def availability(cls, device: torch.device) -> Availability:
        if device.type == "cpu":
            return Availability(True, "the order of operations is fixed on the CPU")
        return Availability(False, f"on {device.type} it has no fixed order of operations")

    def __init__(self) -> None:
        super().__init__()
        self._products = Products()
        self._queries: dict[tuple[int | None, int], list[_Queries]] = {}

    def begin(self, batch: Batch, block_size: int) -> None:
        super().begin(batch, block_size)
        self._queries = {}

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        with _disable_current_modes():  # nothing here needs to be replaced (see operators.py)
            super().write(cache, key, value)

    def attend(
        self, cache: LayerCache, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        with _disable_current_modes():
            out = query.new_empty(len(query), query.shape[1], cache.value.shape[-1])
            for queries in self._blocks_of_queries(spec.window, query.shape[1] // cache.key.shape[1]):
                mixed = self._attend(cache, spec, query, queries)
                out.index_copy_(0, queries.tokens.view(-1)[queries.real], mixed[queries.real].to(out.dtype))
            return out

    def _blocks_of_queries(self, window: int | None, group: int) -> list[_Queries]:
        """Those of the step for layers with this window and so many query heads to a K/V head."""
        if (window, group) not in self._queries:
            batch = self._current
            decodes, several = np.arange(batch.decodes), np.arange(batch.decodes, len(batch.lengths))
            made = [(decodes, 1), (several, max(1, _ROWS // group))]
            self._queries[window, group] = [self._make(window, *one) for one in made if len(one[0])]
        return self._queries[window, group]

    def _make(self, window: int | None, sequences: NDArray[np.int64], size: int) -> _Queries:
        """The queries of these sequences in blocks of `size`."""
        batch = self._current
        counts = np.diff(batch.query_starts)[sequences]
        blocks = -(-counts // size)
        of = np.repeat(np.arange(len(sequences)), blocks)  # the sequence of each block
        start = (np.arange(len(of)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * size
        index = np.minimum(start[:, None] + np.arange(size), counts[of, None] - 1)
        first_position = (batch.lengths[sequences] - counts)[of]
        position = first_position[:, None] + index
        low = np.zeros_like(start) if window is None else np.maximum(position[:, 0] - window + 1, 0) // _TILE
        tiles = position[:, -1] // _TILE + 1 - low
        order = np.argsort(-tiles, kind="stable")
        of, start, index, position, low, tiles = (x[order] for x in (of, start, index, position, low, tiles))
        return _Queries(
            torch.from_numpy(batch.query_starts[sequences[of], None] + index),
            torch.from_numpy(np.flatnonzero(start[:, None] + np.arange(size) < counts[of, None])),
            [
                self._tile(window, sequences[of[:n]], position[:n], (low[:n] + number) * _TILE)
                for number, n in enumerate(np.count_nonzero(tiles > number) for number in range(tiles[0]))
            ],
        )

    def _tile(self, window: int | None, sequence: NDArray[Any], position: NDArray[Any], begin: NDArray[Any]) -> _Tile:
        """The tile of keys that begins at `begin` [n] for blocks of queries at `position` [n, queries]."""
        batch = self._current
        keys = begin[:, None] + np.arange(_TILE)
        there = np.minimum(keys, position[:, -1:])
        hidden = keys[:, None, :] > position[:, :, None]
        if window is not None:
            hidden |= keys[:, None, :] <= position[:, :, None] - window
        return _Tile(
            torch.from_numpy(batch.tables[sequence[:, None], there // self._block_size].astype(np.int64)),
            torch.from_numpy(there % self._block_size),
            torch.from_numpy(hidden) if hidden.any() else None,
        )

    def _attend(self, cache: LayerCache, spec: AttentionSpec, query: torch.Tensor, queries: _Queries) -> torch.Tensor:
        """[blocks * queries, heads, value_dim] in float32, in the order of `queries.tokens`."""
        blocks, size = queries.tokens.shape
        heads, dim = query.shape[1:]
        kv_heads, value_dim = cache.key.shape[1], cache.value.shape[-1]
        group = heads // kv_heads
        q = query.index_select(0, queries.tokens.view(-1)).float().view(blocks, size, kv_heads, group, dim)
        q = q.transpose(1, 2).reshape(blocks * kv_heads, size * group, dim)
        # Padded once to a number of rows that the first product takes.
        sizes = self._products.batched_sizes(dim, _TILE, q.dtype, True)
        rows = next((n for n in sizes if n >= size * group), size * group)
        q = torch.nn.functional.pad(q, (0, 0, 0, rows - size * group))

        top = torch.full((blocks, kv_heads, rows), -torch.inf)
        total = torch.zeros(blocks, kv_heads, rows)
        if spec.sinks is not None:  # one more key with no value
            sinks = spec.sinks.float().view(kv_heads, group).repeat(1, size)
            top[:, :, : size * group] = sinks
            total[:, :, : size * group] = 1
        mixed = torch.zeros(blocks, kv_heads, rows, value_dim)
        for tile in queries.tiles:
            n = len(tile.offsets)
            keys, values = (_gather(pool, tile).float() for pool in (cache.key, cache.value))
            scores = self._products.batched(q[: n * kv_heads], keys.transpose(1, 2)) * spec.scale
            if spec.softcap is not None:
                scores = tail_free(torch.tanh, scores / spec.softcap) * spec.softcap
            scores = scores.view(n, kv_heads, rows, _TILE)
            if tile.hidden is not None:
                hidden = tile.hidden.repeat_interleave(group, 1)
                hidden = torch.nn.functional.pad(hidden, (0, 0, 0, rows - size * group))
                scores.masked_fill_(hidden[:, None], -torch.inf)
            higher = torch.maximum(top[:n], scores.amax(-1))
            base = torch.where(higher == -torch.inf, 0.0, higher)
            weights = tail_free(torch.exp, scores - base[..., None])
            decay = tail_free(torch.exp, top[:n] - base)
            top[:n] = higher
            total[:n] = total[:n] * decay + weights.sum(-1)
            added = self._products.batched(weights.view(n * kv_heads, rows, _TILE), values)
            mixed[:n] = mixed[:n] * decay[..., None] + added.view(n, kv_heads, rows, value_dim)
        mixed = mixed / total[..., None]
        mixed = mixed[:, :, : size * group].view(blocks, kv_heads, size, group, value_dim)
        return mixed.transpose(1, 2).reshape(blocks * size, heads, value_dim)


def _gather(pool: torch.Tensor, tile: _Tile) -> torch.Tensor:
    """A tile's numbers out of pool [blocks, kv_heads, block_size, dim]: [n * kv_heads, _TILE, dim]."""
    _, kv_heads, size, dim = pool.shape
    at = tile.pool_blocks * (pool.stride(0) // dim) + tile.offsets
    rows = at[:, None, :] + size * torch.arange(kv_heads)[:, None]
    count = (pool.shape[0] - 1) * (pool.stride(0) // dim) + kv_heads * size
    flat = pool.as_strided((count, dim), (dim, 1), pool.storage_offset())
    return flat.index_select(0, rows.view(-1)).view(-1, _TILE, dim)


# ---- CUDA -----------------------------------------------------------------------------------------------------------

_LOG2E = math.log2(math.e)
# Keys that make a softmax of their own, so that a long context is divided among programs.
SPLIT = 1024


class InvariantTritonAttention(AttentionBackend):
    """By the kernels of kernels/deterministic.py: decodes as chunks of one query."""

    name: ClassVar[str] = TritonAttention.name
    needs_clean_blocks: ClassVar[bool] = False
    reads_pool: ClassVar[bool] = True

    @classmethod
    def availability(cls, device: torch.device) -> Availability:
        return TritonAttention.availability(device)

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._tables = torch.empty(0)
        self._tiles: dict[tuple[int, bool], torch.Tensor] = {}

    def begin(self, batch: Batch, block_size: int) -> None:
        self._batch = batch
        width = max(1, int(-(-batch.lengths.max(initial=0) // block_size)))
        self._tables = upload(np.ascontiguousarray(batch.tables[:, :width]), batch.device)
        self._tiles = {}

    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        batch = self._current
        write_kv(cache, key, value, batch.slot_blocks, batch.slot_offsets)

    def attend(
        self, cache: LayerCache, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        batch = self._current
        out = query.new_empty(len(query), query.shape[1], cache.value.shape[-1])
        queries = _queries(query.shape[1] // cache.key.shape[1], query.dtype)
        longest = int(batch.lengths[: batch.decodes].max(initial=0))
        if batch.decodes:
            tiles = self._tiles_of(queries, decodes=True)
            fixed_attention(query, cache, spec, self._tables, tiles, out, splits=-(-longest // SPLIT))
        if batch.decodes < len(batch.lengths):
            fixed_attention(query, cache, spec, self._tables, self._tiles_of(queries, decodes=False), out)
        return out

    @property
    def _current(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("attention was called outside of a step")
        return self._batch

    def _tiles_of(self, queries: int, *, decodes: bool) -> torch.Tensor:
        """This step's tiles, made in the first layer that asks."""
        if (queries, decodes) not in self._tiles:
            batch = self._current
            end = batch.decodes if decodes else len(batch.lengths)
            first = 0 if decodes else batch.decodes
            tiles = prefill_tiles(batch.query_starts[: end + 1], batch.lengths[:end], first, queries)
            self._tiles[queries, decodes] = upload(tiles, batch.device)
        return self._tiles[queries, decodes]


def _rows(group: int, dtype: torch.dtype) -> int:
    """(query, head) pairs of a program: those of at least one query."""
    return power_of_two(group, 16 if dtype.itemsize == 4 else 64)


def _queries(group: int, dtype: torch.dtype) -> int:
    """Queries of a program."""
    return _rows(group, dtype) // group


def fixed_attention(
    query: torch.Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    splits: int = 1,
) -> None:
    """Attention of tiles of queries over the pool, in a fixed order of operations.

    Args:
        query: [T, heads, key_dim], any strides over tokens and heads.
        cache: the layer's pool, of the same dtype.
        tables: int32 [sequences, width], the last dimension contiguous.
        tiles: int32 [n, 4] of `prefill_tiles`, on the device.
        out: [T, heads, value_dim]; the tokens of the tiles are written, all others stay.
        splits: with more than one, every tile has one query, and its keys are at most `splits` * SPLIT; their splits
            are then computed side by side. The result is the same bits.
    """
    from flatbed.kernels.deterministic import attention_kernel, join_kernel

    if tiles.shape[0] == 0:
        return
    query = query if query.stride(-1) == 1 else query.contiguous()
    _, heads, key_dim = query.shape
    _, kv_heads, block_size, value_dim = cache.value.shape
    divided = splits > 1
    room = len(tiles) * splits * heads if divided else 0
    partials = torch.empty(room, value_dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(room, 2, dtype=torch.float32, device=query.device)
    sinks = query if spec.sinks is None else spec.sinks
    window, value_pad = spec.window or 0, power_of_two(value_dim, 16)
    dim = max(power_of_two(key_dim, 16), value_pad)
    tile = 64 if query.dtype.itemsize < 4 else 32 if dim <= 64 else 16
    attention_kernel[(len(tiles) * kv_heads, splits if divided else 1)](
        query, cache.key, cache.value, out, partials, stats, tables, tiles, sinks,
        spec.scale * _LOG2E if spec.softcap is None else spec.scale / spec.softcap, spec.softcap or 0.0, window,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), tables.stride(0),
        cache.key.stride(0), cache.value.stride(0),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim, BLOCK_SIZE=block_size,
        SOFTCAP=spec.softcap is not None, SINKS=spec.sinks is not None, WINDOW=spec.window is not None,
        ROWS=_rows(heads // kv_heads, query.dtype), KEY_PAD=power_of_two(key_dim, 16), VALUE_PAD=value_pad,
        TILE=tile, SPLIT=SPLIT, DIVIDED=divided, num_warps=4 if dim <= 128 else 8, num_stages=2,
    )  # fmt: skip
    if divided:
        join_kernel[(len(tiles), heads)](
            partials, stats, out, tiles, sinks, window, splits, out.stride(0), out.stride(1),
            HEADS=heads, VALUE_DIM=value_dim, SINKS=spec.sinks is not None, WINDOW=spec.window is not None,
            VALUE_PAD=value_pad, TILE=tile, SPLIT=SPLIT, num_warps=1,
        )  # fmt: skip
