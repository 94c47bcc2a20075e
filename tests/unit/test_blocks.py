"""The block pool: who holds what, which block comes next, and what memory is asked for."""

from __future__ import annotations

import random

import pytest

from flatbed.scheduling.blocks import BlockPool


def take(pool: BlockPool, count: int) -> list[int]:
    blocks = [pool.allocate() for _ in range(count)]
    assert None not in blocks
    return [block for block in blocks if block is not None]


def remembering(pool: BlockPool) -> tuple[set[int], list[int]]:
    """Makes the pool keep the blocks of the first set; evictions are listed in the second."""
    cached: set[int] = set()
    evicted: list[int] = []

    def evict(block: int) -> None:
        cached.remove(block)
        evicted.append(block)

    pool.is_cached = cached.__contains__
    pool.on_evict = evict
    return cached, evicted


def test_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_hands_out_lowest_first_and_no_more_than_there_are() -> None:
    pool = BlockPool(4)
    assert take(pool, 4) == [0, 1, 2, 3]
    assert pool.allocate() is None
    for block in (3, 0, 2):
        assert pool.release(block)
    assert take(pool, 3) == [0, 2, 3]
    pool.check()


def test_a_huge_capacity_costs_nothing_until_it_is_used() -> None:
    pool = BlockPool(10**12)
    take(pool, 3)
    assert pool.watermark == len(pool.refs) == 3
    assert pool.available == 10**12 - 3


def test_a_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(2)
    (block,) = take(pool, 1)
    pool.hold(block)
    assert not pool.release(block)
    assert pool.held == 1
    assert pool.release(block)
    assert (pool.held, pool.idle, pool.available) == (0, 0, 2)
    pool.check()


def test_peak_held_remembers_the_most_that_were_held_at_once() -> None:
    pool = BlockPool(8)
    blocks = take(pool, 5)
    for block in blocks:
        pool.release(block)
    take(pool, 2)
    assert pool.peak_held == 5


def test_cached_blocks_become_idle_and_can_be_held_again() -> None:
    pool = BlockPool(2)
    cached, evicted = remembering(pool)
    (block,) = take(pool, 1)
    cached.add(block)
    pool.release(block)
    assert (pool.held, pool.idle, pool.available) == (0, 1, 2)
    assert pool.is_idle(block)
    pool.hold(block)
    assert (pool.held, pool.idle) == (1, 0)
    assert not pool.is_idle(block)
    assert evicted == []
    pool.check()


def test_the_least_recently_used_idle_block_is_evicted_first() -> None:
    pool = BlockPool(4)
    cached, evicted = remembering(pool)
    blocks = take(pool, 4)
    cached.update(blocks)
    for block in (2, 0, 3, 1):
        pool.release(block)
    pool.hold(2)  # used once more: now the most recent of all
    pool.release(2)
    assert take(pool, 4) == [0, 3, 1, 2]
    assert evicted == [0, 3, 1, 2]
    assert pool.allocate() is None
    pool.check()


def test_free_blocks_go_before_idle_ones() -> None:
    pool = BlockPool(2)
    cached, evicted = remembering(pool)
    take(pool, 2)
    cached.add(0)
    pool.release(0)
    pool.release(1)
    assert take(pool, 1) == [1]
    assert evicted == []


def test_idle_blocks_are_evicted_before_the_watermark_rises() -> None:
    asked: list[int] = []
    pool = BlockPool(100, grow=lambda blocks: asked.append(blocks) or True)  # type: ignore[func-returns-value]
    cached, _ = remembering(pool)
    for _ in range(50):
        blocks = take(pool, 3)
        cached.update(blocks)
        for block in blocks:
            pool.release(block)
    assert pool.watermark == 3
    assert asked == [1, 2, 3]
    pool.check()


def test_a_refused_growth_is_a_full_pool_for_now() -> None:
    allowed = 1
    pool = BlockPool(3, grow=lambda blocks: blocks <= allowed)
    assert take(pool, 1) == [0]
    assert pool.allocate() is None
    assert (pool.watermark, pool.held) == (1, 1)
    pool.check()
    allowed = 3
    assert take(pool, 2) == [1, 2]
    pool.check()


def test_reused_lists_blocks_that_held_other_tokens() -> None:
    pool = BlockPool(4)
    cached, _ = remembering(pool)
    take(pool, 3)
    assert pool.reused == []  # never touched before
    cached.add(1)
    pool.release(0)
    pool.release(1)
    take(pool, 3)  # the free one, the idle one, and one that is new
    assert pool.reused == [0, 1]


def test_evict_idle_frees_everything_that_only_the_cache_remembers() -> None:
    pool = BlockPool(3)
    cached, evicted = remembering(pool)
    take(pool, 3)
    cached.update((0, 2))
    pool.release(0)
    pool.release(2)
    pool.evict_idle()
    assert sorted(evicted) == [0, 2]
    assert (pool.held, pool.idle, pool.watermark) == (1, 0, 3)
    pool.check()
    assert take(pool, 2) == [0, 2]


def test_trim_lowers_the_watermark_to_the_last_block_in_use() -> None:
    pool = BlockPool(10)
    take(pool, 6)
    for block in (1, 3, 4, 5):
        pool.release(block)
    assert pool.trim() == 3
    assert pool.watermark == 3
    pool.check()
    assert take(pool, 3) == [1, 3, 4]
    pool.check()


def test_trim_keeps_idle_blocks() -> None:
    pool = BlockPool(4)
    cached, _ = remembering(pool)
    take(pool, 4)
    cached.add(2)
    for block in range(4):
        pool.release(block)
    assert pool.trim() == 3
    assert pool.idle == 1
    pool.check()


def test_blocks_above_a_trimmed_watermark_count_as_reused() -> None:
    """Memory goes back by chunk; a block within a chunk that stayed still holds what it held."""
    pool = BlockPool(4)
    take(pool, 3)
    for block in range(3):
        pool.release(block)
    assert pool.trim() == 0
    assert take(pool, 4) == [0, 1, 2, 3]
    assert pool.reused == [0, 1, 2]


def test_reused_names_no_block_above_the_watermark() -> None:
    """Allocated and released without a step in between, then trimmed: clearing it would touch memory that is gone."""
    pool = BlockPool(4)
    take(pool, 2)
    for _ in range(2):
        pool.release(1)
        take(pool, 1)
    pool.release(1)
    assert pool.trim() == 1
    assert pool.reused == []


def test_check_notices_books_that_do_not_balance() -> None:
    def broken(damage: str) -> BlockPool:
        pool = BlockPool(4)
        take(pool, 3)
        pool.release(1)
        pool.check()
        exec(damage, {"pool": pool})
        return pool

    for damage in (
        "pool._free.append(1)",  # free twice
        "pool._free.append(0)",  # free and held
        "pool._free.clear()",  # lost
        "pool.refs[2] = -1",
        "pool.refs.append(0)",
        "pool._idle[1] = pool._free.clear()",  # idle, though nothing remembers it
    ):
        with pytest.raises(AssertionError):
            broken(damage).check()


def test_random_use_keeps_the_books_balanced() -> None:
    for seed in range(50):
        noise = random.Random(seed)
        pool = BlockPool(noise.randint(1, 12), grow=lambda blocks, noise=noise: noise.random() < 0.7)
        cached, _ = remembering(pool)
        refs: dict[int, int] = {}
        for _ in range(200):
            choice = noise.random()
            if choice < 0.45:
                block = pool.allocate()
                if block is not None:
                    assert block not in refs
                    refs[block] = 1
                    cached.discard(block)
            elif choice < 0.55 and (refs or pool.idle):
                block = noise.choice([*refs, *pool._idle])
                pool.hold(block)
                refs[block] = refs.get(block, 0) + 1
            elif choice < 0.6:
                pool.trim()
            elif refs:
                block = noise.choice(list(refs))
                if refs[block] == 1 and noise.random() < 0.5:
                    cached.add(block)
                assert pool.release(block) == (refs[block] == 1)
                refs[block] -= 1
                if not refs[block]:
                    del refs[block]
            pool.check()
            assert pool.held == len(refs)
            assert pool.available == pool.num_blocks - len(refs)
