"""The block pool: which blocks are free, held or idle. Bookkeeping only; the memory itself is in `flatbed.memory`.

Every block id below the watermark is in exactly one of three states::

               allocate()                       release(), nothing cached in it
      free ───────────────────▶ held (refs ≥ 1) ───────────────────────────▶ free
                                  ▲        │ release(), its tokens are in the prefix cache
                           hold() │        ▼
                                  └────── idle ───▶ evicted (least recently used first), then as free

      ids:   0 ────────────────────────── watermark ─────────────── num_blocks
             handed out at least once     │ never touched: no list, no memory, no cost

Invariant: free + held + idle = watermark. Work and memory follow the watermark, never `num_blocks`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

Grow = Callable[[int], bool]


class BlockPool:
    """Hands out block ids, lowest first, so that live blocks stay together at the beginning of the memory.

    Args:
        num_blocks: the capacity.
        grow: asked to make blocks `0 .. n-1` usable when the watermark is to rise to n. False means that the memory
            cannot be had now: for the scheduler that is the same as a full pool.
    """

    def __init__(self, num_blocks: int, grow: Grow = lambda blocks: True) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.watermark = 0
        self.touched = 0  # the highest watermark there ever was
        self.peak_held = 0
        self.refs: list[int] = []
        self.reused: list[int] = []  # blocks handed out that held other tokens before; their reader empties it
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.grow = grow
        # Set by the prefix cache: is a block's content worth keeping, and forget it when the block is evicted.
        self.is_cached: Callable[[int], bool] = lambda block: False
        self.on_evict: Callable[[int], None] = lambda block: None

    @property
    def held(self) -> int:
        """Blocks that hold tokens of running requests."""
        return self.watermark - len(self._free) - len(self._idle)

    @property
    def idle(self) -> int:
        """Blocks that only the prefix cache remembers."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that could be allocated if the memory can be had."""
        return self.num_blocks - self.held

    def allocate(self) -> int | None:
        """A block with one reference, or None when there is none to be had.

        Idle blocks are evicted before the watermark rises: what the prefix cache keeps lives in memory that live
        requests have already paid for, and never makes the pool grow.
        """
        if self._free:
            block = heapq.heappop(self._free)
            self.reused.append(block)
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self.on_evict(block)
            self.reused.append(block)
        elif self.watermark < self.num_blocks and self.grow(self.watermark + 1):
            block = self.watermark
            self.watermark += 1
            self.refs.append(0)
            if block < self.touched:  # memory may have kept it: what lies above a trimmed watermark goes by chunk
                self.reused.append(block)
            self.touched = max(self.touched, self.watermark)
        else:
            return None
        self.refs[block] = 1
        held = self.watermark - len(self._free) - len(self._idle)
        if held > self.peak_held:
            self.peak_held = held
        return block

    def allocate_up_to(self, count: int) -> list[int]:
        """As many blocks, at most `count`, as can be had."""
        blocks: list[int] = []
        while len(blocks) < count and (block := self.allocate()) is not None:
            blocks.append(block)
        return blocks

    def hold(self, block: int) -> None:
        """One more reference to a block that is held or idle."""
        if self.refs[block] == 0:
            del self._idle[block]
        self.refs[block] += 1
        self.peak_held = max(self.peak_held, self.held)

    def is_idle(self, block: int) -> bool:
        return self.refs[block] == 0

    def release(self, block: int) -> bool:
        """One reference less. True when that was the last one."""
        self.refs[block] -= 1
        if self.refs[block] > 0:
            return False
        if self.is_cached(block):
            self._idle[block] = None
        else:
            heapq.heappush(self._free, block)
        return True

    def evict_idle(self) -> None:
        """Forgets everything that only the prefix cache remembers."""
        while self._idle:
            block, _ = self._idle.popitem(last=False)
            self.on_evict(block)
            heapq.heappush(self._free, block)

    def trim(self) -> int:
        """Lowers the watermark to just above the last block in use. Returns the new watermark."""
        top = self.watermark
        while top > 0 and self.refs[top - 1] == 0 and (top - 1) not in self._idle:
            top -= 1
        if top < self.watermark:
            self._free = [block for block in self._free if block < top]
            heapq.heapify(self._free)
            del self.refs[top:]
            self.watermark = top
            self.reused = [block for block in self.reused if block < top]
        return top

    def check(self) -> None:
        """Raises AssertionError when the books do not balance."""
        free, idle = set(self._free), set(self._idle)
        held = {block for block, refs in enumerate(self.refs) if refs > 0}
        assert len(self.refs) == self.watermark <= self.num_blocks, "watermark beyond the pool"
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(idle) + len(held) == len(free | idle | held), "a block is in two states"
        assert free | idle | held == set(range(self.watermark)), "a block is lost"
        assert all(refs >= 0 for refs in self.refs), "negative reference count"
        assert all(self.is_cached(block) for block in idle), "an idle block that nothing remembers"
