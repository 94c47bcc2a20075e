"""Attention of the decodes in a CUDA graph, in the same order of operations as everywhere else."""

from __future__ import annotations

import torch

from flatbed.attention.base import AttentionSpec, LayerCache
from flatbed.model.deterministic.attention import SPLIT, fixed_attention
from flatbed.model.graphs import StaticDecode


class InvariantStaticDecode(StaticDecode):
    """Every row of the graph is a tile of one query; a row of length 0 gives 0."""

    def __init__(self, views: dict[str, torch.Tensor], tables: torch.Tensor) -> None:
        super().__init__(views, tables)
        self._tiles = torch.empty(0)

    def restart(self) -> None:
        """A new step begins: where its queries stand."""
        lengths = self._views["lengths"]
        rows = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        self._tiles = torch.stack([rows, rows, lengths - 1, (lengths > 0).to(torch.int32)], 1)

    def attend(
        self, cache: LayerCache, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        out = query.new_empty(len(query), query.shape[1], cache.value.shape[-1])
        longest = self._tables.shape[1] * cache.key.shape[2]
        fixed_attention(query, cache, spec, self._tables, self._tiles, out, splits=-(-longest // SPLIT))
        return out
