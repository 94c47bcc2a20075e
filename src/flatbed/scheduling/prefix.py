"""The prefix cache: finds blocks whose K/V was computed for the same tokens at the same positions.

Full blocks form chains. A chain's next link is looked up by (parent link, the tokens themselves), so a hit compares
tokens, not hashes, and a recycled block cannot be mistaken for its former content: links are numbered once and never
again::

      root ──[t0..t3]──▶ link 7 (block 2) ──[t4..t7]──▶ link 9 (block 5) ──[t8 t9]──▶ tail: block 6, 2 tokens

A *tail* is the unfinished last block of a whole prompt. A twin (the same prompt again) copies it instead of computing
it; its full blocks are shared. Of a prompt of P tokens, tokens 0 .. P-2 can come from here; the last one is always
computed, because its logits are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flatbed.scheduling.blocks import BlockPool

ROOT = 0


@dataclass(slots=True)
class Match:
    """What the cache holds of a prompt.

    Attributes:
        blocks: full blocks to share, from the beginning.
        link: the chain link of the last of them, ROOT if there is none.
        tail: a block to copy for the tokens after the full blocks, or None.
        tokens: how many tokens blocks and tail cover.
    """

    blocks: list[int] = field(default_factory=list)
    link: int = ROOT
    tail: int | None = None
    tokens: int = 0

    def forgo_tail(self, block_size: int) -> None:
        """Computes the tail instead of copying it."""
        self.tail = None
        self.tokens = len(self.blocks) * block_size


# A block whose content is known: (its link, the block, the step that computes it).
_Entry = tuple[int, int, int]
# The parent link and the tokens after it. Fewer than `block_size` of them make a tail.
_Key = tuple[int, tuple[int, ...]]


class PrefixCache:
    """Remembers the content of blocks for as long as the pool keeps it.

    Args:
        pool: idle blocks of this pool are kept while this cache knows them.
        block_size: tokens in a block.
        enabled: when False nothing is remembered, and twins are computed each for itself.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._pool = pool
        self._block_size = block_size
        self._entries: dict[_Key, _Entry] = {}
        self._keys_of: dict[int, list[_Key]] = {}
        self._next_link = ROOT + 1
        pool.is_cached = self._keys_of.__contains__
        pool.on_evict = self.forget

    def __len__(self) -> int:
        return len(self._keys_of)

    def match(self, tokens: Sequence[int], *, step: int) -> Match:
        """The longest known beginning of `tokens[:-1]`, for a sequence that is admitted in `step`.

        Full blocks may be computed in the very step that is being planned, because every layer writes all K/V of a
        step before any of it is read. A tail is copied before the step, so it must be from an earlier one.
        """
        match = Match()
        if not self.enabled:
            return match
        size = self._block_size
        usable = len(tokens) - 1
        while match.tokens + size <= usable:
            found = self._entries.get((match.link, tuple(tokens[match.tokens : match.tokens + size])))
            if found is None:
                return match
            match.link, block, _ = found
            match.blocks.append(block)
            match.tokens += size
        if match.tokens < usable:
            found = self._entries.get((match.link, tuple(tokens[match.tokens :])))
            if found is not None:
                _, block, computed_in = found
                if computed_in < step:
                    match.tail = block
                    match.tokens = usable
        return match

    def add(self, parent: int | None, tokens: Sequence[int], block: int, *, step: int) -> int | None:
        """Records that `step` computes `tokens` into `block`, after the chain `parent`; returns the chain's new link.

        When another block already stands for the same content, its link is returned and the chain goes on from there.
        None (the cache is off, or the parent is None) ends the chain.
        """
        if not self.enabled or parent is None:
            return None
        key = (parent, tuple(tokens))
        fresh = (self._next_link, block, step)
        known = self._entries.setdefault(key, fresh)  # looked up once: hashing the key is most of the cost
        if known is fresh:
            self._next_link += 1
            keys = self._keys_of.get(block)
            if keys is None:
                self._keys_of[block] = [key]
            else:
                keys.append(key)
        return known[0]

    def forget(self, block: int) -> None:
        """Drops everything known about `block`."""
        for key in self._keys_of.pop(block, ()):
            del self._entries[key]

    def clear(self) -> None:
        """Drops everything: the weights changed, or a step failed. Blocks in use stay with their requests."""
        self._pool.evict_idle()
        for block in list(self._keys_of):
            self.forget(block)

    def check(self) -> None:
        """Raises AssertionError when the two directions of the index disagree."""
        keys = [key for keys in self._keys_of.values() for key in keys]
        assert len(keys) == len(self._entries), "an entry without its block"
        for key, (_, block, _) in self._entries.items():
            assert key in self._keys_of[block], "an entry that its block does not know"
            assert block < self._pool.watermark, "an entry for memory that was given back"
