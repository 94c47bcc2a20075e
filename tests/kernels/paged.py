"""Random ragged batches over a poisoned pool, and plain float64 attention: what backends are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from flatbed.attention.base import AttentionBackend, AttentionSpec, Batch, LayerCache
from flatbed.memory.capacity import KVLayout, LayerShape


@dataclass
class Case:
    """What attention is asked for.

    Attributes:
        lengths: tokens of each sequence, once the batch is written.
        queries: how many of them are new; sequences with one, from the first on, are decodes.
        poison: what every slot holds that no sequence has written.
    """

    lengths: list[int]
    queries: list[int]
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    poison: float = float("nan")


class Paged:
    """Random K/V of a `Case`, scattered over the blocks of the middle one of three layers."""

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.case, self.dtype, self.device = case, dtype, device
        generator = torch.Generator().manual_seed(seed)
        size = case.block_size
        shape = LayerShape(case.kv_heads, case.key_dim, case.value_dim)
        self.layout = KVLayout((shape,) * 3, size, dtype.itemsize)
        widths = [self.layout.blocks_for(length) for length in case.lengths]
        total = sum(widths) + 5
        ids = iter(torch.randperm(total, generator=generator).tolist())
        tables = np.zeros((len(widths), max(widths) + 3), np.int32)
        for table, width in zip(tables, widths, strict=True):
            table[:width] = [next(ids) for _ in range(width)]
        self.tables = tables
        self.pool = torch.full((total * self.layout.block_elements,), case.poison, dtype=dtype, device=device)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        self.keys = [draw(length, case.kv_heads, case.key_dim) for length in case.lengths]
        self.values = [draw(length, case.kv_heads, case.value_dim) for length in case.lengths]
        new = list(zip(case.lengths, case.queries, strict=True))
        for s, (length, count) in enumerate(new):
            before = np.arange(length - count)
            blocks = torch.from_numpy(tables[s, before // size].astype(np.int64)).to(device)
            offsets = torch.from_numpy(before % size).to(device)
            self.cache.key[blocks, :, offsets] = self.keys[s][: length - count]
            self.cache.value[blocks, :, offsets] = self.values[s][: length - count]
        slots = [(tables[s, p // size], p % size) for s, (n, count) in enumerate(new) for p in range(n - count, n)]
        starts = np.concatenate([[0], np.cumsum(case.queries)]).astype(np.int64)
        tokens = int(starts[-1])
        # What a model hands over: views of wider rows, strided over the tokens.
        wide = draw(tokens, case.heads * case.key_dim + case.kv_heads * (case.key_dim + case.value_dim))
        query, key, value = wide.split(
            [case.heads * case.key_dim, case.kv_heads * case.key_dim, case.kv_heads * case.value_dim], dim=1
        )
        self.query = query.view(tokens, case.heads, -1)
        self.key, self.value = key.view(tokens, case.kv_heads, -1), value.view(tokens, case.kv_heads, -1)
        for s, (length, count) in enumerate(new):
            self.keys[s][length - count :] = self.key[starts[s] : starts[s + 1]]
            self.values[s][length - count :] = self.value[starts[s] : starts[s + 1]]
        several = [s for s, count in enumerate(case.queries) if count != 1]
        self.batch = Batch(
            decodes=several[0] if several else len(new),
            query_starts=starts,
            lengths=np.array(case.lengths, np.int64),
            tables=tables,
            slot_blocks=torch.tensor([int(block) for block, _ in slots], device=device),
            slot_offsets=torch.tensor([offset for _, offset in slots], device=device),
            device=device,
        )
        sinks = draw(case.heads) if case.sinks else None
        self.spec = AttentionSpec(case.key_dim**-0.5, case.window, case.softcap, sinks)

    @property
    def cache(self) -> LayerCache:
        return self.cache_of(self.pool)

    def cache_of(self, pool: torch.Tensor, layer: int = 1) -> LayerCache:
        """A layer's view of a pool."""
        layout, shape = self.layout, self.layout.layers[layer]
        blocks = pool.numel() // layout.block_elements

        def view(offset: int, dim: int) -> torch.Tensor:
            size = layout.block_size
            return pool.as_strided(
                (blocks, shape.kv_heads, size, dim), (layout.block_elements, size * dim, dim, 1), offset
            )

        return LayerCache(
            view(layout.key_offsets[layer], shape.key_dim), view(layout.value_offsets[layer], shape.value_dim)
        )

    def attend(self, backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
        """The backend's output, and the pool it has written to."""
        pool = self.pool.clone()
        if backend.needs_clean_blocks:
            pool.nan_to_num_(0.0)
        cache = self.cache_of(pool)
        backend.begin(self.batch, self.case.block_size)
        backend.write(cache, self.key, self.value)
        return backend.attend(cache, self.spec, self.query, self.key, self.value), pool

    def expected(self) -> torch.Tensor:
        """Attention in float64, query by query position, from the K/V as it was drawn."""
        case = self.case
        group = case.heads // case.kv_heads
        outs = []
        for s, (length, count) in enumerate(zip(case.lengths, case.queries, strict=True)):
            start = int(self.batch.query_starts[s])
            query = self.query[start : start + count].double().view(count, case.kv_heads, group, case.key_dim)
            scores = torch.einsum("qhgd,khd->hgqk", query, self.keys[s].double()) * self.spec.scale
            if case.softcap is not None:
                scores = torch.tanh(scores / case.softcap) * case.softcap
            at = torch.arange(length - count, length, device=self.device)[:, None]
            seen = torch.arange(length, device=self.device) <= at
            if case.window is not None:
                seen &= torch.arange(length, device=self.device) > at - case.window
            scores = scores.masked_fill(~seen, -torch.inf)
            if self.spec.sinks is not None:
                sinks = self.spec.sinks.double().view(case.kv_heads, group, 1, 1).expand(-1, -1, count, 1)
                weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            mixed = torch.einsum("hgqk,khd->qhgd", weights, self.values[s].double())
            outs.append(mixed.reshape(count, case.heads, case.value_dim))
        return torch.cat(outs)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """‖got − expected‖ / ‖expected‖; NaN where any is."""
    return float((got.double() - expected).norm() / expected.norm())
