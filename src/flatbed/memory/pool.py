"""The K/V pool: addresses for the whole capacity, memory for what is live.

::

      capacity    ├──────────────────────────────────────────────────────────────┤  reserved: addresses only
      committed   ├─────────────────────┤                                           memory, by whole chunks
      watermark   ├──────────────────┤                                              blocks handed out at least once
      live        ██ ███ ████ ██ █████                                              blocks of running requests

The scheduler's block pool asks `grow` before its watermark rises; `shrink` gives memory back below it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from flatbed.memory.capacity import KVLayout


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one engine's K/V pool, and of what else it holds.

    Attributes:
        capacity: the most that K/V may take.
        reserved: addresses set aside; costs no memory where memory is committed apart from addresses.
        committed: memory taken now.
        live: K/V blocks of running requests.
        peak: the most that `live` has been.
        graphs: memory of captured graphs.
        casts: in mixed precision, memory of the weights that were cast for this call.
    """

    capacity: int
    reserved: int
    committed: int
    live: int
    peak: int
    graphs: int = 0
    casts: int = 0


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of the pool.

    Attributes:
        key: [blocks, kv_heads, block_size, key_dim]; strided over the blocks, each [block_size, key_dim] contiguous.
        value: [blocks, kv_heads, block_size, value_dim], likewise.
    """

    key: torch.Tensor
    value: torch.Tensor


class Backing(ABC):
    """Where the bytes come from.

    Attributes:
        stable: addresses stay the same for the backing's life.
        reserved, committed: bytes.
    """

    stable: ClassVar[bool]
    reserved: int
    committed: int

    @property
    @abstractmethod
    def buffer(self) -> torch.Tensor:
        """uint8 over the reserved range (or, when not `stable`, the committed one); may change after `grow`."""

    @abstractmethod
    def grow(self, nbytes: int) -> bool:
        """Makes bytes 0 .. nbytes-1 usable, zero where new. False when the memory cannot be had now."""

    @abstractmethod
    def shrink(self, nbytes: int) -> None:
        """Gives back what lies beyond nbytes, by whole chunks; the rest keeps its content."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back."""


class Pool:
    """`num_blocks` blocks of a layout over a backing, as one strided view per layer."""

    def __init__(self, layout: KVLayout, num_blocks: int, dtype: torch.dtype, backing: Backing) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.dtype = dtype
        self._backing = backing
        self._views: tuple[LayerCache, ...] = ()
        self._viewed: tuple[int, int] = (-1, -1)

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """The pool as each layer sees it. Where addresses are not stable, ask again after `grow`."""
        buffer = self._backing.buffer
        seen = (buffer.data_ptr(), buffer.numel())
        if seen != self._viewed:
            self._views, self._viewed = self._make_views(buffer), seen
        return self._views

    def _make_views(self, buffer: torch.Tensor) -> tuple[LayerCache, ...]:
        layout = self.layout
        blocks = min(self.num_blocks, buffer.numel() // layout.block_bytes)
        flat = buffer[: blocks * layout.block_bytes].view(self.dtype)

        def view(offset: int, heads: int, dim: int) -> torch.Tensor:
            shape = (blocks, heads, layout.block_size, dim)
            strides = (layout.block_elements, layout.block_size * dim, dim, 1)
            return flat.as_strided(shape, strides, offset)

        return tuple(
            LayerCache(view(k, shape.kv_heads, shape.key_dim), view(v, shape.kv_heads, shape.value_dim))
            for shape, k, v in zip(layout.layers, layout.key_offsets, layout.value_offsets, strict=True)
        )

    def grow(self, blocks: int) -> bool:
        """Makes blocks 0 .. blocks-1 usable. False when the memory cannot be had now."""
        return self._backing.grow(blocks * self.layout.block_bytes)

    def shrink(self, blocks: int) -> None:
        """Gives back the memory beyond the first `blocks` blocks."""
        self._backing.shrink(blocks * self.layout.block_bytes)

    def clear(self, blocks: list[int]) -> None:
        """Fills blocks with zeros."""
        if blocks:
            self._blocks()[blocks] = 0

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks; all are read before any is written."""
        if pairs:
            rows = self._blocks()
            rows[[to for _, to in pairs]] = rows[[source for source, _ in pairs]]

    def _blocks(self) -> torch.Tensor:
        """The pool as [blocks, bytes of a block]."""
        buffer = self._backing.buffer
        size = self.layout.block_bytes
        return buffer[: buffer.numel() // size * size].view(-1, size)

    def report(self, held: int, peak_held: int, graph_bytes: int = 0, cast_bytes: int = 0) -> MemoryReport:
        """Bytes, for `held` blocks of running requests now and `peak_held` at most."""
        size = self.layout.block_bytes
        return MemoryReport(
            capacity=self.num_blocks * size,
            reserved=self._backing.reserved,
            committed=self._backing.committed,
            live=held * size,
            peak=peak_held * size,
            graphs=graph_bytes,
            casts=cast_bytes,
        )

    def close(self) -> None:
        """Gives all memory back; the pool cannot be used afterwards."""
        self._views, self._viewed = (), (-1, -1)
        self._backing.close()
