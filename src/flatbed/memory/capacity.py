"""Byte arithmetic of the K/V pool: capacity texts, and the layout of a block. Plain ints; no torch.

Layout of the pool (block-major, so that memory can be committed block by block)::

    block 0                                            block 1                         ...
    ┌──────────────┬──────────────┬──────────────┬───┐ ┌──────────────┬───
    │ layer 0: K   │ layer 0: V   │ layer 1: K   │...│ │ layer 0: K   │
    └──────────────┴──────────────┴──────────────┴───┘ └──────────────┴───
      │
      └─ [kv_heads, block_size, head_dim]: the K of one head of one block is one contiguous run of
         block_size * head_dim numbers, which is what attention reads at a time.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from flatbed.errors import ConfigError

# What `auto` takes of the memory that is free when the engine is built. It is a ceiling for what live tokens may
# come to use, so it leaves room for activations and for whatever else runs on the machine.
AUTO_PERCENT = 80.0

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%|[a-zA-Z]+)\s*")
_KNOWN = ('"64 blocks"', '"20000 tokens"', '"8 GiB"', '"50%"', '"auto"')


@dataclass(frozen=True)
class Capacity:
    """A parsed capacity text.

    Attributes:
        amount: how much.
        unit: `blocks`, `tokens`, `bytes` or `percent` (of free memory).
    """

    amount: float
    unit: str

    @classmethod
    def parse(cls, text: object) -> Capacity:
        """Reads `"64 blocks"`, `"20000 tokens"`, `"8 GiB"`, `"50%"` or `"auto"`. Raises ConfigError for all else."""
        if isinstance(text, str):
            if text.strip().lower() == "auto":
                return cls(AUTO_PERCENT, "percent")
            match = _TEXT.fullmatch(text)
            if match:
                amount, unit = float(match[1]), match[2]
                if unit == "%" and 0 < amount <= 100:
                    return cls(amount, "percent")
                counted = unit.lower().removesuffix("s") + "s"
                if counted in ("blocks", "tokens") and amount >= 1 and amount == int(amount):
                    return cls(amount, counted)
                if unit.upper() in _UNITS and amount > 0:
                    return cls(amount * _UNITS[unit.upper()], "bytes")
        raise ConfigError.unknown("capacity", text, _KNOWN)

    def blocks(self, layout: KVLayout, free_bytes: int) -> int:
        """Whole blocks that fit; `free_bytes` is what a percentage is of."""
        if self.unit == "blocks":
            return int(self.amount)
        if self.unit == "tokens":
            return math.ceil(self.amount / layout.block_size)
        size = self.amount if self.unit == "bytes" else free_bytes * self.amount / 100
        return int(size // layout.block_bytes)


@dataclass(frozen=True)
class LayerShape:
    """K/V of one attention layer: heads, and the sizes of a key and of a value vector (they may differ)."""

    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class KVLayout:
    """Where everything lies in the pool, counted in elements of `itemsize` bytes.

    Attributes:
        key_offsets, value_offsets: per layer, from the beginning of a block.
        block_elements: from one block to the next.
    """

    layers: tuple[LayerShape, ...]
    block_size: int
    itemsize: int
    key_offsets: tuple[int, ...] = field(init=False)
    value_offsets: tuple[int, ...] = field(init=False)
    block_elements: int = field(init=False)

    def __post_init__(self) -> None:
        # Each head's run starts at a multiple of its own length and of 16 elements, so that any view of the pool as
        # rows of one head stays exact and vector loads stay aligned.
        unit = math.lcm(16, *(self.block_size * d for s in self.layers for d in (s.key_dim, s.value_dim)))
        keys: list[int] = []
        values: list[int] = []
        at = 0
        for shape in self.layers:
            for offsets, dim in ((keys, shape.key_dim), (values, shape.value_dim)):
                at = round_up(at, self.block_size * dim)
                offsets.append(at)
                at += shape.kv_heads * self.block_size * dim
        object.__setattr__(self, "key_offsets", tuple(keys))
        object.__setattr__(self, "value_offsets", tuple(values))
        object.__setattr__(self, "block_elements", round_up(at, unit))

    @property
    def block_bytes(self) -> int:
        return self.block_elements * self.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K/V over all layers, without padding."""
        return self.itemsize * sum(s.kv_heads * (s.key_dim + s.value_dim) for s in self.layers)

    def blocks_for(self, tokens: int) -> int:
        return blocks_for(tokens, self.block_size)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


def round_up(value: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-value // unit) * unit


def power_of_two(value: int, least: int = 1) -> int:
    """The smallest power of two that is at least `value` and `least` (a power of two itself)."""
    return max(least, 1 << (value - 1).bit_length())
