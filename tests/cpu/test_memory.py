"""Capacity is a limit, not a cost: time and memory follow the tokens that are alive."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import assert_idle, draw_prompts, expected, shared, tokens_of
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import flatbed
from flatbed.errors import CapacityError, ConfigError
from flatbed.memory import host
from flatbed.memory.capacity import AUTO_PERCENT, Capacity, KVLayout, LayerShape, blocks_for
from flatbed.memory.growing import GrowingBacking
from flatbed.memory.host import CHUNK, HostBacking
from flatbed.memory.pool import Backing, MemoryReport, Pool

MIB = 1 << 20
PROMPTS = draw_prompts((33, 3, 70), seed=8)
NEW = 12
GREEDY = flatbed.SamplingParams(max_new_tokens=NEW, ignore_eos=True)

proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")


def resident() -> int:
    """Bytes of this process in memory now, without what the C library keeps of freed activations."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# ---- capacity texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("64 blocks", 64, "blocks"),
        ("1 block", 1, "blocks"),
        ("64blocks", 64, "blocks"),
        ("  64  Blocks ", 64, "blocks"),
        ("20000 tokens", 20000, "tokens"),
        ("1 token", 1, "tokens"),
        ("20000.0 tokens", 20000, "tokens"),
        ("8 GiB", 8 * 2**30, "bytes"),
        ("8gib", 8 * 2**30, "bytes"),
        ("1.5 GB", 1.5e9, "bytes"),
        ("512 MiB", 512 * 2**20, "bytes"),
        ("100 KB", 100_000, "bytes"),
        ("0.25 TiB", 2**38, "bytes"),
        ("50%", 50, "percent"),
        ("12.5 %", 12.5, "percent"),
        ("100%", 100, "percent"),
        ("auto", AUTO_PERCENT, "percent"),
        (" AUTO ", AUTO_PERCENT, "percent"),
    ],
)
def test_capacity_texts(text: str, amount: float, unit: str) -> None:
    assert Capacity.parse(text) == Capacity(amount, unit)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "64",
        "blocks",
        "0 blocks",
        "-3 blocks",
        "1.5 blocks",
        "0.5 tokens",
        "64 blockss",
        "64 pages",
        "8 G",
        "8 GiB 3",
    ]
    + ["0%", "101%", "-5%", "50 percent", "%", "all", "inf GiB", "nan%", "1e3 tokens", "0 GiB", "８ GiB\n8"]
    + [None, 64, 0.5, b"8 GiB", ["8 GiB"]],
)
def test_bad_capacity_texts_are_told_what_is_known(text: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        Capacity.parse(text)
    assert repr(text) in str(raised.value)
    for known in ("64 blocks", "20000 tokens", "8 GiB", "50%", "auto"):
        assert known in str(raised.value)
    with pytest.raises(ConfigError):
        flatbed.EngineConfig(capacity=text)


def test_capacity_in_blocks() -> None:
    layout = KVLayout((LayerShape(2, 8, 8),), 4, 4)
    assert layout.block_bytes == 512
    free = 100_000
    for text, blocks in [
        ("7 blocks", 7),
        ("1 token", 1),
        ("4 tokens", 1),
        ("5 tokens", 2),
        ("1 KiB", 2),
        ("1.4 KiB", 2),
        ("50%", 97),
        ("100%", 195),
        ("0.5 KiB", 1),
        ("0.4 KiB", 0),
    ]:
        assert Capacity.parse(text).blocks(layout, free) == blocks, text
    assert Capacity.parse("auto").blocks(layout, free) == int(free * AUTO_PERCENT / 100 // 512)


@pytest.mark.parametrize("capacity", ["1 KB", "3 KB"])
def test_less_than_one_block_is_told_with_the_size_of_a_block(capacity: str) -> None:
    with pytest.raises(ConfigError, match=r"less than one block of .* bytes"):
        flatbed.Engine(shared("llama"), capacity=capacity, block_size=32)


@pytest.mark.parametrize("capacity", ["99999 TiB", "9999999999999999999 blocks", "99999999999999999999999 tokens"])
def test_more_than_can_be_addressed_is_an_error_of_the_setting(capacity: str) -> None:
    with pytest.raises(ConfigError, match="cannot be addressed"):
        flatbed.Engine(shared("llama"), capacity=capacity)


# ---- the layout ------------------------------------------------------------------------------------------------------

SHAPES = {
    "plain": (LayerShape(2, 16, 16), LayerShape(2, 16, 16)),
    "values are smaller": (LayerShape(4, 24, 12),) * 3,
    "values are larger": (LayerShape(1, 8, 80),) * 2,
    "layers differ": (LayerShape(2, 16, 16), LayerShape(1, 32, 32), LayerShape(3, 24, 12)),
    "odd sizes": (LayerShape(1, 5, 7), LayerShape(3, 9, 1)),
}


@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 256])
@pytest.mark.parametrize("name", SHAPES)
def test_every_number_of_the_layout_has_its_own_place(name: str, block_size: int) -> None:
    """Filling all layers of all blocks with different numbers and reading them back finds each where it was put."""
    layers, blocks = SHAPES[name], 3
    layout = KVLayout(layers, block_size, 4)
    pool = Pool(layout, blocks, torch.float32, HostBacking(blocks * layout.block_bytes))
    pool.grow(blocks)
    draw = torch.Generator().manual_seed(0)
    filled = []
    for shape, cache in zip(layers, pool.layers, strict=True):
        assert cache.key.shape == (blocks, shape.kv_heads, block_size, shape.key_dim)
        assert cache.value.shape == (blocks, shape.kv_heads, block_size, shape.value_dim)
        for view in (cache.key, cache.value):
            view.copy_(torch.randn(view.shape, generator=draw))
            filled.append((view, view.clone()))
            assert view[0, 0].is_contiguous()
    for view, wanted in filled:
        assert torch.equal(view, wanted)
    assert layout.token_bytes == 4 * sum(s.kv_heads * (s.key_dim + s.value_dim) for s in layers)
    assert layout.block_bytes >= block_size * layout.token_bytes
    # Heads' runs are whole multiples of their own length from the beginning of the pool, in every block.
    for shape, key, value in zip(layers, layout.key_offsets, layout.value_offsets, strict=True):
        assert key % (block_size * shape.key_dim) == value % (block_size * shape.value_dim) == 0
        assert layout.block_elements % (block_size * shape.key_dim) == 0
        assert layout.block_elements % (block_size * shape.value_dim) == 0
    assert layout.block_elements % 16 == 0


def test_a_layout_of_equal_heads_wastes_nothing() -> None:
    layout = KVLayout((LayerShape(8, 128, 128),) * 4, 32, 2)
    assert layout.block_bytes == 32 * layout.token_bytes == 32 * 4 * 8 * 256 * 2


def test_blocks_for() -> None:
    assert [blocks_for(n, 16) for n in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


# ---- backings --------------------------------------------------------------------------------------------------------

BACKINGS: dict[str, Callable[[int], Backing]] = {
    "host": HostBacking,
    "growing": lambda capacity: GrowingBacking(capacity, torch.device("cpu")),
}


@pytest.mark.parametrize("name", BACKINGS)
def test_a_backing_keeps_its_content_while_it_grows_and_shrinks(name: str) -> None:
    backing = BACKINGS[name](16 * MIB)
    assert (backing.reserved, backing.committed) == (16 * MIB, 0)
    assert backing.grow(MIB)
    assert MIB <= backing.committed <= 4 * MIB
    assert not backing.buffer[:MIB].any()
    backing.buffer[:MIB] = 7
    address = backing.buffer.data_ptr()
    assert backing.grow(9 * MIB)
    assert 9 * MIB <= backing.committed <= 16 * MIB
    assert (backing.buffer[:MIB] == 7).all()
    assert not backing.buffer[MIB : 9 * MIB].any()
    if backing.stable:
        assert backing.buffer.data_ptr() == address
    backing.buffer[MIB : 9 * MIB] = 9
    assert backing.grow(2 * MIB), "asking for less changes nothing"
    assert backing.committed >= 9 * MIB
    backing.shrink(MIB)
    assert MIB <= backing.committed <= 3 * MIB
    assert (backing.buffer[:MIB] == 7).all()
    assert backing.grow(16 * MIB)
    assert backing.committed == 16 * MIB
    assert (backing.buffer[:MIB] == 7).all()
    assert not backing.buffer[4 * MIB : 9 * MIB].any(), "what was given back comes again as zeros"
    backing.close()
    assert backing.committed == 0


def test_growing_copies_seldom() -> None:
    backing = GrowingBacking(1 << 20, torch.device("cpu"))
    moves, address = 0, backing.buffer.data_ptr()
    for size in range(1024, (1 << 20) + 1, 1024):
        assert backing.grow(size)
        moves += address != backing.buffer.data_ptr()
        address = backing.buffer.data_ptr()
        assert size <= backing.committed <= max(2 * size, 1024)
    assert moves <= 11


def test_a_growing_backing_that_finds_no_memory_says_so_and_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    backing = GrowingBacking(1 << 20, torch.device("cpu"))
    assert backing.grow(1000)
    backing.buffer[:1000] = 5
    zeros = torch.zeros

    def out_of_memory_beyond(size: int, **kwargs: Any) -> torch.Tensor:
        if size > 1500:
            raise torch.OutOfMemoryError("no more")
        return zeros(size, **kwargs)

    monkeypatch.setattr(torch, "zeros", out_of_memory_beyond)
    assert backing.grow(1400), "twice as much cannot be had, as much as is needed can"
    assert backing.committed == 1400
    assert not backing.grow(1600)
    assert backing.committed == 1400
    assert (backing.buffer[:1000] == 5).all()


@proc
def test_host_memory_is_resident_only_where_it_was_written() -> None:
    backing = HostBacking(int(host.free_bytes() * 0.9))
    before = resident()
    assert backing.grow(64 * MIB)
    assert resident() - before < 8 * MIB
    backing.buffer[: 32 * MIB] = 1
    assert 24 * MIB < resident() - before < 40 * MIB
    backing.shrink(0)
    assert resident() - before < 8 * MIB
    backing.close()


# ---- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.timing
@proc
def test_a_capacity_of_nearly_all_memory_costs_neither_time_nor_memory() -> None:
    model = shared("llama")

    def build_and_run(capacity: str) -> tuple[float, float, int, MemoryReport]:
        before, start = resident(), time.perf_counter()
        engine = flatbed.Engine(model, capacity=capacity, block_size=16)
        built = time.perf_counter() - start
        assert tokens_of(engine.generate(PROMPTS, GREEDY)) == expected("llama", PROMPTS, NEW)
        ran = time.perf_counter() - start - built
        grown, report = resident() - before, engine.memory()
        engine.close()
        return built, ran, grown, report

    build_and_run("16 blocks")  # whatever is done once in a process
    small = [build_and_run("16 blocks") for _ in range(3)]
    large = [build_and_run("90%") for _ in range(3)]
    assert large[0][3].capacity > 0.5 * host.free_bytes()
    assert large[0][3].reserved >= large[0][3].capacity
    assert min(built for built, *_ in large) - min(built for built, *_ in small) < 0.5
    assert min(ran for _, ran, *_ in large) < 1.5 * min(ran for _, ran, *_ in small) + 0.05
    assert min(grown for _, _, grown, _ in large) - min(grown for _, _, grown, _ in small) < 8 * MIB
    assert large[0][3].committed == small[0][3].committed


def test_the_report_follows_live_tokens() -> None:
    params = flatbed.SamplingParams(max_new_tokens=60, ignore_eos=True)
    with flatbed.Engine(shared("llama"), capacity="4000 blocks", block_size=4, prefix_cache=False) as engine:
        size = engine._pool.layout.block_bytes
        report = engine.memory()
        assert report == MemoryReport(capacity=4000 * size, reserved=report.reserved, committed=0, live=0, peak=0)
        assert 0 <= report.reserved - report.capacity < CHUNK
        seen = []
        engine.generate([[1, 2, 3]] * 7, params, on_step=lambda: seen.append(engine.memory()))
        lives = [report.live for report in seen]
        assert lives[0] == 7 * size
        assert max(lives) == 7 * size * math.ceil((3 + 60 - 1) / 4)
        assert lives[:-1] == sorted(lives[:-1]), "live memory grows with the tokens"
        assert lives[-1] == 0
        for report in seen:
            assert report.live <= report.peak <= report.committed + size <= report.reserved + size
            assert report.committed % CHUNK == 0
            assert report.committed - report.peak < CHUNK, "no more than a chunk beyond what was ever alive"
        assert engine.memory().peak == max(lives)
        assert engine.memory().graphs == 0


def test_memory_is_committed_by_chunks_as_tokens_come() -> None:
    """One long request after another: each commits as much as it needs."""
    with flatbed.Engine(shared("llama"), capacity="2000 blocks", block_size=256, prefix_cache=False) as engine:
        size = engine._pool.layout.block_bytes
        per_request = 100
        committed = []
        for count in (1, 40, per_request, 10):
            engine.generate(draw_prompts((5,) * count, seed=count), flatbed.SamplingParams(max_new_tokens=2))
            committed.append(engine.memory().committed)
        assert [math.ceil(n * size / CHUNK) * CHUNK for n in (1, 40, 100, 100)] == committed


@functools.cache
def heavy() -> nn.Module:
    """A small model whose K/V are large: 32 KiB a token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=8,
        head_dim=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@proc
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_release_gives_the_memory_back_and_the_engine_goes_on(prefix_cache: bool) -> None:
    prompts = draw_prompts((60,) * 24, seed=1, vocabulary=64)
    params = flatbed.SamplingParams(max_new_tokens=40)
    with flatbed.Engine(heavy(), capacity="90%", block_size=64, prefix_cache=prefix_cache, token_budget=90) as engine:
        first = tokens_of(engine.generate(prompts, params))  # after this, activations have the room they need
        engine.release()
        assert engine.memory().committed == 0
        before = resident()
        assert tokens_of(engine.generate(prompts, params)) == first
        report = engine.memory()
        needed = 24 * 60 * engine._pool.layout.token_bytes
        assert report.committed >= report.peak >= needed > 40 * MIB
        assert resident() - before > 0.8 * needed
        engine.release()
        assert engine.memory().committed == 0
        assert engine.memory().reserved == report.reserved
        assert resident() - before < 0.1 * needed
        again = engine.generate(prompts, params)
        assert tokens_of(again) == first
        assert [output.cached_tokens for output in again] == [0] * 24, "what was given back is not served"
        assert_idle(engine)


def test_release_leaves_running_requests_what_they_hold() -> None:
    with flatbed.Engine(shared("llama"), block_size=16) as engine:
        outputs = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
        steps = 0
        while engine.has_work:
            engine.step()
            engine.release()
            engine._scheduler.check()
            assert engine.memory().committed >= engine.memory().live
            steps += 1
        assert steps > NEW - 1
        assert tokens_of(outputs) == expected("llama", PROMPTS, NEW)
        engine.release()
        assert engine.memory().committed == 0


@proc
def test_close_gives_everything_back() -> None:
    def run() -> int:
        with flatbed.Engine(heavy(), capacity="90%", block_size=64, token_budget=90) as engine:
            engine.generate(draw_prompts((60,) * 24, seed=2, vocabulary=64), flatbed.SamplingParams(max_new_tokens=40))
            return engine.memory().peak

    run()
    before = resident()
    needed = max(run() for _ in range(3))
    assert needed > 40 * MIB
    assert resident() - before < 0.1 * needed


def test_an_engine_that_is_dropped_without_close_gives_everything_back() -> None:
    import weakref

    engine = flatbed.Engine(shared("llama"))
    engine.generate(PROMPTS, GREEDY)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


# ---- memory that moves, and memory that cannot be had ----------------------------------------------------------------


def use(monkeypatch: pytest.MonkeyPatch, make: Callable[[int], Backing]) -> None:
    monkeypatch.setattr("flatbed.engine.make_backing", lambda capacity, device: make(capacity))


def test_a_pool_that_moves_while_it_grows_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, BACKINGS["growing"])
    params = flatbed.SamplingParams(max_new_tokens=80, ignore_eos=True)
    prompts = draw_prompts((3, 50, 9), seed=4)
    with flatbed.Engine(shared("llama"), block_size=4) as engine:
        addresses = set()
        outputs = engine.generate(prompts, params, on_step=lambda: addresses.add(engine._pool.layers[0].key.data_ptr()))
        assert len(addresses) >= 3, "the pool did not move; the test says little"
        assert tokens_of(outputs) == expected("llama", prompts, 80)
        engine.release()
        assert engine.memory().committed == 0
        assert tokens_of(engine.generate(prompts, params)) == expected("llama", prompts, 80)


class Scarce(GrowingBacking):
    """A device on which others leave room for `room` bytes."""

    room = 0

    def grow(self, nbytes: int) -> bool:
        return nbytes <= max(self.room, self.committed) and super().grow(nbytes)


def test_a_device_without_memory_makes_requests_wait_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lambda capacity: Scarce(capacity, torch.device("cpu")))
    prompts = draw_prompts((3, 30, 9, 14, 22), seed=4)
    params = flatbed.SamplingParams(max_new_tokens=80, ignore_eos=True)
    with flatbed.Engine(shared("llama"), block_size=4, capacity="1000 blocks") as engine:
        monkeypatch.setattr(Scarce, "room", 29 * engine._pool.layout.block_bytes)
        outputs = engine.generate(prompts, params)
        assert tokens_of(outputs) == expected("llama", prompts, 80)
        assert engine.stats().preemptions > 3
        assert_idle(engine)


def test_a_request_for_which_the_device_has_no_memory_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lambda capacity: Scarce(capacity, torch.device("cpu")))
    prompts = draw_prompts((9, 150, 14), seed=4)
    params = flatbed.SamplingParams(max_new_tokens=20, ignore_eos=True)
    with flatbed.Engine(shared("llama"), block_size=4, capacity="1000 blocks") as engine:
        monkeypatch.setattr(Scarce, "room", 20 * engine._pool.layout.block_bytes)
        with pytest.warns(flatbed.FlatbedWarning, match="no memory left"):
            outputs = engine.generate(prompts, params)
        error = outputs[1].error
        assert isinstance(error, CapacityError)
        assert (error.request_id, error.needed) == (outputs[1].request_id, math.ceil(169 / 4))
        assert [tokens for i, tokens in enumerate(tokens_of(outputs)) if i != 1] == [
            tokens for i, tokens in enumerate(expected("llama", prompts, 20)) if i != 1
        ]
        assert_idle(engine)
        monkeypatch.setattr(Scarce, "room", 10**9)
        assert tokens_of(engine.generate(prompts, params)) == expected("llama", prompts, 20), "and then there is memory"
