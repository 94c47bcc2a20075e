"""Elastic memory on a CUDA device: what it costs, what comes back, graphs over it, and running out of it."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flatbed.memory.elastic import CHUNK, ElasticBacking, availability

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not availability()[0]:
    pytest.skip(availability()[1], allow_module_level=True)

import transformers

import flatbed
from flatbed.errors import CapacityError

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
GIB, MIB = 1 << 30, 1 << 20
SLACK = 8 * MIB  # what else the driver may take or keep: page tables, rounding


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(CUDA)[0]


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    """Loads what every test uses, so that no test pays for it; leaves nothing in PyTorch's cache."""
    warm = ElasticBacking(CHUNK, CUDA)
    warm.grow(1)
    assert not warm.buffer.any()
    warm.close()
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def fill_device() -> list[torch.Tensor]:
    """Tensors that leave less than a chunk of the device free, and room in PyTorch's cache for a few small ones."""
    kept = [torch.empty(1, device=CUDA)]  # takes 2 MiB, of which other small tensors can have the rest
    size = free()
    while size >= CHUNK // 2:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device=CUDA))
        except torch.OutOfMemoryError:
            size //= 2
    return kept


def test_reserving_100_gib_is_quick_and_takes_no_memory() -> None:
    before = free()
    start = time.perf_counter()
    backing = ElasticBacking(100 * GIB, CUDA)
    seconds = time.perf_counter() - start
    assert seconds < 0.05
    assert abs(before - free()) < SLACK
    assert (backing.reserved, backing.committed) == (100 * GIB, 0)
    start = time.perf_counter()
    assert backing.grow(1)
    print(f"\nreserved in {seconds * 1e6:.0f} us; first chunk in {(time.perf_counter() - start) * 1e6:.0f} us")
    assert backing.buffer.numel() == 100 * GIB
    assert abs(before - free() - CHUNK) < SLACK
    backing.close()
    assert abs(before - free()) < SLACK


def test_more_than_the_device_has_can_be_reserved_but_not_more_than_can_be_addressed() -> None:
    ElasticBacking(2 * torch.cuda.mem_get_info(CUDA)[1], CUDA).close()
    with pytest.raises(OverflowError, match="bytes of addresses cannot be reserved"):
        ElasticBacking(1 << 60, CUDA)


def test_content_below_stays_and_memory_goes_back() -> None:
    before = free()
    backing = ElasticBacking(8 * GIB, CUDA)
    assert backing.grow(GIB)
    assert backing.committed == GIB
    buffer = backing.buffer
    assert not buffer[:GIB].any()
    pattern = torch.randint(0, 256, (CHUNK + 5,), dtype=torch.uint8, device=CUDA)
    buffer[: len(pattern)] = pattern
    buffer[len(pattern) : GIB] = 255
    taken = free()
    start = time.perf_counter()
    backing.shrink(len(pattern))
    seconds = time.perf_counter() - start
    assert backing.committed == 2 * CHUNK
    assert free() - taken >= GIB - 2 * CHUNK - SLACK
    start = time.perf_counter()
    assert backing.grow(GIB)
    again = time.perf_counter() - start
    chunks = GIB // CHUNK - 2
    print(f"\nunmapping a chunk {seconds / chunks * 1e6:.0f} us, mapping one {again / chunks * 1e6:.0f} us")
    assert backing.buffer is buffer
    assert torch.equal(buffer[: len(pattern)], pattern)
    assert (buffer[len(pattern) : 2 * CHUNK] == 255).all()
    assert not buffer[2 * CHUNK : GIB].any()
    backing.close()
    del buffer
    torch.cuda.empty_cache()
    assert before - free() < SLACK + 2 * CHUNK


def test_growing_does_not_wait_for_the_device() -> None:
    backing = ElasticBacking(GIB, CUDA)
    assert backing.grow(1)
    free()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    done = torch.cuda.Event()
    done.record()
    assert backing.grow(4 * CHUNK)
    assert not done.query()
    assert not backing.buffer[: 4 * CHUNK].any()  # on the same stream, after the zeros
    backing.close()


def test_another_thread_may_grow_and_shrink() -> None:
    backing = ElasticBacking(GIB, CUDA)
    problems: list[BaseException] = []

    def work() -> None:
        try:
            assert backing.grow(3 * CHUNK)
            backing.buffer[: 3 * CHUNK] = 5
            backing.shrink(CHUNK)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not problems
    assert backing.committed == CHUNK
    assert (backing.buffer[:CHUNK] == 5).all()
    backing.close()


def test_a_backing_that_is_dropped_gives_everything_back() -> None:
    before = free()
    backing = ElasticBacking(4 * GIB, CUDA)
    assert backing.grow(GIB)
    held = backing.buffer[:10]
    del backing
    gc.collect()
    held += 1  # a tensor keeps its memory
    assert held.tolist() == [1] * 10
    del held
    gc.collect()
    assert before - free() < SLACK


def test_a_graph_replays_rightly_after_its_memory_went_and_came_back() -> None:
    backing = ElasticBacking(100 * GIB, CUDA)
    assert backing.grow(2 * CHUNK)
    numbers = backing.buffer[: 2 * CHUNK].view(torch.int32)
    out = torch.empty_like(numbers)
    torch.add(numbers, 1, out=out)
    numbers.mul_(2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(numbers, 1, out=out)
        numbers.mul_(2)
    for value in (3, 5, 7):
        backing.shrink(0)
        assert backing.committed == 0
        other = torch.full((2 * CHUNK,), 99, dtype=torch.uint8, device=CUDA)  # may well get the memory that went
        assert backing.grow(2 * CHUNK)
        numbers.fill_(value)
        graph.replay()
        graph.replay()
        assert (out == 2 * value + 1).all()
        assert (numbers == 4 * value).all()
        assert (other == 99).all()
        del other
        torch.cuda.empty_cache()
    del graph
    backing.close()


def test_a_full_device_is_told_and_pytorchs_cache_is_used() -> None:
    backing = ElasticBacking(100 * GIB, CUDA)
    assert backing.grow(CHUNK)
    backing.buffer[:CHUNK] = 3
    kept = fill_device()
    for nbytes in (CHUNK + 1, 10 * CHUNK):
        assert not backing.grow(nbytes)
        assert backing.committed == CHUNK
    assert backing.grow(CHUNK)
    kept.clear()
    assert torch.cuda.memory_reserved(CUDA) > GIB  # nothing went back to the driver
    assert backing.grow(10 * CHUNK)
    assert backing.committed == 10 * CHUNK
    assert (backing.buffer[:CHUNK] == 3).all()
    assert not backing.buffer[CHUNK : 10 * CHUNK].any()
    backing.close()


# ---- the engine ------------------------------------------------------------------------------------------------------

NEW = 32
GREEDY = flatbed.SamplingParams(max_new_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    # 16 kB of K/V a token, so that the prompts below fill several chunks.
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval().to(CUDA)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(256) for _ in range(length)] for length in (1, 1900, 2, 1700, 1000, 16, 700, 33)]


@pytest.fixture(scope="module")
def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` makes of each prompt alone."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=CUDA)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def tokens_of(outputs: list[flatbed.Output]) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


def test_an_engine_takes_what_it_needs_and_gives_it_back(
    model: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    device = torch.cuda.mem_get_info(CUDA)[1]
    with flatbed.Engine(model, capacity="90%") as engine:
        assert isinstance(engine._pool._backing, ElasticBacking)
        assert engine.memory().reserved > device // 2
        assert engine.memory().committed == 0
        for _ in range(3):
            assert tokens_of(engine.generate(prompts, GREEDY)) == expected
            memory = engine.memory()
            assert memory.live == 0
            assert memory.peak > 2 * CHUNK
            assert memory.peak <= memory.committed < memory.peak + CHUNK
            assert memory.committed <= 1.25 * memory.peak + 400 * MIB
            taken = free()
            engine.release()
            assert engine.memory().committed == 0
            assert free() - taken >= memory.committed - SLACK
            assert engine.memory().reserved == memory.reserved


def test_release_in_the_middle_of_requests_keeps_what_they_hold(
    model: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    lengths = [NEW - 4 * i for i in range(len(prompts))]  # the first end last, so that memory falls free from the top
    with flatbed.Engine(model, capacity="90%") as engine:
        outputs = [
            engine.submit(prompt, flatbed.SamplingParams(max_new_tokens=length, ignore_eos=True))
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        committed = []
        while engine.has_work:
            engine.step()
            engine.release()
            assert engine.memory().committed >= engine.memory().live
            committed.append(engine.memory().committed)
        assert tokens_of(outputs) == [whole[:length] for whole, length in zip(expected, lengths, strict=True)]
        assert len(set(committed)) > 2
        assert committed[-1] == 0


def test_another_tenant_took_the_memory(model: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with flatbed.Engine(model, capacity="90%", prefix_cache=False) as engine:
        assert tokens_of(engine.generate(prompts, GREEDY)) == expected
        engine.release()
        kept = fill_device()
        with pytest.warns(flatbed.FlatbedWarning, match="8 of 8 requests failed"):
            outputs = engine.generate(prompts, GREEDY)
        assert all(isinstance(output.error, CapacityError) for output in outputs)
        assert "no memory left" in str(outputs[0].error)
        kept.clear()  # to PyTorch's cache, from where the pool takes it
        assert tokens_of(engine.generate(prompts, GREEDY)) == expected
