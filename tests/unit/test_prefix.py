"""The prefix cache: what it finds, what it forgets, and that a hit compares tokens."""

from __future__ import annotations

import pytest

from flatbed.scheduling.blocks import BlockPool
from flatbed.scheduling.prefix import ROOT, Match, PrefixCache

SIZE = 4


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8)


@pytest.fixture
def cache(pool: BlockPool) -> PrefixCache:
    return PrefixCache(pool, SIZE)


def store(cache: PrefixCache, pool: BlockPool, tokens: list[int], *, step: int = 1) -> list[int]:
    """Records a whole prompt, with its tail, as a sequence that computes it in `step` does. Returns its blocks."""
    blocks: list[int] = []
    link: int | None = ROOT
    for at in range(0, len(tokens), SIZE):
        block = pool.allocate()
        assert block is not None
        blocks.append(block)
        piece = tokens[at : at + SIZE]
        if len(piece) == SIZE:
            link = cache.add(link, piece, block, step=step)
        elif len(piece) > 1:
            cache.add(link, piece, block, step=step)
    cache.check()
    return blocks


def test_finds_full_blocks_from_the_beginning(cache: PrefixCache, pool: BlockPool) -> None:
    blocks = store(cache, pool, list(range(12)))
    match = cache.match([*range(8), 99, 98, 97, 96, 95], step=2)
    assert (match.blocks, match.tokens, match.tail) == (blocks[:2], 8, None)
    assert cache.match([1, *range(12)], step=2) == Match()


def test_the_last_token_is_always_computed(cache: PrefixCache, pool: BlockPool) -> None:
    """Its logits are needed. A prompt of whole blocks shares all but the last, and copies that one."""
    blocks = store(cache, pool, list(range(8)))
    match = cache.match(list(range(8)), step=2)
    assert (match.blocks, match.tail, match.tokens) == (blocks[:1], blocks[1], 7)
    assert cache.match([0], step=2) == Match()
    match = cache.match(list(range(9)), step=2)
    assert (match.blocks, match.tail, match.tokens) == (blocks, None, 8)


def test_a_tail_is_found_by_the_whole_prompt_only(cache: PrefixCache, pool: BlockPool) -> None:
    blocks = store(cache, pool, list(range(7)))
    match = cache.match(list(range(7)), step=2)
    assert (match.blocks, match.tail, match.tokens) == (blocks[:1], blocks[1], 6)
    for other in (list(range(6)), list(range(8)), [*range(6), 99]):
        match = cache.match(other, step=2)
        assert (match.blocks, match.tail, match.tokens) == (blocks[:1], None, 4)


def test_a_tail_of_this_very_step_is_not_copied_but_full_blocks_are_shared(cache: PrefixCache, pool: BlockPool) -> None:
    """Copies happen before the step computes anything; reads happen after all of its writes."""
    blocks = store(cache, pool, list(range(7)), step=5)
    match = cache.match(list(range(7)), step=5)
    assert (match.blocks, match.tail, match.tokens) == (blocks[:1], None, 4)
    assert cache.match(list(range(7)), step=6).tail == blocks[1]


def test_forgo_tail_leaves_the_full_blocks(cache: PrefixCache, pool: BlockPool) -> None:
    store(cache, pool, list(range(7)))
    match = cache.match(list(range(7)), step=2)
    match.forgo_tail(SIZE)
    assert (len(match.blocks), match.tail, match.tokens) == (1, None, 4)


def test_equal_tokens_after_different_beginnings_are_different_content(cache: PrefixCache, pool: BlockPool) -> None:
    same = [7, 7, 7, 7]
    first = store(cache, pool, [1, 2, 3, 4, *same])
    second = store(cache, pool, [4, 3, 2, 1, *same])
    assert cache.match([1, 2, 3, 4, *same, 0], step=2).blocks == first
    assert cache.match([4, 3, 2, 1, *same, 0], step=2).blocks == second
    assert cache.match([*same, 0], step=2).blocks == []


def test_colliding_hashes_do_not_alias(cache: PrefixCache, pool: BlockPool) -> None:
    """In CPython -1 and -2 have the same hash, and so have tuples of them: only the tokens tell them apart."""
    assert hash((-1,) * SIZE) == hash((-2,) * SIZE)
    blocks = store(cache, pool, [-1] * SIZE)
    assert cache.match([-2] * SIZE + [0], step=2).blocks == []
    assert cache.match([-1] * SIZE + [0], step=2).blocks == blocks


def test_the_first_block_for_some_content_stands_for_it(cache: PrefixCache, pool: BlockPool) -> None:
    first = store(cache, pool, list(range(8)))
    second = store(cache, pool, list(range(8)))
    assert cache.match(list(range(9)), step=2).blocks == first
    for block in second:
        pool.release(block)
    assert pool.idle == 0  # nothing remembers the second ones
    for block in first:
        pool.release(block)
    assert pool.idle == 2
    pool.check()


def test_a_recycled_block_is_not_mistaken_for_its_former_content(cache: PrefixCache, pool: BlockPool) -> None:
    blocks = store(cache, pool, list(range(8)))
    for block in blocks:
        pool.release(block)
    pool.evict_idle()
    assert cache.match(list(range(9)), step=2) == Match()
    # The first block is recorded again, into the same block id: its old children must not hang on the new link.
    again = store(cache, pool, list(range(4)))
    assert again == blocks[:1]
    assert cache.match(list(range(9)), step=2).blocks == again


def test_children_of_a_forgotten_block_are_out_of_reach(cache: PrefixCache, pool: BlockPool) -> None:
    blocks = store(cache, pool, list(range(12)))
    cache.forget(blocks[1])
    cache.check()
    assert cache.match(list(range(13)), step=2).blocks == blocks[:1]
    block = pool.allocate()
    assert block is not None
    cache.add(cache.match(list(range(5)), step=2).link, [4, 5, 6, 7], block, step=2)
    # The old third block was computed after the old second one; equal or not, it is not found under the new one.
    assert cache.match(list(range(13)), step=3).blocks == [blocks[0], block]


def test_eviction_forgets(cache: PrefixCache, pool: BlockPool) -> None:
    blocks = store(cache, pool, list(range(8)))
    for block in reversed(blocks):
        pool.release(block)
    assert pool.idle == 2
    pool.num_blocks = pool.watermark  # full: what comes next is evicted
    assert pool.allocate() == blocks[1]  # deepest first: what is left can still be found
    cache.check()
    assert cache.match(list(range(9)), step=2).blocks == blocks[:1]


def test_clear_forgets_everything_and_leaves_held_blocks_with_their_holders(
    cache: PrefixCache, pool: BlockPool
) -> None:
    held = store(cache, pool, list(range(8)))
    idle = store(cache, pool, [9] * 8)
    for block in idle:
        pool.release(block)
    assert len(cache) == 4
    cache.clear()
    assert len(cache) == 0
    assert (pool.held, pool.idle) == (len(held), 0)
    assert cache.match(list(range(9)), step=2) == Match()
    for block in held:
        pool.release(block)
    assert pool.idle == 0
    pool.check()
    cache.check()


def test_a_chain_that_ended_is_not_continued(cache: PrefixCache, pool: BlockPool) -> None:
    block = pool.allocate()
    assert block is not None
    assert cache.add(None, [1, 2, 3, 4], block, step=1) is None
    assert len(cache) == 0


def test_switched_off_it_remembers_nothing(pool: BlockPool) -> None:
    cache = PrefixCache(pool, SIZE, enabled=False)
    blocks = store(cache, pool, list(range(8)))
    assert len(cache) == 0
    assert cache.match(list(range(9)), step=2) == Match()
    for block in blocks:
        pool.release(block)
    assert pool.idle == 0


def test_check_notices_an_index_that_disagrees(cache: PrefixCache, pool: BlockPool) -> None:
    blocks = store(cache, pool, list(range(8)))
    cache._keys_of[blocks[0]].clear()
    with pytest.raises(AssertionError):
        cache.check()
