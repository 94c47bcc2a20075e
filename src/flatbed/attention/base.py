"""What a backend for attention must do, and what it is given.

One forward pass attends for a ragged batch: first the decodes, one query each, then the prefill chunks::

      queries  │ d0 │ d1 │ d2 │  chunk 0 (5 queries)  │ chunk 1 (3) │          T = query_starts[-1] in all
      lengths    41   7    100      12 (7 before)        3 (0 before)          K/V each sees at its end
      tables   block ids per sequence, [S, width]; position p lies in block tables[s, p // block_size]

In every layer, `write` puts the K/V of all T tokens into the pool before `attend` reads any. So a sequence may read
blocks that another sequence of the same batch writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from flatbed.memory.pool import LayerCache


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run, and why (not)."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer's attention is, beyond causal.

    Attributes:
        scale: factor on query times key.
        window: a query at position p sees positions p - window + 1 .. p; None sees all.
        softcap: scores become softcap * tanh(scores / softcap); None leaves them.
        sinks: [heads] extra logits that take part in the softmax and attend to nothing; None has none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass
class Batch:
    """The shape of one forward pass, made by the runner from a plan.

    Attributes:
        decodes: how many sequences, from the first, have exactly one query.
        query_starts: int64 [S + 1]; the queries of sequence s are query_starts[s] .. query_starts[s + 1].
        lengths: int64 [S]; tokens each sequence has in the pool once this batch is written.
        tables: int32 [S, width]; entries beyond a sequence's last block are 0 and must not be read.
        slot_blocks, slot_offsets: int64 tensors [T] on the device: the block and the offset in it of every token.
        device: where the model runs.
    """

    decodes: int
    query_starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tables: NDArray[np.int32]
    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    device: torch.device


class AttentionBackend(ABC):
    """Writes K/V into the pool and attends over it. One instance serves one engine."""

    name: ClassVar[str]
    # True when the backend multiplies stale K/V by zero instead of leaving it out, so that a NaN left there by a former
    # owner would spread: the engine then clears blocks before they are used again.
    needs_clean_blocks: ClassVar[bool]
    # True when `attend` reads all K/V from the pool and never looks at its arguments key and value.
    reads_pool: ClassVar[bool]

    @classmethod
    @abstractmethod
    def availability(cls, device: torch.device) -> Availability:
        """Whether it can run on `device`."""

    @abstractmethod
    def begin(self, batch: Batch, block_size: int) -> None:
        """Prepares a step; everything that is the same in all layers is made here, once."""

    @abstractmethod
    def write(self, cache: LayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key [T, kv_heads, key_dim] and value [T, kv_heads, value_dim] of the step's tokens."""

    @abstractmethod
    def attend(
        self, cache: LayerCache, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attention of query [T, heads, key_dim] over the pool; returns [T, heads, value_dim].

        `key` and `value` are what `write` has just stored, for backends that read fresh prefill from there.
        """


__all__ = ["AttentionBackend", "AttentionSpec", "Availability", "Batch", "LayerCache"]
